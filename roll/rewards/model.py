"""The interface of reward models, which give each conversation a score, and the checks before they are loaded.

The score of a conversation does not depend on the others in its batch, except for rounding. A problem with one
conversation is returned as data; an exception means that the whole call failed. An unsuitable model is rejected by its
files before anything is loaded. torch is imported only when an engine is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.rewards import RewardConfig, RewardModelConfig
from roll.configs.roles import ModelArguments
from roll.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Conversation = list[dict[str, str]]
"""Messages with `role` and `content`, the response last."""


@dataclass(frozen=True)
class ScorerSetup:
    """A reward model and the settings to run it."""

    model_path: str
    model_args: ModelArguments
    config: RewardModelConfig
    batch_size: int
    """Number of conversations in one forward pass."""
    device: str
    """``cpu`` or ``cuda``."""


@dataclass(frozen=True)
class Scored:
    """The result for one conversation."""

    score: float = 0.0
    tokens: int = 0
    """Number of tokens that were scored."""
    cut_tokens: int = 0
    """Number of tokens cut off at the beginning of the conversation."""
    problem: str = ""
    """Reason why there is no score; empty if there is a score."""


class ScoreStrategy(Protocol):
    """A loaded reward model."""

    def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Score any number of conversations, and return the results in the same order."""

    def offload_states(self) -> None:
        """Move the weights off the device."""

    def load_states(self) -> None:
        """Undo `offload_states`."""


POSITIONS_AFTER_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Model types whose first position is the padding id plus one, so that they have fewer positions than table rows."""


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the longest input in tokens; None if the model has no such limit."""
    text = config.get_text_config()
    rows = text.to_dict().get("max_position_embeddings")
    if rows is None or text.model_type not in POSITIONS_AFTER_PADDING or text.pad_token_id is None:
        return rows
    return rows - text.pad_token_id - 1


def check_reward_model(model_path: str, reward: RewardConfig, path: str) -> None:
    """Raise `ConfigError` if this model cannot be a reward model, or not with these keys.

    ``path`` is the configuration path of the reward.
    """
    from transformers import AutoConfig

    arguments = reward.model_args
    model_key = f"{path}.model_args.model_name_or_path" if arguments.model_name_or_path else "reward_pretrain"
    tokenizer = load_tokenizer(model_path, trust_remote_code=arguments.trust_remote_code, config_path=model_key)
    problems = []
    if not tokenizer.chat_template:
        message = f"the tokenizer of {model_path!r} has no chat template, which would put prompt and response together"
        remedy = "take a reward model with a chat template, or add a `chat_template.jinja` to its folder"
        problems.append(ConfigProblem(model_key, message, remedy))
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as cause:
        message = f"the configuration of {model_path!r} cannot be read ({str(cause).splitlines()[0]})"
        problems.append(ConfigProblem(model_key, message, "give a model folder as `save_pretrained` writes it"))
        raise ConfigError(problems) from cause
    problems += _model_problems(model_path, config, model_key)
    problems += _key_problems(reward, config, path)
    if problems:
        raise ConfigError(problems)


def _model_problems(model_path: str, config: PretrainedConfig, key: str) -> Iterator[ConfigProblem]:
    architectures = config.architectures or []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        message = f"{model_path!r} is a {architectures[0]}, which has no head that scores"
        yield ConfigProblem(key, message, "name a sequence classifier (`...ForSequenceClassification`)")
    if Path(model_path).is_dir() and not any(Path(model_path).glob("*.safetensors")):
        message = f"{model_path!r} has no weights as safetensors"
        yield ConfigProblem(key, message, "convert them (`save_pretrained`); pickled weights are not read")


def _key_problems(reward: RewardConfig, config: PretrainedConfig, path: str) -> Iterator[ConfigProblem]:
    label, longest = reward.reward_model.label, reward.reward_model.max_length
    labels, positions = config.num_labels, position_limit(config)
    if label is None and labels != 1:
        message = f"the classifier has {labels} labels ({', '.join(map(str, config.id2label.values()))})"
        yield ConfigProblem(f"{path}.reward_model.label", message, f"write which one is the score: 0 to {labels - 1}")
    if label is not None and label >= labels:
        message = f"{label}, but the classifier has {labels} labels, counted from 0"
        yield ConfigProblem(f"{path}.reward_model.label", message, f"write 0 to {labels - 1}")
    if longest is not None and positions is not None and longest > positions:
        message = f"{longest} tokens are more than the model's {positions} positions"
        yield ConfigProblem(f"{path}.reward_model.max_length", message, f"write at most {positions}")
    for key in reward.strategy_args.strategy_config:
        message = "hf_infer has no such option for reward models"
        yield ConfigProblem(f"{path}.strategy_args.strategy_config.{key}", message, "remove it: there are none")
