"""Cost model: seconds of generation, training and weight updates, from model size, device data sheet and inputs.

- Decoding: a step of n requests takes a fixed time, plus the longer of reading the weights and computing 2 FLOPs per
  weight and request, plus the time to read the KV cache (the roofline: Williams et al. 2009; for transformers: Pope et
  al., "Efficiently Scaling Transformer Inference", 2022). Of MoE experts, only those that some request selects are
  read.
- Training: 6 FLOPs per weight and token, and 12 per layer, query element and pair of tokens, halved by the causal mask
  (Kaplan et al. 2020, Narayanan et al. 2021, "Efficient Large-Scale Language Model Training"). n ranks are as fast as n
  to the power of `trainer.exponent` single ones. An optimizer step takes at least as long as its longest sequence takes
  on the ranks that hold one copy of the model; in a pipeline, on those of one stage. In each optimizer step the stages
  of a pipeline wait for (stages - 1) / micro-batches of the time in which they compute (Narayanan et al. 2021, section
  2.2).
- Expert parallelism: in each layer a token's hidden state goes to each of its experts and comes back, in the backward
  pass again (Lepikhin et al. 2021, "GShard"). Nothing is computed meanwhile. Exchanges within a node and between nodes
  overlap. Published: 20 to 60 % of the time of a training step (arXiv 2603.07685).
- Measured times replace any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from roll.check.hardware import Hardware
from roll.check.memory import find_shape
from roll.check.memory_parts import ELEMENT_BYTES, GIB, ModelShape, ShapeUnknown
from roll.check.memory_roles import HF_MAX_RUNNING, SGLANG_MAX_RUNNING, VLLM_BATCHES, engine_share
from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.plugins import problem
from roll.configs.roles import WorkerConfig
from roll.configs.run import PipelineConfig
from roll.configs.strategies import Options
from roll.simulation.inputs import Inputs

MFU, MFU_OF_EXPERTS = 0.4, 0.3
"""Default of `trainer.mfu` for dense models, and for mixtures of experts."""
STATE_BYTES = 16
"""Bytes on the device per trained weight: weight, gradient and two moments in float32."""


@dataclass(frozen=True)
class EngineCosts:
    """Costs and capacity of one engine replica."""

    step: Sequence[float]
    """Number of running requests -> seconds of a decoding step, without reading the KV cache."""
    cached_token: float
    """Seconds that each cached token adds to a decoding step."""
    prefill_token: float
    """Seconds to prefill a prompt token."""
    max_running: int
    """Maximum number of requests that run at once."""
    cache_tokens: float
    """Capacity of the KV cache, in tokens."""
    threads: float
    """Cores that the replica occupies while it computes."""

    def slower(self, factor: float) -> EngineCosts:
        """Return the costs of a replica that takes ``factor`` times as long."""
        return replace(
            self,
            step=[factor * seconds for seconds in self.step],
            cached_token=factor * self.cached_token,
            prefill_token=factor * self.prefill_token,
        )


class Tokens:
    """Lengths of a set of samples in tokens, prompts included."""

    __slots__ = ("lengths", "longest", "samples", "squares", "total")

    def __init__(self, lengths: Sequence[float] | np.ndarray = ()) -> None:
        self.lengths = np.asarray(lengths, dtype=np.float64)
        self.samples = len(self.lengths)
        self.total = float(self.lengths.sum())
        self.squares = float(np.square(self.lengths).sum())
        """Sum of the squared lengths."""
        self.longest = float(self.lengths.max(initial=0.0))

    @classmethod
    def joined(cls, sets: Iterable[Tokens]) -> Tokens:
        """Return the samples of all sets together."""
        return cls(np.concatenate([np.empty(0), *(each.lengths for each in sets)]))

    def split(self, parts: int) -> list[Tokens]:
        """Return this many sets of equal size, each with samples of as many groups as possible."""
        return [self] if parts == 1 else [Tokens(self.lengths[first::parts]) for first in range(parts)]


@dataclass(frozen=True)
class Costs:
    """Costs of all roles, in seconds."""

    engine: EngineCosts
    slowest_engine: EngineCosts
    """Of one of the replicas."""
    train: Callable[[Tokens], float]
    """Tokens of a batch (or a part of one) -> seconds to train on them, without the fixed times of a step."""
    train_step: float
    """Fixed seconds per training step."""
    train_part: float
    """Fixed seconds per part of a batch that does not complete it."""
    forward: dict[str, Callable[[Tokens], float]]
    """Role -> function of tokens that returns the seconds to compute their log-probabilities. For `actor_train`: the
    pass before the first update."""
    gather: float
    """Seconds of each phase of a weight update, as for `send`, `fetch` and `load`."""
    send: float
    fetch: float
    load: float
    exchange: dict[str, float]
    """Role -> seconds to load its states onto shared devices, or to offload them."""
    train_threads: float
    """Cores that the trainer occupies while it computes."""


def shape_of(config: PipelineConfig, role: WorkerConfig) -> ModelShape:
    """Return the sizes of a role's model. Raises `ConfigError` if they cannot be determined."""
    model = derived.model_path(config, role)
    try:
        return find_shape(model)
    except ShapeUnknown as reason:
        recipe = Path(model).parent / "make_model.py"
        remedy = f"make it with `python {recipe}`" if recipe.is_file() else "give a folder with the model's config.json"
        raise problem("pretrain", str(reason), remedy) from reason


def _chosen_share(shape: ModelShape) -> float:
    return shape.experts_per_token / shape.experts


def costs_of(config: PipelineConfig, inputs: Inputs) -> Costs:
    """Compute the costs of a configuration. Raises `ConfigError` if a model's size or the device is unknown."""
    hardware, given = inputs.hardware(config.cluster.device), inputs.trainer
    infer, role, roles = config.actor_infer, config.actor_train, derived.present_roles(config)
    shape = shape_of(config, role)
    size = float(shape.parameters * ELEMENT_BYTES[infer.model_args.dtype])
    optimizer_steps = derived.optimizer_steps_per_step(config, config.actor_train)
    optimizer_batch = derived.optimizer_batch_size(config, role)
    passes = _Passes(config, inputs, hardware, config.actor_train)
    update = inputs.weight_update
    moved = {
        role: (STATE_BYTES if role in ("actor_train", "critic") else 2) * shape_of(config, section).parameters
        / (len(parse_device_mapping(section.device_mapping)) or 1) / update.exchange_bandwidth
        for role, section in roles.items()
    }  # fmt: skip
    moved["actor_infer"] = size / infer.num_gpus_per_engine / update.exchange_bandwidth
    if update.exchange_seconds is not None:
        moved = dict.fromkeys(moved, update.exchange_seconds)
    engine = engine_costs(config, inputs, shape, hardware)
    on_load = size / infer.num_gpus_per_engine / update.load_bandwidth
    return Costs(
        engine,
        engine.slower(inputs.engine.slowest),
        train=lambda tokens: (
            config.ppo_epochs
            * sum(
                passes.trained(each) + given.micro_batch_seconds * micro_batches(role, each)
                for each in tokens.split(max(1, round(tokens.samples / optimizer_batch)))
            )
        ),
        train_step=given.step_seconds + optimizer_steps * given.optimizer_seconds,
        train_part=given.part_seconds,
        forward={
            role: _Passes(config, inputs, hardware, roles[role]).forward
            for role in ("actor_train", "reference", "teacher")
            if role in roles
        },
        gather=size / update.gather_bandwidth if update.gather_seconds is None else update.gather_seconds,
        send=size / update.send_bandwidth if update.send_seconds is None else update.send_seconds,
        fetch=update.fetch_seconds,
        load=on_load if update.load_seconds is None else update.load_seconds,
        exchange=moved,
        train_threads=given.threads * len(parse_device_mapping(config.actor_train.device_mapping)),
    )


def micro_batches(role: WorkerConfig, tokens: Tokens) -> int:
    """Return the micro-batches of a data-parallel rank for these tokens."""
    if role.use_dynamic_batching_in_train:
        number, budget = tokens.total, role.max_tokens_per_microbatch_in_train
    else:
        number, budget = tokens.samples, role.training_args.per_device_train_batch_size
    return math.ceil(number / derived.data_parallel_ranks(role) / budget)


def engine_costs(config: PipelineConfig, inputs: Inputs, shape: ModelShape, hardware: Hardware) -> EngineCosts:
    """Compute the costs and capacity of one engine replica. Raises `ConfigError` if its memory is too small."""
    given, gpus = inputs.engine, config.actor_infer.num_gpus_per_engine
    element = ELEMENT_BYTES[config.actor_infer.model_args.dtype]
    running = given.max_running or _running(config, hardware)
    bandwidth, flops = given.bandwidth * hardware.bandwidth * gpus, given.efficiency * hardware.flops * gpus
    active = shape.active_parameters
    experts = float(shape.layers * shape.expert_parameters)
    dense = shape.parameters - experts - (0 if shape.tied else shape.embedding_parameters)
    nodes = math.ceil(gpus / linked(config, hardware))
    sum_seconds = given.communication_seconds + 2 * math.log2(nodes) * given.network_seconds
    sums = 2 * shape.layers * sum_seconds if gpus > 1 else 0.0
    measured = given.step_seconds is not None

    def step(requests: int) -> float:
        if given.step_seconds is not None:
            return given.scale * (given.step_seconds + given.request_seconds * requests)
        read = dense + (experts * (1 - (1 - _chosen_share(shape)) ** requests) if experts else 0.0)
        return given.scale * (
            given.overhead_seconds + sums + max(read * element / bandwidth, 2 * active * requests / flops)
        )

    known: list[float] = [step(requests) for requests in range(running + 1)]
    cached = shape.cache_bytes_per_token(element) * max(1, gpus / shape.kv_heads)  # fewer KV heads than GPUs: copied
    room = engine_share(config, hardware.memory) * gpus - shape.parameters * element
    tokens = math.inf if config.cluster.device == "cpu" else room / cached
    if given.cache_tokens is None and tokens <= derived.sequence_length(config):
        message = f"a replica of {gpus} has room for {max(0, tokens):,.0f} tokens, less than one sequence"
        remedy = "give a replica more devices, larger ones, or a larger share of their memory"
        raise problem("actor_infer.num_gpus_per_engine", message, remedy)
    prefill = 0.0 if measured else 2 * active / flops
    return EngineCosts(
        step=known,
        cached_token=0.0 if measured else given.scale * cached / bandwidth,
        prefill_token=given.scale * (prefill if given.prefill_token_seconds is None else given.prefill_token_seconds),
        max_running=running,
        cache_tokens=tokens if given.cache_tokens is None else given.cache_tokens,
        threads=given.threads,
    )


def _running(config: PipelineConfig, hardware: Hardware) -> int:
    """Return the maximum number of requests that a replica runs at once: the engine's option or its default."""
    options = Options.of(config.actor_infer)
    if options.strategy == "sglang":
        return int(options.get("max_running_requests", SGLANG_MAX_RUNNING))
    if options.strategy == "hf_infer":
        return int(options.get("max_running_requests", HF_MAX_RUNNING))
    usual = next(requests for below, _, requests in VLLM_BATCHES if hardware.memory < below * GIB)
    return int(options.get("max_num_seqs", usual) if options.strategy == "vllm" else usual)


def linked(config: PipelineConfig, hardware: Hardware) -> int:
    """Return the number of devices that NVLink, or the node, connects."""
    return max(hardware.linked, config.cluster.num_devices_per_node)


def exchange_seconds(config: PipelineConfig, inputs: Inputs, hardware: Hardware, role: WorkerConfig) -> float:
    """Return the seconds in which a rank exchanges one token in all layers of a forward pass, there and back.

    With expert parallelism in Megatron, tokens travel to their experts. With rows that are split in FSDP2, queries,
    keys and values travel to the ranks of their heads (Ulysses, arXiv 2309.14509), and the results back. The keys and
    values that travel with split rows in Megatron are not counted: its attention computes meanwhile.
    """
    shape, options = shape_of(config, role), Options.of(role)
    if options.strategy == "fsdp2_train":
        width, ranks = 1, derived.context_ranks(role)
        elements = 2 * (shape.queries + shape.keys)
    elif options.strategy == "megatron_train" and shape.experts:
        width = options.get("expert_tensor_parallel_size", options.get("tensor_model_parallel_size", 1))
        ranks = options.get("expert_model_parallel_size", 1) * width
        elements = 2 * shape.experts_per_token * shape.hidden
    else:
        return 0.0
    if ranks <= width:
        return 0.0
    near = min(ranks, linked(config, hardware))
    sent = shape.layers * elements * ELEMENT_BYTES[role.model_args.dtype]
    shares = ((near - width) / hardware.link, (ranks - near) / hardware.network)
    return sent * max(shares) / ranks / inputs.trainer.link_efficiency


class _Passes:
    """Times of a role's forward and backward passes."""

    def __init__(self, config: PipelineConfig, inputs: Inputs, hardware: Hardware, role: WorkerConfig) -> None:
        self._given, self._shape = inputs.trainer, shape_of(config, role)
        self._exchange = exchange_seconds(config, inputs, hardware, role)
        self._ranks = len(parse_device_mapping(role.device_mapping)) or 1
        self._of_one_model = self._ranks / max(1, derived.data_parallel_ranks(role))
        self._flops, self._role = hardware.flops, role
        pipelined = role.strategy_args.strategy_name == "megatron_train"
        self._stages = Options.of(role).get("pipeline_model_parallel_size", 1) if pipelined else 1

    def trained(self, tokens: Tokens) -> float:
        """Return the seconds of forward and backward passes over these tokens."""
        return self._seconds(tokens, 3, self._given.mfu, self._given.token_seconds)

    def forward(self, tokens: Tokens) -> float:
        """Return the seconds of a forward pass over these tokens."""
        return self._seconds(tokens, 1, self._given.forward_mfu, self._given.forward_token_seconds)

    def _seconds(self, tokens: Tokens, passes: int, mfu: float | None, measured: float | None) -> float:
        if measured is not None:
            return self._given.scale * measured * tokens.total / self._ranks**self._given.exponent
        peak = self._flops * (mfu or (MFU_OF_EXPERTS if self._shape.experts else MFU)) / passes
        exchange = self._exchange * (1 if passes == 1 else 2)
        together = self._shape.forward_operations(tokens.total, tokens.squares) / (
            peak * self._ranks**self._given.exponent
        )
        together += exchange * tokens.total / self._ranks
        together *= 1 + (self._stages - 1) / max(1, micro_batches(self._role, tokens))
        of_one_stage = self._of_one_model / self._stages
        longest = self._shape.forward_operations(tokens.longest, tokens.longest**2) / (peak * of_one_stage)
        longest += exchange * tokens.longest / of_one_stage
        return self._given.scale * max(together, longest)
