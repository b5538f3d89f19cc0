"""Everything that can be known to be wrong before Ray or a model starts.

The configuration's own checks come first; then what it names is looked up: the cluster, prompts, verifiers,
algorithms, stages, worker classes, engine options. All problems are reported at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.schema import ClusterConfig, RLVRConfig
from roll.data.dataset import load_prompts
from roll.data.imports import import_object
from roll.data.records import Prompt
from roll.data.tokenizer import load_tokenizer
from roll.rewards.registry import Verifier, check_prompts, resolve_verifier, route_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.algorithms.correction import Correction
    from roll.algorithms.objective import PolicyObjective
    from roll.distributed.worker import Worker
    from roll.pipeline.advantages import AdvantageSettings
    from roll.pipeline.algorithms import Algorithms
    from roll.pipeline.stage import Stage

Value = TypeVar("Value")

CLUSTER_PROBE_SECONDS = 3.0
"""Longest wait for a cluster to answer. Ray itself would try for minutes."""


@dataclass
class Prepared:
    """A configuration with everything it names found and checked."""

    config: RLVRConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    validation_prompts: list[Prompt]
    objective: PolicyObjective
    advantages: AdvantageSettings
    correction: Correction | None
    stage_classes: dict[str, type[Stage]]
    worker_classes: dict[str, type[Worker]]


class _Problems:
    """Collects problems, so that one wrong thing does not hide another."""

    def __init__(self) -> None:
        self.found: list[ConfigProblem] = []

    def attempt(self, look_up: Callable[[], Value]) -> Value | None:
        try:
            return look_up()
        except ConfigError as error:
            self.found += error.problems
            return None

    def raise_any(self) -> None:
        if self.found:
            raise ConfigError(self.found)


def prepare(config: RLVRConfig) -> Prepared:
    """Look up what a (checked) configuration names. Raises `ConfigError` with all problems of cluster, data, verifiers
    and algorithms, or else with all of engines, stages and worker classes, whose libraries take long to import."""
    problems = _Problems()
    problems.attempt(lambda: _check_cluster(config.cluster))
    verifiers = {
        name: problems.attempt(partial(resolve_verifier, reward, f"rewards.{name}"))
        for name, reward in config.rewards.items()
    }
    tokenizer = problems.attempt(lambda: _tokenizer(config))
    prompts: list[Prompt] = []
    validation_prompts: list[Prompt] = []
    if tokenizer is not None:
        prompts = problems.attempt(lambda: _prompts(config, tokenizer)) or []
        validation_prompts = problems.attempt(lambda: _validation_prompts(config, tokenizer)) or []
    if prompts and not problems.found:
        problems.found += _judgement_problems(config, verifiers, prompts, validation_prompts)
    algorithms = problems.attempt(lambda: _algorithms(config))
    problems.raise_any()
    problems.attempt(lambda: _check_strategies(config))
    worker_classes = problems.attempt(lambda: _worker_classes(config))
    if not config.stages:  # the built-in ones are there, and need not be imported before a refusal
        problems.raise_any()
    stage_classes = problems.attempt(lambda: _stage_classes(config))
    problems.raise_any()
    return Prepared(
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        validation_prompts=validation_prompts,
        objective=algorithms.objective,
        advantages=algorithms.advantages,
        correction=algorithms.correction,
        stage_classes=stage_classes,
        worker_classes=worker_classes,
    )


def _algorithms(config: RLVRConfig) -> Algorithms:
    from roll.pipeline.algorithms import build_algorithms

    return build_algorithms(config)


def _check_cluster(cluster: ClusterConfig) -> None:
    """Something listens at the address of the cluster."""
    if cluster.address is None or cluster.address == "auto":
        return
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        message = f"nothing answers at {cluster.address} ({error})"
        remedy = "give the address that `ray start --head` printed, or remove the key to start a local cluster"
        raise ConfigError([ConfigProblem("cluster.address", message, remedy)]) from error


def _tokenizer(config: RLVRConfig) -> PreTrainedTokenizerBase:
    """The trained policy's."""
    arguments = config.actor_train.model_args
    return load_tokenizer(
        derived.model_path(config, config.actor_train),
        trust_remote_code=arguments.trust_remote_code,
        config_path="actor_train.model_args.model_name_or_path" if arguments.model_name_or_path else "pretrain",
    )


def _check_strategies(config: RLVRConfig) -> None:
    """Options that an engine does not know are an error here, not in a worker."""
    from roll.strategies.infer import infer_option_check
    from roll.strategies.train import train_option_check

    problems: list[ConfigProblem] = []
    for role, role_config in derived.present_roles(config).items():
        find = infer_option_check if role == "actor_infer" else train_option_check
        arguments = role_config.strategy_args
        path = f"{role}.strategy_args.strategy_config"
        problems += find(arguments.strategy_name)(arguments.strategy_config, path)
    if problems:
        raise ConfigError(problems)


def _stage_classes(config: RLVRConfig) -> dict[str, type[Stage]]:
    from roll.pipeline.registry import resolve_stages
    from roll.pipeline.stages import STAGE_ORDER

    return resolve_stages({name: name for name in STAGE_ORDER}, config.stages)


def _worker_classes(config: RLVRConfig) -> dict[str, type[Worker]]:
    """Classes of the user's own, by role."""
    paths = {name: role.worker_cls for name, role in derived.present_roles(config).items() if role.worker_cls}
    if not paths:
        return {}
    from roll.distributed.infer_worker import InferWorker
    from roll.distributed.train_worker import TrainWorker

    classes: dict[str, type[Worker]] = {}
    problems: list[ConfigProblem] = []
    for role, import_path in paths.items():
        base = InferWorker if role == "actor_infer" else TrainWorker
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
    """Every prompt needs a reward that can judge it, and every reward's domain needs prompts."""
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
