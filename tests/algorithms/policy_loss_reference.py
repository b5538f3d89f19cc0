"""Every policy loss once more, from its paper, with loops over numbers: values, derivatives and what a bound changed.

A row holds response tokens only. `derivatives[t][j]` is the derivative of the value of token t with respect to the
log-probability of token j, written down by hand: stop-gradients are no matter of finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs


@dataclass
class Row:
    """The response tokens of one sequence."""

    logprobs: list[float]
    behaviour: list[float]
    proximal: list[float]
    old_policy: list[float]
    advantages: list[float]
    score: float
    selected: list[bool]
    segments: list[int]
    """Number of the unbroken run that each token is in."""

    def log_ratios(self) -> list[float]:
        return [p - b for p, b in zip(self.logprobs, self.old_policy, strict=True)]


Result = tuple[list[float], list[list[float]], list[bool]]


def each_token(function: Callable[[Row, int], tuple[float, float, bool]]) -> Callable[[Row], Result]:
    """A loss whose tokens know nothing of each other, from (value, derivative, changed) of one."""

    def loss(row: Row) -> Result:
        tokens = [function(row, t) for t in range(len(row.logprobs))]
        derivatives = [[tokens[t][1] if t == j else 0.0 for j in range(len(tokens))] for t in range(len(tokens))]
        return [token[0] for token in tokens], derivatives, [token[2] for token in tokens]

    return loss


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(
    log_ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float, bool]:
    ratio = math.exp(log_ratio)
    plain, clipped = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    value, slope, cut = (-plain, -plain, False) if plain <= clipped else (-clipped, 0.0, True)
    if dual is not None and advantage < 0 and value > -dual * advantage:
        return -dual * advantage, 0.0, True
    return value, slope, cut


def vanilla() -> Callable[[Row], Result]:
    return each_token(lambda row, t: (-row.advantages[t] * row.logprobs[t], -row.advantages[t], False))


def ppo(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Callable[[Row], Result]:
    return each_token(lambda row, t: surrogate(row.log_ratios()[t], row.advantages[t], low, high, dual))


def decoupled_ppo(
    low: float = 0.2, high: float = 0.2, dual: float | None = None, cap: float = math.inf
) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        behaviour_ratio = math.exp(row.proximal[t] - row.behaviour[t])
        weight = min(behaviour_ratio, cap)
        value, slope, cut = surrogate(row.logprobs[t] - row.proximal[t], row.advantages[t], low, high, dual)
        return weight * value, weight * slope, cut or behaviour_ratio > cap

    return each_token(token)


def weighted(weight: Callable[[float, float], float]) -> Callable[[Row], Result]:
    """-w A log p with a constant weight from the ratio and the advantage."""

    def token(row: Row, t: int) -> tuple[float, float, bool]:
        ratio, advantage = math.exp(row.log_ratios()[t]), row.advantages[t]
        used = weight(ratio, advantage)
        return -used * advantage * row.logprobs[t], -used * advantage, used != ratio

    return each_token(token)


def tis(lower: float = 0.0, upper: float = 1.0, level: str = "token") -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        ratio = math.exp(sum(row.log_ratios()) if level == "sequence" else row.log_ratios()[t])
        weight = clip(ratio, lower, upper)
        return -weight * row.advantages[t] * row.logprobs[t], -weight * row.advantages[t], weight != ratio

    return each_token(token)


def cispo(low: float = 1.0, high: float = 0.28, unified: bool = False) -> Callable[[Row], Result]:
    def weight(ratio: float, advantage: float) -> float:
        if unified and ((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)):
            return 0.0
        return clip(ratio, 1 - low, 1 + high)

    return weighted(weight)


def topr(
    positive: float = 1.0, negative: float = 1.0, above: float = 0.0, level: str = "sequence"
) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        log_ratio = sum(row.log_ratios()) if level == "sequence" else row.log_ratios()[t]
        if row.score > above:
            weight, changed = positive, False
        else:
            weight, changed = negative * clip(math.exp(log_ratio), 0, 1), log_ratio > 0
        return -weight * row.advantages[t] * row.logprobs[t], -weight * row.advantages[t], changed

    return each_token(token)


def kimi15(tau: float = 0.1, level: str = "token") -> Callable[[Row], Result]:
    def loss(row: Row) -> Result:
        count, total = len(row.logprobs), sum(row.log_ratios())
        values, derivatives = [], []
        for t in range(count):
            policy, d = -row.advantages[t] * row.logprobs[t], row.log_ratios()[t]
            values.append(policy + (tau / 2 * d * d if level == "token" else tau / 2 * total * total / count))
            pull = [tau * d if t == j else 0.0 for j in range(count)]
            if level == "sequence":
                pull = [tau * total / count] * count
            derivatives.append([pull[j] - (row.advantages[t] if t == j else 0.0) for j in range(count)])
        return values, derivatives, [False] * count

    return loss


def gspo(low: float = 3e-4, high: float = 4e-4, level: str = "sequence") -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        ratios = row.log_ratios()
        if level == "segment":
            ratios = [d for d, segment in zip(ratios, row.segments, strict=True) if segment == row.segments[t]]
        return surrogate(sum(ratios) / len(ratios), row.advantages[t], low, high, None)

    return each_token(token)


def gmpo(low: float = 0.4, high: float = 0.4) -> Callable[[Row], Result]:
    def loss(row: Row) -> Result:
        count = len(row.logprobs)
        clipped, moving = [], []
        for d, advantage in zip(row.log_ratios(), row.advantages, strict=True):
            changed = (advantage > 0 and d > high) or (advantage < 0 and d < -low)
            clipped.append((high if advantage > 0 else -low) if changed else d)
            moving.append(not changed)
        mean = math.exp(sum(clipped) / max(1, count))
        values = [-advantage * mean for advantage in row.advantages]
        derivatives = [[value / count * moving[j] for j in range(count)] for value in values]
        return values, derivatives, [not is_moving for is_moving in moving]

    return loss


def sapo(positive: float = 1.0, negative: float = 1.05) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        ratio, advantage = math.exp(row.log_ratios()[t]), row.advantages[t]
        tau = positive if advantage > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, False

    return each_token(token)


def dppo(
    kind: str = "tv", threshold: float = 0.15, cap: float = math.inf, high: float | None = None
) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        ratio, advantage = math.exp(row.log_ratios()[t]), row.advantages[t]
        mu, pi = math.exp(row.old_policy[t]), math.exp(row.logprobs[t])
        divergence = abs(mu - pi) if kind == "tv" else bernoulli_kl(mu, pi)
        leaving = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        largest = high if high is not None and advantage > 0 else threshold
        weight = 0.0 if leaving and divergence > largest else min(ratio, cap)
        return -weight * advantage, -weight * advantage, weight != ratio

    return each_token(token)


def clip_cov(low: float = 1.0, high: float = 1.0) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        if row.selected[t]:
            return 0.0, 0.0, True
        return surrogate(row.log_ratios()[t], row.advantages[t], low, high, None)

    return each_token(token)


def kl_cov(beta: float = 1.0) -> Callable[[Row], Result]:
    def token(row: Row, t: int) -> tuple[float, float, bool]:
        d, chosen = row.log_ratios()[t], row.selected[t]
        plain, sign = -math.exp(d) * row.advantages[t], (d > 0) - (d < 0)
        return plain + beta * abs(d) * chosen, plain + beta * sign * chosen, chosen

    return each_token(token)


def bernoulli_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


CASES = {
    "vanilla": ("vanilla", {}, vanilla()),
    "ppo": ("ppo", {}, ppo()),
    "ppo clip-higher": ("ppo", {"clip_low": 0.1, "clip_high": 0.4}, ppo(0.1, 0.4)),
    "ppo dual clip": ("ppo", {"dual_clip": 2.0}, ppo(dual=2.0)),
    "ppo dual clip within the range": ("ppo", {"clip_high": 0.5, "dual_clip": 1.1}, ppo(high=0.5, dual=1.1)),
    "decoupled_ppo": ("decoupled_ppo", {}, decoupled_ppo()),
    "decoupled_ppo knobs": (
        "decoupled_ppo",
        {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "behaviour_weight_cap": 1.2},
        decoupled_ppo(0.1, 0.3, 1.5, 1.2),
    ),
    "tis": ("tis", {}, tis()),
    "tis bounds": ("tis", {"lower": 0.5, "upper": 2.0}, tis(0.5, 2.0)),
    "tis sequence": ("tis", {"upper": 2.0, "level": "sequence"}, tis(upper=2.0, level="sequence")),
    "tis unbounded": ("tis", {"upper": math.inf}, tis(upper=math.inf)),
    "topr": ("topr", {}, topr()),
    "topr knobs": (
        "topr",
        {"positive_weight": 0.5, "negative_weight": 0.3, "positive_above": 0.4},
        topr(0.5, 0.3, 0.4),
    ),
    "topr token": ("topr", {"level": "token"}, topr(level="token")),
    "cispo": ("cispo", {}, cispo()),
    "cispo bounds": ("cispo", {"epsilon_low": 0.3, "epsilon_high": 0.5}, cispo(0.3, 0.5)),
    "cispo unified mask": ("cispo", {"epsilon_low": 0.2, "use_unified_mask": True}, cispo(0.2, unified=True)),
    "kimi15": ("kimi15", {}, kimi15()),
    "kimi15 sequence": ("kimi15", {"tau": 0.7, "level": "sequence"}, kimi15(0.7, "sequence")),
    "gspo": ("gspo", {}, gspo()),
    "gspo wide": ("gspo", {"clip_low": 0.2, "clip_high": 0.3}, gspo(0.2, 0.3)),
    "gspo segment": ("gspo", {"level": "segment", "clip_low": 0.2, "clip_high": 0.3}, gspo(0.2, 0.3, "segment")),
    "gmpo": ("gmpo", {}, gmpo()),
    "gmpo narrow": ("gmpo", {"clip_low": 0.05, "clip_high": 0.1}, gmpo(0.05, 0.1)),
    "sapo": ("sapo", {}, sapo()),
    "sapo knobs": ("sapo", {"tau_positive": 0.3, "tau_negative": 2.0}, sapo(0.3, 2.0)),
    "clip_cov": ("clip_cov", {}, clip_cov()),
    "clip_cov bounds": ("clip_cov", {"clip_low": 0.2, "clip_high": 0.3}, clip_cov(0.2, 0.3)),
    "kl_cov": ("kl_cov", {}, kl_cov()),
    "kl_cov beta": ("kl_cov", {"beta": 0.3}, kl_cov(0.3)),
    "dppo": ("dppo", {}, dppo()),
    "dppo threshold and cap": ("dppo", {"threshold": 0.02, "ratio_cap": 1.3}, dppo(threshold=0.02, cap=1.3)),
    "dppo two thresholds": ("dppo", {"threshold": 0.02, "threshold_high": 0.2}, dppo(threshold=0.02, high=0.2)),
    "dppo kl": ("dppo", {"divergence": "kl"}, dppo("kl", 0.05)),
    "dppo kl threshold": ("dppo", {"divergence": "kl", "threshold": 0.002}, dppo("kl", 0.002)),
}
"""Label -> (variant, arguments, reference)."""


def random_inputs(seed: int, rows: int = 5, width: int = 7, old_policy: str = "behaviour") -> PolicyInputs:
    """float64 inputs with holes in the mask, ties (ratio 1, advantage 0) and scores of either sign."""
    return PolicyInputs(**random_fields(seed, rows, width), old_policy=old_policy)


def random_fields(seed: int, rows: int, width: int) -> dict[str, Tensor]:
    """The fields of `random_inputs`, with values outside the mask too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = -draw(rows, width).abs() - 0.01
    proximal = -(behaviour + 0.3 * draw(rows, width)).abs() - 0.01
    current = -(proximal + 0.3 * draw(rows, width)).abs() - 0.01
    choice = torch.rand(rows, width, generator=generator)
    current = torch.where(choice < 0.1, behaviour, current)
    return {
        "logprobs": current,
        "behaviour_logprobs": behaviour,
        "advantages": draw(rows, width).masked_fill(choice > 0.9, 0.0),
        "response_mask": torch.rand(rows, width, generator=generator) < 0.7,
        "proximal_logprobs": proximal,
        "scores": draw(rows),
        "selected": torch.rand(rows, width, generator=generator) < 0.3,
    }


def hard_inputs(old_policy: str = "behaviour") -> PolicyInputs:
    """An empty row, one-token responses, padding on either side, and ratios of e^20 and e^-20 under either sign."""
    fields = random_fields(11, rows=8, width=7)
    mask = torch.zeros(8, 7, dtype=torch.bool)
    mask[1, 3] = mask[2, 0] = mask[3, 6] = True
    mask[4, :4] = mask[5, 3:] = mask[6] = mask[7] = True
    high, low = torch.tensor(-0.5, dtype=torch.float64), torch.tensor(-20.5, dtype=torch.float64)
    logprobs, behaviour = fields["logprobs"], fields["behaviour_logprobs"]
    proximal, advantages = fields["proximal_logprobs"], fields["advantages"]
    for row, column, current, old, advantage in (
        (1, 3, high, low, 1.5), (2, 0, high, low, -1.5), (3, 6, low, high, 1.5),
        (6, 0, high, low, 0.5), (6, 1, low, high, -0.5), (6, 2, high, low, -0.5), (7, 5, low, high, -2.0),
    ):  # fmt: skip
        logprobs[row, column], behaviour[row, column], advantages[row, column] = current, old, advantage
        proximal[row, column] = old
    proximal[7, 5] = low
    return PolicyInputs(**fields | {"response_mask": mask}, old_policy=old_policy)


def row_of(inputs: PolicyInputs, row: int) -> Row:
    """The response tokens of one row."""
    chosen = inputs.response_mask[row]

    def pick(values: Tensor) -> list[float]:
        return values[row][chosen].tolist()

    return Row(
        pick(inputs.logprobs),
        pick(inputs.behaviour_logprobs),
        pick(inputs.proximal_logprobs),
        pick(inputs.proximal_logprobs if inputs.old_policy == "proximal" else inputs.behaviour_logprobs),
        pick(inputs.advantages),
        inputs.scores[row].item(),
        pick(inputs.selected),
        [int((~chosen[:place]).sum()) for place in chosen.nonzero()[:, 0]],
    )
