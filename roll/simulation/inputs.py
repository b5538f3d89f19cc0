"""Inputs of a simulation besides the run's configuration: speeds, latencies and lengths, each with a default.

Every number can be set in a small YAML file (`roll simulate FILE --inputs NUMBERS`) or as `simulation.engine.scale=1.2`
on the command line. The origin of an input is *given* (written by the user), *measured* or *fitted* (written by
`--calibrate`), or *default*. The more uncertain an input is, the more it is varied for the printed interval
(`SPREADS`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from omegaconf import OmegaConf

from roll.check.hardware import DEVICES, Hardware
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, choose_among
from roll.configs.fields import Count, NotNegative, Nucleus, Positive, Range, Share, changes, option, values_below
from roll.configs.loader import dump_yaml, read_mapping, validated
from roll.configs.plugins import problem
from roll.configs.run import PipelineConfig

Origin = Literal["default", "given", "fitted", "measured"]
Section = TypeVar("Section")


@dataclass
class LengthInputs:
    """Lengths of prompts and responses, in tokens. The response of an episode is that of all its turns together."""

    prompt: NotNegative | None = option(None, "Mean prompt. Default: half of `prompt_length`.")
    median: Positive | None = option(None, "Median response before the limit. Default: a quarter of the longest.")
    sigma: NotNegative = option(0.8, "Standard deviation of the logarithm of a response's length.")
    correlation: Share = option(
        0.5, "Share of the variance (of logarithms) that the samples of a group have in common."
    )
    quantiles: list[float] = option(
        list, "Lengths at equally spaced quantiles, from the shortest to the longest, in place of `median` and `sigma`."
    )


@dataclass
class EngineInputs:
    """Speed and capacity of an engine replica.

    The defaults are for whole runs, not for single kernels. A single request to a 7B model used 34 % of an H100's
    bandwidth with CUDA graphs, 27 % without, and 81 % of an L4's (arXiv 2605.30571); with these defaults it uses 35 %.
    Before vLLM 0.6, an 8B model on an H100 spent 38 % of the time on the GPU, where a step takes about 5 ms (vLLM blog,
    2024-09-05 and 2025-01-27), so about 8 ms were overhead; it is less since. `efficiency` is an estimate.
    `network_seconds` is the latency by which NCCL chooses its algorithms (`tuning.cc`: tree, LL128, between nodes).
    """

    scale: Positive = option(1.0, "Seconds of prefill and decoding are multiplied by this.")
    slowest: Positive = option(1.0, "Further factor of these seconds for the slowest replica.")
    efficiency: Nucleus = option(0.4, "Share of the peak operations that matrix products reach.")
    bandwidth: Nucleus = option(0.6, "Share of the peak memory bandwidth that reading weights and caches reaches.")
    overhead_seconds: NotNegative = option(0.005, "Fixed time of a decoding step: scheduling, sampling, launches.")
    communication_seconds: NotNegative = option(
        2e-5, "Time of one of the two sums over GPUs in each layer, if a replica has several on one node."
    )
    network_seconds: NotNegative = option(
        8.5e-6, "Time that a message between nodes takes; a sum over n nodes waits for 2 log2(n) of them."
    )
    step_seconds: NotNegative | None = option(
        None, "Measured time of a decoding step, in place of what model and device say (with `request_seconds`)."
    )
    request_seconds: NotNegative = option(0.0, "Time that each running request adds to `step_seconds`.")
    prefill_token_seconds: NotNegative | None = option(None, "Measured time of a prompt token.")
    max_running: Count | None = option(None, "Requests that a replica runs at once. Default: the engine's option.")
    cache_tokens: Positive | None = option(None, "Tokens of keys and values that a replica has room for.")
    threads: Positive = option(1.0, "Cores that a decoding replica keeps busy (see `host.cores`).")


@dataclass
class TrainerInputs:
    """Speed of trainers, and of the roles that compute log-probabilities.

    Llama 3 405B was trained at MFUs of 0.38 to 0.43 (arXiv 2407.21783, table 4). With experts, verl published 0.40,
    0.37 and 0.31 (30B on 8, 16 and 32 GPUs) and 0.19 (671B on 96 H20), in `docs/perf/dpsk.md`: their geometric mean is
    0.3. An H20 is slow for the links between the GPUs, so the exchange of tokens between experts took little of that
    time; it is counted beside (`costs.py`). `link_efficiency` is an estimate; DeepEP, which is not used here, publishes
    0.96 of NVLink (H800).
    """

    scale: Positive = option(1.0, "Seconds that grow with tokens are multiplied by this.")
    mfu: Nucleus | None = option(
        None,
        "Share of the peak operations that forward and backward passes reach on one rank. Default: 0.4; of a mixture "
        "of experts 0.3.",
    )
    forward_mfu: Nucleus | None = option(None, "The same of passes for log-probabilities.")
    exponent: Annotated[float, Range(above=0, at_most=1)] = option(
        0.95, "n ranks do the work of n to this power; 0.82 was published for a mixture of experts on 8 to 32 GPUs."
    )
    link_efficiency: Nucleus = option(
        0.6,
        "Share of the peak bandwidth of NVLink and network at which ranks exchange the tokens of their experts, or of "
        "rows that they split.",
    )
    step_seconds: NotNegative = option(2.0, "Fixed time of a training step.")
    part_seconds: NotNegative = option(0.0, "Fixed time of each part of a batch but the last, if the trainer streams.")
    optimizer_seconds: NotNegative = option(0.5, "Time of an optimizer step.")
    micro_batch_seconds: NotNegative = option(0.0, "Fixed time of a micro-batch.")
    token_seconds: NotNegative | None = option(None, "Measured time of a trained token on one rank.")
    forward_token_seconds: NotNegative | None = option(None, "The same of a pass for log-probabilities.")
    threads: Positive = option(1.0, "Cores that a training rank keeps busy (see `host.cores`).")


@dataclass
class UpdateInputs:
    """Times of the phases of a weight update.

    In `roll`, rank 0 gathers and sends all weights (`roll.weights.publisher`): two minutes for 671B parameters. Systems
    in which each rank sends its shard take seconds: for 1T parameters on 256 ranks 1.3 s (Perplexity, 2025-09), or 7 s
    (53 s before, with broadcasts; LMSYS, 2026-04-29). To simulate such a system, multiply the bandwidths by the number
    of ranks.
    """

    gather_seconds: NotNegative | None = option(None, "Trainer stands still. Default: bytes / `gather_bandwidth`.")
    send_seconds: NotNegative | None = option(None, "In the background. Default: bytes / `send_bandwidth`.")
    fetch_seconds: NotNegative = option(0.0, "A replica receives, and decodes meanwhile.")
    load_seconds: NotNegative | None = option(
        None, "A replica stands still. Default: bytes / GPUs of the replica / `load_bandwidth`."
    )
    gather_bandwidth: Positive = option(2e10, "Bytes a second.")
    send_bandwidth: Positive = option(1e10, "Bytes a second.")
    load_bandwidth: Positive = option(2e10, "Bytes a second of one GPU.")
    exchange_bandwidth: Positive = option(2e10, "Bytes a second between one device and its host.")
    exchange_seconds: NotNegative | None = option(
        None,
        "Shared devices: time to move a role's states away, and to bring them back. Default: bytes / devices that they "
        "are spread over / `exchange_bandwidth`.",
    )


@dataclass
class LatencyInputs:
    """A log-normally distributed latency, with a limited number of workers."""

    seconds: NotNegative = option(0.05, "Median time.")
    sigma: NotNegative = option(0.5, "Standard deviation of its logarithm.")
    workers: Count | None = option(None, "Number at a time. Default: unlimited.")


@dataclass
class EnvironmentInputs(LatencyInputs):
    """Latency of environment steps, and the number of turns."""

    turns: Count | None = option(None, "Median turns of an episode. Default: half of `max_steps` of its environment.")
    turns_sigma: NotNegative = option(
        0.0, "Standard deviation of the logarithm of an episode's turns. Longer responses have more turns."
    )
    cpu_seconds: NotNegative = option(
        0.0,
        "Processor time of a turn in its worker process, messages and resets included; it does one after another.",
    )


@dataclass
class ValidationInputs:
    """A validation. It is repeated every `eval_steps`, at most every 16 steps: rarer ones count with their share."""

    seconds: NotNegative | None = option(
        None, "Time of a validation on all replicas (`validation.mode` says what waits). Default: they are left out."
    )


@dataclass
class DriverInputs:
    """Time of the driver process, which handles samples one at a time."""

    sample_seconds: NotNegative = option(5e-4, "Time for each sample, from request to batch (`benchmarks/README.md`).")
    part_seconds: NotNegative = option(0.0, "Time of a batch, or of each of its parts, in the stages before training.")
    step_seconds: NotNegative = option(0.0, "Fixed time of a step, between its update and the next requests.")
    turn_seconds: NotNegative = option(
        0.0, "Wait of each turn of an episode for messages between processes, beside the work of any of them."
    )


@dataclass
class HostInputs:
    """CPU cores, which all roles share on a CPU-only machine.

    The default of `slowdown` is an estimate: 0.28 was measured on two cores (`docs/simulation.md`).
    """

    cores: Positive | None = option(
        None, "With `cluster.device: cpu`, work beyond so many cores slows all down. Default: the cores here."
    )
    slowdown: NotNegative = option(
        0.2, "Share of time by which work takes longer while all other cores compute too, since they share the memory."
    )


@dataclass
class Inputs:
    """All inputs of a simulation besides the run's configuration."""

    __pydantic_config__ = {"extra": "forbid"}

    device: str | None = option(None, f"Device: {', '.join(DEVICES)}. Default: H100, or CPU as `cluster.device` says.")
    lengths: LengthInputs = option(LengthInputs, "Lengths of prompts and responses.")
    engine: EngineInputs = option(EngineInputs, "The engine.")
    trainer: TrainerInputs = option(TrainerInputs, "The trainer.")
    weight_update: UpdateInputs = option(UpdateInputs, "The weight update.")
    rewards: LatencyInputs = option(LatencyInputs, "Judging a response.")
    environments: EnvironmentInputs = option(EnvironmentInputs, "A step of an environment.")
    validation: ValidationInputs = option(ValidationInputs, "Validations.")
    driver: DriverInputs = option(DriverInputs, "The driver.")
    host: HostInputs = option(HostInputs, "The host.")
    filtered_share: Annotated[float, Range(at_least=0, below=1)] = option(
        0.3, "Share of the groups that `group_filter` drops."
    )
    origins: dict[str, Origin] = option(
        dict, "Source of the numbers in this file; `roll simulate --calibrate` writes it. Default: given."
    )

    def hardware(self, kind: str) -> Hardware:
        """Return the device's performance. ``kind`` is `cluster.device`. Raises `ConfigError` for an unknown device."""
        name = self.device or ("CPU" if kind == "cpu" else "H100")
        if name not in DEVICES:
            raise problem("simulation.device", f"`{name}` is no known device", choose_among(name, DEVICES))
        return DEVICES[name]

    def cores(self, kind: str) -> float:
        """Return the number of CPU cores that all roles share; infinite if they compute on GPUs."""
        return math.inf if kind != "cpu" else self.host.cores or float(os.cpu_count() or 1)

    def origin(self, path: str) -> Origin:
        """Return the origin of the input at ``path``, such as ``engine.scale``."""
        changed = {where for where, _ in changes(self) if not where.startswith("origins")}
        return self.origins.get(path, "given" if path in changed else "default")

    def known(self) -> dict[Origin, list[str]]:
        """Return origin -> the inputs of that origin as ``path=value``; defaults are left out."""
        found: dict[Origin, list[str]] = {}
        for path, value in self.told():
            shown = f"{len(value)} lengths" if isinstance(value, list) else f"{value:g}" if is_number(value) else value
            found.setdefault(self.origin(path), []).append(f"{path}={shown}")
        return found

    def told(self) -> Iterator[tuple[str, Any]]:
        """Yield (path, value) of each input that was set, even if to its default."""
        changed = {path for path, _ in changes(self)}
        for path, _, value, item in values_below(self):
            if item.name != "origins" and not is_dataclass(value) and (path in changed or path in self.origins):
                yield path, value


def is_number(value: Any) -> bool:
    """Return True for an int or float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_inputs(file: str | None, overrides: Sequence[str] = ()) -> Inputs:
    """Read inputs from a YAML file (None: all defaults) and apply ``key=value`` overrides.

    All inputs that are set have the origin `given`, unless ``origins`` in the file says otherwise. Raises `ConfigError`
    listing every unknown key and invalid value.
    """
    return _overridden(read_mapping(Path(file)) if file is not None else {}, overrides)


def overridden(inputs: Inputs, overrides: Sequence[str]) -> Inputs:
    """Return inputs with ``key=value`` overrides applied. Raises `ConfigError` for an unknown key or invalid value."""
    return _overridden(_tree(inputs), overrides) if overrides else inputs


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> Inputs:
    wrong = [each for each in overrides if "=" not in each]
    if wrong:
        raise ConfigError([ConfigProblem(f"simulation.{each}", "is no input", "write `key=value`") for each in wrong])
    above = OmegaConf.from_dotlist(list(overrides))
    given = _leaves(OmegaConf.to_container(above))
    if given.keys() & {"lengths.median", "lengths.sigma"} and "lengths.quantiles" not in given:
        # Calibrated quantiles are dropped if the command line sets other lengths.
        if (
            isinstance(lengths := tree.get("lengths"), dict)
            and _origins(tree).get("lengths.quantiles", "given") != "given"
        ):
            tree = {**tree, "lengths": {name: each for name, each in lengths.items() if name != "quantiles"}}
    merged: Any = OmegaConf.to_container(OmegaConf.merge(tree, above))
    origins = {path: origin for path, origin in _origins(merged).items() if path not in given}
    return inputs_from_tree({**merged, "origins": origins} if origins or "origins" in merged else merged)


def _origins(tree: Any) -> dict[str, Any]:
    origins = tree.get("origins")
    return origins if isinstance(origins, dict) else {}


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return path -> value of the leaves of a nested mapping; None and empty lists are left out."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            found[f"{prefix}{name}"] = value
    return found


def inputs_from_tree(tree: Any) -> Inputs:
    """Validate a nested mapping of inputs. Raises `ConfigError` listing every unknown key and invalid value."""
    inputs, problems = validated(Inputs, tree)
    problems = [*problems, *_out_of_range(inputs)] if inputs is not None else problems
    if problems:
        raise ConfigError([replace(each, path=f"simulation.{each.path}") for each in problems])
    assert isinstance(inputs, Inputs)
    written = _leaves({name: value for name, value in tree.items() if name != "origins"})
    return replace(inputs, origins={path: inputs.origins.get(path, "given") for path in written})


def _out_of_range(inputs: Inputs) -> list[ConfigProblem]:
    from roll.check.rules import numbers_are_in_range

    problems = list(numbers_are_in_range(inputs))  # type: ignore[arg-type]
    table = inputs.lengths.quantiles
    if table and (len(table) < 2 or sorted(table) != table or table[0] < 0):
        message = "these are no lengths at rising quantiles"
        problems.append(ConfigProblem("lengths.quantiles", message, "write at least two, from the shortest on"))
    if table and inputs.lengths.median is not None:
        message = "there is `lengths.quantiles` too, which takes its place"
        problems.append(ConfigProblem("lengths.median", message, "leave one of them out"))
    known = {item.name for item in fields(Inputs)}
    for path in inputs.origins:
        if path.partition(".")[0] not in known:
            problems.append(ConfigProblem(f"origins.{path}", "there is no such input", choose_among(path, known)))
    return problems


def dump_inputs(inputs: Inputs) -> str:
    """Render inputs as YAML for `read_inputs`; defaults are left out."""
    return dump_yaml(_tree(inputs))


def _tree(inputs: Inputs) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in inputs.told():
        *above, last = path.split(".")
        below = tree
        for name in above:
            below = below.setdefault(name, {})
        below[last] = value
    origins = {path: origin for path, origin in inputs.origins.items() if origin != "given"}
    return {**tree, "origins": origins} if origins else tree


INSTEAD_OF: Mapping[str, tuple[str, ...]] = {
    "lengths.quantiles": ("lengths.median", "lengths.sigma"),
    "trainer.token_seconds": ("trainer.mfu",),
    "trainer.forward_token_seconds": ("trainer.forward_mfu",),
    "weight_update.gather_seconds": ("weight_update.gather_bandwidth",),
    "weight_update.send_seconds": ("weight_update.send_bandwidth",),
    "weight_update.load_seconds": ("weight_update.load_bandwidth",),
}
"""Measured input -> the inputs that it replaces."""


def with_value(inputs: Inputs, path: str, value: Any, origin: Origin) -> Inputs:
    """Return the inputs with one value set, unless the user gave it or an input that it would replace."""
    if any(inputs.origin(each) == "given" for each in (path, *INSTEAD_OF.get(path, ()))):
        return inputs
    section, _, name = path.rpartition(".")
    changed = {section: replace(vars(inputs)[section], **{name: value})} if section else {name: value}
    return replace(inputs, **changed, origins={**inputs.origins, path: origin})


SPREADS: Mapping[str, float] = {
    "lengths.median": 1.0,
    "lengths.sigma": 0.2,
    "lengths.prompt": 0.5,
    "lengths.correlation": 0.4,
    "filtered_share": 0.5,
    "engine.scale": 0.55,
    "trainer.scale": 0.55,
    "trainer.exponent": 0.05,
    "trainer.step_seconds": 0.5,
    "trainer.optimizer_seconds": 0.5,
    "weight_update.gather_bandwidth": 1.0,
    "weight_update.send_bandwidth": 1.0,
    "weight_update.load_bandwidth": 1.0,
    "rewards.seconds": 0.5,
    "environments.seconds": 0.5,
    "environments.cpu_seconds": 0.5,
    "driver.sample_seconds": 0.3,
    "driver.part_seconds": 0.3,
    "driver.step_seconds": 0.3,
    "driver.turn_seconds": 0.3,
    "host.slowdown": 0.5,
    "trainer.part_seconds": 0.5,
    "weight_update.exchange_bandwidth": 1.0,
}
"""Uncertain input -> uncertainty of its default: the standard deviation of the logarithm of its relative error. An
estimate, checked against published runs (`docs/simulation.md`)."""
REMAINING: Mapping[Origin, float] = {"default": 1.0, "fitted": 0.25, "measured": 0.1, "given": 0.0}
"""Origin of an input -> fraction of its uncertainty in `SPREADS` that remains."""
STANDS_FOR: Mapping[str, Mapping[str, float]] = {
    "lengths.median": {"lengths.quantiles": 0},
    "lengths.sigma": {"lengths.quantiles": 0},
    "engine.scale": {"engine.step_seconds": 0, "engine.bandwidth": 0.3, "engine.efficiency": 0.5},
    "trainer.scale": {"trainer.token_seconds": 0, "trainer.mfu": 0},
    "weight_update.gather_bandwidth": {"weight_update.gather_seconds": 0},
    "weight_update.send_bandwidth": {"weight_update.send_seconds": 0},
    "weight_update.load_bandwidth": {"weight_update.load_seconds": 0},
    "weight_update.exchange_bandwidth": {"weight_update.exchange_seconds": 0, "driver.step_seconds": 0.25},
}
"""Input -> related inputs -> fraction of the input's uncertainty that remains if the related one is known."""
LARGEST: Mapping[str, float] = {"lengths.correlation": 1.0, "trainer.exponent": 1.0, "filtered_share": 0.95}
"""Input -> maximum of its varied values."""


def varied(inputs: Inputs, factors: Mapping[str, float], config: PipelineConfig) -> Inputs:
    """Return inputs with some values multiplied by ``factors`` (path -> factor).

    Also applies to defaults that are derived from the configuration."""
    longest = derived.longest_response(config)
    unset = {"lengths.median": longest / 4, "lengths.prompt": config.prompt_length / 2}
    for path, factor in factors.items():
        section, _, name = path.rpartition(".")
        old: Any = vars(inputs)[section] if section else inputs
        value: Any = vars(old)[name]
        if path == "lengths.median" and old.quantiles:
            name, value = "quantiles", [min(longest, length * factor) for length in old.quantiles]
        else:
            value = min((unset[path] if value is None else value) * factor, LARGEST.get(path, math.inf))
        changed: Any = replace(old, **{name: value})
        inputs = replace(inputs, **{section: changed}) if section else changed
    return inputs


def drawn_factors(inputs: Inputs, random: np.random.Generator) -> dict[str, float]:
    """Draw a random error factor for each uncertain input: path -> log-normal factor."""
    factors = {}
    for path, spread in SPREADS.items():
        left = REMAINING[inputs.origin(path)]
        for other, share in STANDS_FOR.get(path, {}).items():
            if (origin := inputs.origin(other)) != "default":
                left = min(left, max(share, REMAINING[origin]))
        drawn = math.exp(spread * left * random.standard_normal())
        if left:
            factors[path] = drawn
    return factors
