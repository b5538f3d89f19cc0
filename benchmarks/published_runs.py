"""Compare simulations with published step times of other systems.

Of each family (a system's runs of one model on one kind of device) one row calibrates: inputs that its source does not
tell (`UNKNOWN`) are fitted to its synchronous and its asynchronous step, each with its uncertainty, by the method of
`roll simulate --calibrate`. The other rows are predicted with them, and every row is predicted blind as well, with an
interval. Lengths have the published means; where a source has none, they are fitted too. Where a source tells how the
time went on, a step is one of the first hundred: lengths drift during training, and in each run differently.

Schedules of other systems are mapped to the nearest of ours: their staleness threshold, or number of steps off, is the
ratio. Where verl goes on with responses after updates (`partial_rollout`), it may do so after any number of them. While
weights move, engines of other systems stand still, and all of them receive all weights (`REFIT_BANDWIDTH`). NeMo-RL's
recipes have a KL penalty of 0.01 (`grpo_math_1B.yaml`), so the reference's log-probabilities are computed too.

    python benchmarks/published_runs.py published_runs.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from roll.check import memory_parts
from roll.configs.loader import config_from_tree
from roll.configs.run import PipelineConfig
from roll.simulation.fit import NOISE, most_likely
from roll.simulation.inputs import SPREADS, Inputs, LengthInputs, drawn_factors, varied
from roll.simulation.prediction import interval
from roll.simulation.run import simulate

DEEPSEEK_V3 = memory_parts.ModelShape(
    129_280, 7168, 18432, 61, 128, 2, 144, False, experts=256, experts_per_token=9, expert_intermediate=2048
)
"""With the cache of its latent attention, 576 elements of a token and layer, and the shared expert among the chosen."""
MODELS = {
    "Qwen2.5-Math-7B": "Qwen2.5-7B",
    "Qwen2.5-7B (ReTool)": "Qwen2.5-7B",
    "Qwen3-30B-A3B-Base": "Qwen3-30B-A3B",
    "R1-Distill-Qwen-1.5B": "Qwen2.5-1.5B",
    "R1-Distill-Qwen-7B": "Qwen2.5-7B",
}
"""Published model -> one of the same sizes."""
REFIT_BANDWIDTH = 3.8e10
"""Bytes of weights a second. NeMo-RL's pull request 638, which is no row, has 55 s for an update of 671 billion
parameters, about 20 of them for moving states."""
PROMPT = 150
"""Tokens of a prompt where the source gives the mean of prompt and response."""
NODE = 8
"""GPUs of a node. Those of GB200 have 4, and NVLink between nodes."""
ANY_AGE = 16
"""Bound of staleness, in versions, that responses of a hundred steps hardly reach."""
WITHIN = 0.15
UNKNOWN = {
    **{path: SPREADS[path] for path in (
        "engine.scale",
        "trainer.scale",
        "trainer.exponent",
        "trainer.step_seconds",
        "trainer.optimizer_seconds",
        "weight_update.load_bandwidth",
        "weight_update.exchange_bandwidth",
        "lengths.median",
        "lengths.sigma",
        "lengths.prompt",
        "lengths.correlation",
    )},
    "engine.overhead_seconds": 0.7,
}  # fmt: skip
"""Input -> standard deviation of the logarithm of what is known of it. These may be fitted to the row that calibrates,
as far as its steps tell of them. The fixed time of a decoding step is an estimate, good for a factor of two."""
TOLD = ("lengths.median", "lengths.prompt")
"""Those that a published mean tells."""
NOISE_OF_STEP = NOISE[2]
STEPS = 4
"""Steps that are averaged."""
PASSES = 6
"""How often a fit takes its derivatives."""


@dataclass
class Case:
    """One step time of a row."""

    row: dict[str, Any]
    asynchronous: bool

    @property
    def seconds(self) -> float:
        """The published time of a step, on average; of the first hundred steps where that is told."""
        told = self.row.get(f"{self._name}_cumulative_seconds")
        return float(told["100"] / 100 if told else self.row[f"{self._name}_step_seconds"])

    @property
    def family(self) -> str:
        """The rows that share what is fitted. Lengths are fitted as shares of the limits, which are the same in these
        rows."""
        return f"{self.row['system'].split(' 0.')[0]}, {self.row['model']}, {self.row['gpus']['kind']}"

    @property
    def mean(self) -> float | None:
        """The published mean of prompt and response, in tokens."""
        lengths = self.row["lengths"]
        return lengths.get("mean") or lengths.get(f"mean_{self._name}")

    def build(self, factors: Mapping[str, float] = MappingProxyType({})) -> tuple[PipelineConfig, Inputs]:
        """Return configuration and inputs of the simulation. ``factors``: input -> factor of its default."""
        row, settings = self.row, self.row.get("settings", {})
        split, gpus = row["split"], row["gpus"]
        train, generate = split["train"], split["generate"]
        if not self.asynchronous:
            train = generate = gpus.get("sync") or gpus["count"]
        of_engine = settings.get("engine_tensor_parallel") or settings["engine_tp_" + self._name]
        generate = max(1, generate // of_engine) * of_engine
        tensor, context, experts, stages = self._parallel
        devices = max(train, generate) if not self.asynchronous else train + generate
        first = train if self.asynchronous else 0
        ratio = row.get("staleness_threshold", row.get("steps_off", 1)) if self.asynchronous else 0
        megatron = max(tensor * context, experts) * stages > context or "Megatron" in settings.get("train", "")
        optimizer_batch = settings.get("ppo_mini_batch_prompts", row["batch"]) * row["group"]
        longest = row["lengths"].get("response_max") or row["lengths"]["total_max"] - PROMPT
        tree = {
            "pretrain": MODELS.get(row["model"], row["model"]),
            "cluster": {
                "device": "cuda",
                "num_devices_per_node": NODE,
                "num_nodes": math.ceil(devices / NODE),
            },
            "rollout_batch_size": row["batch"],
            "num_return_sequences_in_group": row["group"],
            "prompt_length": row["lengths"].get("prompt_max") or 2 * PROMPT,
            "response_length": longest,
            "async_generation_ratio": ratio,
            "weight_update": {"max_unavailable": 1.0},
            "old_logprobs": "behaviour" if self.asynchronous and row["system"].startswith("verl") else "recompute",
            "actor_train": {
                "device_mapping": f"0-{train - 1}",
                "model_args": {"dtype": "bfloat16"},
                # Ranks that share sequences count as tensor-parallel ones; micro-batches are packed to the longest.
                "strategy_args": {
                    "strategy_name": "megatron_train" if megatron else "fsdp2_train",
                    "strategy_config": {
                        "tensor_model_parallel_size": tensor * context,
                        "pipeline_model_parallel_size": stages,
                        "expert_model_parallel_size": experts,
                        "expert_tensor_parallel_size": 1,
                    }
                    if megatron
                    else {"context_parallel_size": context},
                },
                "training_args": {
                    "per_device_train_batch_size": 1,
                    "gradient_accumulation_steps": optimizer_batch * tensor * context * stages // train,
                },
                "use_dynamic_batching_in_train": True,
                "max_tokens_per_microbatch_in_train": longest + (row["lengths"].get("prompt_max") or PROMPT),
            },
            "actor_infer": {
                "device_mapping": f"{first}-{first + generate - 1}",
                "num_gpus_per_engine": of_engine,
                "strategy_args": {"strategy_name": "vllm"},
                "model_args": {"dtype": "bfloat16"},
            },
        }
        if row["system"].startswith("NeMo") or "ref" in row["breakdown"].get(self._name, {}):
            tree["teacher"] = {"weights": "policy"}  # another forward pass of the trainer, for the reference
        if self.asynchronous and row["system"].startswith("verl fully"):
            tree["actor_train"]["stream_groups"] = True
        if ratio and settings.get("partial_rollout"):
            tree["max_staleness"] = ANY_AGE
        config, known = config_from_tree(tree), Inputs()
        lengths = known.lengths
        if self.mean:
            sigma = lengths.sigma * factors.get("lengths.sigma", 1.0)
            lengths = LengthInputs(PROMPT, median_of(self.mean - PROMPT, longest, sigma), sigma)
            factors = {path: factor for path, factor in factors.items() if path not in (*TOLD, "lengths.sigma")}
        update = replace(
            known.weight_update, gather_seconds=0.0, send_seconds=0.0, load_bandwidth=REFIT_BANDWIDTH / of_engine
        )
        inputs = Inputs(device=gpus["kind"], lengths=lengths, weight_update=update)
        return config, varied(inputs, factors, config)

    @property
    def _parallel(self) -> tuple[int, int, int, int]:
        """Tensor, context, expert and pipeline sizes of the trainer."""
        settings = self.row["settings"]
        if settings.get("train", "").startswith("Megatron"):  # such as Megatron TP2 CP2 EP8
            told = {word[:2]: int(word[2:]) for word in settings["train"].split()[1:]}
            return told.get("TP", 1), told.get("CP", 1), told.get("EP", 1), told.get("PP", 1)
        split = (1, settings.get("train_sequence_parallel", 1), 1, 1)
        tensor, context, experts, stages = settings.get(f"train_{self._name}[TP,CP,EP,PP]", split)
        return tensor, context, experts, stages

    @property
    def _name(self) -> str:
        return "async" if self.asynchronous else "sync"


def algorithms_of(config: PipelineConfig) -> Any:
    """Return what a simulation asks of the algorithms; losses of other systems need not pass our checks."""
    fields = {"proximal_logprobs"} if config.old_logprobs == "recompute" else set[str]()
    objective = SimpleNamespace(token_fields=fields)
    return SimpleNamespace(streams=config.actor_train.stream_groups is True, correction=None, objective=objective)


def simulated(case: Case, factors: Mapping[str, float]) -> float:
    """Return the time of a step."""
    config, inputs = case.build(factors)
    return simulate(config, inputs, steps=STEPS, algorithms=algorithms_of(config)).step_seconds


def median_of(mean: float, longest: int, sigma: float) -> float:
    """Return the median of log-normal lengths whose mean is this after they were cut at the longest."""
    normal = NormalDist()

    def cut_mean(median: float) -> float:
        score = math.log(longest / median) / sigma
        return median * math.exp(sigma**2 / 2) * normal.cdf(score - sigma) + longest * (1 - normal.cdf(score))

    low, high = 1.0, 100.0 * longest
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


def fit(cases: list[Case]) -> dict[str, float]:
    """Return the factors of `UNKNOWN` inputs with which the steps of these cases take the times that they took."""
    paths = [path for path in UNKNOWN if path not in TOLD or not all(case.mean for case in cases)]

    def factors(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(paths, np.exp(logs).tolist(), strict=True))

    def errors(logs: np.ndarray) -> list[float]:
        return [math.log(simulated(case, factors(logs)) / case.seconds) / NOISE_OF_STEP for case in cases]

    return factors(most_likely(errors, np.array([UNKNOWN[path] for path in paths]), passes=PASSES))


def usable(row: dict[str, Any]) -> bool:
    """Return True if a row tells devices, split and batch of two language-model steps."""
    kind, split = row["gpus"]["kind"], row["split"]
    name = MODELS.get(row["model"], row["model"]).lower()
    told = bool(split.get("train") and row.get("settings") and row.get("async_step_seconds"))
    text = "images" not in row["lengths"] and isinstance(row.get("group"), int)
    return name in memory_parts.KNOWN and kind in ("H20", "H100", "GB200") and told and text


class Predicted(NamedTuple):
    """Seconds of a step, blind and with what was fitted to another row."""

    blind: float
    calibrated: float | None


@dataclass
class Tally:
    """Counts over all rows."""

    inside: list[bool] = field(default_factory=list)
    close: list[bool] = field(default_factory=list)
    signs: list[bool] = field(default_factory=list)
    calibrated_signs: list[bool] = field(default_factory=list)


def compare(case: Case, factors: Mapping[str, float] | None, fitted: bool, draws: int, tally: Tally) -> Predicted:
    """Print a line of the table. Returns the predictions of the step."""
    random, blind = np.random.default_rng(0), simulated(case, {})
    drawn = [simulated(case, drawn_factors(Inputs(), random)) for _ in range(draws)]
    low, high = interval(blind, drawn)
    tally.inside.append(low <= case.seconds <= high)
    told, seconds = " | ", None
    if factors is not None:
        seconds = simulated(case, factors)
        off = seconds / case.seconds - 1
        told = f"{seconds:.0f} | {off:+.0%}{' (fitted)' if fitted else ''}"
        if not fitted:
            tally.close.append(abs(off) <= WITHIN)
    cells = [
        case.row["id"],
        "asynchronous" if case.asynchronous else "synchronous",
        f"{case.seconds:.0f}",
        f"{blind:.0f}",
        f"{low:.0f}-{high:.0f}",
        "yes" if tally.inside[-1] else "no",
        told,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    return Predicted(blind, seconds)


def compare_family(members: list[dict[str, Any]], draws: int, tally: Tally) -> dict[str, float] | None:
    """Print the lines of a family; the first row with both steps calibrates the others. Returns what was fitted."""
    members.sort(key=lambda row: row.get("sync_step_seconds") is None)
    first = members[0]
    fits = len(members) > 1 and first.get("sync_step_seconds") is not None
    factors = fit([Case(first, False), Case(first, True)]) if fits else None
    seen: set[tuple[int, float]] = set()
    for row in members:
        made: dict[bool, Predicted] = {}
        synchronous = (row["gpus"].get("sync") or row["gpus"]["count"], row.get("sync_step_seconds"))
        if synchronous[1] is not None and synchronous not in seen:  # several rows repeat one synchronous run
            made[False] = compare(Case(row, False), factors, row is first, draws, tally)
            seen.add(synchronous)
        made[True] = compare(Case(row, True), factors, row is first, draws, tally)
        if len(made) == 2 and row["gpus"].get("sync") == row["gpus"].get("async"):
            pays = Case(row, True).seconds < Case(row, False).seconds
            tally.signs.append((made[True].blind < made[False].blind) == pays)
            if (ahead := made[True].calibrated) is not None and (behind := made[False].calibrated) is not None:
                tally.calibrated_signs.append((ahead < behind) == pays)
    return factors


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--draws", type=int, default=12, help="simulations behind an interval; at least 9")
    parser.add_argument("--only", default="", help="families whose name contains this")
    options = parser.parse_args()
    memory_parts.KNOWN["deepseek-v3"] = DEEPSEEK_V3
    rows = json.loads(options.file.read_text())["rows"]
    families: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if usable(row) and options.only in Case(row, True).family:
            families[Case(row, True).family].append(row)
    print(f"{sum(map(len, families.values()))} of {len(rows)} rows tell enough\n")
    print("| row | step | published s | blind s | interval | inside | calibrated s | off |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    tally = Tally()
    fits = [(name, compare_family(members, options.draws, tally)) for name, members in families.items()]
    print(f"\ninside of the blind interval: {sum(tally.inside)} of {len(tally.inside)}")
    print(f"calibrated on another row, within {WITHIN:.0%}: {sum(tally.close)} of {len(tally.close)}")
    for name, factors in fits:
        if factors is not None:
            print(f"{name}: {', '.join(f'{path} x {factor:.2f}' for path, factor in factors.items())}")
    for how, signs in (("blind", tally.signs), ("calibrated", tally.calibrated_signs)):
        print(f"right about what pays on as many devices, {how}: {sum(signs)} of {len(signs)}")


if __name__ == "__main__":
    main()
