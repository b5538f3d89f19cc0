"""The memory of a run: each role by itself, then the sum on each device and on the host of each node.

On GPUs, roles that share devices take turns: the active role has its states on the device, the states of the others are
on the host. On CPU slots nothing moves, so everything exists at once. Lengths are the maximum that the configuration
allows, so a run of shorter samples needs less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.configs import derived
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.memory.activations import MicroBatch
from roll.configs.memory.engines import EngineMemory, engine_memory
from roll.configs.memory.rank import Trainer
from roll.configs.memory.records import CONTEXT, ELEMENT_BYTES, GIB, Part, Phase, RoleMemory, driver
from roll.configs.memory.scorers import scorer_memory
from roll.configs.memory.shapes import ModelShape, ShapeUnknown, find_shape
from roll.configs.memory.trainers import trainer_memory
from roll.configs.schema import FORWARD_STRATEGIES, PipelineConfig, RewardConfig, WorkerConfig
from roll.configs.wording import count

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
    talking = 1 if section.strategy_args.strategy_name in FORWARD_STRATEGIES else len(devices)
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
    dtype, halves = config.actor_infer.model_args.dtype, 2 if config.weight_update.dual_buffer else 1
    size = halves * shape.parameters * ELEMENT_BYTES[dtype]
    return Part("publication", size, f"{count(halves, 'buffer')} of the whole model in {dtype}, of the first rank")


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
    peaks = {
        role.role: role.peak + sum(size for name, size in waiting.items() if name != role.role) for role in roles
    }
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
