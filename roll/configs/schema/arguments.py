"""Arguments that roles share: model, training, data, sampling and engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.schema.options import COUNT, DECAY, NOT_NEGATIVE, NUCLEUS, POSITIVE, SEED, SHARE, option


@dataclass
class ModelArguments:
    """The model of a role, and how to load it."""

    model_name_or_path: str | None = option(
        None, help="Folder or hub name of the model. Default: `pretrain` (or `reward_pretrain` for reward models)."
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", help="Computing precision. Training keeps float32 master weights and gradients in either case."
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] = option(
        "sdpa", help="Attention implementation handed to transformers."
    )
    trust_remote_code: bool = option(False, help="Allow code that comes with the model files to be executed.")
    lora_target: list[str] | str | None = option(
        None,
        help="Train adapters (LoRA) on these linear layers and nothing else: `q_proj,v_proj`, a list, or `all-linear`. "
        "Default: train all weights. Under `actor_train` with `fsdp2_train`; see `docs/trainers.md`.",
    )
    lora_rank: int = option(8, help="Rank of the adapters.", range=COUNT)
    lora_alpha: int | None = option(
        None, help="What adapters add is multiplied by `lora_alpha / lora_rank`. Default: twice the rank.", range=COUNT
    )


@dataclass
class TrainingArguments:
    """Optimizer and batch arithmetic of a trained role."""

    learning_rate: float = option(1e-6, help="Peak learning rate.", range=POSITIVE)
    weight_decay: float = option(0.0, help="AdamW weight decay (not applied to biases and norms).", range=NOT_NEGATIVE)
    adam_beta1: float = option(0.9, help="AdamW first-moment decay.", range=DECAY)
    adam_beta2: float = option(0.95, help="AdamW second-moment decay.", range=DECAY)
    adam_epsilon: float = option(1e-8, help="AdamW epsilon.", range=POSITIVE)
    max_grad_norm: float = option(
        1.0, help="Global gradient norm is clipped to this value. 0 switches clipping off.", range=NOT_NEGATIVE
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant", help="Shape of the learning rate after warm-up; linear and cosine fall to 0 at the last step."
    )
    warmup_steps: int = option(
        0, help="Optimizer steps over which the learning rate rises linearly from 0.", range=NOT_NEGATIVE
    )
    warmup_ratio: float = option(
        0.0, help="Warm-up as a share of all optimizer steps; used when `warmup_steps` is 0.", range=SHARE
    )
    per_device_train_batch_size: int = option(
        1, help="Samples per rank in one micro-batch (without dynamic batching), and the unit of the optimizer step.",
        range=COUNT,
    )
    gradient_accumulation_steps: int | None = option(
        None,
        help="Micro-batches of `per_device_train_batch_size` per optimizer step. Default: one optimizer step per "
        "training step and epoch, whatever the batch size.",
        range=COUNT,
    )


@dataclass
class ReasoningGymSource:
    """Procedural tasks from the `reasoning-gym` package, used as data and as verifier."""

    dataset: str = option(help="Name of the reasoning-gym dataset, for example `basic_arithmetic`.", default="")
    size: int = option(1000, help="Number of tasks generated.", range=COUNT)
    seed: int = option(0, help="Seed of the generated tasks. Training and validation need different ones.", range=SEED)
    domain: str | None = option(None, help="Domain tag of the tasks. Default: the dataset's name.")
    config: dict[str, Any] = option(
        factory=dict, help="Keyword arguments of the dataset, as reasoning-gym defines them."
    )


@dataclass
class DataArguments:
    """The sources of prompts, and how to render them."""

    file_name: list[str] | str = option(
        factory=list,
        help="JSONL files. A line has `prompt` (text) or `messages` (chat), and optionally `ground_truth` (or "
        "`answer`), `domain` (or `tag`), and anything else, which is kept as metadata.",
    )
    reasoning_gym: list[ReasoningGymSource] = option(
        factory=list, help="Procedural task sets, beside or without files."
    )
    template: Literal["raw", "chat"] = option(
        "raw",
        help="`raw`: the prompt's text is tokenised as it is; `chat`: the tokenizer's chat template with a generation "
        "prompt (a text prompt becomes one user message).",
    )
    system_prompt: str | None = option(None, help="System message put before each prompt (`template: chat` only).")
    domain_interleave_probs: dict[str, float] | None = option(
        None,
        help="Share of each domain in the stream of prompts. Default: in proportion to the prompts of each domain.",
    )
    max_samples: int | None = option(None, help="Use at most this many prompts (after shuffling).", range=COUNT)
    shuffle: bool = option(True, help="Shuffle the prompts at each epoch with the run's seed.")
    overlong_prompts: Literal["error", "drop"] = option(
        "error", help="What to do with prompts longer than `prompt_length` tokens."
    )


@dataclass
class GeneratingArguments:
    """Sampling parameters."""

    max_new_tokens: int | None = option(
        None, help="Longest response in tokens. Default: `response_length`.", range=COUNT
    )
    temperature: float = option(1.0, help="Sampling temperature. 0 is greedy.", range=NOT_NEGATIVE)
    top_p: float = option(
        1.0, help="Nucleus sampling: keep the smallest set of tokens with this total probability.", range=NUCLEUS
    )
    top_k: int = option(0, help="Keep the k most likely tokens. 0 keeps all.", range=NOT_NEGATIVE)
    num_return_sequences: int = option(
        1, help="Samples per prompt in validation. Training uses `num_return_sequences_in_group`.", range=COUNT
    )
    stop_strings: list[str] = option(factory=list, help="A response ends as soon as its text contains one of these.")
    ignore_eos: bool = option(False, help="Go on to `max_new_tokens` whatever is sampled (for benchmarks).")


@dataclass
class ValidationGeneratingArguments(GeneratingArguments):
    """Sampling parameters of validation: greedy by default."""

    temperature: float = option(0.0, help="Sampling temperature. 0 is greedy.", range=NOT_NEGATIVE)


@dataclass
class StrategyArguments:
    """The engine of a role."""

    strategy_name: str = option("", help="Registered strategy, such as `fsdp2_train` or `hf_infer`.")
    strategy_cls: str | None = option(
        None,
        help="Import path of a class of your own, derived from that of the named strategy, to use in its place. "
        "Options and memory are judged by the name.",
    )
    strategy_config: dict[str, Any] = option(
        factory=dict,
        help="Options of the engine, passed on as they are. An option the engine does not know is an error.",
    )
