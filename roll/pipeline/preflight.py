"""Checks of everything that can be known to be wrong before Ray or a model starts.

The configuration's own checks come first. Then its names are looked up: the cluster, the needs of the rollouts (prompts
and verifiers, or environments, managers and a template that can write turns), algorithms, stages, worker classes and
engine options. All problems are reported at once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from roll.agentic.base import observation_from
from roll.agentic.episode import Observation
from roll.agentic.manager import ENVIRONMENT_MANAGERS, EnvManagerFactory
from roll.agentic.registry import ENVIRONMENTS, check_env_type, make_env
from roll.agentic.tools.base import ToolUnavailable
from roll.check.config import check_elsewhere
from roll.check.plan import missing_packages
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, problems_of
from roll.configs.plugins import import_object
from roll.configs.rewards import JudgeConfig, RewardConfig
from roll.configs.run import AgenticConfig, ClusterConfig, CustomEnvConfig, PipelineConfig, RLVRConfig
from roll.configs.strategies import Trainer, option_problems, strategies_of, strategy_class
from roll.data.chat import ChatTurns, RawTurns, TemplateRefused, TurnTemplate, require_append_only
from roll.data.prompts import load_prompts, load_tokenizer
from roll.data.records import Prompt
from roll.rewards.registry import Verifier, check_machine, check_prompts, resolve_verifier, route_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.algorithms.correction import Correction
    from roll.algorithms.objective import PolicyObjective, ValueObjective
    from roll.pipeline.agentic import AgenticSide
    from roll.pipeline.algorithm import AdvantageSettings, Algorithms
    from roll.pipeline.rlvr import RLVRSide
    from roll.pipeline.rollout_side import RolloutPlan, RunDevices
    from roll.pipeline.stages import ChainedStage
    from roll.runtime.actors import Worker
    from roll.tracking.run_directory import RunDirectory

_TRIAL = ({"role": "user", "content": "observation"},)


@dataclass(frozen=True)
class AgenticPlan:
    """The `RolloutPlan` of the agentic pipeline."""

    template: TurnTemplate
    managers: dict[str, EnvManagerFactory]
    """Factory of the environment manager, by tag."""

    def fingerprint(self, config: PipelineConfig) -> str:
        """Implement `RolloutPlan.fingerprint`."""
        config = derived.agentic(config)
        shares = derived.used_tags(config, config.train_env_manager)
        envs = {tag: [config.custom_envs[tag].env_type, config.custom_envs[tag].env_config] for tag in shares}
        return xxhash.xxh3_128_hexdigest(json.dumps([list(shares.items()), envs], default=repr).encode())

    def build(
        self, prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
    ) -> AgenticSide:
        """Implement `RolloutPlan.build`."""
        from roll.pipeline.agentic import AgenticSide

        return AgenticSide(prepared, self, str(run.logs.absolute()), on_event)


def plan_agentic(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> AgenticPlan | None:
    """Look up the named environments, managers and template; what is wrong goes into ``problems``."""
    managers: dict[str, EnvManagerFactory] = {}
    for tag, env in config.custom_envs.items():
        problems.found += check_env_type(tag, env.env_type, env.env_config)
        path = f"custom_envs.{tag}.env_manager_cls"
        factory = problems.attempt(partial(ENVIRONMENT_MANAGERS.load, env.env_manager_cls, path))
        if factory is not None:
            managers[tag] = factory
    if tokenizer is None:
        return None
    template = problems.attempt(lambda: _template(config, tokenizer))
    if template is None or problems.found:
        return None
    problems.found += _template_problems(config, template)
    return AgenticPlan(template, managers)


def _template(config: AgenticConfig, tokenizer: PreTrainedTokenizerBase) -> TurnTemplate:
    if config.template == "raw":
        turns = config.raw_turns
        return RawTurns(tokenizer, turns.message_separator, turns.prompt_end, turns.response_end)
    if not tokenizer.chat_template:
        message = "chat, but the tokenizer has no chat template"
        remedy = "set `template: raw`, or take an instruction-tuned model"
        raise ConfigError([ConfigProblem("template", message, remedy)])
    return ChatTurns(tokenizer, config.chat_template_kwargs)


def _template_problems(config: AgenticConfig, template: TurnTemplate) -> Iterator[ConfigProblem]:
    """Try the template on the first observation of each environment.

    For built-in environments it is the real one, for others a plain text.
    """
    for tag, env in config.custom_envs.items():
        try:
            first = _first_observation(env) if env.env_type in ENVIRONMENTS.built_in else Observation(_TRIAL)
            if env.env_manager_cls == "trajectory":
                require_append_only(template, first.messages, first.tools)
            else:
                template.prompt(first.messages, first.tools)
        except TemplateRefused as refused:
            remedy = "change what the environment says (`env_config`), or take another model or template"
            yield ConfigProblem(f"custom_envs.{tag}", str(refused), remedy)
        except ToolUnavailable as missing:
            yield ConfigProblem(f"custom_envs.{tag}.env_config", str(missing), "mend that, or leave the tool out")


def _first_observation(env: CustomEnvConfig) -> Observation:
    made = make_env(env.env_type, env.env_config)
    try:
        return observation_from(*made.reset(seed=0))
    finally:
        made.close()


Value = TypeVar("Value")

CLUSTER_PROBE_SECONDS = 3.0
"""Longest wait for a cluster to answer. Ray itself would try for minutes."""


@dataclass
class Prepared:
    """A checked configuration with everything it names."""

    config: PipelineConfig
    tokenizer: PreTrainedTokenizerBase
    rollouts: RolloutPlan
    source: str
    """Fingerprint of the items that groups are made of; see `RolloutPlan.fingerprint`."""
    objective: PolicyObjective
    value_objective: ValueObjective
    advantages: AdvantageSettings
    correction: Correction | None
    stages: list[ChainedStage]
    worker_classes: dict[str, type[Worker]]


class Problems:
    """Collector of problems, so that one problem does not hide another."""

    def __init__(self) -> None:
        self.found: list[ConfigProblem] = []

    def attempt(self, look_up: Callable[[], Value]) -> Value | None:
        """Return the result of ``look_up``, or None after noting its problems if it raised `ConfigError`."""
        try:
            return look_up()
        except ConfigError as error:
            self.found += error.problems
            return None

    def raise_any(self) -> None:
        """Raise `ConfigError` with all problems so far, if there are any."""
        if self.found:
            raise ConfigError(self.found)


def prepare(config: PipelineConfig) -> Prepared:
    """Look up everything that a (checked) configuration names.

    Raises `ConfigError` with all problems of cluster, rollouts and algorithms. If there are none, raises it with all
    problems of engines, stages and worker classes, whose libraries take long to import.
    """
    problems = Problems()
    problems.attempt(lambda: _check_cluster(config.cluster))
    tokenizer = problems.attempt(lambda: _tokenizer(config))
    rollouts = _plan_rollouts(config, tokenizer, problems)
    algorithms = problems.attempt(lambda: _algorithms(config))
    problems.raise_any()
    problems.attempt(lambda: _check_fallback(config))
    rollouts, algorithms = _found(rollouts, "rollouts"), _found(algorithms, "algorithms")
    problems.attempt(lambda: _check_strategies(config))
    worker_classes = problems.attempt(lambda: _worker_classes(config))
    if not config.stages:  # the built-in stages exist, and need not be imported before a refusal
        problems.raise_any()
    stages = problems.attempt(lambda: _stages(config))
    problems.raise_any()
    return Prepared(
        config=config,
        tokenizer=_found(tokenizer, "tokenizer"),
        rollouts=rollouts,
        source=rollouts.fingerprint(config),
        objective=algorithms.objective,
        value_objective=algorithms.value_objective,
        advantages=algorithms.advantages,
        correction=algorithms.correction,
        stages=_found(stages, "stages"),
        worker_classes=_found(worker_classes, "worker classes"),
    )


def look_up(config: PipelineConfig, *, with_model: bool, without: Collection[str]) -> None:
    """Look up the same names as `prepare`, on a machine that need not be the run's.

    No cluster is contacted. Prompts and templates are read, and judges contacted, only ``with_model``. Roles in
    ``without`` need not have their engine installed. Raises `ConfigError`.
    """
    problems = Problems()
    tokenizer = problems.attempt(lambda: _tokenizer(config)) if with_model else None
    _plan_rollouts(config, tokenizer, problems, asks_models=with_model)
    if problems.attempt(lambda: _algorithms(config)) is not None:
        problems.attempt(lambda: _check_fallback(config))
    problems.attempt(lambda: _check_strategies(config, without, with_model))
    problems.attempt(lambda: _worker_classes(config))
    if config.stages:
        problems.attempt(lambda: _stages(config))
    problems.raise_any()


def _found(value: Value | None, what: str) -> Value:
    """Return the result of a look-up that noted no problem.

    Raises `RuntimeError` if it is None: then a problem was lost.
    """
    if value is None:
        raise RuntimeError(f"the preflight found no {what}, and no problem with them either")
    return value


def _plan_rollouts(
    config: PipelineConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems, *, asks_models: bool = True
) -> RolloutPlan | None:
    """Look up the names that only this pipeline has; None after a problem. ``asks_models``: see `plan_rlvr`."""
    if isinstance(config, AgenticConfig):
        return plan_agentic(config, tokenizer, problems)
    return plan_rlvr(derived.rlvr(config), tokenizer, problems, asks_models=asks_models)


def _algorithms(config: PipelineConfig) -> Algorithms:
    from roll.pipeline.algorithm import build_algorithms

    return build_algorithms(config)


def _check_fallback(config: PipelineConfig) -> None:
    """Check that the fallback configuration for repeated failures can work, too."""
    if config.restarts.synchronous_after is None:
        return
    fallback = replace(derived.synchronous(config), resume_from_checkpoint=True)
    try:
        check_elsewhere(fallback)
        _algorithms(fallback)
    except ConfigError as error:
        problems = [
            ConfigProblem(
                "restarts.synchronous_after",
                f"at `async_generation_ratio: 0` the run would be refused: {each.path}: {each.message}",
                f"remove this key, or {each.remedy}",
            )
            for each in error.problems
        ]
        raise ConfigError(problems) from error


def _check_cluster(cluster: ClusterConfig) -> None:
    """Check that something listens at the address of the cluster."""
    if cluster.address is None or cluster.address == "auto":
        return
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        message = f"nothing answers at {cluster.address} ({error})"
        remedy = "give the address that `ray start --head` printed, or remove the key to start a local cluster"
        raise ConfigError([ConfigProblem("cluster.address", message, remedy)]) from error


def _tokenizer(config: PipelineConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the trained policy."""
    arguments = config.actor_train.model_args
    return load_tokenizer(
        derived.model_path(config, config.actor_train),
        trust_remote_code=arguments.trust_remote_code,
        config_path="actor_train.model_args.model_name_or_path" if arguments.model_name_or_path else "pretrain",
    )


def _check_strategies(config: PipelineConfig, without: Collection[str] = (), with_model: bool = True) -> None:
    """Check that engines are installed and that their options are known and fit the model, before a worker starts.

    Roles in ``without`` need not have their engine. Problems that only the models' own files reveal are left out unless
    ``with_model``.
    """
    problems = [
        ConfigProblem(f"{role}.strategy_args.strategy_name", f"{strategy.package} is not installed", strategy.install)
        for role, strategy in missing_packages(config).items()
        if role not in without
    ]
    for role, section in derived.present_roles(config).items():
        arguments, kind = section.strategy_args, strategies_of(role)
        path = f"{role}.strategy_args.strategy_config"
        problems += option_problems(kind, arguments.strategy_name, arguments.strategy_config, path)
        record = kind.find(arguments.strategy_name, path)
        if with_model and isinstance(record, Trainer) and record.layout is not None:
            problems += import_object(record.layout)(
                section,
                derived.model_path(config, section),
                path,
                kind="value" if role == "critic" else "policy",
                forward_only=role == "reference",
            )
    problems += _own_strategy_problems(config, without)
    if with_model and config.actor_train.model_args.lora_target is not None:
        from roll.trainers.lora import check_adapters

        policy = config.actor_train
        problems += check_adapters(derived.model_path(config, policy), policy.model_args, "actor_train.model_args")
    if problems:
        raise ConfigError(problems)


def _own_strategy_problems(config: PipelineConfig, without: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield the problems of users' strategy classes that cannot replace a strategy, except for roles in ``without``."""
    for role, section in derived.roles_and_reward_models(config).items():
        name, own = section.strategy_args.strategy_name, section.strategy_args.strategy_cls
        if own is not None and role not in without:
            kind, path = strategies_of(role), f"{role}.strategy_args"
            yield from problems_of(partial(strategy_class, kind, name, own, path))


def _stages(config: PipelineConfig) -> list[ChainedStage]:
    from roll.pipeline.stages import stage_chain

    return stage_chain(config.stages)


def _worker_classes(config: PipelineConfig) -> dict[str, type[Worker]]:
    """Return the user's own worker classes by role."""
    roles = derived.roles_and_reward_models(config)
    paths = {name: role.worker_cls for name, role in roles.items() if role.worker_cls}
    if not paths:
        return {}
    from roll.engines.worker import InferWorker
    from roll.rewards.model_pool import ScoreWorker
    from roll.trainers.worker import TrainWorker

    bases: dict[str, type[Worker]] = {"actor_infer": InferWorker}
    classes: dict[str, type[Worker]] = {}
    problems: list[ConfigProblem] = []
    for role, import_path in paths.items():
        base = ScoreWorker if role.startswith("rewards.") else bases.get(role, TrainWorker)
        path = f"{role}.worker_cls"
        try:
            found = import_object(import_path)
        except ImportError as error:
            problems.append(ConfigProblem(path, str(error), "give the class as `package.module:Class`"))
            continue
        if isinstance(found, type) and issubclass(found, base):
            classes[role] = found
        else:
            message = f"{import_path!r} is not a subclass of {base.__name__}"
            problems.append(ConfigProblem(path, message, f"derive it from {base.__module__}.{base.__name__}"))
    if problems:
        raise ConfigError(problems)
    return classes


@dataclass(frozen=True)
class RLVRPlan:
    """The `RolloutPlan` of RLVR."""

    prompts: list[Prompt]
    validation_prompts: list[Prompt]

    def fingerprint(self, config: PipelineConfig) -> str:
        """Implement `RolloutPlan.fingerprint`."""
        data_args = config.actor_train.data_args
        digest = xxhash.xxh3_128(json.dumps([data_args.shuffle, data_args.domain_interleave_probs]).encode())
        for prompt in self.prompts:
            digest.update(f"{prompt.prompt_id}\0{prompt.domain}\0".encode("utf-8", "surrogatepass"))
            digest.update(prompt.token_ids.tobytes())
        return digest.hexdigest()

    def build(
        self, prepared: Prepared, run: RunDirectory, on_event: Callable[[str], None], devices: RunDevices
    ) -> RLVRSide:
        """Implement `RolloutPlan.build`."""
        from roll.pipeline.rlvr import RLVRSide, build_rewards

        rewards = build_rewards(prepared, run, on_event, devices)
        return RLVRSide(prepared, self.prompts, self.validation_prompts, rewards)


def plan_rlvr(
    config: RLVRConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems, *, asks_models: bool
) -> RLVRPlan:
    """Load prompts and find verifiers; what is wrong goes into ``problems``.

    With ``asks_models``, judges must be within reach, reward models must have their files, and programs must be able to
    run, as on the machine of the run.
    """
    models = derived.reward_models(config)
    verifiers = {
        name: problems.attempt(partial(resolve_verifier, reward, f"rewards.{name}"))
        for name, reward in config.rewards.items()
        if f"rewards.{name}" not in models
    }
    for name, verifier in verifiers.items() if asks_models else ():
        if verifier is not None:
            problems.attempt(partial(check_machine, verifier, f"rewards.{name}"))
    for path, reward in models.items():
        model = derived.reward_model_path(config, reward)
        if asks_models or (Path(model) / "config.json").is_file():
            problems.attempt(partial(_check_reward_model, model, reward, path))
    for name, reward in config.rewards.items() if asks_models else ():
        if reward.judge is not None and verifiers[name] is not None:  # without its library the judge cannot be asked
            problems.attempt(partial(_check_judge, reward.judge, f"rewards.{name}.judge"))
    prompts: list[Prompt] = []
    validation_prompts: list[Prompt] = []
    if tokenizer is not None:
        prompts = problems.attempt(lambda: _prompts(config, tokenizer)) or []
        validation_prompts = problems.attempt(lambda: _validation_prompts(config, tokenizer)) or []
    if prompts and not problems.found:
        found = {name: verifier for name, verifier in verifiers.items() if verifier is not None}
        problems.found += _judgement_problems(config, found, prompts, validation_prompts)
    return RLVRPlan(prompts, validation_prompts)


def _check_reward_model(model_path: str, reward: RewardConfig, path: str) -> None:
    from roll.rewards.model import check_reward_model

    check_reward_model(model_path, reward, path)


def _check_judge(judge: JudgeConfig, path: str) -> None:
    from roll.rewards.judge import check_judge

    check_judge(judge, path)


def _prompts(config: RLVRConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    return load_prompts(
        config.actor_train.data_args,
        tokenizer,
        prompt_length=config.prompt_length,
        path="actor_train.data_args",
        seed=config.seed,
    )


def _validation_prompts(config: RLVRConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    if config.validation is None:
        return []
    return load_prompts(
        config.validation.data_args,
        tokenizer,
        prompt_length=config.prompt_length,
        path="validation.data_args",
        seed=config.seed,
    )


def _judgement_problems(
    config: RLVRConfig, verifiers: dict[str, Verifier], prompts: list[Prompt], validation_prompts: list[Prompt]
) -> list[ConfigProblem]:
    """Return problems unless every prompt has a reward that can judge it and every reward's domain has prompts."""
    routes = route_domains(config.rewards)
    problems = check_prompts(routes, verifiers, prompts, "actor_train.data_args")
    problems += check_prompts(routes, verifiers, validation_prompts, "validation.data_args")
    present = sorted({prompt.domain for prompt in [*prompts, *validation_prompts]})
    problems += [
        ConfigProblem(
            f"rewards.{reward}.tag_included",
            f"no prompt has the domain {domain!r}",
            f"the prompts have the domains {', '.join(present)}",
        )
        for domain, reward in sorted(routes.items())
        if domain not in present
    ]
    return problems
