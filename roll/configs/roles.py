"""Sections of the roles that run a model on devices, their shared arguments, and the keys that a role does not read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from roll.configs.fields import (
    Count,
    Decay,
    DeviceMapping,
    Finite,
    Natural,
    NotNegative,
    Nucleus,
    Positive,
    Range,
    Seed,
    Share,
    option,
)


@dataclass
class ModelArguments:
    """The model of a role, and how to load it."""

    model_name_or_path: str | None = option(
        None, "Folder or hub name of the model. Default: `pretrain` (or `reward_pretrain` for reward models)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32",
        "Computing precision. Training keeps float32 master weights and gradients in any case. `float16` is for "
        "engines, reward models, `hf_infer` and `fsdp2_train`, which then scales the loss.",
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = option(
        "sdpa", "Attention implementation handed to transformers."
    )
    trust_remote_code: bool = option(False, "Allow code that comes with the model files to be executed.")
    lora_target: list[str] | str | None = option(
        None,
        "Train adapters (LoRA) on these linear layers and nothing else: `q_proj,v_proj`, a list, or `all-linear`. "
        "Default: train all weights. Under `actor_train` with `fsdp2_train`; see `docs/trainers.md`.",
    )
    lora_rank: Count = option(8, "Rank of the adapters.")
    lora_alpha: Count | None = option(
        None, "The adapters' output is scaled by `lora_alpha / lora_rank`. Default: twice the rank."
    )


@dataclass
class TrainingArguments:
    """Optimizer and batch arithmetic of a trained role."""

    learning_rate: Positive = option(1e-6, "Peak learning rate.")
    weight_decay: NotNegative = option(0.0, "AdamW weight decay (not applied to biases and norms).")
    adam_beta1: Decay = option(0.9, "AdamW first-moment decay.")
    adam_beta2: Decay = option(0.95, "AdamW second-moment decay.")
    adam_epsilon: Positive = option(1e-8, "AdamW epsilon.")
    max_grad_norm: NotNegative = option(1.0, "Global gradient norm is clipped to this value. 0 switches clipping off.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = option(
        "constant", "Shape of the learning rate after warm-up; linear and cosine fall to 0 at the last step."
    )
    warmup_steps: Natural = option(0, "Optimizer steps over which the learning rate rises linearly from 0.")
    warmup_ratio: Share = option(0.0, "Warm-up as a share of all optimizer steps; used when `warmup_steps` is 0.")
    per_device_train_batch_size: Count = option(
        1, "Samples per rank in one micro-batch (without dynamic batching), and the unit of the optimizer step."
    )
    gradient_accumulation_steps: Count | None = option(
        None,
        "Micro-batches of `per_device_train_batch_size` per optimizer step. Default: one optimizer step per training "
        "step and epoch, whatever the batch size.",
    )


@dataclass
class ReasoningGymSource:
    """Procedural tasks from the `reasoning-gym` package, used as data and as verifier."""

    dataset: str = option("", "Name of the reasoning-gym dataset, for example `basic_arithmetic`.")
    size: Count = option(1000, "Number of tasks generated.")
    seed: Seed = option(0, "Seed of the generated tasks. Training and validation need different ones.")
    domain: str | None = option(None, "Domain tag of the tasks. Default: the dataset's name.")
    config: dict[str, Any] = option(dict, "Keyword arguments of the dataset, as reasoning-gym defines them.")


@dataclass
class HubSource:
    """A data set of the Hugging Face hub, or a folder in its form, read by the package `datasets`."""

    dataset: str = option("", "Name on the hub, `owner/name`, or a folder.")
    subset: str | None = option(None, "Its subset (also called configuration or name).")
    split: str = option("train", "Its split; `train[:5%]` takes a part.")
    revision: str | None = option(None, "Commit, tag or branch on the hub.")
    domain: str | None = option(None, "Domain tag of its prompts that have none.")


@dataclass
class RowColumns:
    """The columns that the fields of a row are read from; `extra_info.answer` is a field of a structured column."""

    prompt: str | None = option(None, "Column of the text.")
    messages: str | None = option(None, "Column of the chat messages.")
    domain: str | None = option(None, "Column of the domain tag.")


@dataclass
class PromptColumns(RowColumns):
    """Columns of prompts."""

    ground_truth: str | None = option(None, "Column of the right answer.")


@dataclass
class ExampleColumns(RowColumns):
    """Columns of examples."""

    response: str | None = option(None, "Column of the response.")


@dataclass
class RowArguments:
    """Files and data sets, and how to render their rows."""

    file_name: list[str] | str = option(
        list,
        "JSONL or Parquet files (`.parquet`). A row has `prompt` (text) or `messages` (chat), and optionally "
        "`ground_truth` (or `answer`), `domain` (or `tag`), and anything else, which is kept as metadata.",
    )
    hub: list[HubSource] = option(list, "Data sets of the Hugging Face hub, beside or without files.")
    columns: RowColumns = option(RowColumns, "Columns of files and data sets that have other names for these.")
    template: Literal["raw", "chat"] = option(
        "raw",
        "`raw`: the prompt's text is tokenised as it is; `chat`: the tokenizer's chat template with a generation "
        "prompt (a text prompt becomes one user message).",
    )
    system_prompt: str | None = option(
        None, "System message put before each conversation (`template: chat` only).", needs="template: chat"
    )
    chat_template_kwargs: dict[str, Any] = option(
        dict, "Variables for the chat template, such as `enable_thinking: false`.", needs="template: chat"
    )
    domain_interleave_probs: dict[str, float] | None = option(
        None, "Share of each domain in the stream of rows. Default: in proportion to the rows of each domain."
    )
    max_samples: Count | None = option(None, "Use at most this many rows (after shuffling).")
    shuffle: bool = option(True, "Shuffle the rows at each epoch with the run's seed.")
    overlong_prompts: Literal["error", "drop"] = option(
        "error", "Treatment of prompts longer than `prompt_length` tokens."
    )


@dataclass
class DataArguments(RowArguments):
    """The sources of prompts."""

    columns: PromptColumns = option(PromptColumns, "Columns of files and data sets that have other names for these.")
    reasoning_gym: list[ReasoningGymSource] = option(list, "Procedural task sets, beside or without files.")


@dataclass
class ExampleArguments(RowArguments):
    """The sources of examples for supervised fine-tuning."""

    file_name: list[str] | str = option(
        list,
        "JSONL or Parquet files (`.parquet`). A row has a `prompt` (text) or `messages` (chat) and the `response` to "
        "it (text), or `messages` alone, whose assistant turns are learned; optionally `domain` (or `tag`).",
    )
    columns: ExampleColumns = option(ExampleColumns, "Columns of files and data sets that have other names for these.")
    template: Literal["raw", "chat"] = option(
        "raw",
        "`raw`: `prompt` and `response` are tokenised as they are, and the response ends with the tokenizer's end "
        "token; `chat`: the tokenizer's chat template (a text prompt becomes one user message).",
    )
    overlong_prompts: Literal["error", "drop"] = option(
        "error", "Treatment of examples longer than `sequence_length` tokens. `data/overlong` counts the ones left out."
    )


@dataclass
class GeneratingArguments:
    """Sampling parameters."""

    max_new_tokens: Count | None = option(None, "Longest response in tokens. Default: `response_length`.")
    temperature: NotNegative = option(1.0, "Sampling temperature. 0 is greedy.")
    top_p: Nucleus = option(1.0, "Nucleus sampling: keep the smallest set of tokens with this total probability.")
    top_k: Natural = option(0, "Keep the k most likely tokens. 0 keeps all.")
    num_return_sequences: Count = option(
        1, "Samples per prompt in validation. Training uses `num_return_sequences_in_group`."
    )
    stop_strings: list[str] = option(list, "A response ends as soon as its text contains one of these.")
    ignore_eos: bool = option(False, "Go on to `max_new_tokens` whatever is sampled (for benchmarks).")


@dataclass
class ValidationGeneratingArguments(GeneratingArguments):
    """Sampling parameters of validation: greedy by default."""

    temperature: NotNegative = option(0.0, "Sampling temperature. 0 is greedy.")


@dataclass
class PictureSampling:
    """Sampling parameters of pictures, in training and in validation (which adds no noise)."""

    height: Count = option(512, "Height of the pictures in pixels.")
    width: Count = option(512, "Width of the pictures in pixels.")
    num_inference_steps: Count = option(10, "Denoising steps of a picture.")
    guidance_scale: Annotated[float, Range(at_least=1)] = option(
        1.0,
        "Guidance under diffusers' name. For Stable Diffusion 3: classifier-free guidance, v = v_negative + scale "
        "(v_prompt - v_negative), in sampling and in training; 1: none, and one pass of the model per step in place "
        "of two. For FLUX.1-dev, which was distilled with guidance: the scale that the model reads (diffusers' default "
        "is 3.5).",
    )
    true_cfg_scale: Annotated[float, Range(at_least=1)] = option(
        1.0,
        "Classifier-free guidance of FLUX and Qwen-Image, under diffusers' name. Qwen-Image also rescales the result "
        "to the norm of v_prompt. 1: none.",
    )
    negative_prompt: str = option("", "Prompt that classifier-free guidance steers away from.")
    max_sequence_length: Annotated[int, Range(at_least=1, at_most=512)] = option(
        256,
        "Tokens of a prompt for the T5 encoder of Stable Diffusion 3 and FLUX, or for Qwen-Image's encoder. Shorter "
        "prompts are padded. diffusers' default is 256 for Stable Diffusion 3, and 512 for the others.",
    )
    shift: Positive | None = option(
        None,
        "Shift of the noise levels towards noise. Default: that of the model's scheduler, which for FLUX.1-dev and "
        "Qwen-Image depends on the resolution.",
    )
    kind: Literal["flow_sde", "cps", "dance"] = option(
        "flow_sde",
        "Distribution of a step with noise: `flow_sde` (Flow-GRPO), `cps` (coefficients-preserving sampling) or "
        "`dance` (DanceGRPO). See `docs/images.md`.",
    )
    noise_level: Positive = option(
        0.7, "Strength of that noise: `cps` below 1, `flow_sde` at most 2, `dance` at most twice the root of the steps."
    )
    window_size: Count = option(
        2, "Steps in a row that have noise and are trained on; all others follow the ODE (Flow-GRPO-Fast)."
    )
    window_reach: Count | None = option(
        None,
        "The window lies among the first so many steps, at a place drawn for each group; the last step never has "
        "noise. Default: half of the steps, where most of the picture is decided.",
    )
    log_prob: Literal["mean", "sum", "guard"] = option(
        "mean",
        "Log-probability of a step: `mean` over the dimensions of the latent, whose ratio stays near 1 (clip ranges of "
        "1e-5 to 1e-3), or `sum` (clip ranges near 0.2). `guard`: the mean, with GRPO-Guard's normalised ratios and "
        "weights of steps; the engine then records the mean of each trained step, too.",
    )

    @property
    def reach(self) -> int:
        """Number of denoising steps, from the first, among which the window of trained steps lies."""
        return max(self.window_size, self.num_inference_steps // 2) if self.window_reach is None else self.window_reach


@dataclass
class StrategyArguments:
    """The engine of a role: by default, a trainer."""

    strategy_name: str = option("fsdp2_train", "Registered trainer.")
    strategy_cls: str | None = option(
        None,
        "Import path of a class of your own, derived from that of the named strategy, to use in its place. Options and "
        "memory are judged by the name.",
    )
    strategy_config: dict[str, Any] = option(
        dict, "Options of the engine, passed on as they are. An option the engine does not know is an error."
    )


ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys of `model_args` that describe adapters."""
MODEL_REWARDS = ("reward_model", "judge")
"""Values of `verifier` that query a model and have keys of their own."""


@dataclass
class ReferenceStrategyArguments(StrategyArguments):
    """The engine of the reference."""

    strategy_name: str = option(
        "fsdp2_train", "Registered trainer, or `hf_infer`: a whole model on each device, which share the batch."
    )


@dataclass
class InferStrategyArguments(StrategyArguments):
    """The engine that generates."""

    strategy_name: str = option("hf_infer", "Registered generation engine.")


@dataclass
class WorkerConfig:
    """A role that runs a model on devices."""

    model_args: ModelArguments = option(ModelArguments, "Settings for loading the model.")
    training_args: TrainingArguments = option(TrainingArguments, "Optimizer and batch arithmetic.")
    data_args: RowArguments = option(RowArguments, "Prompts (under `actor_train`: the training prompts).")
    generating_args: GeneratingArguments = option(GeneratingArguments, "Sampling (under `actor_infer`).")
    strategy_args: StrategyArguments = option(StrategyArguments, "Engine of the role.")
    device_mapping: DeviceMapping = option(
        None, 'Devices of the role: `[0, 1]`, `"0-3"`, `"0,2,5-7"`, `list(range(0,4))` or a sum of such lists.'
    )
    infer_batch_size: Count = option(
        16,
        "Samples per forward pass when log-probabilities are computed (without dynamic batching).",
        needs="use_dynamic_batching_in_infer: false",
    )
    worker_cls: str | None = option(None, "Import path of a worker class to use in place of the built-in one.")
    use_dynamic_batching_in_train: bool = option(
        True, "Build training micro-batches by token budget in place of a fixed number of samples."
    )
    max_tokens_per_microbatch_in_train: Count = option(
        8192,
        "Tokens per rank in one training micro-batch (dynamic batching): with padding, or without it where samples are "
        "packed.",
        needs="use_dynamic_batching_in_train: true",
    )
    use_dynamic_batching_in_infer: bool = option(True, "Build forward-only micro-batches by token budget.")
    max_tokens_per_microbatch_in_infer: Count = option(
        16384,
        "Tokens per rank in one forward-only micro-batch (dynamic batching), counted alike.",
        needs="use_dynamic_batching_in_infer: true",
    )
    use_sequence_packing: bool | Literal["auto"] = option(
        "auto",
        "Put the samples of a micro-batch one behind the other in a single row, without padding, for training and for "
        "log-probabilities. Same results. A model that would mix samples is refused with `true`; with `auto` it gets "
        "padded rows, and the log says why (`docs/trainers.md`).",
    )


def _roll_name(argument: str, loss: str) -> Any:
    help = f"ROLL's name of `{argument}`, an argument of `{loss}`."
    return field(default=None, metadata={"help": help, "needs": None, "argument": (loss, argument)})


@dataclass
class ActorTrainConfig(WorkerConfig):
    """The trained policy."""

    data_args: DataArguments = option(DataArguments, "Prompts (under `actor_train`: the training prompts).")
    pg_variant: str = option("ppo", "Policy loss: a name from `docs/algorithms/policy_losses.md`.")
    pg_variant_args: dict[str, Any] = option(
        dict, "Arguments of the policy loss, listed on the same page; those of another loss are an error."
    )
    stream_groups: bool | Literal["auto"] = option(
        False,
        "Train on groups as they finish: add up their gradients, and take the optimizer step when the last group of a "
        "batch has come. Loss and gradient are those of the whole batch, but for rounding. `true` is refused where "
        "something needs the whole batch; `auto` then waits for it, and says so.",
    )
    router_replay: bool = option(
        False,
        "For mixtures of experts: train with the experts that the engine chose for each token when it generated (R3), "
        "in place of the trainer's own choice; their weights are computed from the trainer's router. See "
        "`docs/trainers.md`.",
    )
    tis_lower_bound: Finite | None = _roll_name("lower", "tis")
    tis_upper_bound: Finite | None = _roll_name("upper", "tis")
    topr_positive_weight: Finite | None = _roll_name("positive_weight", "topr")
    topr_negative_weight: Finite | None = _roll_name("negative_weight", "topr")
    cispo_epsilon_low: Finite | None = _roll_name("epsilon_low", "cispo")
    cispo_epsilon_high: Finite | None = _roll_name("epsilon_high", "cispo")
    cispo_use_unified_mask: bool | None = _roll_name("use_unified_mask", "cispo")
    kimi15_tau: Finite | None = _roll_name("tau", "kimi15")


@dataclass
class PictureTrainConfig(ActorTrainConfig):
    """The trained model of pictures."""

    use_dynamic_batching_in_train: bool = option(
        False,
        "Build training micro-batches by token budget in place of `per_device_train_batch_size` pictures. A picture "
        "has one token for each trained step, and one for its prompt.",
    )
    use_dynamic_batching_in_infer: bool = option(
        False, "Build forward-only micro-batches by token budget in place of `infer_batch_size` pictures."
    )


ROLL_ARGUMENTS: dict[str, tuple[str, str]] = {
    item.name: item.metadata["argument"] for item in fields(ActorTrainConfig) if "argument" in item.metadata
}
"""ROLL's names for arguments of policy losses, accepted as keys of `actor_train`: name -> (loss, argument)."""


@dataclass
class SupervisedTrainConfig(WorkerConfig):
    """The model that is fine-tuned."""

    data_args: ExampleArguments = option(ExampleArguments, "The examples that are learned.")


@dataclass
class ActorInferConfig(WorkerConfig):
    """The engine that generates."""

    strategy_args: InferStrategyArguments = option(InferStrategyArguments, "Engine of the role.")
    num_gpus_per_engine: Count = option(1, "Devices of one engine replica; the number of replicas follows.")
    max_replica_restarts: Natural = option(
        3, "Restarts of dead engine replicas before the run fails; counted anew if it is resumed."
    )
    request_timeout_seconds: Positive = option(
        600.0,
        "The requests of a replica that yields no token of any of them for this long fail with its name. Their length "
        "does not matter, nor does the time they wait in the engine's queue while others get tokens.",
    )
    silence_timeout_seconds: Positive = option(
        300.0,
        "A replica whose engine gives no sign of life for this long is replaced. Must be longer than the longest step, "
        "one in which many long prompts are prefilled.",
    )


@dataclass
class PictureStrategyArguments(InferStrategyArguments):
    """The engine that draws."""

    strategy_name: str = option("diffusers_infer", "Registered engine of pictures.")


@dataclass
class PictureInferConfig(ActorInferConfig):
    """The engine that draws pictures."""

    strategy_args: PictureStrategyArguments = option(PictureStrategyArguments, "Engine of the role.")


@dataclass
class ReferenceConfig(WorkerConfig):
    """The frozen reference policy."""

    strategy_args: ReferenceStrategyArguments = option(ReferenceStrategyArguments, "Engine of the role.")


@dataclass
class PictureReferenceConfig(ReferenceConfig):
    """The frozen reference model of pictures."""

    use_dynamic_batching_in_infer: bool = option(
        False, "Build forward-only micro-batches by token budget in place of `infer_batch_size` pictures."
    )


@dataclass
class TeacherConfig(ReferenceConfig):
    """The model that the policy learns from, by `distillation`."""

    prompt: str | None = option(
        None,
        "Text that the teacher sees in place of the prompt (`pipeline: rlvr`): `{prompt}`, `{ground_truth}` and "
        "fields of the row stand in braces; other braces are doubled. With `template: chat` it takes the place of the "
        "last user message. Default: the prompt itself.",
    )
    weights: Literal["frozen", "policy"] = option(
        "frozen",
        "`frozen`: the teacher is a model of its own; `policy`: it is the policy at the beginning of a training step, "
        "which learns from itself with another `prompt`, on the devices of actor_train.",
    )


@dataclass
class ActorLogpConfig(ReferenceConfig):
    """The policy as it was before the first update on a batch."""


ROLES = ("actor_train", "actor_infer", "actor_logp", "reference", "teacher", "critic")
"""Roles that run a model on devices."""
COMPARED_ROLES = ("reference", "teacher")
"""Roles whose log-probabilities of sampled tokens are compared with the policy's, in the field `<role>_logprobs`."""
FORWARD_ROLES = ("actor_logp", *COMPARED_ROLES)
"""Roles without an optimizer, which compute log-probabilities."""
TRAINED_ROLES = ("actor_train", "critic")
"""Roles that are trained."""
TRAINING_KEYS = ("training_args", "data_args", "use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train")
FORWARD_KEYS = ("infer_batch_size", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer")
UNREAD_KEYS: dict[str, tuple[str, ...]] = {
    "actor_train": ("generating_args",),
    "actor_infer": TRAINING_KEYS + FORWARD_KEYS + ("use_sequence_packing",),
    **dict.fromkeys(FORWARD_ROLES, TRAINING_KEYS + ("generating_args",)),
    "critic": ("generating_args", "data_args"),
}
"""Keys that a role's type has but that nothing reads; setting one is an error."""
UNREAD_PATHS = tuple(f"{role}.{key}" for role, keys in UNREAD_KEYS.items() for key in keys)
"""Paths of the keys in `UNREAD_KEYS`; they are neither documented nor suggested."""


@dataclass
class ValidationSettings:
    """Sampling and timing of validation."""

    generating_args: ValidationGeneratingArguments = option(
        ValidationGeneratingArguments, "Sampling in validation; greedy by default."
    )
    mode: Literal["pause", "overlap"] = option(
        "pause",
        "`pause`: no training group starts while validation runs, and new weights wait; `overlap`: groups start.",
    )
    replicas: Annotated[float, Range(at_least=0, below=1)] = option(
        0.25,
        "Share of the engine's replicas, at least one and never all, that keep the validated version until its "
        "validation is over. The others go on with newer weights, and nothing waits. 0, a single replica, or an engine "
        "that shares its devices: all replicas keep it, and new weights wait.",
        needs="mode: overlap",
    )
    timeout_seconds: Positive = option(1800.0, "Longest time for one validation before the run fails.")


@dataclass
class SupervisedValidationConfig:
    """Examples whose loss is measured."""

    data_args: ExampleArguments = option(ExampleArguments, "Validation examples.")


@dataclass
class ValidationConfig(ValidationSettings):
    """Validation prompts and their own sampling parameters."""

    data_args: DataArguments = option(DataArguments, "Validation prompts.")
