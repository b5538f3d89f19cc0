"""Checks of a configuration that are possible before Ray or a model starts.

The configuration's own checks come first. Then everything it names is looked up: the cluster, the needs of the rollouts
(prompts and verifiers, or environments, managers and chat template), algorithms, stages, worker classes and engine
options. All problems are reported at once.

Slow imports (torch, Ray, transformers) happen inside functions, so a wrong configuration is reported without waiting
for them.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from roll.check.config import check_elsewhere
from roll.check.data import positions_of
from roll.check.memory_parts import ShapeUnknown, find_shape
from roll.check.pictures import prompt_picture_problems
from roll.check.plan import missing_packages
from roll.check.rules import restarts_have_a_checkpoint
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, Problems
from roll.configs.plugins import import_object, load_subclass, problem
from roll.configs.roles import FORWARD_ROLES
from roll.configs.run import (
    AgenticConfig,
    ClusterConfig,
    ImageConfig,
    PipelineConfig,
    PromptConfig,
    RLVRConfig,
    RunConfig,
    SFTConfig,
)
from roll.configs.strategies import Trainer, option_problems, strategies_of, strategy_class
from roll.data.examples import Examples, load_examples
from roll.data.pictures import PictureProcessor, digest
from roll.data.prompts import load_prompts, rewritten_prompts
from roll.data.records import Prompt
from roll.data.sources import REASONING_GYM_KEY
from roll.data.tokenizer import load_tokenizer
from roll.pipeline.agentic_plan import AgenticPlan, plan_agentic
from roll.rewards.model import check_reward_model
from roll.rewards.registry import check_machine, check_prompts, check_sight, resolve_verifier, route_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.algorithms.correction import Correction
    from roll.algorithms.objective import PolicyObjective, SupervisedObjective, ValueObjective
    from roll.pipeline.algorithm import AdvantageSettings
    from roll.pipeline.stages import ChainedStage
    from roll.runtime.workers import Worker

CLUSTER_PROBE_SECONDS = 3.0
"""Longest wait for the cluster's address to answer. Ray itself would retry for minutes."""
TRAINING_PROMPTS, VALIDATION_PROMPTS = "actor_train.data_args", "validation.data_args"
"""Configuration sections that name the prompts."""


@dataclass
class Prepared:
    """A checked configuration, with all the objects that it names."""

    config: PipelineConfig
    tokenizer: PreTrainedTokenizerBase
    rollouts: RLVRPlan | AgenticPlan
    source: str
    """Fingerprint of the prompts or environment tasks of the groups.

    Two runs have the same fingerprint if group ``n`` starts from the same prompt or task in both, for every ``n``.
    """
    objective: PolicyObjective
    value_objective: ValueObjective
    advantages: AdvantageSettings
    correction: Correction | None
    stages: list[ChainedStage]
    worker_classes: dict[str, type[Worker]]
    answers: str | None = None
    """Fingerprint of what the responses to the prompts are judged by (ground truths, metadata); None: there is none."""
    streams: bool = False
    not_streamed: str | None = None
    """See `Algorithms`."""


@dataclass
class PreparedSFT:
    """A checked configuration of supervised fine-tuning, with all the objects that it names."""

    config: SFTConfig
    """The configuration, with `epochs` converted to `max_steps`."""
    tokenizer: PreTrainedTokenizerBase
    examples: Examples
    validation: Examples | None
    source: str
    """Fingerprint of the examples and of the settings that decide their order."""
    objective: SupervisedObjective
    worker_classes: dict[str, type[Worker]]


def prepare(config: RunConfig) -> Prepared | PreparedSFT:
    """Load all the objects that a checked configuration names, but no models.

    Raises `ConfigError` with all problems of cluster, rollouts (or examples) and algorithms. If there are none, raises
    it with all problems of engines, stages and worker classes, which take long to import.
    """
    if isinstance(config, SFTConfig):
        return _prepare_sft(config)
    return prepare_rollouts(derived.reinforcement(config))


def _prepare_sft(config: SFTConfig) -> PreparedSFT:
    problems = Problems()
    problems.attempt(_check_cluster, config.cluster)
    tokenizer = problems.attempt(_tokenizer, config)
    examples, validation = _load_all_examples(config, tokenizer, problems)
    problems.raise_any()
    problems.attempt(_check_strategies, config, problems)
    worker_classes = _worker_classes(config, problems)
    problems.raise_any()
    if tokenizer is None or examples is None:
        raise RuntimeError("the preflight has not found everything, and no problem either")
    from roll.algorithms.objective import SupervisedObjective

    if config.epochs is not None:
        steps = math.ceil(config.epochs * len(examples.examples) / config.train_batch_size)
        config = replace(config, epochs=None, max_steps=steps)
        problems.found += restarts_have_a_checkpoint(config)
        problems.raise_any()
    return PreparedSFT(
        config,
        tokenizer,
        examples,
        validation,
        examples.fingerprint(config.actor_train.data_args),
        SupervisedObjective(config.sequence_length, config.loss_agg_mode),
        worker_classes,
    )


def _load_all_examples(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems
) -> tuple[Examples | None, Examples | None]:
    """Return the training and validation examples. Adds problems to ``problems``."""
    if tokenizer is None:
        return None, None
    load = partial(
        load_examples,
        tokenizer=tokenizer,
        sequence_length=config.sequence_length,
        seed=config.seed,
        refuse_control_tokens=config.on_control_tokens == "refuse",
    )
    examples = problems.attempt(load, config.actor_train.data_args, path=TRAINING_PROMPTS)
    if config.validation is None:
        return examples, None
    return examples, problems.attempt(load, config.validation.data_args, path=VALIDATION_PROMPTS)


def prepare_rollouts(config: PipelineConfig) -> Prepared:
    """Do what `prepare` does, for reinforcement learning."""
    problems = Problems()
    problems.attempt(_check_cluster, config.cluster)
    tokenizer = problems.attempt(_tokenizer, config)
    problems.attempt(_check_teacher, config, tokenizer)
    rollouts = _plan_rollouts(config, tokenizer, problems)
    from roll.pipeline.algorithm import build_algorithms

    algorithms = problems.attempt(build_algorithms, config)
    problems.raise_any()
    _check_fallback(config, problems)
    problems.attempt(_check_strategies, config, problems)
    worker_classes = _worker_classes(config, problems)
    if not config.stages:  # only custom stages can be wrong; importing the module is slow
        problems.raise_any()
    from roll.pipeline.stages import stage_chain

    stages = problems.attempt(stage_chain, config.stages)
    problems.raise_any()
    if tokenizer is None or rollouts is None or algorithms is None or stages is None:
        raise RuntimeError("the preflight has not found everything, and no problem either")
    return Prepared(
        config=config,
        tokenizer=tokenizer,
        rollouts=rollouts,
        source=rollouts.fingerprint(),
        answers=rollouts.answers() if isinstance(rollouts, RLVRPlan) else None,
        stages=stages,
        worker_classes=worker_classes,
        **vars(algorithms),
    )


def look_up(config: RunConfig, *, with_model: bool, without: Collection[str]) -> None:
    """Check the same names as `prepare`, possibly on another machine than the run's.

    Does not contact the cluster. Reads prompts and templates, and contacts judges, only ``with_model``. Engines of the
    roles in ``without`` need not be installed. Raises `ConfigError`.
    """
    problems = Problems()
    tokenizer = problems.attempt(_tokenizer, config) if with_model else None
    if isinstance(config, SFTConfig):
        _load_all_examples(config, tokenizer, problems)
    else:
        rollouts = derived.reinforcement(config)
        _look_up_rollouts(rollouts, tokenizer, problems, contacts_models=with_model)
    problems.attempt(_check_strategies, config, problems, without, with_model)
    _worker_classes(config, problems)
    if isinstance(config, PipelineConfig) and config.stages:
        from roll.pipeline.stages import stage_chain

        problems.attempt(stage_chain, config.stages)
    problems.raise_any()


def _look_up_rollouts(
    config: PipelineConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems, *, contacts_models: bool
) -> None:
    from roll.pipeline.algorithm import build_algorithms

    problems.attempt(_check_teacher, config, tokenizer)
    _plan_rollouts(config, tokenizer, problems, contacts_models=contacts_models)
    if problems.attempt(build_algorithms, config) is not None:
        _check_fallback(config, problems)


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the trained policy."""
    arguments = config.actor_train.model_args
    return load_tokenizer(
        derived.tokenizer_path(config),
        trust_remote_code=arguments.trust_remote_code,
        config_path="actor_train.model_args.model_name_or_path" if arguments.model_name_or_path else "pretrain",
    )


def _check_teacher(config: PipelineConfig, policy: PreTrainedTokenizerBase | None) -> None:
    """Check that the teacher has enough positions and the same token ids as ``policy``, the policy's tokenizer."""
    if policy is None or config.teacher is None:
        return
    arguments, model = config.teacher.model_args, derived.model_path(config, config.teacher)
    longest, (positions, is_scaled) = derived.sequence_length(config), positions_of(Path(model))
    if positions is not None and longest > positions and not is_scaled:
        message = f"{model} has {positions:,} positions, and sequences have up to {longest:,} tokens"
        raise problem("teacher", message, "take a teacher with more positions, or shorter responses")
    if model == derived.model_path(config, config.actor_train):
        return
    path = "teacher.model_args.model_name_or_path"
    known = load_tokenizer(model, trust_remote_code=arguments.trust_remote_code, config_path=path).get_vocab()
    tokens = sorted(policy.get_vocab().items(), key=lambda pair: pair[1])
    remedy = "take a teacher with the policy's tokenizer: the two are compared token by token"
    for token, number in tokens:
        if known.get(token) != number:
            theirs = f"number {known[token]}" if token in known else "unknown"
            message = f"{model} has another tokenizer: token {number} of the policy, {token!r}, is {theirs} there"
            raise problem(path, message, remedy)
    with suppress(ShapeUnknown):
        size, needed = find_shape(model).vocabulary, tokens[-1][1] + 1
        if size < needed:
            raise problem(path, f"{model} has {size:,} tokens, and the policy's tokenizer {needed:,}", remedy)


def _check_cluster(cluster: ClusterConfig) -> None:
    """Check that something listens at the cluster's address."""
    if cluster.address is None or cluster.address == "auto":
        return
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        message = f"nothing answers at {cluster.address} ({error})"
        remedy = "give the address that `ray start --head` printed, or remove the key to start a local cluster"
        raise problem("cluster.address", message, remedy) from error


def _check_fallback(config: PipelineConfig, problems: Problems) -> None:
    """Check that the synchronous fallback of `restarts.synchronous_after` is a valid configuration, too."""
    if config.restarts.synchronous_after is None:
        return
    from roll.pipeline.algorithm import build_algorithms

    fallback = replace(derived.synchronous(config), resume_from_checkpoint=True)
    try:
        check_elsewhere(fallback)
        build_algorithms(fallback)
    except ConfigError as error:
        for each in error.problems:
            message = f"at `async_generation_ratio: 0` the run would be refused: {each.path}: {each.message}"
            problems.add("restarts.synchronous_after", message, f"remove this key, or {each.remedy}")


def _check_strategies(
    config: RunConfig, problems: Problems, without: Collection[str] = (), with_model: bool = True
) -> None:
    """Check that engines are installed, and that their options exist and fit the model.

    Engines of the roles in ``without`` need not be installed. Problems that only the model's files reveal are reported
    only ``with_model``.
    """
    for role, strategy in missing_packages(config).items():
        if role not in without:
            path = f"{role}.strategy_args.strategy_name"
            problems.add(path, f"{strategy.package} is not installed", strategy.install)
    for role, section in derived.present_roles(config).items():
        arguments, kind = section.strategy_args, strategies_of(role)
        path = f"{role}.strategy_args.strategy_config"
        problems.found += option_problems(kind, arguments.strategy_name, arguments.strategy_config, path)
        record = kind.find(arguments.strategy_name, path)
        if with_model and isinstance(record, Trainer) and record.layout is not None:
            problems.found += import_object(record.layout)(
                section,
                derived.model_path(config, section),
                path,
                kind="value" if role == "critic" else "policy",
                forward_only=role in FORWARD_ROLES,
                device=config.cluster.device,
            )
    for role, owner in derived.roles_and_reward_models(config).items():
        name, own = owner.strategy_args.strategy_name, owner.strategy_args.strategy_cls
        if own is not None and role not in without:
            problems.attempt(strategy_class, strategies_of(role), name, own, f"{role}.strategy_args")
    if with_model and config.actor_train.model_args.lora_target is not None:
        from roll.trainers.lora import check_adapters

        policy, path = config.actor_train, "actor_train.model_args"
        problems.found += check_adapters(
            derived.model_path(config, policy), policy.model_args, path, derived.picture_sampling(config) is not None
        )


def _worker_classes(config: RunConfig, problems: Problems) -> dict[str, type[Worker]]:
    """Return the user-defined worker classes by role."""
    roles = derived.roles_and_reward_models(config)
    paths = {name: role.worker_cls for name, role in roles.items() if role.worker_cls}
    if not paths:
        return {}
    from roll.engines.worker import InferWorker
    from roll.rewards.model_pool import ScoreWorker
    from roll.trainers.worker import TrainWorker

    bases: dict[str, type[Worker]] = {"actor_infer": InferWorker}
    classes: dict[str, type[Worker]] = {}
    for role, import_path in paths.items():
        base = ScoreWorker if role.startswith("rewards.") else bases.get(role, TrainWorker)
        found = problems.attempt(load_subclass, import_path, base, f"{role}.worker_cls")
        if found is not None:
            classes[role] = found
    return classes


def _plan_rollouts(
    config: PipelineConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    problems: Problems,
    *,
    contacts_models: bool = True,
) -> RLVRPlan | AgenticPlan | None:
    """Prepare the rollouts of this pipeline; None after a problem. ``contacts_models``: see `_plan_rlvr`."""
    if isinstance(config, AgenticConfig):
        return plan_agentic(config, tokenizer, problems)
    return _plan_rlvr(derived.prompted(config), tokenizer, problems, contacts_models=contacts_models)


@dataclass(frozen=True)
class RLVRPlan:
    """The prompts of a run."""

    config: PromptConfig
    prompts: list[Prompt]
    validation_prompts: list[Prompt]
    teacher_prompts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Prompts of the teacher (int32 ``[length]``) by prompt id; empty if the teacher sees the policy's prompts."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the prompts and their order; see `Prepared.source`."""
        data_args = self.config.actor_train.data_args
        hashed = xxhash.xxh3_128(json.dumps([data_args.shuffle, data_args.domain_interleave_probs]).encode())
        for prompt in self.prompts:
            hashed.update(f"{prompt.prompt_id}\0{prompt.domain}\0".encode("utf-8", "surrogatepass"))
            hashed.update(prompt.token_ids.tobytes())
            hashed.update(digest(prompt.pictures).encode())
        return hashed.hexdigest()

    def answers(self) -> str:
        """Return the fingerprint of the ground truths and metadata; see `Prepared.answers`."""
        hashed = xxhash.xxh3_128()
        for prompt in self.prompts:
            # Some data sets of reasoning-gym find another example solution of the same task in each process.
            truth = None if REASONING_GYM_KEY in prompt.metadata else prompt.ground_truth
            hashed.update(json.dumps([truth, prompt.metadata], default=repr).encode())
        return hashed.hexdigest()


def _picture_processor(config: PromptConfig) -> PictureProcessor | None:
    """Return the processor of prompts' pictures; None if the pipeline supports none."""
    if not isinstance(config, RLVRConfig):
        return None
    role = config.actor_train
    return PictureProcessor(derived.model_path(config, role), role.model_args.trust_remote_code)


def _plan_rlvr(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None, problems: Problems, *, contacts_models: bool
) -> RLVRPlan:
    """Load the prompts and resolve the verifiers. Adds problems to ``problems``.

    With ``contacts_models``, also check that judges answer, that reward models have their files, and that verifiers can
    run on this machine.
    """
    models = derived.reward_models(config)
    verifiers = {}
    for name, reward in config.rewards.items():
        path = f"rewards.{name}"
        verifier = None if path in models else problems.attempt(resolve_verifier, reward, path)
        if verifier is None:
            continue
        verifiers[name] = verifier
        problems.attempt(check_sight, verifier, isinstance(config, ImageConfig), path)
        if contacts_models:
            problems.attempt(check_machine, verifier, path)
        if contacts_models and reward.judge is not None:
            from roll.rewards.judge import check_judge

            problems.attempt(check_judge, reward.judge, f"{path}.judge")
    for path, reward in models.items():
        model = derived.model_path(config, reward)
        if contacts_models or (Path(model) / "config.json").is_file():
            problems.attempt(check_reward_model, model, reward, path)
    prompts: list[Prompt] = []
    validation_prompts: list[Prompt] = []
    if tokenizer is not None:
        load = partial(
            load_prompts,
            tokenizer=tokenizer,
            prompt_length=config.prompt_length,
            seed=config.seed,
            refuse_control_tokens=config.on_control_tokens == "refuse",
            processor=_picture_processor(config),
        )
        prompts = problems.attempt(load, config.actor_train.data_args, path=TRAINING_PROMPTS) or []
        if config.validation is not None:
            validation_prompts = problems.attempt(load, config.validation.data_args, path=VALIDATION_PROMPTS) or []
    if any(prompt.pictures for prompt in [*prompts, *validation_prompts]):
        problems.found += prompt_picture_problems(config)
    if prompts and not problems.found:
        routes = route_domains(config.rewards)
        if derived.is_scored(config):
            problems.found += check_prompts(routes, verifiers, prompts, TRAINING_PROMPTS)
            problems.found += check_prompts(routes, verifiers, validation_prompts, VALIDATION_PROMPTS)
        problems.found += _weight_problems(config.sample_weight, prompts)
        present = sorted({prompt.domain for prompt in [*prompts, *validation_prompts]})
        for domain, name in sorted(routes.items()):
            if domain not in present:
                remedy = f"the prompts have the domains {', '.join(present)}"
                problems.add(f"rewards.{name}.tag_included", f"no prompt has the domain {domain!r}", remedy)
    asked = problems.attempt(_teacher_prompts, config, tokenizer, prompts) if tokenizer is not None else None
    return RLVRPlan(config, prompts, validation_prompts, asked or {})


def _teacher_prompts(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> dict[str, np.ndarray]:
    """Return the teacher's prompts; see `RLVRPlan`. Raises `ConfigError` if they are too long for its positions."""
    teacher, path = config.teacher, "teacher.prompt"
    if teacher is None or teacher.prompt is None or not prompts:
        return {}
    refuses = config.on_control_tokens == "refuse"
    rewritten = rewritten_prompts(
        prompts, teacher.prompt, config.actor_train.data_args, tokenizer, path, refuse_control_tokens=refuses
    )
    positions, is_scaled = positions_of(Path(derived.model_path(config, teacher)))
    name, longest = max(((name, len(ids)) for name, ids in rewritten.items()), key=lambda pair: pair[1])
    longest += derived.max_new_tokens(config)
    if positions is not None and longest > positions and not is_scaled:
        message = f"{name} and a response are up to {longest:,} tokens, and the teacher has {positions:,} positions"
        raise problem(path, message, "write a shorter text, or lower `response_length`")
    return rewritten


def _weight_problems(name: str | None, prompts: list[Prompt]) -> Iterator[ConfigProblem]:
    """Yield a problem for the first prompt with an invalid sample weight."""
    for prompt in prompts:
        weight = prompt.metadata.get(name) if name else None
        if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight < math.inf):
            message = f"{name}: prompt {prompt.prompt_id} has the weight {weight!r}"
            yield ConfigProblem("sample_weight", message, "give every row a number of at least 0, or none")
            return


def agentic_plan(config: AgenticConfig) -> tuple[PreTrainedTokenizerBase, AgenticPlan]:
    """Return the policy's tokenizer and the `AgenticPlan`. Raises `ConfigError` with all problems."""
    problems = Problems()
    tokenizer = problems.attempt(_tokenizer, config)
    plan = plan_agentic(config, tokenizer, problems)
    problems.raise_any()
    if tokenizer is None or plan is None:
        raise RuntimeError("the preflight has not found everything, and no problem either")
    return tokenizer, plan
