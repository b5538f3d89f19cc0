"""The arithmetic of a run in units, printed before anything loads.

`plan` collects the numbers of a configuration that passed `check_config`; `render` prints them in sentences that a
reader can verify: prompts times samples, optimizer steps, devices, groups ahead and the maximum age of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from roll.check.config import config_warnings
from roll.check.data import files_of
from roll.check.rules import tracker_words
from roll.configs import derived
from roll.configs.devices import compact, parse_device_mapping
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.roles import DataArguments, ModelArguments, WorkerConfig
from roll.configs.run import AgenticConfig, EnvManagerConfig, PipelineConfig
from roll.configs.strategies import strategy_of


@dataclass(frozen=True)
class RolePlan:
    """The strategy, model and devices of a role."""

    name: str
    strategy: str
    model: str
    devices: list[int]
    workers: int
    """Number of ranks or engine replicas."""
    worker_word: str
    """``rank`` or ``replica``."""
    shares_with: list[str]
    """Roles that use some of the same devices, and take turns on them."""
    adapters: str = ""
    """Description of the adapters, if not the whole model is trained."""


@dataclass(frozen=True)
class Plan:
    """The numbers of a run."""

    exp_name: str
    device: str
    devices: int
    roles: list[RolePlan]
    reference_is_base: bool
    """True if the reference is the trainer without its adapters."""
    training_data: str
    validation_data: str
    prompts_per_step: int
    samples_per_prompt: int
    words: tuple[str, str]
    """Words for the start of a group and for its members."""
    samples_per_step: int
    optimizer_batch_size: int
    optimizer_steps_per_step: int
    epochs: int
    steps: int
    critic_warmup: int
    total_optimizer_steps: int
    warmup_steps: int
    prompt_length: int
    max_new_tokens: int
    sequence_length: int
    ratio: float
    groups_ahead: int
    consumption: str
    max_staleness: int
    least_staleness: int
    interval_steps: int
    transport: str
    in_flight: str
    eval_steps: int
    validation_count: int
    trackers: list[str]
    warnings: list[str] = field(default_factory=list)


def plan(config: PipelineConfig) -> Plan:
    """Collect the numbers of a configuration that passed `check_config`."""
    return Plan(
        exp_name=config.exp_name,
        device=config.cluster.device,
        devices=derived.total_devices(config),
        reference_is_base=derived.reference_is_base(config),
        roles=[_role_plan(config, name, role) for name, role in derived.roles_and_reward_models(config).items()],
        training_data=_training_data(config),
        validation_data=_validation_data(config),
        prompts_per_step=config.rollout_batch_size,
        samples_per_prompt=derived.group_size(config),
        words=("seed", "episode") if isinstance(config, AgenticConfig) else ("prompt", "sample"),
        samples_per_step=derived.samples_per_step(config),
        optimizer_batch_size=derived.optimizer_batch_size(config, config.actor_train),
        optimizer_steps_per_step=derived.optimizer_steps_per_step(config, config.actor_train),
        epochs=config.ppo_epochs,
        steps=config.max_steps,
        critic_warmup=config.critic_warmup,
        total_optimizer_steps=derived.total_optimizer_steps(config, config.actor_train),
        warmup_steps=derived.warmup_steps(config, config.actor_train),
        prompt_length=config.prompt_length,
        max_new_tokens=derived.max_new_tokens(config),
        sequence_length=derived.sequence_length(config),
        ratio=config.async_generation_ratio,
        groups_ahead=derived.groups_ahead(config),
        consumption=derived.resolved_consumption(config),
        max_staleness=derived.resolved_max_staleness(config),
        least_staleness=derived.least_staleness(config),
        interval_steps=config.weight_update.interval_steps,
        transport=derived.weight_transport(config),
        in_flight=config.weight_update.in_flight,
        eval_steps=config.eval_steps,
        validation_count=derived.validation_count(config),
        trackers=tracker_words(config),
        warnings=config_warnings(config),
    )


def _role_plan(config: PipelineConfig, name: str, role: WorkerConfig | RewardConfig) -> RolePlan:
    owned = {other: parse_device_mapping(mapping) for other, mapping in derived.device_mappings(config).items()}
    devices = owned[name]
    generates, scores = name == "actor_infer", isinstance(role, RewardConfig)
    strategy = strategy_of(name, role)
    holds_whole_model = strategy is not None and strategy.replicates
    return RolePlan(
        name=name,
        strategy=role.strategy_args.strategy_name,
        model=derived.role_model_path(config, role),
        devices=devices,
        workers=derived.engine_replicas(config) if generates else len(devices),
        worker_word="replica" if generates or scores or holds_whole_model else "rank",
        shares_with=[other for other, theirs in owned.items() if other != name and set(devices) & set(theirs)],
        adapters=_adapters(role.model_args),
    )


def _adapters(arguments: ModelArguments) -> str:
    wanted = arguments.lora_target
    if wanted is None:
        return ""
    return f"adapters of rank {arguments.lora_rank} on {wanted if isinstance(wanted, str) else ', '.join(wanted)}"


def _training_data(config: PipelineConfig) -> str:
    if isinstance(config, AgenticConfig):
        return _environments(config, config.train_env_manager)
    return _sources(config.actor_train.data_args)


def _validation_data(config: PipelineConfig) -> str:
    if isinstance(config, AgenticConfig):
        manager = config.val_env_manager
        if manager is None:
            return ""
        groups, size = manager.num_env_groups or 0, manager.group_size
        return f"{count(groups, 'seed')} x {count(size, 'episode')}: {_environments(config, manager)}"
    validation = derived.rlvr(config).validation
    return _sources(validation.data_args) if validation is not None else ""


def _environments(config: AgenticConfig, manager: EnvManagerConfig) -> str:
    shares = derived.used_tags(config, manager)
    whole = sum(shares.values())
    kinds = {tag: config.custom_envs[tag] for tag in shares}
    return ", ".join(
        f"{tag} ({kind.env_type}, {shares[tag]} of {count(whole, 'group')}, up to {count(kind.max_steps, 'turn')})"
        for tag, kind in kinds.items()
    )


def _sources(data: DataArguments) -> str:
    tasks = [f"{source.dataset} ({count(source.size, 'task')}, seed {source.seed})" for source in data.reasoning_gym]
    return ", ".join([*files_of(data), *tasks])


def render(plan: Plan) -> str:
    """Format the plan as lines for a console."""
    slots = "CPU slot" if plan.device == "cpu" else "GPU"
    rows = [
        ("run", f"{plan.exp_name}: {count(plan.steps, 'training step')} on {count(plan.devices, slots)}"),
        *((role.name, _role_text(role)) for role in plan.roles),
        *([("reference", "actor_train without its adapters")] if plan.reference_is_base else []),
        ("data", plan.training_data),
        ("batch", _batch_text(plan)),
        ("optimizer", _optimizer_text(plan)),
        ("lengths", _length_text(plan)),
        ("schedule", _schedule_text(plan)),
        ("staleness", _staleness_text(plan)),
        ("weights", _weights_text(plan)),
        ("validation", _validation_text(plan)),
        ("metrics", ", ".join(["metrics.jsonl", *plan.trackers])),
        *(("warning", warning) for warning in plan.warnings),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _role_text(role: RolePlan) -> str:
    where = f"shared with {', '.join(role.shares_with)}" if role.shares_with else "of its own"
    return (
        f"{role.strategy}, {count(role.workers, role.worker_word)} on device {compact(role.devices)} ({where}), "
        f"model {role.model}" + (f", {role.adapters}" if role.adapters else "")
    )


def _batch_text(plan: Plan) -> str:
    return (
        f"{count(plan.prompts_per_step, plan.words[0])} x {count(plan.samples_per_prompt, plan.words[1])} = "
        f"{count(plan.samples_per_step, plan.words[1])} a step; "
        f"{count(plan.optimizer_steps_per_step // plan.epochs, 'optimizer step')} of {plan.optimizer_batch_size:,}"
        + (f", {plan.epochs} epochs" if plan.epochs > 1 else "")
    )


def _optimizer_text(plan: Plan) -> str:
    warmup = f", {plan.warmup_steps:,} of them warm-up" if plan.warmup_steps else ""
    learning = count(plan.steps - plan.critic_warmup, "training step")
    before = f" after {plan.critic_warmup:,} of the critic alone" if plan.critic_warmup else ""
    return (
        f"{learning}{before} x {plan.optimizer_steps_per_step:,} = "
        f"{count(plan.total_optimizer_steps, 'optimizer step')}{warmup}"
    )


def _length_text(plan: Plan) -> str:
    return (
        f"prompt up to {plan.prompt_length:,} + response up to {plan.max_new_tokens:,} tokens, "
        f"together up to {plan.sequence_length:,}"
    )


def _schedule_text(plan: Plan) -> str:
    if plan.ratio == 0:
        return "ratio 0: generation and training take turns (on-policy)"
    return (
        f"ratio {plan.ratio:g} x {count(plan.prompts_per_step, 'group')} = up to {count(plan.groups_ahead, 'group')} "
        f"in flight beyond the batch being trained; {plan.consumption}"
    )


def _staleness_text(plan: Plan) -> str:
    versions = count(plan.max_staleness, "policy version")
    if plan.max_staleness > plan.least_staleness:
        reason = f"configured; at least {plan.least_staleness} is needed"
    else:
        reason = f"ceil({plan.ratio:g}) + {plan.interval_steps} - 1 = {math.ceil(plan.ratio) + plan.interval_steps - 1}"
    return f"no token older than {versions} is trained on ({reason})"


def _weights_text(plan: Plan) -> str:
    way = plan.transport.replace("_", " ")
    return f"published every {_steps(plan.interval_steps)} ({way}); running requests: {plan.in_flight}"


def _validation_text(plan: Plan) -> str:
    if not plan.validation_count:
        return "none"
    times = count(plan.validation_count, "time")
    rhythm = f"before the first step, every {_steps(plan.eval_steps)} and after the last"
    return f"{times} ({rhythm}) on {plan.validation_data}"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
