"""Off-policy correction: importance weights and rejection for the gap between the sampling and the trained policy.

Both use the ratio rho = proximal / behaviour. It does not change during the updates on a batch, so it is computed once,
on the whole batch. A weight multiplies the policy loss of a token. Rejection removes a token from the loss, from
numerator and normaliser alike. Both are computed from all response tokens, so the order of rejections does not matter
and a sequence ratio covers the whole sequence. Bounds on rho are compared in log space, so no ratio overflows.

One weight and any number of rejections can be combined. Except for normalised weights and rejection by second moment,
results for a part of a batch are the same as within the whole batch. `docs/algorithms/correction.md` lists the settings
for known methods (TIS, MIS, IcePop, geometric mask, OPSM, veto, M2PO). Sources besides those on that page: Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training", 2025 (TIS for engines that differ from the
trainer); Liu et al., "When speed kills stability", 2025 (MIS); Li et al., arXiv 2512.23075 (also bounds the largest
divergence of a token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.shared import segment_means
from roll.algorithms.aggregation import checked_mask, checked_shape, keep, needed
from roll.algorithms.kl import KL_ESTIMATORS
from roll.algorithms.metrics import lag_buckets, off_policy_metrics, off_policy_sums
from roll.configs.errors import Problems, choose_among
from roll.configs.plugins import made, problem

Level = Literal["token", "segment", "sequence", "geometric"]
"""Granularity of a ratio. ``token``: each token's own; ``segment``: geometric mean over an unbroken run of response
tokens (a turn of an episode); ``sequence``: product over the response; ``geometric``: geometric mean over it."""
RejectionLevel = Literal["token", "segment", "sequence", "geometric", "veto"]
"""`Level`, or ``veto``: a single token outside the bounds rejects its whole response."""


@dataclass(frozen=True)
class ImportanceWeight:
    """Settings of a bounded importance weight rho.

    At level ``sequence`` or ``geometric``, all tokens of a response share one weight; at level ``segment``, all tokens
    of an unbroken run do."""

    level: Annotated[
        Level,
        Field(
            description="rho of each token, its geometric mean over an unbroken run of response tokens, rho of the "
            "whole response, or its geometric mean."
        ),
    ] = "token"
    mode: Annotated[
        Literal["truncate", "mask"],
        Field(
            description="Outside the bounds: the nearest bound, or 0 with the token still counted in the normaliser."
        ),
    ] = "truncate"
    lower: Annotated[float, Field(ge=0, le=1, description="Smallest weight.")] = 0.0
    upper: Annotated[float, Field(ge=1, lt=math.inf, description="Largest weight.")] = 2.0

    def __post_init__(self) -> None:
        if self.lower == self.upper:
            raise ValueError("lower and upper are both 1, which leaves no weight; lower must be below upper")


@dataclass(frozen=True)
class RatioRejection:
    """Rejection of tokens or sequences whose rho lies outside the bounds."""

    level: Annotated[
        RejectionLevel,
        Field(
            description="As for a weight; `veto`: rho of each token, and one outside the bounds rejects the response."
        ),
    ]
    lower: Annotated[float | None, Field(gt=0, le=1, description="Smallest rho kept. Default: no bound.")] = None
    upper: Annotated[float | None, Field(ge=1, lt=math.inf, description="Largest rho kept. Default: no bound.")] = None

    def __post_init__(self) -> None:
        if self.lower is None and self.upper is None:
            raise ValueError("without lower and upper nothing would be rejected; give one of them, or both")
        if self.lower == self.upper:
            raise ValueError("lower and upper are both 1, which keeps next to nothing; lower must be below upper")

    def accepts(self, log_ratio: Tensor, mask: Tensor, advantages: Tensor | None) -> Tensor:
        """Return the tokens to keep, bool ``[batch, seq]``; ``log_ratio`` is 0 outside ``mask``. NaN is rejected."""
        lower, upper = self.lower or 0.0, self.upper or math.inf
        return _accepted(log_ratio, mask, self.level, lambda values: _inside(values, lower, upper))


@dataclass(frozen=True)
class DivergenceRejection:
    """Rejection of tokens or sequences whose estimated KL(behaviour || proximal) exceeds a threshold."""

    level: Annotated[
        RejectionLevel,
        Field(
            description="Estimate of each token, its mean over an unbroken run of response tokens, the sum over the "
            "response (`sequence`), or the mean (`geometric`); `veto`: that of each token, and one above the "
            "threshold rejects the response."
        ),
    ]
    divergence: Annotated[
        Literal["k1", "abs", "k2", "k3"],
        Field(
            description="Per-token estimate of KL(behaviour || proximal): k1 = -log rho (one-sided: it rejects "
            "improbable tokens only), abs = |log rho|, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho."
        ),
    ]
    threshold: Annotated[float, Field(gt=0, lt=math.inf, description="Largest divergence kept, in nats.")]
    only_negative: Annotated[
        bool, Field(description="Reject tokens with a negative advantage only (off-policy sequence masking).")
    ] = False

    def accepts(self, log_ratio: Tensor, mask: Tensor, advantages: Tensor | None) -> Tensor:
        """Return the tokens to keep, bool ``[batch, seq]``; ``log_ratio`` is 0 outside ``mask``. NaN is rejected,
        whatever its advantage."""
        divergence = KL_ESTIMATORS[self.divergence](-log_ratio)
        accepted = _accepted(divergence, mask, self.level, lambda values: values <= self.threshold)
        if not self.only_negative:
            return accepted
        return accepted | ((needed(advantages, "advantages") >= 0) & log_ratio.isfinite())


@dataclass(frozen=True)
class SecondMomentRejection:
    """Rejection of the tokens with the largest (log rho)^2, until its mean over the remaining tokens of the batch is at
    most a threshold (M2PO, Zheng et al., arXiv 2510.01161)."""

    second_moment: Annotated[
        float, Field(gt=0, lt=math.inf, description="Largest mean of (log rho)^2 over the batch; the paper has 0.04.")
    ]

    def accepts(self, log_ratio: Tensor, mask: Tensor, advantages: Tensor | None) -> Tensor:
        """Return the tokens to keep, bool ``[batch, seq]``; ``log_ratio`` is 0 outside ``mask``.

        NaN is rejected. Tokens with equal values are all kept or all rejected."""
        squares = log_ratio.square().nan_to_num(nan=math.inf)
        ordered = squares[mask].sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
        beyond = (means > self.second_moment).nonzero()
        return squares < ordered[beyond[0, 0]] if len(beyond) else torch.ones_like(mask)


Rejection = RatioRejection | DivergenceRejection | SecondMomentRejection


@dataclass(frozen=True)
class Correction:
    """Settings of the off-policy correction. ``ValueError`` if it would have no effect."""

    weight: Annotated[
        ImportanceWeight | None, Field(description="The importance weight of each token. Default: none.")
    ] = None
    normalize: Annotated[
        bool,
        Field(
            description="Divide the weights by their mean over what stays in the loss (self-normalised importance "
            "sampling): less variance, some bias, and a loss on the scale of the uncorrected one. The mean is over "
            "tokens, or with `loss_agg_mode: seq-mean-token-mean` over sequences, each with the mean of its tokens."
        ),
    ] = False
    reject: Annotated[
        tuple[Rejection, ...], Field(description="What leaves the loss: all rejections act, in any order.")
    ] = ()

    @property
    def needs_batch(self) -> bool:
        """True if a token's weight or rejection depends on other samples of the batch."""
        return self.normalize or any(isinstance(each, SecondMomentRejection) for each in self.reject)

    def __post_init__(self) -> None:
        if self.weight is None and self.normalize:
            raise ValueError("normalize has no effect without a weight")
        if self.weight is None and not self.reject:
            raise ValueError("a correction without weight and without rejection has no effect")


@dataclass(frozen=True)
class CorrectionResult:
    """The result of `correct` for a batch."""

    weights: Tensor
    """``[batch, seq]``, without gradient: factor of each token's policy loss; 0 where ``kept`` is false."""
    kept: Tensor
    """bool ``[batch, seq]``: response tokens that were not rejected."""
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    settings: Correction,
    *,
    advantages: Tensor | None = None,
    trained: Tensor | None = None,
    sequences: Tensor | None = None,
    lags: Tensor | None = None,
    max_lag: int | None = None,
    capped: bool = False,
) -> CorrectionResult:
    """Compute weights and rejection for a whole batch, before the first update on it.

    ``proximal_logprobs`` (the trainer's before the update), ``behaviour_logprobs``, ``response_mask`` (bool), ``lags``
    (int) and ``advantages`` are ``[batch, seq]``; a row is a whole response. Entries outside the mask are never read.
    ``advantages`` are required if a rejection depends on their sign (else ``ValueError``). Computed in float64; the
    weights are float32, or float64 if an input is. ``trained`` (bool, default: the response mask) marks the tokens to
    train on, before rejection. ``lags``, ``max_lag`` and ``capped`` are those of `lag_buckets`.

    The mean weight, by which ``normalize`` divides, is over the trained tokens that are kept. With ``sequences`` (the
    loss is a mean over sequences; int64 ``[batch]``, the index of each row's sequence), it is the mean over sequences
    of their tokens' means.

    Metrics, all 0 without response tokens: those of `off_policy_metrics` for proximal against behaviour;
    ``clipped_share``: response tokens whose weight was changed by a bound; ``rejected_share``: response tokens that
    were rejected; ``rejected_sequences_share``: responses whose tokens were all rejected; ``weight_mean``: the mean
    weight before normalisation. With ``max_lag``, the two shares of tokens are also reported per lag, as
    ``lag_<n>/...``. ``ValueError`` for a wrong shape or dtype.
    """
    checked_mask(response_mask)
    for name, tensor in (("proximal_logprobs", proximal_logprobs), ("behaviour_logprobs", behaviour_logprobs)):
        checked_shape(name, tensor, tuple(response_mask.shape), floating=True)
    for name, optional in (("advantages", advantages), ("trained", trained), ("lags", lags)):
        if optional is not None:
            checked_shape(name, optional, tuple(response_mask.shape))
    log_ratio = keep(proximal_logprobs.double(), response_mask) - keep(behaviour_logprobs.double(), response_mask)
    kept = response_mask
    for rejection in settings.reject:
        kept = kept & rejection.accepts(log_ratio, response_mask, advantages)
    weights, clipped = _bounded_weights(log_ratio, response_mask, settings.weight)
    weights = keep(weights, kept)
    staying = kept if trained is None else kept & trained
    mean = _mean_weight(weights, staying, sequences)
    if settings.normalize:
        weights = weights / torch.where(mean > 0, mean, torch.ones_like(mean))
    buckets = lag_buckets(response_mask, lags, max_lag, capped)
    shares = {
        f"{prefix}{name}": _share(changed & bucket, bucket)
        for prefix, bucket in buckets.items()
        for name, changed in (("clipped_share", clipped), ("rejected_share", ~kept))
        if not prefix or bucket.any()
    }
    metrics = {
        **shares,
        "rejected_sequences_share": _share(response_mask.any(-1) & ~kept.any(-1), response_mask.any(-1)),
        "weight_mean": mean.item(),
        **off_policy_metrics(off_policy_sums(log_ratio, buckets)),
    }
    dtype = torch.promote_types(proximal_logprobs.dtype, behaviour_logprobs.dtype)
    return CorrectionResult(weights.to(torch.promote_types(dtype, torch.float32)), kept.clone(), metrics)


def parse_correction(args: Mapping[str, Any]) -> Correction:
    """Build a correction from the mapping `train_infer_correction` of a configuration file.

    ``weight``: the arguments of `ImportanceWeight`; ``normalize``: bool; ``reject``: a list with the arguments of a
    `SecondMomentRejection` (recognised by ``second_moment``), `DivergenceRejection` (by ``divergence`` or
    ``threshold``) or `RatioRejection`. Raises `ConfigError` listing every wrong key, type, range and combination.
    """
    path = "train_infer_correction"
    problems = Problems()
    weight, normalize, reject = (args.get(name) for name in ("weight", "normalize", "reject"))
    built_weight = None
    if weight is not None:
        built_weight = problems.attempt(_build, "the importance weight", ImportanceWeight, weight, f"{path}.weight")
    if normalize is not None and not isinstance(normalize, bool):
        problems.add(f"{path}.normalize", f"{normalize!r} is no choice", "it must be true or false")
    rejections: list[Any] = []
    if isinstance(reject, Sequence) and not isinstance(reject, str):
        for index, item in enumerate(reject):
            keys = set(item) if isinstance(item, Mapping) else set()
            name = next((name for key, name in _KINDS.items() if key in keys), "rejection by ratio")
            rejections.append(problems.attempt(_build, name, _REJECTIONS[name], item, f"{path}.reject[{index}]"))
    elif reject is not None:
        problems.add(f"{path}.reject", f"{reject!r} is no list", "give a list, one item for each rejection")
    valid = [item.name for item in fields(Correction)]
    for key in args:
        if key not in valid:
            problems.add(f"{path}.{key}", f"a correction has no key `{key}`", choose_among(str(key), valid))
    if normalize is True and weight is None:
        problems.add(f"{path}.normalize", "it has no effect without a weight", "add `weight`, or remove it")
    if weight is None and not reject:
        message = "a correction without `weight` and `reject` has no effect"
        problems.add(path, message, "add one, or remove it all")
    problems.raise_any()
    return Correction(built_weight, bool(normalize), tuple(rejections))


_REJECTIONS: dict[str, type[Rejection]] = {
    "rejection by ratio": RatioRejection,
    "rejection by divergence": DivergenceRejection,
    "rejection by second moment": SecondMomentRejection,
}
_KINDS = {
    "second_moment": "rejection by second moment",
    "divergence": "rejection by divergence",
    "threshold": "rejection by divergence",
}
"""Key that identifies a kind of rejection -> the kind's name."""


def _build(name: str, record: type, args: Any, path: str) -> Any:
    if not isinstance(args, Mapping):
        valid = ", ".join(item.name for item in fields(record))
        raise problem(path, f"{args!r} is no mapping", f"give keys and values; valid keys: {valid}")
    return made(name, record, {str(key): value for key, value in args.items()}, path, _owners)


def _owners(key: str) -> list[str]:
    return [name for name, record in _REJECTIONS.items() if key in {item.name for item in fields(record)}]


def _bounded_weights(log_ratio: Tensor, mask: Tensor, weight: ImportanceWeight | None) -> tuple[Tensor, Tensor]:
    """Return the weights (1 everywhere if ``weight`` is None), and a bool mask of those that a bound changed."""
    if weight is None:
        return torch.ones_like(log_ratio), torch.zeros_like(mask)
    log_ratio = _at_level(log_ratio, mask, weight.level)
    inside = _inside(log_ratio, weight.lower, weight.upper)
    if weight.mode == "mask":
        return keep(log_ratio.exp(), inside), ~inside
    # exp(log(upper)) may miss upper by a rounding error, hence the second clamp.
    bounded = log_ratio.clamp(_log(weight.lower), _log(weight.upper)).exp()
    return bounded.clamp(weight.lower, weight.upper), ~inside


def _mean_weight(weights: Tensor, staying: Tensor, sequences: Tensor | None) -> Tensor:
    """Return the mean weight over tokens, or the mean over sequences of their tokens' means; 0-d, 0 without tokens."""
    lengths, totals = staying.sum(-1), keep(weights, staying).sum(-1)
    if sequences is not None:
        lengths, totals = (torch.bincount(sequences, each.double()) for each in (lengths, totals))
        return (totals / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    return totals.sum() / lengths.sum().clamp(min=1)


def _at_level(values: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Aggregate token values ``[batch, seq]`` (0 outside ``mask``) to a level: each position gets its own value, the
    mean of its segment, or the sum (``sequence``) or mean (``geometric``) of its row."""
    if level == "token":
        return values
    if level == "segment":
        return segment_means(values, mask)
    total = values.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return total.expand(values.shape)


def _accepted(values: Tensor, mask: Tensor, level: RejectionLevel, accepts: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``accepts`` to values at a level, bool ``[batch, seq]``. With ``veto``, a row needs all tokens accepted."""
    if level == "veto":
        return (accepts(values) | ~mask).all(-1, keepdim=True).expand(values.shape)
    return accepts(_at_level(values, mask, level))


def _inside(log_ratio: Tensor, lower: float, upper: float) -> Tensor:
    return (log_ratio >= _log(lower)) & (log_ratio <= _log(upper))


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _share(part: Tensor, whole: Tensor) -> float:
    return part.sum().item() / max(1, whole.sum().item())
