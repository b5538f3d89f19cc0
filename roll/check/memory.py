"""`estimate_memory`: computes the memory of a run from its configuration, for each device and each node's host.

The configuration has passed `check_config`; `render` prints the estimate line by line, each with its arithmetic. On
GPUs, roles that share devices take turns: the active role has its states on the device, the states of the others are
on the host. On CPU slots nothing moves, so everything exists at once. Lengths are the maximum that the configuration
allows, so a run with shorter samples needs less. `docs/memory.md` explains each line for a 7B model;
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
    find_shape,
    gib,
    one_layer,
    overhead,
    states,
)
from roll.check.memory_pictures import find_picture_shape, picture_memory
from roll.check.memory_roles import Learned, Trainer, adapted_layers, engine_memory, trainer_memory
from roll.configs import derived
from roll.configs.devices import compact, parse_device_mapping
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.roles import TRAINED_ROLES, WorkerConfig
from roll.configs.run import LARGEST_DELTA, ImageConfig, PipelineConfig, RunConfig
from roll.configs.strategies import Options, strategy_of

MOVED_STATES = ("weights", "adapters", "optimizer", "text encoders", "VAE")
"""States that leave a device while another role has it."""
TIGHT = 0.9
"""Share of a device above which an estimate is tight: it may be 10 % too low, and memory fragments."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a group of devices that are used by the same roles."""

    devices: list[int]
    roles: list[str]
    peak: float
    """Bytes of each device; on a CPU, bytes of all slots of the group together."""
    how: str


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a run needs."""

    on_gpu: bool
    roles: list[RoleMemory]
    devices: list[DeviceMemory]
    host: list[Part]
    """Host memory of a node in addition to that of its processes."""
    device_bytes: float | None
    """Memory of one GPU; None if unknown."""
    unknown: list[str]
    """Roles that could not be estimated, and why."""
    misfits: list[str]
    """Messages about memory that will not fit."""
    tight: list[str]
    """Messages about memory that fits, but barely."""


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Estimate the memory of a configuration that passed `check_config`."""
    on_gpu, size = config.cluster.device == "cuda", config.cluster.device_memory_gib
    device_bytes = size * GIB if size is not None and on_gpu else None
    roles: list[RoleMemory] = []
    unknown: dict[str, list[str]] = {}
    for name, section in derived.roles_and_reward_models(config).items():
        model, devices = derived.model_path(config, section), parse_device_mapping(section.device_mapping)
        strategy = section.strategy_args.strategy_name
        try:
            if isinstance(config, ImageConfig) and isinstance(section, WorkerConfig):
                drawer = find_picture_shape(model)
                title = f"{strategy}, {model} ({drawer.parameters / 1e9:.2f} billion parameters)"
                memory = picture_memory(config, name, section, drawer)
                roles.append(replace(memory, role=name, title=title, devices=devices))
                continue
            shape = find_shape(model)
        except ShapeUnknown as reason:
            unknown.setdefault(str(reason), []).append(name)
            continue
        if isinstance(section, RewardConfig) or name == "critic":
            shape = replace(shape, value_head=True)
        if isinstance(section, RewardConfig):
            memory = _scorer(config, name, section, shape)
        elif name == "actor_infer":
            memory = engine_memory(derived.reinforcement(config), shape, device_bytes)
        else:
            memory = _rank(config, name, section, shape)
        title = f"{strategy}, {model} ({shape.parameters / 1e9:.2f} billion parameters)"
        roles.append(replace(memory, role=name, title=title, devices=devices))
    misfits, tight = [misfit for role in roles for misfit in role.misfits], list[str]()
    groups = _devices(config, roles, on_gpu)
    for each in groups:
        if device_bytes is None:
            break
        needed = f"a device of {', '.join(each.roles)} needs {gib(each.peak)} of {gib(device_bytes)}"
        if each.peak > device_bytes:
            misfits.append(needed)
        elif each.peak > TIGHT * device_bytes and not _takes_a_share(config, roles, each.peak):
            tight.append(f"{needed}: leave a tenth, for memory in pieces")
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unknown.items()]
    return MemoryEstimate(on_gpu, roles, groups, _host(config, roles), device_bytes, reasons, misfits, tight)


def _takes_a_share(config: RunConfig, roles: list[RoleMemory], peak: float) -> bool:
    """Return True if vLLM causes the peak. It always takes its configured share of the device, so it is not tight."""
    vllm = isinstance(config, PipelineConfig) and config.actor_infer.strategy_args.strategy_name == "vllm"
    return vllm and all(role.peak < peak - 2 * CONTEXT for role in roles if role.role != "actor_infer")


def _rank(config: RunConfig, name: str, section: WorkerConfig, shape: ModelShape) -> RoleMemory:
    """Estimate a trainer or a forward-only role."""
    trainer = _trainer(config, section, shape, learns=name in TRAINED_ROLES)
    memory, on_gpu = trainer_memory(trainer), trainer.on_gpu
    # Replicas join their results on the hosts; only trainers communicate from device to device.
    strategy = strategy_of(name, section)
    always = [*memory.always, overhead(on_gpu, 1 if strategy is not None and strategy.replicates else trainer.ranks)]
    phases, host_of_first, stays = [*memory.phases], list[Part](), 0.0
    host = [replace(part, how=f"{name}: {part.how}") for part in memory.host]
    if config.save_steps > 0 and memory.state > 0:
        how = f"{name}: 12 bytes for each weight that learns, shared out over ranks"
        host.append(Part("state being saved", memory.state, how))
    if name == "actor_logp":
        how = f"one matrix at a time, whole, in {trainer.dtype}"
        part = Part("a new weight", trainer.element * shape.largest_matrix, how)
        phases.append(Phase("new weights are loaded", (part,)))
    if name == "actor_train" and isinstance(config, PipelineConfig):
        dtype, buffers = config.actor_infer.model_args.dtype, derived.weight_buffers(config)
        transport, element = derived.weight_transport(config), ELEMENT_BYTES[dtype]
        parameters, what = shape.parameters, "the whole model"
        if config.weight_update.content == "adapter":
            parameters, what = trainer.learned.parameters, "the adapters"
        holder = "each rank" if transport == "cuda_ipc" else "the first rank"
        how = f"{count(buffers, 'buffer')} of {what} in {dtype}, of {holder}"
        publication = Part("publication", buffers * parameters * element, how)
        if transport == "cuda_ipc":
            always.insert(-1, publication)
            stays = publication.size
        else:
            host_of_first.append(publication)
        if config.weight_update.content == "delta":
            how = f"at most {LARGEST_DELTA:g} of each buffer"
            host_of_first.append(Part("deltas", LARGEST_DELTA * publication.size, how))
        if transport == "nccl":
            bucket = derived.load_bucket_bytes(config) + element * shape.largest_matrix
            how = "two buckets and their tensors, of the first rank"
            always.insert(-1, Part("weights on their way", 4 * bucket, how))
    if name == "actor_train":
        model = Part("model being saved", 4 * shape.parameters, "float32, of the first rank, until it is written")
        # With checkpoints a model is written while training continues. On GPUs it always adds to the host's memory.
        if on_gpu or config.save_steps > 0:
            host_of_first.append(model)
        else:
            phases.append(Phase("the model is saved at the end", (model,)))
    return replace(
        memory,
        always=tuple(always),
        phases=tuple(phases),
        processes=trainer.ranks,
        host=tuple(host),
        host_of_first=tuple(host_of_first),
        start=_loading(name, section, trainer, shape),
        stays=stays,
    )


def _loading(name: str, section: WorkerConfig, trainer: Trainer, shape: ModelShape) -> Part | None:
    """Return the host memory for loading a rank's model; None if the rank only maps the pages of its files."""
    kept = trainer.dtype if trainer.has_adapters or not trainer.learns else "float32"  # weights that learn are float32
    strategy, size, what = section.strategy_args.strategy_name, shape.parameters * ELEMENT_BYTES[kept], "all weights"
    if strategy == "megatron_train":
        return None
    if shape.stored == kept or (strategy == "fsdp2_train" and kept == "float32"):
        if not shape.experts:
            return None
        size, what = shape.parameters * ELEMENT_BYTES.get(shape.stored, 4), "and joins all experts"
    return Part("models while they load", size, f"{name}: each rank reads {what}")


def _scorer(config: RunConfig, name: str, reward: RewardConfig, shape: ModelShape) -> RoleMemory:
    """Estimate a reward model: its weights, and the scoring of a batch. ``shape`` has a scalar head.

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
    return RoleMemory(
        (weights, overhead(config.cluster.device == "cuda", 1)),
        (Phase("a batch is scored", scoring),),
        processes=len(parse_device_mapping(reward.device_mapping)),
        start=replace(weights, name="models while they load", how=f"{name}: each process reads all weights"),
    )


def _trainer(config: RunConfig, role: WorkerConfig, shape: ModelShape, *, learns: bool) -> Trainer:
    """Return a rank with the largest micro-batches that `plan_micro_batches` makes.

    Such a micro-batch fills the token budget, or is a single sample that exceeds it.
    """
    longest, ranks = derived.sequence_length(config), derived.data_parallel_ranks(role)
    trained = -(-derived.optimizer_batch_size(config, role) // ranks)
    passed = -(-derived.samples_per_step(config) // ranks)
    train_tokens = min(role.training_args.per_device_train_batch_size, trained) * longest
    if role.use_dynamic_batching_in_train:
        train_tokens = min(max(role.max_tokens_per_microbatch_in_train, longest), trained * longest)
    infer_tokens = min(role.infer_batch_size, passed) * longest
    if role.use_dynamic_batching_in_infer:
        infer_tokens = min(max(role.max_tokens_per_microbatch_in_infer, longest), passed * longest)
    micro_batches = -(-trained * longest // train_tokens)
    train_tokens, infer_tokens = (-(-tokens // derived.context_ranks(role)) for tokens in (train_tokens, infer_tokens))
    arguments, has_adapters = role.model_args, learns and role.model_args.lora_target is not None
    return Trainer(
        role,
        shape,
        Options.of(role),
        dtype=arguments.dtype,
        element=ELEMENT_BYTES[arguments.dtype],
        has_adapters=has_adapters,
        adapted=adapted_layers(shape, arguments.lora_target) if has_adapters else (),
        learned=Learned.adapters(shape, arguments) if has_adapters else Learned.all_weights(shape),
        ranks=len(parse_device_mapping(role.device_mapping)),
        on_gpu=config.cluster.device == "cuda",
        learns=learns,
        longest=longest,
        train_tokens=train_tokens,
        micro_batches=micro_batches,
        infer_tokens=infer_tokens,
    )


def _devices(config: RunConfig, roles: list[RoleMemory], on_gpu: bool) -> list[DeviceMemory]:
    """Group devices by the roles that use them, and estimate each group."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in range(derived.total_devices(config)):
        names = tuple(role.role for role in roles if device in role.devices)
        if names:
            groups.setdefault(names, []).append(device)
    by_name, estimates = {role.role: role for role in roles}, list[DeviceMemory]()
    for names, devices in groups.items():
        sharing = [by_name[name] for name in names]
        peak, how = _taking_turns(sharing) if on_gpu else _together(sharing, devices)
        estimates.append(DeviceMemory(devices, list(names), peak, how))
    return estimates


def _taking_turns(roles: list[RoleMemory]) -> tuple[float, str]:
    """Return the peak, and its description, of a GPU whose roles take turns.

    The active role has its states there; each other role only keeps its CUDA context and the buffers it pushes from.
    """
    waiting = {role.role: role.stays + (CONTEXT if len(roles) > 1 else 0.0) for role in roles}
    peaks = {role.role: role.peak + sum(size for name, size in waiting.items() if name != role.role) for role in roles}
    name, peak = max(peaks.items(), key=lambda item: item[1])
    how = f"when {name} has them; the states of the others are on the host then" if len(roles) > 1 else "alone"
    return peak, how


def _together(roles: list[RoleMemory], devices: list[int]) -> tuple[float, str]:
    """Return the peak, and its description, of CPU slots, where all processes keep everything."""
    first = sum(part.size for role in roles if role.devices[0] in devices for part in role.host_of_first)
    each = [(role.peak + sum(part.size for part in role.host)) * len({*role.devices} & {*devices}) for role in roles]
    return first + sum(each), "all processes together"


def _host(config: RunConfig, roles: list[RoleMemory]) -> list[Part]:
    """Return the host memory of the node that needs most; empty without GPUs.

    It covers loading models, weight updates, checkpoints, offloaded states, and states that leave a shared device.
    """
    per_node, nodes = config.cluster.num_devices_per_node, list[list[Part]]()
    for node in range(config.cluster.num_nodes if config.cluster.device == "cuda" else 0):
        parts: list[Part] = []
        for role in roles:
            gpus = sum(device // per_node == node for device in role.devices)
            if not gpus:
                continue
            processes = -(-gpus * role.processes // len(role.devices))
            for part in (*([role.start] if role.start is not None else []), *role.host):
                parts.append(replace(part, size=part.size * processes, how=f"{part.how} ({processes} on a node)"))
            parts += role.host_of_first if role.devices[0] // per_node == node else ()
            moved = [part for part in role.always if part.name in MOVED_STATES and part.size]
            if moved and derived.shares_devices(config, role.role):
                names = " and ".join(part.name for part in moved)
                how = f"{role.role}: {names} on {count(gpus, 'GPU')}, while others have them"
                parts.append(Part("states that made room", sum(part.size for part in moved) * gpus, how))
        nodes.append(parts)
    return max(nodes, key=lambda parts: sum(part.size for part in parts), default=[])


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
