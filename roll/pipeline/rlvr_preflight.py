"""Preflight of RLVR: prompts and verifiers, found and checked against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from roll.configs import derived
from roll.configs.errors import ConfigProblem
from roll.configs.schema import JudgeConfig, PipelineConfig, RewardConfig, RLVRConfig
from roll.data.dataset import load_prompts
from roll.data.records import Prompt
from roll.rewards.registry import Verifier, check_machine, check_prompts, resolve_verifier, route_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.pipeline.preflight import Prepared, Problems
    from roll.pipeline.rlvr import RLVRSide
    from roll.pipeline.rollout_side import RunDevices
    from roll.tracking.run_directory import RunDirectory


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
        from roll.pipeline.rewards import build_rewards
        from roll.pipeline.rlvr import RLVRSide

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
    from roll.strategies.score.classifier_facts import check_reward_model

    check_reward_model(model_path, reward, path)


def _check_judge(judge: JudgeConfig, path: str) -> None:
    from roll.rewards.judge_preflight import check_judge

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
