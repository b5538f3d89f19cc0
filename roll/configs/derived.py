"""Values derived from a configuration, each computed in one place.

The pipeline, the checks and the printed plan all read them here, so what is printed is what runs. Functions expect a
configuration whose single values are in range; `roll.check` decides if the values fit together.

`cluster.shares` is a shorter way to write device mappings; the loader replaces shares by mappings. Every node is
divided in the same way: each share gets adjacent devices, in the order written. The share `train` is for actor_train,
and for critic, reference and teacher unless they have shares of their own; these roles take turns on its devices.
`infer` is for actor_infer; any other share has the name of its role.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from roll.configs.devices import MAX_DEVICES, DeviceMappingError, compact, parse_device_mapping
from roll.configs.errors import ConfigProblem, choose_among, count, shown
from roll.configs.fields import DeviceMapping
from roll.configs.rewards import RewardConfig
from roll.configs.roles import (
    COMPARED_ROLES,
    ROLES,
    ROLL_ARGUMENTS,
    TRAINED_ROLES,
    PictureSampling,
    TeacherConfig,
    TrainingArguments,
    ValidationSettings,
    WorkerConfig,
)
from roll.configs.run import (
    TENSORBOARD,
    TRACKERS,
    AgenticConfig,
    EnvManagerConfig,
    ImageConfig,
    PipelineConfig,
    PromptConfig,
    RunConfig,
    SFTConfig,
)
from roll.configs.strategies import Options

SYNCHRONOUS_KEYS = (
    "async_generation_ratio",
    "max_staleness",
    "consumption",
    "staleness_policy",
    "allow_uncorrected_off_policy",
)
"""Keys that `synchronous` changes and that affect learning."""
MEBIBYTE = 1024 * 1024
REWARD_TIMEOUT_SECONDS = {"code": 60.0, "reward_model": 120.0, "judge": 600.0, "scoring_service": 600.0}
"""Default timeouts of the verifiers that do not have the usual 10 seconds."""
LONGEST_CANARY = 64
"""Maximum length of a parity-check sequence in tokens: enough for attention to matter, and cheap to compute."""


def reinforcement(config: RunConfig) -> PipelineConfig:
    """Return the configuration typed as `PipelineConfig`. Raises `TypeError` for `pipeline: sft`."""
    if not isinstance(config, PipelineConfig):
        raise TypeError(f"a configuration of reinforcement learning is needed here, not a {type(config).__name__}")
    return config


def prompted(config: RunConfig) -> PromptConfig:
    """Return the configuration typed as that of `rlvr` or `image`. Raises `TypeError` for another pipeline."""
    if not isinstance(config, PromptConfig):
        raise TypeError(f"a configuration of `pipeline: rlvr` or `image` is needed here, not a {type(config).__name__}")
    return config


def role_sections(config: RunConfig) -> dict[str, WorkerConfig]:
    """Return the role sections present in the configuration, by role name."""
    if not isinstance(config, PipelineConfig):
        return {"actor_train": config.actor_train}
    logp, compared = config.actor_logp, (config.reference, config.teacher)
    sections = (config.actor_train, config.actor_infer, logp, *compared, config.critic)
    return {name: role for name, role in zip(ROLES, sections, strict=True) if role is not None}


def picture_sampling(config: RunConfig) -> PictureSampling | None:
    """Return the sampling settings of `pipeline: image`; None if the run generates text."""
    return config.sampling if isinstance(config, ImageConfig) else None


def present_roles(config: RunConfig) -> dict[str, WorkerConfig]:
    """Return the roles of this run that own devices, by name."""
    return {name: role for name, role in role_sections(config).items() if not is_trainer(config, name)}


def trained_roles(config: RunConfig) -> dict[str, WorkerConfig]:
    """Return the roles of this run that are trained, by name."""
    return {name: role for name, role in present_roles(config).items() if name in TRAINED_ROLES}


def is_trainer(config: RunConfig, role: str) -> bool:
    """Return True if the role has a section but `actor_train` does its work."""
    if role == "actor_logp":
        return logp_is_trainer(config)
    return role in COMPARED_ROLES and (is_base(config, role) or is_policy(config, role))


def is_policy(config: RunConfig, role: str) -> bool:
    """Return True if the role is a teacher that is the policy itself (`teacher.weights: policy`)."""
    teacher = config.teacher if isinstance(config, PipelineConfig) else None
    return role == "teacher" and teacher is not None and teacher.weights == "policy"


def is_base(config: RunConfig, role: str) -> bool:
    """Return True if the reference or the teacher is the trainer with its LoRA adapters switched off.

    That holds if the role has the same model, and either the same devices or none of its own: a second copy of the
    model would compute the same.
    """
    section, trained = role_sections(config).get(role), config.actor_train
    if section is None or trained.model_args.lora_target is None or is_policy(config, role):
        return False
    if section.device_mapping is None or model_path(config, section) != model_path(config, trained):
        return model_path(config, section) == model_path(config, trained)
    return _names_devices_of_trainer(config, section)


def logp_is_trainer(config: RunConfig) -> bool:
    """Return True if the trainer does the work of `actor_logp`, which then names the trainer's devices or none."""
    role = config.actor_logp if isinstance(config, PipelineConfig) else None
    return role is not None and (role.device_mapping is None or _names_devices_of_trainer(config, role))


def _names_devices_of_trainer(config: RunConfig, role: WorkerConfig) -> bool:
    try:
        return set(parse_device_mapping(role.device_mapping)) == set(
            parse_device_mapping(config.actor_train.device_mapping)
        )
    except DeviceMappingError:  # another rule reports it
        return False


def roles_and_reward_models(config: RunConfig) -> dict[str, WorkerConfig | RewardConfig]:
    """Return every section that runs a model on devices, by the name of its role."""
    return {**present_roles(config), **reward_models(config)}


def reward_models(config: RunConfig) -> dict[str, RewardConfig]:
    """Return the rewards that run a model on devices, by the name of their role."""
    rewards = config.rewards if isinstance(config, PromptConfig) else {}
    return {f"rewards.{name}": reward for name, reward in rewards.items() if reward.verifier == "reward_model"}


def device_mappings(config: RunConfig) -> dict[str, DeviceMapping]:
    """Return the `device_mapping` of each role, reward models included."""
    return {name: role.device_mapping for name, role in roles_and_reward_models(config).items()}


def reward_timeout(reward: RewardConfig) -> float:
    """Return the time limit, in seconds, for judging one sample (for a reward model: one batch)."""
    return reward.timeout_seconds or REWARD_TIMEOUT_SECONDS.get(reward.verifier, 10.0)


def batch_wait_seconds(config: PipelineConfig, reward: RewardConfig) -> float:
    """Return the time, in seconds, that a reward model's batch waits for more samples.

    The default is 0 at ratio 0, so that runs repeat bit for bit.
    """
    if reward.reward_model.batch_wait_seconds is not None:
        return reward.reward_model.batch_wait_seconds
    return 0.005 if config.async_generation_ratio > 0 else 0.0


def uses_kl(config: PipelineConfig) -> bool:
    """Return True if a KL term is configured, which needs the reference policy."""
    return config.use_kl_loss or config.add_token_level_kl


def learns_from_rewards(config: PipelineConfig) -> bool:
    """Return True unless the policy learns from its teacher alone."""
    return config.distillation is None or config.distillation.reward_coef > 0


def is_scored(config: PipelineConfig) -> bool:
    """Return True if the rollouts are scored, by rewards or environments."""
    return not isinstance(config, PromptConfig) or bool(config.rewards)


def pg_variant_args(config: PipelineConfig) -> dict[str, Any]:
    """Return the arguments of the policy loss: `pg_variant_args` and the keys of `ROLL_ARGUMENTS` that are set."""
    given = {argument: vars(config.actor_train)[name] for name, (_, argument) in ROLL_ARGUMENTS.items()}
    return {**config.actor_train.pg_variant_args, **{key: value for key, value in given.items() if value is not None}}


def may_be_stale(config: PipelineConfig) -> bool:
    """Return True if training may use tokens sampled by older weights."""
    return least_staleness(config) > 0


def model_path(config: RunConfig, role: WorkerConfig | RewardConfig) -> str:
    """Return the folder or hub name of the model of a role or reward."""
    shared = config.pretrain
    if isinstance(role, TeacherConfig) and role.weights == "policy":
        return model_path(config, config.actor_train)
    if isinstance(role, RewardConfig):
        shared = reinforcement(config).reward_pretrain or ""
    return role.model_args.model_name_or_path or shared


def total_devices(config: RunConfig) -> int:
    """Return the number of devices of the cluster; they are numbered from 0."""
    return config.cluster.num_nodes * config.cluster.num_devices_per_node


def context_ranks(role: WorkerConfig) -> int:
    """Return the number of ranks that split the positions of a row; 1: each rank has whole rows."""
    if role.strategy_args.strategy_name not in ("fsdp2_train", "megatron_train"):
        return 1
    return int(Options.of(role).get("context_parallel_size", 1))


def compiles_layers(role: WorkerConfig) -> bool:
    """Return True if the role's trainer compiles the layers of its model."""
    compiling = role.strategy_args.strategy_name in ("fsdp2_train", "deepspeed_train")
    return compiling and bool(Options.of(role).get("compile", False))


def takes_transformer_engine(transformer_impl: str, device: str) -> bool:
    """Return True if `megatron_train` with this option uses the layers of Transformer Engine on such a device."""
    on_gpu = device == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    return transformer_impl == "transformer_engine" or (transformer_impl == "auto" and on_gpu)


def data_parallel_ranks(role: WorkerConfig) -> int:
    """Return the number of data-parallel ranks of a trainer.

    With Megatron, tensor x pipeline x context ranks form one data-parallel rank, with `fsdp2_train` context ranks.
    """
    ranks, options = len(parse_device_mapping(role.device_mapping)), Options.of(role)
    split = context_ranks(role)
    if role.strategy_args.strategy_name == "megatron_train":
        split *= math.prod(options.get(f"{way}_model_parallel_size", 1) for way in ("tensor", "pipeline"))
    return max(1, ranks // split)


def engine_replicas(config: PipelineConfig) -> int:
    """Return the number of generation engines, each on ``num_gpus_per_engine`` devices."""
    return len(parse_device_mapping(config.actor_infer.device_mapping)) // config.actor_infer.num_gpus_per_engine


def shares_devices(config: RunConfig, role: str) -> bool:
    """Return True if another role uses a device of this one."""
    mappings = {name: set(parse_device_mapping(mapping)) for name, mapping in device_mappings(config).items()}
    own = mappings.pop(role)
    return any(own & others for others in mappings.values())


def weight_transport(config: PipelineConfig, platform: str = sys.platform) -> str:
    """Return the weight transport; `auto` is shared memory if trainer and engines are on one Linux node."""
    chosen = config.weight_update.transport
    if chosen != "auto":
        return chosen
    return "shared_memory" if platform == "linux" and len(publication_nodes(config)) == 1 else "object_store"


def needs_whole_models(config: PipelineConfig) -> bool:
    """Return True if `actor_logp` has devices of its own, and so receives the trainer's full weights."""
    return config.actor_logp is not None and not logp_is_trainer(config)


def adapter_rank(config: PipelineConfig) -> int | None:
    """Return the LoRA rank if weight updates carry adapters only; None if they carry all weights."""
    return config.actor_train.model_args.lora_rank if config.weight_update.content == "adapter" else None


def replays_routing(config: RunConfig) -> bool:
    """Return True if the trainer sends tokens to the experts that the engine chose."""
    return isinstance(config, PipelineConfig) and config.actor_train.router_replay


def publication_nodes(config: PipelineConfig) -> set[int]:
    """Return the nodes of the trainer and of the roles that receive its weights."""
    roles = present_roles(config)
    mappings = [roles[name].device_mapping for name in ("actor_train", "actor_infer", "actor_logp") if name in roles]
    devices = [device for mapping in mappings for device in parse_device_mapping(mapping)]
    return {device // config.cluster.num_devices_per_node for device in devices}


def tokenizer_path(config: RunConfig) -> str:
    """Return the folder or hub name of the tokenizer of the trained policy."""
    model = model_path(config, config.actor_train)
    return f"{model}/tokenizer" if isinstance(config, ImageConfig) else model


def tracker_list(config: RunConfig) -> list[str]:
    """Return the configured trackers as a list."""
    return [config.track_with] if isinstance(config.track_with, str) else config.track_with


def tracker_classes(config: RunConfig) -> dict[str, str]:
    """Return the import path of each configured plug-in tracker, by its name."""
    return {name: TRACKERS.find(name, "track_with").path for name in tracker_list(config) if name != TENSORBOARD}


def gather_bucket_bytes(config: PipelineConfig) -> int:
    """Return the size of the largest bucket that the trainer packs, in bytes."""
    megabytes = config.weight_update.param_update_gather_bucket_size_mb
    return max(1, int(megabytes * MEBIBYTE))


def load_bucket_bytes(config: PipelineConfig) -> int:
    """Return the largest number of bytes that an engine receives at a time."""
    megabytes = config.weight_update.param_update_load_bucket_size_mb
    return max(1, int(megabytes * MEBIBYTE))


def group_size(config: PipelineConfig) -> int:
    """Return the samples of one group: responses to a prompt, or episodes of a seed."""
    if isinstance(config, AgenticConfig):
        return config.train_env_manager.group_size
    return prompted(config).num_return_sequences_in_group


def group_size_key(config: PipelineConfig) -> str:
    """Return the key that sets the group size."""
    return "train_env_manager.group_size" if isinstance(config, AgenticConfig) else "num_return_sequences_in_group"


def samples_per_step(config: RunConfig) -> int:
    """Return the samples (or episodes) of one training step: groups times samples per group, or examples."""
    if isinstance(config, SFTConfig):
        return config.train_batch_size
    rollouts = reinforcement(config)
    return rollouts.rollout_batch_size * group_size(rollouts)


def used_tags(config: AgenticConfig, manager: EnvManagerConfig) -> dict[str, int]:
    """Return the environment tags in use, in order, each with its number of groups per cycle."""
    tags = manager.tags or list(config.custom_envs)
    return dict(zip(tags, manager.num_groups_partition or [1] * len(tags), strict=True))


def only_agents(config: AgenticConfig, manager: EnvManagerConfig) -> bool:
    """Return True if agents play all the tags that a manager uses."""
    envs = [config.custom_envs[tag] for tag in manager.tags or config.custom_envs if tag in config.custom_envs]
    return bool(envs) and all(env.env_manager_cls == "agent" for env in envs)


def validation_settings(config: PipelineConfig) -> ValidationSettings | None:
    """Return the sampling settings of validation; None without validation."""
    if isinstance(config, AgenticConfig):
        return config.validation if config.val_env_manager is not None else None
    return prompted(config).validation


def pinned_replicas(config: PipelineConfig) -> int:
    """Return the number of replicas that keep a weight version for validation while the others take newer versions."""
    settings = validation_settings(config)
    if settings is None or settings.mode == "pause" or shares_devices(config, "actor_infer"):
        return 0
    share, replicas = settings.replicas, engine_replicas(config)
    return min(max(1, int(share * replicas)), replicas - 1) if share else 0


def pull_after_seconds(config: PipelineConfig) -> float | None:
    """Return the maximum delay, in seconds, of a weight update at a busy replica; None if weights are pushed."""
    return config.weight_update.pull_after_seconds if config.weight_update.mode == "pull" else None


def weight_buffers(config: PipelineConfig) -> int:
    """Return the number of copies of the weights that the trainer has memory for."""
    return (2 if has_two_buffers(config) else 1) + (1 if pinned_replicas(config) else 0)


def has_two_buffers(config: PipelineConfig) -> bool:
    """Return True if new weights are gathered while engines still take the previous ones.

    With `cuda_ipc`, trainer and engines take turns on the same devices, so a second copy there would not save time.
    """
    return config.weight_update.dual_buffer and config.weight_update.transport != "cuda_ipc"


def reward_weights(config: PipelineConfig, counted_in_turns: bool) -> tuple[float, float]:
    """Return the weights of the episode's reward and of its turns' rewards, for an estimator that counts in turns or
    not. In RLVR a response is its own episode."""
    if not isinstance(config, AgenticConfig):
        return 1.0, 0.0
    episode, step = config.episode_reward_weight, config.step_reward_weight
    defaults = (0.0, 1.0) if counted_in_turns else (1.0, 0.0)
    return (defaults[0] if episode is None else episode, defaults[1] if step is None else step)


def optimizer_batch_size(config: RunConfig, role: WorkerConfig, samples: int | None = None) -> int:
    """Return the samples per optimizer step of a trained role, over all ranks.

    Without `gradient_accumulation_steps` these are all samples of a training step: ``samples``, or by default the
    configured number.
    """
    arguments = role.training_args
    if arguments.gradient_accumulation_steps is None:
        return samples_per_step(config) if samples is None else samples
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * data_parallel_ranks(role)


def optimizer_steps_per_step(config: RunConfig, role: WorkerConfig) -> int:
    """Return the optimizer steps of one training step, all epochs together."""
    epochs = config.ppo_epochs if isinstance(config, PipelineConfig) else 1
    return samples_per_step(config) // optimizer_batch_size(config, role) * epochs


def total_optimizer_steps(config: RunConfig, role: WorkerConfig) -> int:
    """Return the optimizer steps of the run, the length of the role's learning rate schedule.

    The policy takes no steps while only the critic learns.
    """
    waiting = config.critic_warmup if isinstance(config, PipelineConfig) and role is config.actor_train else 0
    return (config.max_steps - waiting) * optimizer_steps_per_step(config, role)


def warmup_steps(config: RunConfig, role: WorkerConfig) -> int:
    """Return the optimizer steps of warm-up, from `warmup_steps` or else `warmup_ratio`."""
    return warmup_steps_of(role.training_args, total_optimizer_steps(config, role))


def warmup_steps_of(arguments: TrainingArguments, total_steps: int) -> int:
    """Return the warm-up steps of a schedule over ``total_steps``, rounded up."""
    return arguments.warmup_steps or math.ceil(round(arguments.warmup_ratio * total_steps, 6))


def sequence_length(config: RunConfig) -> int:
    """Return the maximum length of prompt plus response in tokens.

    A picture counts one token for its prompt and one for each denoising step.
    """
    if isinstance(config, SFTConfig):
        return config.sequence_length
    if isinstance(config, ImageConfig):
        return 1 + config.sampling.num_inference_steps
    rollouts = reinforcement(config)
    longest = rollouts.prompt_length + rollouts.response_length
    return longest if rollouts.sequence_length is None else min(rollouts.sequence_length, longest)


def max_new_tokens(config: PipelineConfig) -> int:
    """Return the maximum length of a training response in tokens.

    A long prompt may leave less room: see `sequence_length`. For a picture, tokens are the denoising steps trained on.
    """
    if isinstance(config, ImageConfig):
        return config.sampling.window_size
    if isinstance(config, AgenticConfig):
        return config.response_length
    return config.actor_infer.generating_args.max_new_tokens or config.response_length


def longest_response(config: PipelineConfig) -> int:
    """Return the maximum length of a response in tokens; of an episode of several samples, that of all turns."""
    one = max_new_tokens(config)
    if isinstance(config, AgenticConfig):
        environments = config.custom_envs.values()
        return one * max((each.max_steps for each in environments if each.env_manager_cls != "trajectory"), default=1)
    return one


def least_staleness(config: PipelineConfig) -> int:
    """Return the smallest `max_staleness` that a run can keep: ceil(async_generation_ratio) + interval_steps - 1.

    A group may start ceil(ratio) steps before it is trained on, with weights up to interval_steps - 1 versions old.
    """
    return math.ceil(config.async_generation_ratio) + config.weight_update.interval_steps - 1


def synchronous(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration made synchronous: no generation ahead, and training on whole batches only.

    Keys that then have no effect (`SYNCHRONOUS_KEYS`) are reset.
    """
    fallback = replace(
        config,
        async_generation_ratio=0.0,
        max_staleness=None,
        consumption=None,
        staleness_policy="wait",
        actor_train=replace(config.actor_train, stream_groups=False),
        restarts=replace(config.restarts, synchronous_after=None),
    )
    on_policy = not may_be_stale(fallback) and optimizer_steps_per_step(fallback, fallback.actor_train) == 1
    return replace(fallback, allow_uncorrected_off_policy=False) if on_policy else fallback


def resolved_max_staleness(config: PipelineConfig) -> int:
    """Return the maximum age of a token trained on, in policy versions."""
    return least_staleness(config) if config.max_staleness is None else config.max_staleness


def resolved_consumption(config: PipelineConfig) -> Literal["ready_first", "fifo"]:
    """Return the order in which finished groups are trained on."""
    return config.consumption or ("ready_first" if config.async_generation_ratio > 0 else "fifo")


def groups_ahead(config: PipelineConfig) -> int:
    """Return the number of groups in flight beyond the batch being trained: ratio times batch, rounded up."""
    return math.ceil(config.async_generation_ratio * config.rollout_batch_size)


def truncates_sampling(config: PipelineConfig) -> bool:
    """Return True if training samples from a truncated distribution; the trainer cannot reproduce the truncation."""
    sampling = config.actor_infer.generating_args
    return sampling.top_p < 1 or sampling.top_k > 0


def canary_length(config: PipelineConfig) -> int:
    """Return the length of a parity-check sequence in tokens; one position stays free, which some engines need."""
    return min(LONGEST_CANARY, sequence_length(config) - 1)


def canary_tolerances(config: PipelineConfig) -> tuple[float, float]:
    """Return the limits of the parity check above which the run warns and stops, in nats per token.

    Both limit a mean absolute difference. They are equal if `canary_tolerance` is set or if trainer and engine
    compute in float32. The limits for pictures are relative (`compare_canaries`), and smaller, because a step depends
    on many numbers at once.
    """
    if config.weight_update.canary_tolerance is not None:
        return (config.weight_update.canary_tolerance,) * 2
    dtypes = {config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype}
    if isinstance(config, ImageConfig):
        return (1e-4, 1e-4) if dtypes == {"float32"} else (1e-3, 0.1)
    return (1e-3, 1e-3) if dtypes == {"float32"} else (0.1, 0.5)


def validation_count(config: RunConfig) -> int:
    """Return the number of validations: before the first step, every `eval_steps`, and after the last."""
    if config.eval_steps == 0:
        return 0
    whole, rest = divmod(config.max_steps, config.eval_steps)
    return 1 + whole + (rest > 0)


TAKING_TURNS = ("actor_train", "critic", "reference", "teacher")
"""Roles that get their devices from the share `train`."""
_ROUNDING = 0.02
"""Tolerance, in devices, of a share that is not a whole number of devices: 0.33 of 3 devices is one."""


def place_shares(config: RunConfig) -> list[ConfigProblem]:
    """Replace `cluster.shares` by device mappings, in place. Return the problems of shares that cannot be placed."""
    cluster, shares = config.cluster, config.cluster.shares
    if not shares or not 0 < total_devices(config) <= MAX_DEVICES or cluster.num_nodes < 1:
        return []  # rules reject such a cluster
    roles = _roles_of_shares(config)
    sections = _sections(config)
    problems = list(_problems_of_shares(config, roles))
    if problems:
        return problems
    first = 0
    for name, share in shares.items():
        size = round(share * cluster.num_devices_per_node)
        starts = [node * cluster.num_devices_per_node + first for node in range(cluster.num_nodes)]
        for role in roles[name]:
            sections[role].device_mapping = compact(start + each for start in starts for each in range(size))
        first += size
    cluster.shares = {}
    return []


def _sections(config: RunConfig) -> dict[str, WorkerConfig | RewardConfig]:
    return {**role_sections(config), **reward_models(config)}


def _roles_of_shares(config: RunConfig) -> dict[str, list[str]]:
    """Map the name of each share that this run may have to the roles that get its devices."""
    names = list(_sections(config))
    turns = [role for role in TAKING_TURNS if role in names and role not in config.cluster.shares]
    others = {name: [name] for name in names if name not in ("actor_train", "actor_infer")}
    engine = {"infer": ["actor_infer"]} if "actor_infer" in names else {}
    return {"train": turns, **engine, **others}


def _problems_of_shares(config: RunConfig, roles: dict[str, list[str]]) -> Iterator[ConfigProblem]:
    shares, devices = config.cluster.shares, config.cluster.num_devices_per_node
    sections = _sections(config)
    for name, share in shares.items():
        path = f"cluster.shares.{name}"
        if name not in roles:
            yield ConfigProblem(path, "this run has no such share", choose_among(name, roles))
            continue
        for role in roles[name]:
            given = sections[role].device_mapping
            if given is not None:
                message = f"{shown(share)}, but {role}.device_mapping is {shown(given)}"
                yield ConfigProblem(path, message, "remove one of the two; both name the devices of a role")
        if not 0 < share <= 1:
            yield ConfigProblem(path, f"{shown(share)} is no share", "write a number above 0 and at most 1")
            continue
        number = share * devices
        if round(number) == 0 or abs(number - round(number)) > _ROUNDING:
            even = [each for each in (math.floor(number), math.ceil(number)) if each > 0]
            ways = " or ".join(f"{each / devices:.4g} ({each} of {devices})" for each in even)
            message = f"{shown(share)} of the {count(devices, 'device')} of a node is {number:.4g}, no whole number"
            remedy = f"write {ways}, or change `cluster.num_devices_per_node`"
            yield ConfigProblem(path, message, remedy)
    total = sum(shares.values())
    if total * devices > devices + _ROUNDING * len(shares):
        message = f"{' + '.join(f'{share:g}' for share in shares.values())} = {total:g}, more than a node has"
        yield ConfigProblem("cluster.shares", message, "lower the shares; together they are at most 1")
