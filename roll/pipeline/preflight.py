"""Preflight: checks of everything that can be known to be wrong before Ray or a model starts.

The configuration's own checks come first. Then its names are looked up: the cluster, the needs of the rollouts (one
module per pipeline), algorithms, stages, worker classes and engine options. All problems are reported at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from roll.configs import derived
from roll.configs.checks import check_elsewhere
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.needs import missing_packages
from roll.configs.schema import AgenticConfig, ClusterConfig, PipelineConfig
from roll.data.imports import import_object
from roll.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.algorithms.correction import Correction
    from roll.algorithms.objective import PolicyObjective
    from roll.algorithms.value_objective import ValueObjective
    from roll.distributed.worker import Worker
    from roll.pipeline.advantages import AdvantageSettings
    from roll.pipeline.algorithms import Algorithms
    from roll.pipeline.rollout_side import RolloutPlan
    from roll.pipeline.stage import Stage

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
    stage_classes: dict[str, type[Stage]]
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
    stage_classes = problems.attempt(lambda: _stage_classes(config))
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
        stage_classes=_found(stage_classes, "stages"),
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
        problems.attempt(lambda: _stage_classes(config))
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
        from roll.pipeline.agentic_preflight import plan_agentic

        return plan_agentic(config, tokenizer, problems)
    from roll.pipeline.rlvr_preflight import plan_rlvr

    return plan_rlvr(derived.rlvr(config), tokenizer, problems, asks_models=asks_models)


def _algorithms(config: PipelineConfig) -> Algorithms:
    from roll.pipeline.algorithms import build_algorithms

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
    from roll.strategies.infer import infer_option_check
    from roll.strategies.train import train_option_check

    problems = [
        ConfigProblem(f"{role}.strategy_args.strategy_name", f"{package.name} is not installed", package.install)
        for role, package in missing_packages(config).items()
        if role not in without
    ]
    for role, role_config in derived.present_roles(config).items():
        find = infer_option_check if role == "actor_infer" else train_option_check
        arguments = role_config.strategy_args
        path = f"{role}.strategy_args.strategy_config"
        problems += find(arguments.strategy_name)(arguments.strategy_config, path)
        if with_model and arguments.strategy_name == "megatron_train":
            from roll.strategies.train.megatron.facts import layout_problems

            problems += layout_problems(
                role_config,
                derived.model_path(config, role_config),
                path,
                kind="value" if role == "critic" else "policy",
                forward_only=role == "reference",
            )
    problems += _own_strategy_problems(config, without)
    if with_model and config.actor_train.model_args.lora_target is not None:
        from roll.strategies.train.lora import check_adapters

        policy = config.actor_train
        problems += check_adapters(derived.model_path(config, policy), policy.model_args, "actor_train.model_args")
    if problems:
        raise ConfigError(problems)


def _own_strategy_problems(config: PipelineConfig, without: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield the problems of users' strategy classes that cannot replace a strategy, except for roles in ``without``."""
    from roll.strategies.infer import infer_strategy_class
    from roll.strategies.score import score_strategy_class
    from roll.strategies.train import forward_strategy_class, train_strategy_class

    of_roles = {"actor_infer": infer_strategy_class, "reference": forward_strategy_class}
    for role, section in derived.roles_and_reward_models(config).items():
        arguments = section.strategy_args
        if arguments.strategy_cls is None or role in without:
            continue
        look_up = score_strategy_class if role.startswith("rewards.") else of_roles.get(role, train_strategy_class)
        try:
            look_up(arguments.strategy_name, arguments.strategy_cls)
        except (ImportError, TypeError) as error:
            remedy = f"give a class derived from that of {arguments.strategy_name} as `package.module:Class`"
            yield ConfigProblem(f"{role}.strategy_args.strategy_cls", str(error), remedy)


def _stage_classes(config: PipelineConfig) -> dict[str, type[Stage]]:
    from roll.pipeline.registry import resolve_stages
    from roll.pipeline.stages import STAGE_ORDER

    return resolve_stages({name: name for name in STAGE_ORDER}, config.stages)


def _worker_classes(config: PipelineConfig) -> dict[str, type[Worker]]:
    """Return the user's own worker classes by role."""
    roles = derived.roles_and_reward_models(config)
    paths = {name: role.worker_cls for name, role in roles.items() if role.worker_cls}
    if not paths:
        return {}
    from roll.distributed.infer_worker import InferWorker
    from roll.distributed.score_worker import ScoreWorker
    from roll.distributed.train_worker import TrainWorker

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
