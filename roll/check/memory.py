"""`estimate_memory`: the memory of a run by arithmetic alone, for each device and for the host of each node.

It takes a configuration that passed `check_config`; `render` prints the estimate line by line, each with its
arithmetic. On GPUs, roles that share devices take turns: the active role has its states on the device, the states of
the others are on the host. On CPU slots nothing moves, so everything exists at once. Lengths are the maximum that the
configuration allows, so a run of shorter samples needs less. `docs/memory.md` explains each line for a 7B model;
`benchmarks/README.md` compares the estimate with measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roll.check import memory_parts
from roll.check.memory_engines import EngineMemory, engine_memory
from roll.check.memory_parts import (
    CONTEXT,
    ELEMENT_BYTES,
    GIB,
    MicroBatch,
    ModelShape,
    Part,
    Phase,
    RoleMemory,
    ShapeUnknown,
    Trainer,
    billions,
    driver,
    find_shape,
)
from roll.check.memory_trainers import trainer_memory
from roll.configs import derived
from roll.configs.devices import compact, parse_device_mapping
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.roles import WorkerConfig
from roll.configs.run import PipelineConfig
from roll.configs.strategies import strategy_of

LIBRARIES = 0.5 * GIB
"""Memory of a process on a CPU: Python, torch, transformers, Ray."""
MOVED_STATES = ("weights", "adapters", "optimizer")
"""States that leave a device while another role has it."""
TIGHT = 0.9
"""Share of a device above which an estimate is reported as tight: it may be a tenth too low, and memory fragments."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the devices that the same roles use."""

    devices: list[int]
    roles: list[str]
    peak: float
    """Bytes of each device, or on a CPU of all these slots together."""
    how: str


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a run needs."""

    on_gpu: bool
    roles: list[RoleMemory]
    devices: list[DeviceMemory]
    host: list[Part]
    """Memory on a node's host besides what the processes themselves take."""
    device_bytes: float | None
    """Memory of one GPU; None if unknown."""
    unknown: list[str]
    """Roles that could not be estimated, and why."""
    misfits: list[str]
    """Messages about memory that will not fit."""
    tight: list[str]
    """Messages about memory that fits, but barely."""


def estimate_memory(config: PipelineConfig) -> MemoryEstimate:
    """Estimate the memory of a configuration that passed `check_config`."""
    gib = config.cluster.device_memory_gib
    on_gpu = config.cluster.device == "cuda"
    device_bytes = gib * GIB if gib is not None and on_gpu else None
    roles: list[RoleMemory] = []
    unknown: dict[str, list[str]] = {}
    misfits: list[str] = []
    for name, section in derived.roles_and_reward_models(config).items():
        try:
            shape = find_shape(derived.role_model_path(config, section))
        except ShapeUnknown as reason:
            unknown.setdefault(str(reason), []).append(name)
            continue
        if isinstance(section, RewardConfig):
            roles.append(_scorer_role(config, name, section, replace(shape, value_head=True)))
        elif name == "actor_infer":
            engine = engine_memory(config, shape, device_bytes)
            misfits += _engine_misfits(engine, device_bytes)
            roles.append(_engine_role(config, shape, engine))
        else:
            roles.append(_trainer_role(config, name, section, shape))
    devices = _devices(config, roles, on_gpu)
    needs = {_named(each): each.peak for each in devices}
    tight: list[str] = []
    for name, peak in needs.items():
        if device_bytes is None:
            break
        said = f"{name} needs {_gib(peak)} of {_gib(device_bytes)}"
        if peak > device_bytes:
            misfits.append(said)
        elif peak > TIGHT * device_bytes and not _takes_a_share(config, roles, peak):
            tight.append(f"{said}: leave a tenth, for memory in pieces")
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unknown.items()]
    return MemoryEstimate(on_gpu, roles, devices, _host(config, roles), device_bytes, reasons, misfits, tight)


def _takes_a_share(config: PipelineConfig, roles: list[RoleMemory], peak: float) -> bool:
    """Return True if the peak is that of vLLM, which takes its configured share of the device, however large."""
    vllm = config.actor_infer.strategy_args.strategy_name == "vllm"
    return vllm and all(role.peak < peak - 2 * CONTEXT for role in roles if role.role != "actor_infer")


def _named(devices: DeviceMemory) -> str:
    return f"a device of {', '.join(devices.roles)}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _title(config: PipelineConfig, section: WorkerConfig | RewardConfig, shape: ModelShape) -> str:
    size = f"{shape.parameters / 1e9:.2f} billion parameters"
    return f"{section.strategy_args.strategy_name}, {derived.role_model_path(config, section)} ({size})"


def _engine_misfits(engine: EngineMemory, device_bytes: float | None) -> list[str]:
    """Report an engine whose share of the device has no room for one sequence."""
    if device_bytes is None or engine.share is None or engine.least.size <= engine.share.size:
        return []
    share = f"{engine.share.how} = {_gib(engine.share.size)}"
    return [f"actor_infer has {share} ({engine.share.name}), and {engine.least.how} need {_gib(engine.least.size)}"]


def _engine_role(config: PipelineConfig, shape: ModelShape, engine: EngineMemory) -> RoleMemory:
    role, on_gpu = config.actor_infer, config.cluster.device == "cuda"
    copy = shape.parameters * ELEMENT_BYTES[role.model_args.dtype]
    how = "the next version beside the present one, mapped or staged"
    if role.strategy_args.strategy_name == "sglang":
        how = "files in memory, which SGLang reads while an update lasts"
    staged = not on_gpu or role.strategy_args.strategy_name == "sglang"
    return RoleMemory(
        role="actor_infer",
        title=_title(config, role, shape),
        devices=parse_device_mapping(role.device_mapping),
        always=(*engine.always, _overhead(on_gpu, role.num_gpus_per_engine)),
        processes=derived.engine_replicas(config),
        host=(Part("new weights", copy, how),) if staged else (),
        notes=engine.notes,
    )


def _trainer_role(config: PipelineConfig, name: str, section: WorkerConfig, shape: ModelShape) -> RoleMemory:
    on_gpu, devices = config.cluster.device == "cuda", parse_device_mapping(section.device_mapping)
    shape = replace(shape, value_head=True) if name == "critic" else shape
    trainer = Trainer(
        config=section,
        shape=shape,
        ranks=len(devices),
        on_gpu=on_gpu,
        learns=name != "reference",
        train=_train_micro_batch(config, section),
        infer=_infer_micro_batch(config, section),
    )
    memory = trainer_memory(trainer)
    # Replicas join their results on the hosts; only trainers communicate from device to device.
    strategy = strategy_of(name, section)
    talking = 1 if strategy is not None and strategy.replicates else len(devices)
    publication = _publication(config, shape) if name == "actor_train" else None
    pushed = publication is not None and derived.weight_transport(config) in ("nccl", "cuda_ipc")
    reads_all = section.strategy_args.strategy_name != "megatron_train"
    loading = Part("models while they load", shape.parameters * trainer.stored, f"{name}: each rank reads all weights")
    saved = _saved_state(config, name, memory.state)
    model = Part("model being saved", 4 * shape.parameters, "float32, of the first rank, until it is written")
    exports = name == "actor_train"
    # With checkpoints a model is written while training continues. On GPUs it always adds to the host's memory.
    beside = exports and (on_gpu or config.save_steps > 0)
    at_the_end = (Phase("the model is saved at the end", (model,)),) if exports and not beside else ()
    return RoleMemory(
        role=name,
        title=_title(config, section, shape),
        devices=devices,
        always=(*memory.always, *((publication,) if publication and pushed else ()), _overhead(on_gpu, talking)),
        phases=(*memory.phases, *at_the_end),
        processes=len(devices),
        host=(*(replace(part, how=f"{name}: {part.how}") for part in memory.elsewhere), *saved),
        host_of_first=(
            *((publication,) if publication is not None and not pushed else ()),
            *((model,) if beside else ()),
        ),
        start=loading if reads_all else None,
        stays=publication.size if publication is not None and pushed else 0.0,
    )


def _saved_state(config: PipelineConfig, name: str, size: float) -> tuple[Part, ...]:
    """Return a rank's part of a training state, held from the moment a checkpoint is taken until it is written."""
    if config.save_steps == 0 or size == 0:
        return ()
    return (Part("state being saved", size, f"{name}: 12 bytes for each weight that learns, shared out over ranks"),)


def _scorer_role(config: PipelineConfig, name: str, reward: RewardConfig, shape: ModelShape) -> RoleMemory:
    weights, scoring = scorer_memory(config, reward, shape)
    devices = parse_device_mapping(reward.device_mapping)
    return RoleMemory(
        role=name,
        title=_title(config, reward, shape),
        devices=devices,
        always=(weights, _overhead(config.cluster.device == "cuda", 1)),
        phases=(scoring,),
        processes=len(devices),
        start=replace(weights, name="models while they load", how=f"{name}: each process reads all weights"),
    )


def _overhead(on_gpu: bool, ranks: int) -> Part:
    return driver(ranks) if on_gpu else Part("libraries", LIBRARIES, "Python, torch, transformers, Ray")


def _train_micro_batch(config: PipelineConfig, role: WorkerConfig) -> MicroBatch:
    samples = -(-derived.optimizer_batch_size(config, role) // derived.data_parallel_ranks(role))
    budget = role.max_tokens_per_microbatch_in_train if role.use_dynamic_batching_in_train else None
    return _micro_batch(config, samples, budget, role.training_args.per_device_train_batch_size)


def _infer_micro_batch(config: PipelineConfig, role: WorkerConfig) -> MicroBatch:
    samples = -(-derived.samples_per_step(config) // derived.data_parallel_ranks(role))
    budget = role.max_tokens_per_microbatch_in_infer if role.use_dynamic_batching_in_infer else None
    return _micro_batch(config, samples, budget, role.infer_batch_size)


def _micro_batch(config: PipelineConfig, samples: int, budget: int | None, fixed: int) -> MicroBatch:
    """Return the largest micro-batch that `plan_micro_batches` makes.

    It has as many samples as the budget holds, or one sample that is longer by itself.
    """
    longest = derived.sequence_length(config)
    tokens = min(fixed, samples) * longest if budget is None else min(max(budget, longest), samples * longest)
    return MicroBatch(tokens, longest, -(-samples * longest // tokens))


def _publication(config: PipelineConfig, shape: ModelShape) -> Part:
    dtype, buffers = config.actor_infer.model_args.dtype, 2 if config.weight_update.dual_buffer else 1
    size = buffers * shape.parameters * ELEMENT_BYTES[dtype]
    return Part("publication", size, f"{count(buffers, 'buffer')} of the whole model in {dtype}, of the first rank")


def _devices(config: PipelineConfig, roles: list[RoleMemory], on_gpu: bool) -> list[DeviceMemory]:
    """Group devices by the roles that use them, and estimate each group."""
    owners: dict[tuple[str, ...], list[int]] = {}
    for device in range(derived.total_devices(config)):
        names = tuple(role.role for role in roles if device in role.devices)
        if names:
            owners.setdefault(names, []).append(device)
    by_name = {role.role: role for role in roles}
    build = _taking_turns if on_gpu else _together
    return [build([by_name[name] for name in names], devices) for names, devices in owners.items()]


def _taking_turns(roles: list[RoleMemory], devices: list[int]) -> DeviceMemory:
    """Estimate devices on which one role has its states; the others keep their process and the buffers they push
    from."""
    waiting = {role.role: role.stays + (CONTEXT if len(roles) > 1 else 0.0) for role in roles}
    peaks = {role.role: role.peak + sum(size for name, size in waiting.items() if name != role.role) for role in roles}
    name, peak = max(peaks.items(), key=lambda item: item[1])
    how = f"when {name} has them; the states of the others are on the host then" if len(roles) > 1 else "alone"
    return DeviceMemory(devices, [role.role for role in roles], peak, how)


def _together(roles: list[RoleMemory], devices: list[int]) -> DeviceMemory:
    """Estimate CPU slots, where all processes keep everything."""
    first = sum(part.size for role in roles if role.devices[0] in devices for part in role.host_of_first)
    each = [
        (role.peak + sum(part.size for part in role.host)) * len(set(role.devices) & set(devices)) for role in roles
    ]
    return DeviceMemory(devices, [role.role for role in roles], first + sum(each), "all processes together")


def _host(config: PipelineConfig, roles: list[RoleMemory]) -> list[Part]:
    """Return the host memory of the node that needs most, on GPUs.

    It holds loading models, weight updates, checkpoints, states kept there, and states that leave a shared device.
    """
    if config.cluster.device != "cuda":
        return []
    nodes = [_host_of(config, roles, node) for node in range(config.cluster.num_nodes)]
    return max(nodes, key=lambda parts: sum(part.size for part in parts))


def _host_of(config: PipelineConfig, roles: list[RoleMemory], node: int) -> list[Part]:
    per_node = config.cluster.num_devices_per_node
    parts: list[Part] = []
    for role in roles:
        gpus = sum(device // per_node == node for device in role.devices)
        if not gpus:
            continue
        processes = -(-gpus * role.processes // len(role.devices))
        start = (role.start,) if role.start is not None else ()
        parts += [_times(part, processes) for part in (*start, *role.host)]
        parts += role.host_of_first if role.devices[0] // per_node == node else ()
        moved = [part for part in role.always if part.name in MOVED_STATES and part.size]
        if moved and derived.shares_devices(config, role.role):
            names = " and ".join(part.name for part in moved)
            how = f"{role.role}: {names} on {count(gpus, 'GPU')}, while others have them"
            parts.append(Part("states that made room", sum(part.size for part in moved) * gpus, how))
    return parts


def _times(part: Part, processes: int) -> Part:
    return replace(part, size=part.size * processes, how=f"{part.how} ({processes} on a node)")


SCORING = "a batch is scored"


def scorer_memory(config: PipelineConfig, reward: RewardConfig, shape: ModelShape) -> tuple[Part, Phase]:
    """Return the weights and the phase in which a batch is scored; ``shape`` is that of a model with a scalar head.

    A conversation is assumed to have the same number of tokens for the reward model as for the policy.
    """
    element, longest = ELEMENT_BYTES[reward.model_args.dtype], derived.sequence_length(config)
    length = min(longest, reward.reward_model.max_length or longest)
    tokens = reward.infer_batch_size * length
    one = memory_parts.forward_only_bytes(shape, element)
    seen = length * (2 + 4 * shape.heads if reward.model_args.attn_implementation == "eager" else 1)
    keys = shape.cache_bytes_per_token(element)
    each = f"{element} bytes ({reward.model_args.dtype})"
    return (
        Part("weights", shape.parameters * element, f"{billions(shape.parameters)} x {each}"),
        Phase(
            SCORING,
            (
                Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer"),
                Part("attention", seen * tokens, f"a mask, and with eager scores: {tokens:,} x {length:,} tokens"),
                Part("keys and values", keys * tokens, f"{keys / 1024:,.0f} KiB a token: transformers keeps them"),
            ),
        ),
    )


def render(estimate: MemoryEstimate) -> str:
    """Format the estimate as lines."""
    return "\n".join(_lines(estimate))


def _lines(estimate: MemoryEstimate) -> Iterator[str]:
    known = f" of {estimate.device_bytes / GIB:g} GiB" if estimate.device_bytes is not None else ""
    unit = f"one GPU{known}" if estimate.on_gpu else "one process"
    yield f"memory of {unit}, at the longest lengths (an estimate; docs/memory.md explains each line)"
    for role in estimate.roles:
        yield from _role_lines(role, estimate.on_gpu)
    for devices in estimate.devices:
        which = ("GPU " if estimate.on_gpu else "CPU slot ") + compact(devices.devices)
        yield f"  {which} ({', '.join(devices.roles)}): {_size(devices.peak).strip()} {devices.how}"
    if estimate.host:
        yield "  memory of the host of the node that needs most, beside the processes"
        yield from (_part_line(part) for part in estimate.host)
    yield from (f"  not estimated: {reason}" for reason in estimate.unknown)
    yield from (f"  tight: {reason}" for reason in estimate.tight)
    yield from (f"  will not fit: {reason}" for reason in estimate.misfits)


def _role_lines(role: RoleMemory, on_gpu: bool) -> Iterator[str]:
    slots = "GPU" if on_gpu else "CPU slot"
    yield f"  {role.role} on {slots} {compact(role.devices)} ({count(len(role.devices), slots)}): {role.title}"
    largest = role.largest
    yield from (_part_line(part) for part in role.always)
    if largest.parts:
        yield f"    and when {largest.name}" if " " in largest.name else f"    and for {largest.name}"
        yield from (_part_line(part) for part in largest.parts if part.size)
    if not on_gpu:
        yield from (_part_line(part) for part in (*role.host, *role.host_of_first) if part.size)
    yield f"    {'together':<22}{_size(role.peak + (0.0 if on_gpu else role.host_bytes))}"
    yield from (f"    note: {note}" for note in role.notes)


def _part_line(part: Part) -> str:
    return f"    {part.name:<22}{_size(part.size)}  {part.how}"


def _size(size: float) -> str:
    return f"{size / GIB:8.2f} GiB"
