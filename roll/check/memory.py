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

from roll.check.memory_parts import (
    CONTEXT,
    ELEMENT_BYTES,
    GIB,
    ModelShape,
    Part,
    Phase,
    RoleMemory,
    ShapeUnknown,
    driver,
    find_shape,
    one_layer,
    states,
)
from roll.check.memory_roles import EngineMemory, MicroBatch, Trainer, engine_memory, trainer_memory
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
    tight: list[str] = []
    for each in devices:
        if device_bytes is None:
            break
        needed = f"a device of {', '.join(each.roles)} needs {_gib(each.peak)} of {_gib(device_bytes)}"
        if each.peak > device_bytes:
            misfits.append(needed)
        elif each.peak > TIGHT * device_bytes and not _takes_a_share(config, roles, each.peak):
            tight.append(f"{needed}: leave a tenth, for memory in pieces")
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unknown.items()]
    return MemoryEstimate(on_gpu, roles, devices, _host(config, roles), device_bytes, reasons, misfits, tight)


def _takes_a_share(config: PipelineConfig, roles: list[RoleMemory], peak: float) -> bool:
    """Return True if the peak is that of vLLM, which takes its configured share of the device, however large."""
    vllm = config.actor_infer.strategy_args.strategy_name == "vllm"
    return vllm and all(role.peak < peak - 2 * CONTEXT for role in roles if role.role != "actor_infer")


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
    train, infer = _micro_batches(config, section)
    trainer = Trainer(section, shape, len(devices), on_gpu, learns=name != "reference", train=train, infer=infer)
    memory = trainer_memory(trainer)
    # Replicas join their results on the hosts; only trainers communicate from device to device.
    strategy = strategy_of(name, section)
    always = [*memory.always, _overhead(on_gpu, 1 if strategy is not None and strategy.replicates else len(devices))]
    phases, host_of_first, stays = [*memory.phases], list[Part](), 0.0
    host = [replace(part, how=f"{name}: {part.how}") for part in memory.elsewhere]
    if config.save_steps > 0 and memory.state > 0:
        how = f"{name}: 12 bytes for each weight that learns, shared out over ranks"
        host.append(Part("state being saved", memory.state, how))
    if name == "actor_train":
        publication = _publication(config, shape)
        if derived.weight_transport(config) in ("nccl", "cuda_ipc"):
            always.insert(-1, publication)
            stays = publication.size
        else:
            host_of_first.append(publication)
        model = Part("model being saved", 4 * shape.parameters, "float32, of the first rank, until it is written")
        # With checkpoints a model is written while training continues. On GPUs it always adds to the host's memory.
        if on_gpu or config.save_steps > 0:
            host_of_first.append(model)
        else:
            phases.append(Phase("the model is saved at the end", (model,)))
    loading = Part("models while they load", shape.parameters * trainer.stored, f"{name}: each rank reads all weights")
    return RoleMemory(
        role=name,
        title=_title(config, section, shape),
        devices=devices,
        always=tuple(always),
        phases=tuple(phases),
        processes=len(devices),
        host=tuple(host),
        host_of_first=tuple(host_of_first),
        start=loading if section.strategy_args.strategy_name != "megatron_train" else None,
        stays=stays,
    )


def _scorer_role(config: PipelineConfig, name: str, reward: RewardConfig, shape: ModelShape) -> RoleMemory:
    """Estimate a reward model, which holds its weights and scores a batch; ``shape`` has a scalar head.

    A conversation is assumed to have the same number of tokens for the reward model as for the policy.
    """
    arguments, longest = reward.model_args, derived.sequence_length(config)
    element, length = ELEMENT_BYTES[arguments.dtype], min(longest, reward.reward_model.max_length or longest)
    tokens, keys = reward.infer_batch_size * length, shape.cache_bytes_per_token(element)
    seen = length * (2 + 4 * shape.heads if arguments.attn_implementation == "eager" else 1)
    scoring = (
        one_layer(shape, element, tokens),
        Part("attention", seen * tokens, f"a mask, and with eager scores: {tokens:,} x {length:,} tokens"),
        Part("keys and values", keys * tokens, f"{keys / 1024:,.0f} KiB a token: transformers keeps them"),
    )
    weights = states("weights", shape.parameters, 1, element, arguments.dtype)
    devices = parse_device_mapping(reward.device_mapping)
    return RoleMemory(
        role=name,
        title=_title(config, reward, shape),
        devices=devices,
        always=(weights, _overhead(config.cluster.device == "cuda", 1)),
        phases=(Phase("a batch is scored", scoring),),
        processes=len(devices),
        start=replace(weights, name="models while they load", how=f"{name}: each process reads all weights"),
    )


def _overhead(on_gpu: bool, ranks: int) -> Part:
    return driver(ranks) if on_gpu else Part("libraries", LIBRARIES, "Python, torch, transformers, Ray")


def _micro_batches(config: PipelineConfig, role: WorkerConfig) -> tuple[MicroBatch, MicroBatch]:
    """Return the largest micro-batches that `plan_micro_batches` makes for training and for log-probabilities.

    One has as many samples as the budget holds, or one sample that is longer by itself.
    """
    longest, ranks = derived.sequence_length(config), derived.data_parallel_ranks(role)

    def largest(samples: int, dynamic: bool, budget: int, fixed: int) -> MicroBatch:
        samples = -(-samples // ranks)
        tokens = min(max(budget, longest), samples * longest) if dynamic else min(fixed, samples) * longest
        return MicroBatch(tokens, longest, -(-samples * longest // tokens))

    train, infer = role.max_tokens_per_microbatch_in_train, role.max_tokens_per_microbatch_in_infer
    fixed, step = role.training_args.per_device_train_batch_size, derived.optimizer_batch_size(config, role)
    return (
        largest(step, role.use_dynamic_batching_in_train, train, fixed),
        largest(derived.samples_per_step(config), role.use_dynamic_batching_in_infer, infer, role.infer_batch_size),
    )


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
