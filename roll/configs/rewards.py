"""Scoring of responses: verifiers, reward models, judges and the length penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.fields import Count, DeviceMapping, Finite, Natural, NotNegative, Positive, Share, option
from roll.configs.plugins import Kind, PlugIn
from roll.configs.roles import ModelArguments, StrategyArguments


@dataclass(frozen=True)
class VerifierPlugIn(PlugIn):
    """A verifier. Workers import its required modules when they start."""

    timeout_score: float | None = None
    """Score of a response that is not judged in time; with ``None`` a timeout is a failure of the reward."""


VERIFIERS = Kind(
    "verifier",
    "roll.verifiers",
    {
        "exact": VerifierPlugIn("roll.rewards.verifiers:exact"),
        "numeric": VerifierPlugIn("roll.rewards.verifiers:numeric"),
        # An expression that takes ten seconds to evaluate is not an answer. If it were a failure, the policy could make
        # whole groups disappear by writing such expressions.
        "math": VerifierPlugIn("roll.rewards.verifiers:math_answer", ("math_verify",), timeout_score=0.0),
        "reasoning_gym": VerifierPlugIn(
            "roll.rewards.verifiers:reasoning_gym_task", ("reasoning_gym",), timeout_score=0.0
        ),
        # The verifier limits the time of programs itself, so exceeding the worker's limit is a fault of the machine.
        "code": VerifierPlugIn("roll.rewards.code:CodeVerifier"),
        "shapes": VerifierPlugIn("roll.rewards.pictures:Shapes"),
        "ocr": VerifierPlugIn("roll.rewards.pictures:Ocr", ("rapidocr", "onnxruntime")),
        "jpeg_size": VerifierPlugIn("roll.rewards.pictures:jpeg_size"),
        "scoring_service": VerifierPlugIn("roll.rewards.scoring_service:ScoringService", ("aiohttp",)),
    },
    VerifierPlugIn,
)


@dataclass
class ScoreStrategyArguments(StrategyArguments):
    """The engine of a reward model."""

    strategy_name: str = option("hf_infer", "Registered engine of reward models.")


@dataclass
class RewardModelConfig:
    """The conversion of a sequence classifier's output into a score."""

    label: Natural | None = option(
        None, "Index of the label whose logit is the score. Required if the classifier has several labels."
    )
    max_length: Count | None = option(
        None, "Longest conversation in the reward model's tokens. Default: what its positions allow."
    )
    overlong: Literal["truncate_left", "refuse"] = option(
        "truncate_left",
        "A longer conversation loses its beginning, counted in `reward/truncated_left`, or fails, and with it its "
        "group.",
    )
    batch_wait_seconds: NotNegative | None = option(
        None,
        "Seconds that a batch waits for responses of other groups. 0: a group's responses are scored by themselves, "
        "so that rounding does not depend on timing. Default: 0 at `async_generation_ratio: 0`, else 0.005.",
    )


@dataclass
class JudgeConfig:
    """A language model behind an OpenAI-compatible address that returns a score."""

    base_url: str = option("", "Address up to and without `/chat/completions`: `http://127.0.0.1:8000/v1`.")
    model: str = option("", "Name of the model there.")
    api_key_env: str | None = option(None, "Name of the environment variable that holds the key of the address.")
    system_prompt: str | None = option(None, "System message of the question.")
    template: str | None = option(
        None,
        "The question. `{prompt}`, `{response}` and `{ground_truth}` become fenced texts; a picture comes before it. "
        "Default: asks for an integer between `score_min` and `score_max` in a last line `Score: N`.",
    )
    score_pattern: str | None = option(
        None,
        "Regular expression; the first group of its last match in the answer is the score. Default: the number after "
        "`Score:`.",
    )
    score_field: str | None = option(
        None, "In place of a pattern: the field of the last JSON object of the answer that has it."
    )
    score_min: Finite = option(0.0, "Worst score of the judge; becomes 0.")
    score_max: Finite = option(10.0, "Best score of the judge; becomes 1.")
    temperature: NotNegative = option(0.0, "Sampling temperature of the judge.")
    max_tokens: Count = option(1024, "Longest answer of the judge in tokens.")
    extra_body: dict[str, Any] = option(
        dict, "Further fields of the request, such as `seed` or `chat_template_kwargs`."
    )
    max_concurrency: Count = option(64, "Responses under judgement at a time.")
    request_timeout_seconds: Positive = option(60.0, "Longest wait for one answer.")
    request_retries: Natural = option(
        6,
        "Further requests after a refused connection, a timeout or a status 408, 409, 425, 429 or 5xx; each waits "
        "twice as long as the one before (from 0.5 s, at most 30 s), or as long as `Retry-After` says.",
    )
    verdict_retries: Natural = option(
        2, "Number of further requests to the judge after an answer without a score in range."
    )
    fallback_score: Share | None = option(
        None, "Score, between 0 and 1, of a response on which no verdict can be had. Default: its group fails."
    )


@dataclass
class RewardConfig:
    """A verifier and its worker processes; the key under `rewards` is its name."""

    verifier: str = option(
        "",
        "`math`, `exact`, `numeric`, `reasoning_gym`, `code`, `reward_model`, `judge`, of pictures `shapes`, `ocr`, "
        "`jpeg_size`, `scoring_service`, or the import path of a callable `package.module:function`. See "
        "`docs/rewards.md`.",
    )
    verifier_args: dict[str, Any] = option(dict, "Keyword arguments of the verifier.")
    weights: dict[str, float] = option(
        dict,
        "Several rewards: the verifier returns a mapping with a number for each of these names, and the score is their "
        "sum with these weights. `adv_estimator: gdpo` compares each by itself. Empty, the default: the verifier "
        "returns the score.",
    )
    tag_included: list[str] = option(
        list, "Domain tags of the prompts this reward judges. Default: the reward's own name."
    )
    num_workers: Count = option(1, "Number of worker processes. A reward model has one for each group of its devices.")
    timeout_seconds: Positive | None = option(
        None,
        "Longest time to judge one sample (a `reward_model`: one batch; a `judge`: all its attempts); then the worker "
        "is replaced. Default: 10, of `code` 60, of a reward model 120, of a judge or a `scoring_service` 600.",
    )
    max_retries: Natural = option(
        2, "Further attempts after an error or a timeout; then the group is dropped as failed."
    )
    model_args: ModelArguments = option(ModelArguments, "Settings for loading a `reward_model`'s model.")
    strategy_args: ScoreStrategyArguments = option(ScoreStrategyArguments, "Engine of a `reward_model`.")
    device_mapping: DeviceMapping = option(
        None, "Devices of a `reward_model`, one copy of the model on each; other roles may have them too."
    )
    infer_batch_size: Count = option(16, "Samples per forward pass of a `reward_model`.")
    worker_cls: str | None = option(
        None, "Import path of a worker class to use in place of the built-in one (`reward_model` only)."
    )
    reward_model: RewardModelConfig = option(
        RewardModelConfig, "Settings for the score of a `reward_model`'s classifier."
    )
    judge: JudgeConfig | None = option(None, "The language model that a `judge` asks.")


@dataclass
class LengthPenaltyConfig:
    """A penalty on long responses, subtracted from the reward."""

    kind: Literal["overlong", "relative"] = option(
        "overlong",
        "`overlong`: 0 up to `buffer` tokens below the longest response, then falling to -`weight` at it (DAPO); "
        "`relative`: -`weight` / 2 for the longest to +`weight` / 2 for the shortest correct response of its group, "
        "and never above 0 for a wrong one (Kimi k1.5).",
    )
    weight: Positive = option(1.0, "Size of the penalty, in units of the reward.")
    buffer: Count | None = option(
        None,
        "Tokens over which the penalty of `overlong` grows. Default: an eighth of the longest response.",
        needs="kind: overlong",
    )
    correct_above: Finite = option(
        0.0, "`relative` only: a response is correct if its score is above this.", needs="kind: relative"
    )


@dataclass
class RepetitionPenaltyConfig:
    """A penalty on repeated n-grams, subtracted from the reward."""

    ngram_size: Count = option(3, "Tokens of an n-gram.")
    weight: Positive = option(
        1.0,
        "Penalty of a response of one n-gram only; in general its share of n-grams that are repetitions times this.",
    )
