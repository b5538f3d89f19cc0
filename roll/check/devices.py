"""Rules about devices: they exist, each role has some, and roles that share devices do not overlap in part only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

from roll.check.memory_parts import has_experts
from roll.configs import derived
from roll.configs.devices import MAX_DEVICES, DeviceMappingError, compact, parse_device_mapping
from roll.configs.errors import ConfigProblem, count, shown, without_effect
from roll.configs.roles import GeneratingArguments, ModelArguments
from roll.configs.run import PipelineConfig, RunConfig
from roll.configs.strategies import ENGINES, Engine, Options, Trainer, strategy_of

FLASH_ATTENTION = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("flash_attn_interface", "build `hopper` of github.com/Dao-AILab/flash-attention"),
}
"""``attn_implementation`` -> the module that computes it, and how to install that."""
_ADDRESS = re.compile(r"auto|[^/\s]+:[0-9]{1,5}")


def readable_mappings(config: RunConfig) -> dict[str, list[int]]:
    """Return the devices of each role whose mapping can be read."""
    mappings = {}
    for name, mapping in derived.device_mappings(config).items():
        try:
            mappings[name] = parse_device_mapping(mapping)
        except DeviceMappingError:
            continue
    return mappings


def cluster_can_be_reached(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject several nodes without a cluster address, malformed addresses, and too many devices."""
    cluster = config.cluster
    if cluster.num_nodes > 1 and cluster.address is None:
        message = f"{cluster.num_nodes} nodes need a running Ray cluster; one started for this run has one node"
        yield ConfigProblem("cluster.num_nodes", message, "run `ray start` on the nodes and set `cluster.address`")
    if derived.total_devices(config) > MAX_DEVICES:
        message = f"{cluster.num_nodes} x {cluster.num_devices_per_node} devices; at most {MAX_DEVICES} can be used"
        yield ConfigProblem("cluster.num_devices_per_node", message, "write the devices that one node really has")
    if cluster.address is not None and not _ADDRESS.fullmatch(cluster.address):
        message = f"{shown(cluster.address)} is no address of a Ray cluster"
        yield ConfigProblem("cluster.address", message, "write `auto` or `host:port`")


def attention_can_be_computed(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject `attn_implementation` for strategies that choose their attention themselves, and where it cannot run."""
    for name, role in derived.roles_and_reward_models(config).items():
        path, chosen = f"{name}.model_args.attn_implementation", role.model_args.attn_implementation
        strategy, engine = strategy_of(name, role), role.strategy_args.strategy_name
        trains = isinstance(strategy, Trainer)
        known = trains or engine in ENGINES.built_in
        chooses_itself = strategy is not None and known and not strategy.chooses_attention
        if chooses_itself and chosen != ModelArguments().attn_implementation:
            engine_key = f"set `attention_backend` in `{name}.strategy_args.strategy_config`"
            remedy = f"remove this key, or {'use another trainer' if trains else engine_key}"
            yield without_effect(path, chosen, f"{engine} chooses its attention itself", remedy)
        elif chosen in FLASH_ATTENTION and config.cluster.device == "cpu":
            yield ConfigProblem(path, f"{chosen} needs GPUs, and cluster.device is cpu", "write `sdpa`")
        elif chosen in FLASH_ATTENTION and role.model_args.dtype == "float32":
            yield ConfigProblem(path, f"{chosen} cannot compute in float32", "set `dtype: bfloat16`")


def gpus_are_visible(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require an NVIDIA driver here for a run that starts its own cluster on GPUs."""
    cluster = config.cluster
    if cluster.device == "cuda" and cluster.address is None and not sees_gpus(os.environ, Path("/dev")):
        message = "cuda, but no NVIDIA GPU is visible here (no /dev/nvidia*, or CUDA_VISIBLE_DEVICES hides them)"
        remedy = "set `cluster.device: cpu`, or give the `cluster.address` of a Ray cluster with GPUs"
        yield ConfigProblem("cluster.device", message, remedy)


def sees_gpus(environment: Mapping[str, str], device_files: Path) -> bool:
    """Return True if a process could use an NVIDIA GPU, by `CUDA_VISIBLE_DEVICES` or else by the driver's files."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return chosen.strip() not in ("", "-1")
    return any(device_files.glob("nvidia[0-9]*")) or (device_files / "dxg").exists()


def devices_exist(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject devices that the cluster does not have."""
    total = derived.total_devices(config)
    for name, mapping in derived.device_mappings(config).items():
        path = f"{name}.device_mapping"
        try:
            devices = parse_device_mapping(mapping)
        except DeviceMappingError as error:
            remedy = f"name devices of this run: 0 to {total - 1}, each once"
            yield ConfigProblem(path, f"{shown(mapping)}: {error}", remedy)
            continue
        outside = [device for device in devices if device >= total]
        if outside:
            cluster = config.cluster
            nodes = f"{count(cluster.num_nodes, 'node')} x {count(cluster.num_devices_per_node, 'device')}"
            named = f"{shown(mapping)} names device {compact(outside)}"
            remedy = f"name devices 0 to {total - 1}, or raise `cluster.num_devices_per_node` or `cluster.num_nodes`"
            yield ConfigProblem(path, f"{named}, but there are {total} ({nodes}), counted from 0", remedy)


def roles_share_devices_whole(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject partial overlaps: two roles are separate, or one role's devices contain the other's.

    Roles that share a device share one lock.
    """
    for (first, owned), (second, others) in combinations(readable_mappings(config).items(), 2):
        shared = set(owned) & set(others)
        if shared and shared not in (set(owned), set(others)):
            message = (
                f"devices {compact(others)} overlap in part with {first}'s {compact(owned)} (shared: {compact(shared)})"
            )
            remedy = "give the roles the same devices, separate ones, or one a part of the other's"
            yield ConfigProblem(f"{second}.device_mapping", message, remedy)


def _cannot_be_pulled(config: PipelineConfig, mappings: Mapping[str, list[int]]) -> Iterator[ConfigProblem]:
    path, remedy = "weight_update.mode", "write `push`"
    update, engine = config.weight_update, mappings.get("actor_infer", [])
    if update.transport in ("nccl", "cuda_ipc"):
        message = f"'pull', but with {update.transport} the trainer pushes into each engine"
        yield ConfigProblem(path, message, f"{remedy}, or another transport")
    if not update.dual_buffer:
        message = "'pull', but a single buffer is written over before each replica has chosen to read it"
        yield ConfigProblem(path, message, f"{remedy}, or `dual_buffer: true`")
    if any({*engine} & {*others} for name, others in mappings.items() if name != "actor_infer"):
        message = "'pull', but the engine shares its devices, and takes turns with the other roles"
        yield ConfigProblem(path, message, remedy)


def adapters_cannot_travel(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Yield the reasons why weight updates cannot carry adapters only."""
    path, remedy = "weight_update.content", "write `full`"
    arguments, role = config.actor_train.model_args, config.actor_infer
    engine, name = strategy_of("actor_infer", role), role.strategy_args.strategy_name
    if arguments.lora_target is None:
        message = "'adapter', but actor_train trains all weights"
        yield ConfigProblem(path, message, f"{remedy}, or set `actor_train.model_args.lora_target`")
    if isinstance(engine, Engine) and not engine.largest_adapter:
        able = [f"`{each}`" for each, record in ENGINES.built_in.items() if record.largest_adapter]
        message = f"'adapter', but {name} takes whole models"
        yield ConfigProblem(path, message, f"{remedy}, or use {' or '.join(able)}")
    elif isinstance(engine, Engine) and arguments.lora_rank > engine.largest_adapter:
        message = f"{arguments.lora_rank}: {name} takes adapters of rank {engine.largest_adapter:g} or less"
        yield ConfigProblem("actor_train.model_args.lora_rank", message, "lower it, or write `content: full`")
    if config.weight_update.transport in ("nccl", "cuda_ipc"):
        message = f"'adapter', but {config.weight_update.transport} transfers all weights, never a part"
        yield ConfigProblem(path, message, f"{remedy}, or `transport: auto`")
    if derived.needs_whole_models(config):
        message = "'adapter', but actor_logp takes whole models"
        yield ConfigProblem(path, message, f"{remedy}, or remove `actor_logp`")
    yield from _bases_differ(config)
    model = derived.model_path(config, role)
    if name == "vllm" and has_experts(model):
        message = f"'adapter', but with adapters vLLM fails at the first request of a model with experts ({model})"
        yield ConfigProblem(path, message, f"{remedy}, or use `hf_infer`")


def _deltas_cannot_travel(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Yield why deltas cannot be published."""
    path, remedy = "weight_update.content", "write `full`"
    update = config.weight_update
    if update.transport in ("nccl", "cuda_ipc"):
        message = f"'delta', but {update.transport} goes from GPU to GPU, past the host on which engines keep a base"
        yield ConfigProblem(path, message, f"{remedy}, or `transport: object_store`")
    if update.transport == "checkpoint":
        message = "'delta', but checkpoint writes whole weights to the disk each time, which takes longer than reading"
        yield ConfigProblem(path, message, f"{remedy}, or `transport: object_store`")
    if not update.dual_buffer:
        message = "'delta', but a single buffer is written over, and the weights before are not there to compare with"
        yield ConfigProblem(path, message, f"{remedy}, or `dual_buffer: true`")
    if sys.platform != "linux":
        yield ConfigProblem(path, "'delta' needs Linux (memfd_create)", remedy)


def _bases_differ(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Yield the reasons why the engine's base model would differ from the trainer's."""
    trainer, role = config.actor_train, config.actor_infer
    dtype, remedy = role.model_args.dtype, "or write `weight_update.content: full`"
    if trainer.model_args.dtype not in ("float32", dtype):
        message = f"{shown(trainer.model_args.dtype)}, but adapters are published alone, to a base in {dtype}"
        able = " or ".join(f"`{each}`" for each in dict.fromkeys((dtype, "float32")))
        yield ConfigProblem("actor_train.model_args.dtype", message, f"write {able}, {remedy}")
    model = derived.model_path(config, trainer)
    if derived.model_path(config, role) != model:
        message = f"the adapters that are published alone belong to {model}"
        yield ConfigProblem("actor_infer.model_args.model_name_or_path", message, f"remove this key, {remedy}")
    if Options.of(role).invents_weights:
        path = "actor_infer.strategy_args.strategy_config.load_format"
        message = "'dummy', but adapters are published alone, to a base that the engine has loaded"
        yield ConfigProblem(path, message, f"remove this key, {remedy}")


def weights_can_travel(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject a weight transport that cannot reach every engine.

    Shared memory needs a single node. vLLM's own transfers between GPUs need different devices for trainer and engine
    with NCCL, and the same devices with CUDA IPC.
    """
    transport, path = config.weight_update.transport, "weight_update.transport"
    mappings = readable_mappings(config)
    if config.weight_update.mode == "pull":
        yield from _cannot_be_pulled(config, mappings)
    if config.weight_update.content == "adapter":
        yield from adapters_cannot_travel(config)
    if config.weight_update.content == "delta":
        yield from _deltas_cannot_travel(config)
    if transport == "shared_memory" and derived.present_roles(config).keys() <= mappings.keys():
        nodes = derived.publication_nodes(config)
        if len(nodes) > 1:
            message = f"{shown('shared_memory')}, but trainer and receivers of weights are on nodes {compact(nodes)}"
            yield ConfigProblem(path, message, "write `object_store` or `checkpoint`, or `auto`")
    if transport == "shared_memory" and sys.platform != "linux":
        yield ConfigProblem(path, "'shared_memory' needs Linux (memfd_create)", "write `object_store`, or `auto`")
    if transport not in ("nccl", "cuda_ipc"):
        return
    strategy = config.actor_infer.strategy_args.strategy_name
    if config.cluster.device != "cuda" or strategy != "vllm":
        message = f"{shown(transport)} is vLLM's way between GPUs; this run has {strategy} on {config.cluster.device}"
        yield ConfigProblem(path, message, "write `auto`, or use vLLM on GPUs")
        return
    trainer, engine = set(mappings.get("actor_train", [])), set(mappings.get("actor_infer", []))
    if transport == "nccl" and trainer & engine:
        message = f"'nccl' needs different devices; both roles have {compact(trainer & engine)}"
        yield ConfigProblem(path, message, "write `cuda_ipc`, or `auto`")
    if transport == "cuda_ipc" and engine - trainer:
        message = f"'cuda_ipc' stays on a device, but device {compact(engine - trainer)} has no trainer"
        yield ConfigProblem(path, message, "write `nccl`, or `auto`")


def engines_sample_what_is_asked(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject small temperatures with vLLM, SGLang without GPUs, and truncated sampling that SGLang cannot record.

    vLLM raises small temperatures to 0.01, so it would sample from another distribution than the one asked for. For
    truncated sampling SGLang needs a top-k within its server's limit.
    """
    engine = config.actor_infer.strategy_args.strategy_name
    if engine == "sglang" and config.cluster.device != "cuda":
        message = f"sglang needs GPUs; this run computes on {config.cluster.device}"
        remedy = "write `cluster.device: cuda`, or use hf_infer or vllm"
        yield ConfigProblem("actor_infer.strategy_args.strategy_name", message, remedy)
    for path, sampling in generating_arguments(config).items():
        if engine == "vllm" and 0 < sampling.temperature < 0.01:
            message = f"{sampling.temperature}: vLLM samples at 0.01 or above, or greedily at 0"
            yield ConfigProblem(f"{path}.temperature", message, "write 0, or at least 0.01")
        if engine != "sglang" or sampling.temperature == 0:
            continue
        limit = Options.of(config.actor_infer).get("sampling_mask_max_tokens", 4096)
        if sampling.top_p < 1 and sampling.top_k == 0:
            message = f"{sampling.top_p}: SGLang records what it samples from under top-p only together with a top-k"
            yield ConfigProblem(f"{path}.top_p", message, f"write 1, or set `top_k` to at most {limit}")
        if sampling.top_k > limit:
            message = f"{sampling.top_k}: SGLang records what it samples from for at most {limit} tokens"
            remedy = "write 0 (all), less, or raise `sampling_mask_max_tokens` in `strategy_config`"
            yield ConfigProblem(f"{path}.top_k", message, remedy)


def generating_arguments(config: PipelineConfig) -> dict[str, GeneratingArguments]:
    """Return the sampling arguments of training, and of validation if there is one, by path."""
    arguments: dict[str, GeneratingArguments] = {"actor_infer.generating_args": config.actor_infer.generating_args}
    validation = derived.validation_settings(config)
    return arguments if validation is None else arguments | {"validation.generating_args": validation.generating_args}


def engines_divide_devices(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require that the number of generation devices is a multiple of `num_gpus_per_engine`."""
    path, size = "actor_infer.num_gpus_per_engine", config.actor_infer.num_gpus_per_engine
    devices = readable_mappings(config).get("actor_infer", [])
    if len(devices) % size:
        message = f"{size} devices per engine do not divide the {count(len(devices), 'device')} of actor_infer"
        divisors = [number for number in range(1, len(devices) + 1) if len(devices) % number == 0]
        yield ConfigProblem(path, message, f"write one of {', '.join(map(str, divisors))}")
    strategy = config.actor_infer.strategy_args.strategy_name
    if config.cluster.device == "cuda" and strategy == "hf_infer" and size > 1:
        yield ConfigProblem(path, f"{size}: hf_infer computes on one GPU, the others would idle", "write 1")


def device_warnings(config: RunConfig) -> Iterator[str]:
    """Warn about devices that no role uses."""
    used = {device for devices in readable_mappings(config).values() for device in devices}
    idle = set(range(derived.total_devices(config))) - used
    if idle:
        yield f"no role uses device {compact(idle)}"
