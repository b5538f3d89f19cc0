"""Every key a user may write, as plain dataclasses.

The loader (`loader.py`) validates a YAML tree against these types with pydantic: an unknown key, a wrong type or an
impossible value is an error with its path. Fields carry their explanation in ``metadata["help"]`` and, if they are
numbers, their range in ``metadata["range"]``; the reference page in ``docs/`` is generated from both. This module
imports nothing heavier than the standard library, and holds no logic beyond defaults: ranges and relations between
keys are judged in ``checks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.ranges import Range

TRAIN_STRATEGIES = ("fsdp2_train", "deepspeed_train", "megatron_train")
"""Trainers; they also drive the forward-only reference."""
FORWARD_STRATEGIES = ("hf_infer",)
"""What drives the forward-only reference beside them, and cannot train: a whole model on each device."""
PACKING_STRATEGIES = ("fsdp2_train", "deepspeed_train")
"""Trainers that can pack samples into rows; so can `FORWARD_STRATEGIES`."""
ADAPTER_STRATEGIES = ("fsdp2_train",)
"""Trainers of adapters (LoRA)."""
ADAPTER_KEYS = ("lora_target", "lora_rank", "lora_alpha")
"""Keys of `model_args` that say what adapters are."""
INFER_STRATEGIES = ("hf_infer", "sglang", "vllm")
"""Generation engines."""
SCORE_STRATEGIES = ("hf_infer",)
"""Engines of reward models."""
BUILTIN_VERIFIERS = ("math", "exact", "numeric", "reasoning_gym")
"""Verifiers known by name; any other is an import path."""
MODEL_REWARDS = ("reward_model", "judge")
"""Rewards that ask a model, with keys of their own; they are named where verifiers are."""
LARGEST_NUMBER = 1e15
"""No setting is larger, so products of settings stay exact enough to compute with."""
ROLL_KNOBS: dict[str, tuple[str, str]] = {
    "tis_lower_bound": ("tis", "lower"),
    "tis_upper_bound": ("tis", "upper"),
    "topr_positive_weight": ("topr", "positive_weight"),
    "topr_negative_weight": ("topr", "negative_weight"),
    "cispo_epsilon_low": ("cispo", "epsilon_low"),
    "cispo_epsilon_high": ("cispo", "epsilon_high"),
    "cispo_use_unified_mask": ("cispo", "use_unified_mask"),
    "kimi15_tau": ("kimi15", "tau"),
}
"""Knobs of policy losses under the names that users of ROLL know, directly in `actor_train`: name -> (loss, knob)."""


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
COUNT = Range(at_least=1)
SHARE = Range(at_least=0, at_most=1)
DECAY = Range(at_least=0, below=1)
NUCLEUS = Range(above=0, at_most=1)
SEED = Range(at_least=0, below=2**32)
ANY_FINITE = Range()


def option(default: Any = None, *, help: str, factory: Any = None, range: Range | None = None) -> Any:
    """A dataclass field with its help text and the range of its number.

    ``factory`` replaces ``default`` for mutable values.
    """
    metadata = {"help": help} if range is None else {"help": help, "range": range}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


DeviceMapping = list[int] | int | str | None
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass
class ClusterConfig:
    """Where the run's devices are."""

    device: Literal["cpu", "cuda"] = option(
        "cpu", help="Kind of device that `device_mapping` numbers: CPU slots or CUDA GPUs."
    )
    num_devices_per_node: int = option(1, help="Devices (CPU slots or GPUs) used on each node.", range=COUNT)
    num_nodes: int = option(1, help="Nodes used. Device `i` lives on node `i // num_devices_per_node`.", range=COUNT)
    address: str | None = option(
        None, help="Address of a running Ray cluster (`auto` or `host:port`). Empty: start a local one for this run."
    )
    device_memory_gib: float | None = option(
        None,
        help="Memory of one GPU in GiB. With it, `roll check` and the start of a run say what will not fit.",
        range=POSITIVE,
    )
    cpu_threads_per_device: int | None = option(
        None,
        help="Computing threads of a worker per CPU slot it owns. Default: cores of the node / slots of the node.",
        range=COUNT,
    )
    worker_start_timeout_seconds: float = option(
        300.0, help="Longest wait for a worker to start and load its model before the run fails.", range=POSITIVE
    )


@dataclass
class ModelArguments:
    """How a role's model is loaded."""

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
    """Where prompts come from and how they are rendered."""

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
    """Sampling parameters of validation: greedy unless told otherwise."""

    temperature: float = option(0.0, help="Sampling temperature. 0 is greedy.", range=NOT_NEGATIVE)


@dataclass
class StrategyArguments:
    """Which engine drives a role."""

    strategy_name: str = option("", help="Registered strategy, such as `fsdp2_train` or `hf_infer`.")
    strategy_config: dict[str, Any] = option(
        factory=dict,
        help="Options of the engine, passed on as they are. An option the engine does not know is an error.",
    )


@dataclass
class TrainStrategyArguments(StrategyArguments):
    """The engine of a trained role, or of a forward-only one."""

    strategy_name: str = option("fsdp2_train", help="Registered trainer.")


@dataclass
class ReferenceStrategyArguments(StrategyArguments):
    """The engine of the reference."""

    strategy_name: str = option(
        "fsdp2_train", help="Registered trainer, or `hf_infer`: a whole model on each device, which share the batch."
    )


@dataclass
class InferStrategyArguments(StrategyArguments):
    """The engine that generates."""

    strategy_name: str = option("hf_infer", help="Registered generation engine.")


@dataclass
class WorkerConfig:
    """A role that runs a model on devices."""

    model_args: ModelArguments = option(factory=ModelArguments, help="How the model is loaded.")
    training_args: TrainingArguments = option(factory=TrainingArguments, help="Optimizer and batch arithmetic.")
    data_args: DataArguments = option(
        factory=DataArguments, help="Prompts (under `actor_train`: the training prompts)."
    )
    generating_args: GeneratingArguments = option(factory=GeneratingArguments, help="Sampling (under `actor_infer`).")
    strategy_args: StrategyArguments = option(factory=StrategyArguments, help="Engine of the role.")
    device_mapping: DeviceMapping = option(
        None, help="Devices of the role: `[0, 1]`, `\"0-3\"`, `\"0,2,5-7\"`, `list(range(0,4))` or a sum of such lists."
    )
    infer_batch_size: int = option(
        16, help="Samples per forward pass when log-probabilities are computed (without dynamic batching).", range=COUNT
    )
    worker_cls: str | None = option(None, help="Import path of a worker class to use in place of the built-in one.")
    use_dynamic_batching_in_train: bool = option(
        True, help="Build training micro-batches by token budget in place of a fixed number of samples."
    )
    max_tokens_per_microbatch_in_train: int = option(
        8192,
        help="Tokens per rank in one training micro-batch (dynamic batching): with padding, or without it where "
        "samples are packed.",
        range=COUNT,
    )
    use_dynamic_batching_in_infer: bool = option(
        True, help="Build forward-only micro-batches by token budget."
    )
    max_tokens_per_microbatch_in_infer: int = option(
        16384, help="Tokens per rank in one forward-only micro-batch (dynamic batching), counted alike.", range=COUNT
    )
    use_sequence_packing: bool = option(
        False,
        help="Put the samples of a micro-batch one behind the other in a single row, without padding, for training and "
        "for log-probabilities. Same results; a model that would mix samples is refused (`docs/trainers.md`).",
    )


@dataclass
class ActorTrainConfig(WorkerConfig):
    """The trained policy."""

    strategy_args: TrainStrategyArguments = option(factory=TrainStrategyArguments, help="Engine of the role.")
    pg_variant: str = option("ppo", help="Policy loss: a name from `docs/algorithms/policy_losses.md`.")
    pg_variant_args: dict[str, Any] = option(
        factory=dict, help="Knobs of the policy loss, listed on the same page; those of another loss are an error."
    )
    tis_lower_bound: float | None = option(
        None, help="ROLL's name of `lower`, a knob of `tis`.", range=ANY_FINITE
    )
    tis_upper_bound: float | None = option(
        None, help="ROLL's name of `upper`, a knob of `tis`.", range=ANY_FINITE
    )
    topr_positive_weight: float | None = option(
        None, help="ROLL's name of `positive_weight`, a knob of `topr`.", range=ANY_FINITE
    )
    topr_negative_weight: float | None = option(
        None, help="ROLL's name of `negative_weight`, a knob of `topr`.", range=ANY_FINITE
    )
    cispo_epsilon_low: float | None = option(
        None, help="ROLL's name of `epsilon_low`, a knob of `cispo`.", range=ANY_FINITE
    )
    cispo_epsilon_high: float | None = option(
        None, help="ROLL's name of `epsilon_high`, a knob of `cispo`.", range=ANY_FINITE
    )
    cispo_use_unified_mask: bool | None = option(None, help="ROLL's name of `use_unified_mask`, a knob of `cispo`.")
    kimi15_tau: float | None = option(
        None, help="ROLL's name of `tau`, a knob of `kimi15`.", range=ANY_FINITE
    )


@dataclass
class ActorInferConfig(WorkerConfig):
    """The engine that generates."""

    strategy_args: InferStrategyArguments = option(factory=InferStrategyArguments, help="Engine of the role.")
    num_gpus_per_engine: int = option(
        1, help="Devices of one engine replica; the number of replicas follows.", range=COUNT
    )
    max_replica_restarts: int = option(
        3, help="Restarts of dead engine replicas over the run before it fails.", range=NOT_NEGATIVE
    )
    request_timeout_seconds: float = option(
        600.0, help="A request that has not ended after this time fails with the replica's name.", range=POSITIVE
    )
    silence_timeout_seconds: float = option(
        300.0,
        help="A replica whose engine gives no sign of life for this long is replaced. Must be longer than the longest "
        "step, one in which many long prompts are prefilled.",
        range=POSITIVE,
    )


@dataclass
class ReferenceConfig(WorkerConfig):
    """The frozen reference policy."""

    strategy_args: ReferenceStrategyArguments = option(factory=ReferenceStrategyArguments, help="Engine of the role.")


@dataclass
class CriticConfig(WorkerConfig):
    """A trained value model."""

    strategy_args: TrainStrategyArguments = option(factory=TrainStrategyArguments, help="Engine of the role.")


@dataclass
class ScoreStrategyArguments(StrategyArguments):
    """The engine of a reward model."""

    strategy_name: str = option("hf_infer", help="Registered engine of reward models.")


@dataclass
class RewardModelConfig:
    """How a sequence classifier becomes a score."""

    label: int | None = option(
        None, help="Which label's logit is the score. Needed for classifiers of more than one label.",
        range=NOT_NEGATIVE,
    )
    max_length: int | None = option(
        None, help="Longest conversation in the reward model's tokens. Default: what its positions allow.", range=COUNT
    )
    overlong: Literal["truncate_left", "refuse"] = option(
        "truncate_left",
        help="A longer conversation loses its beginning, counted in `reward/truncated_left`, or fails, and with it its "
        "group.",
    )
    batch_wait_seconds: float | None = option(
        None,
        help="How long a batch waits for responses of other groups. 0: a group's responses are scored by themselves, "
        "so that rounding does not depend on timing. Default: 0 at `async_generation_ratio: 0`, else 0.005.",
        range=NOT_NEGATIVE,
    )


@dataclass
class JudgeConfig:
    """A language model behind an OpenAI-compatible address, asked for a score."""

    base_url: str = option("", help="Address up to and without `/chat/completions`: `http://127.0.0.1:8000/v1`.")
    model: str = option("", help="Name of the model there.")
    api_key_env: str | None = option(None, help="Name of the environment variable that holds the key of the address.")
    system_prompt: str | None = option(None, help="System message of the question.")
    template: str | None = option(
        None,
        help="The question. `{prompt}`, `{response}` and `{ground_truth}` become fenced texts. Default: asks for an "
        "integer between `score_min` and `score_max` in a last line `Score: N`.",
    )
    score_pattern: str | None = option(
        None,
        help="Regular expression; the first group of its last match in the answer is the score. Default: the number "
        "after `Score:`.",
    )
    score_field: str | None = option(
        None, help="In place of a pattern: the field of the last JSON object of the answer that has it."
    )
    score_min: float = option(0.0, help="Worst score of the judge; becomes 0.", range=ANY_FINITE)
    score_max: float = option(10.0, help="Best score of the judge; becomes 1.", range=ANY_FINITE)
    temperature: float = option(0.0, help="Sampling temperature of the judge.", range=NOT_NEGATIVE)
    max_tokens: int = option(1024, help="Longest answer of the judge in tokens.", range=COUNT)
    extra_body: dict[str, Any] = option(
        factory=dict, help="Further fields of the request, such as `seed` or `chat_template_kwargs`."
    )
    max_concurrency: int = option(64, help="Responses under judgement at a time.", range=COUNT)
    request_timeout_seconds: float = option(60.0, help="Longest wait for one answer.", range=POSITIVE)
    request_retries: int = option(
        6,
        help="Further requests after a refused connection, a timeout or a status 408, 409, 425, 429 or 5xx; each waits "
        "twice as long as the one before (from 0.5 s, at most 30 s), or as long as `Retry-After` says.",
        range=NOT_NEGATIVE,
    )
    verdict_retries: int = option(
        2, help="How often the judge is asked again after an answer without a score in range.", range=NOT_NEGATIVE
    )
    fallback_score: float | None = option(
        None,
        help="Score, between 0 and 1, of a response on which no verdict can be had. Default: its group fails.",
        range=SHARE,
    )


@dataclass
class RewardConfig:
    """A verifier and its worker processes; the key under `rewards` is its name."""

    verifier: str = option(
        "",
        help="`math`, `exact`, `numeric`, `reasoning_gym`, `reward_model`, `judge`, or the import path of a callable "
        "`package.module:function`. See `docs/rewards.md`.",
    )
    verifier_args: dict[str, Any] = option(factory=dict, help="Keyword arguments of the verifier.")
    tag_included: list[str] = option(
        factory=list, help="Domain tags of the prompts this reward judges. Default: the reward's own name."
    )
    num_workers: int = option(1, help="Worker processes. Those of a reward model follow from its devices.", range=COUNT)
    timeout_seconds: float | None = option(
        None,
        help="Longest time to judge one sample (a `reward_model`: one batch; a `judge`: all its attempts); then the "
        "worker is replaced. Default: 10, of a reward model 120, of a judge 600.",
        range=POSITIVE,
    )
    max_retries: int = option(
        2, help="Further attempts after an error or a timeout; then the group is dropped as failed.", range=NOT_NEGATIVE
    )
    model_args: ModelArguments = option(factory=ModelArguments, help="How the model of a `reward_model` is loaded.")
    strategy_args: ScoreStrategyArguments = option(
        factory=ScoreStrategyArguments, help="Engine of a `reward_model`."
    )
    device_mapping: DeviceMapping = option(
        None, help="Devices of a `reward_model`, one copy of the model on each; other roles may have them too."
    )
    infer_batch_size: int = option(16, help="Samples per forward pass of a `reward_model`.", range=COUNT)
    worker_cls: str | None = option(
        None, help="Import path of a worker class to use in place of the built-in one (`reward_model` only)."
    )
    reward_model: RewardModelConfig = option(
        factory=RewardModelConfig, help="How the classifier of a `reward_model` becomes a score."
    )
    judge: JudgeConfig | None = option(None, help="The language model that a `judge` asks.")


@dataclass
class ValidationSettings:
    """How validation is sampled and when."""

    generating_args: ValidationGeneratingArguments = option(
        factory=ValidationGeneratingArguments, help="Sampling in validation; greedy by default."
    )
    mode: Literal["pause", "overlap"] = option(
        "pause", help="`pause`: no training group starts while validation runs; `overlap`: both share the engine."
    )
    timeout_seconds: float = option(
        1800.0, help="Longest time for one validation before the run fails.", range=POSITIVE
    )


@dataclass
class ValidationConfig(ValidationSettings):
    """Validation prompts and their own sampling parameters."""

    data_args: DataArguments = option(factory=DataArguments, help="Validation prompts.")


@dataclass
class WeightUpdateConfig:
    """How new weights reach the engine."""

    interval_steps: int = option(1, help="Publish weights every n training steps.", range=COUNT)
    in_flight: Literal["keep", "resume", "drain"] = option(
        "keep",
        help="Requests running at an update: `keep` freezes them and goes on with their caches, `resume` continues "
        "them from prefix plus partial tokens with new caches, `drain` lets them finish first.",
    )
    transport: Literal["auto", "shared_memory", "object_store", "checkpoint", "nccl", "cuda_ipc"] = option(
        "auto",
        help="How the bytes travel: `shared_memory` (one host), Ray's `object_store`, `checkpoint` (files on a disk "
        "that all hosts see), or by vLLM's own transfer from GPU to GPU: `nccl` (devices apart), `cuda_ipc` (the same "
        "devices). `auto`: shared memory on Linux if trainer and engines are on one node, else the object store.",
    )
    dual_buffer: bool = option(
        True,
        help="Two buffers: a training step's weights are copied into one while engines use or load those in the other. "
        "One buffer takes half the memory; then each engine copies the weights out of it.",
    )
    param_update_gather_bucket_size_mb: float = option(
        256.0, help="Largest bucket that the trainer packs, in MiB (a larger tensor gets its own).", range=POSITIVE
    )
    param_update_load_bucket_size_mb: float = option(
        256.0, help="Most weights that an engine is handed at a time, in MiB.", range=POSITIVE
    )
    checkpoint_dir: str | None = option(
        None,
        help="Folder for the transport `checkpoint`, seen by all hosts; what is written there is deleted again. "
        "Default: in the run's own folder.",
    )
    timeout_seconds: float = option(
        600.0,
        help="Longest time for a replica to take new weights (with `drain`: to end its requests, too), to sleep or to "
        "wake; then its process is replaced.",
        range=POSITIVE,
    )
    canary_interval: int = option(
        10,
        help="The log-probabilities of fixed sequences are compared between trainer and engines at the first "
        "publication and every n; 0: never.",
        range=NOT_NEGATIVE,
    )
    canary_prompts: int = option(
        8,
        help="Canary sequences: training prompts, each followed by pseudo-random tokens up to 64 in all.",
        range=Range(at_least=1, at_most=1024),
    )
    canary_tolerance: float | None = option(
        None,
        help="Largest mean absolute difference in nats per token before the run stops. Default: 0.001 if trainer and "
        "engine compute in float32, else 0.1.",
        range=POSITIVE,
    )


@dataclass
class LengthPenaltyConfig:
    """A penalty on long responses, subtracted from the reward."""

    kind: Literal["overlong", "relative"] = option(
        "overlong",
        help="`overlong`: 0 up to `buffer` tokens below the longest response, then falling to -`weight` at it (DAPO); "
        "`relative`: -`weight` / 2 for the longest to +`weight` / 2 for the shortest correct response of its group, "
        "and never above 0 for a wrong one (Kimi k1.5).",
    )
    weight: float = option(1.0, help="Size of the penalty, in units of the reward.", range=POSITIVE)
    buffer: int | None = option(
        None, help="Tokens over which the penalty of `overlong` grows. Default: an eighth of the longest response.",
        range=COUNT,
    )
    correct_above: float = option(
        0.0, help="`relative` only: a response is correct if its score is above this.", range=ANY_FINITE
    )


@dataclass
class EnvManagerConfig:
    """A set of environments: how many, which, and how their episodes are grouped."""

    num_env_groups: int | None = option(
        None,
        help="Training: groups of episodes that run at once; default: all that may have started. Validation: groups in "
        "all, one seed each.",
        range=COUNT,
    )
    group_size: int = option(1, help="Episodes of one group; they share tag and seed.", range=COUNT)
    group_size_redundancy: int = option(
        0,
        help="Episodes of a group that may fail (environment raised, hung, died): each is replaced by a new one. "
        "Unlike in ROLL they do not start with the others, so slow episodes are not left out for being slow.",
        range=NOT_NEGATIVE,
    )
    tags: list[str] = option(factory=list, help="Tags of `custom_envs` used. Default: all, in their order.")
    num_groups_partition: list[int] = option(
        factory=list,
        help="Share of each tag: of as many successive groups as these numbers add up to, each tag gets its number. "
        "Default: 1 each.",
    )
    max_traj_per_env: int | None = option(
        None,
        help="Groups that one of the `num_env_groups` plays in a training step at most, in the mean; a configuration "
        "that needs more is refused.",
        range=COUNT,
    )
    format_penalty: float = option(
        0.0, help="Added to the reward of a turn whose action is not valid: 0 or less.", range=Range(at_most=0)
    )


@dataclass
class CustomEnvConfig:
    """One kind of environment; the key under `custom_envs` is its tag."""

    env_type: str = option(
        "",
        help="A built-in environment, a gymnasium id, the name of an entry point of the group `roll.environments`, or "
        "an import path `package.module:Class`. See `docs/environments.md`.",
    )
    env_config: dict[str, Any] = option(factory=dict, help="Keyword arguments of the environment.")
    max_steps: int = option(10, help="Longest episode in turns.", range=COUNT)
    max_tokens_per_step: int | None = option(
        None,
        help="Longest response of one turn in tokens; `generating_args.max_new_tokens` may be less. Default: what the "
        "sequence leaves.",
        range=COUNT,
    )
    env_manager_cls: str = option(
        "trajectory",
        help="`trajectory`: an episode is one sample; `step`: each turn is one, with a window of what came before; or "
        "the import path of an environment manager of one's own.",
    )
    history_length: int = option(
        10, help="Turns before the present one that the prompt of a turn shows (`step` only).", range=NOT_NEGATIVE
    )
    keep_first_observation: bool = option(
        True, help="Begin each prompt with the episode's first observation, however long ago it was (`step` only)."
    )
    reset_timeout_seconds: float = option(60.0, help="Longest time of a reset.", range=POSITIVE)
    step_timeout_seconds: float = option(60.0, help="Longest time of a step.", range=POSITIVE)


@dataclass
class RawTurnsConfig:
    """What stands between the turns of a model without a chat template."""

    message_separator: str = option("\n", help="Text between messages that follow each other.")
    prompt_end: str = option("\n", help="Text between an observation and the response.")
    response_end: str = option("\n", help="Text between a response and the next observation.")


@dataclass
class EnvWorkersConfig:
    """The processes that hold the environments of training and validation."""

    num_workers: int = option(1, help="Worker processes.", range=COUNT)
    max_sessions: int = option(4096, help="Episodes in progress at most, over all workers.", range=COUNT)
    max_failed_starts: int = option(
        3, help="Worker processes in a row that do not start before the run fails.", range=COUNT
    )
    silence_timeout_seconds: float = option(
        60.0, help="A worker process that does not answer for this long is replaced.", range=POSITIVE
    )
    place_timeout_seconds: float = option(
        3600.0, help="Longest time that an episode waits for one of the `max_sessions` places.", range=POSITIVE
    )
    max_memory_growth_gib: float = option(
        4.0, help="A worker process whose memory grew by more is replaced when its episodes have ended.", range=POSITIVE
    )


PUBLICATION_CHAOS = ("delay_publication", "corrupt_bucket")
"""Kinds of chaos that happen to a publication, not to a process."""


@dataclass
class ChaosEvent:
    """Something bad that happens once in the life of a run."""

    kind: Literal["kill", "freeze", "fill_disk", "delay_publication", "corrupt_bucket"] = option(
        "kill",
        help="`kill` (SIGKILL), `freeze` (SIGSTOP) or `fill_disk` (no file grows beyond 16 KiB any more) a process; "
        "`delay_publication` or `corrupt_bucket` (one byte changes on the way) for the weights of a version.",
    )
    at_step: int = option(
        1, help="Once so many training steps are over; of a publication: the version of this number.", range=COUNT
    )
    role: str = option(
        "actor_train",
        help="Whose process (`kill`, `freeze`, `fill_disk`): `driver`, `actor_train`, `actor_infer`, `reference`, "
        "`critic`, or `rewards.<name>` of a reward model.",
    )
    rank: int = option(0, help="Which of its processes.", range=NOT_NEGATIVE)
    seconds: float | None = option(
        None, help="How long a publication is held back, or a process stands still. `freeze` without: for good.",
        range=POSITIVE,
    )


@dataclass
class ChaosConfig:
    """Harm on purpose, for tests of recovery only. See `docs/faults.md`."""

    enabled: bool = option(False, help="Has to be `true` for events to be accepted.")
    events: list[ChaosEvent] = option(factory=list, help="What happens, each once, however often the run is resumed.")


@dataclass
class PipelineConfig:
    """Keys that every pipeline has."""

    __pydantic_config__ = {"extra": "forbid"}

    pipeline: Literal["rlvr", "agentic"] = option("rlvr", help="Which pipeline runs: `rlvr` or `agentic`.")
    exp_name: str = option("run", help="Name of the experiment.")
    seed: int = option(42, help="Every random choice derives from it.", range=SEED)
    output_dir: str | None = option(
        None, help="Folder of the run. Default: `output/<exp_name>/<time>`, with a `latest` link."
    )
    pretrain: str = option("", help="Folder or hub name of the model that is trained.")
    reward_pretrain: str | None = option(None, help="Model of learned rewards.")
    cluster: ClusterConfig = option(factory=ClusterConfig, help="Devices and nodes.")

    max_steps: int = option(100, help="Training steps.", range=COUNT)
    save_steps: int = option(
        0,
        help="Write a checkpoint every n steps, with which an interrupted run goes on; 0: only the model, at the end.",
        range=NOT_NEGATIVE,
    )
    max_ckpt_to_keep: int = option(2, help="Checkpoints that stay; older ones are deleted. 0: all.", range=NOT_NEGATIVE)
    resume_from_checkpoint: bool | str = option(
        False,
        help="`true`: go on with the run in `output_dir` (without one: with the latest run of `exp_name`), or begin it "
        "if there is none; or the folder of a run, or of one of its checkpoints.",
    )
    accept_config_changes: bool = option(
        False, help="Resume although keys that decide what is learned have changed. The run lists them."
    )
    eval_steps: int = option(
        0, help="Validate every n steps (and before the first and after the last); 0: never.", range=NOT_NEGATIVE
    )
    logging_steps: int = option(
        1, help="Print a console line every n steps. `metrics.jsonl` always has each step.", range=COUNT
    )
    console_output: Literal["warnings", "all"] = option(
        "warnings",
        help="What the console shows of the processes of roles, with the role's name: warnings and errors, or `all` "
        "that they and their libraries write. It is in files in the run's `logs/` in either case.",
    )
    track_with: list[str] | str = option(
        factory=lambda: ["tensorboard"],
        help="Trackers beside `metrics.jsonl`: `wandb`, `swanlab`, `trackio`, or several in a list; TensorBoard is "
        "written in any case, but with an empty list. See `docs/trackers.md`.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = option(
        factory=dict,
        help="Options by tracker, such as `wandb: {project: sums, mode: offline}`. See `docs/trackers.md`.",
    )
    tracker_timeout_seconds: float = option(
        60.0, help="Longest wait for `wandb`, `swanlab`, `trackio` at the end of a run. Before it they cost no time.",
        range=Range(above=0, at_most=180),
    )
    num_logged_samples: int = option(
        4, help="Readable rollouts written to `samples.jsonl` per step and per validation.", range=NOT_NEGATIVE
    )

    rollout_batch_size: int = option(64, help="Groups (prompts, or environment seeds) per training step.", range=COUNT)
    prompt_length: int = option(
        512, help="Longest prompt in tokens; of an episode, what precedes its first response.", range=COUNT
    )
    response_length: int = option(
        512, help="Longest response in tokens; of an episode, all that follows its prompt.", range=COUNT
    )
    sequence_length: int | None = option(None, help="Longest prompt plus response. Default: their sum.", range=COUNT)

    async_generation_ratio: float = option(
        0.0, help="Groups generated ahead, in training steps: 0 is on-policy, 1 one step off, fractions are allowed.",
        range=NOT_NEGATIVE,
    )
    max_staleness: int | None = option(
        None,
        help="Oldest token trained on, in policy versions. Default: ceil(async_generation_ratio) + interval_steps - 1.",
        range=NOT_NEGATIVE,
    )
    consumption: Literal["ready_first", "fifo"] | None = option(
        None, help="Order in which finished groups are trained on. Default: `fifo` at ratio 0, else `ready_first`."
    )
    staleness_policy: Literal["wait", "drop"] = option(
        "wait", help="A group at its deadline is waited for, or dropped as `stale` (which favours short answers)."
    )
    max_group_retries: int = option(
        2, help="Attempts after the first for a group whose rollout failed.", range=NOT_NEGATIVE
    )
    max_consecutive_refunds: int = option(
        64, help="Groups dropped in a row, with none accepted in between, before the run fails.", range=COUNT
    )
    group_filter: Literal["none", "zero_variance"] = option(
        "none", help="`zero_variance` drops groups whose scores are all equal; each gives its slot back."
    )
    weight_update: WeightUpdateConfig = option(factory=WeightUpdateConfig, help="Weight publication.")
    stall_timeout_seconds: float = option(
        900.0, help="A run in which no stage makes progress for this long fails with a report of who waits for whom.",
        range=POSITIVE,
    )
    chaos: ChaosConfig = option(factory=ChaosConfig, help="Harm on purpose, for tests of recovery only.")
    stages: dict[str, str] = option(
        factory=dict,
        help="Stages of one's own: name of the stage replaced -> registered name or `package.module:Class`.",
    )

    actor_train: ActorTrainConfig = option(factory=ActorTrainConfig, help="The trained policy.")
    actor_infer: ActorInferConfig = option(factory=ActorInferConfig, help="The engine that generates.")
    reference: ReferenceConfig | None = option(
        None,
        help="The frozen reference policy. Needed for a KL term only. Where `actor_train` trains adapters (LoRA) of "
        "the same model, and this section names its devices or none, the reference is actor_train without them.",
    )
    critic: CriticConfig | None = option(
        None, help="The value model. Needed for `adv_estimator: gae` only; it begins as the policy with a new head."
    )
    critic_warmup: int = option(
        0, help="Training steps at the beginning in which only the critic learns.", range=NOT_NEGATIVE
    )
    value_clip: float | None = option(
        None,
        help="How far a value may move from the one before the first update on a batch and still learn; none: any far.",
        range=POSITIVE,
    )

    old_logprobs: Literal["behaviour", "recompute"] = option(
        "behaviour",
        help="What the ratio in the loss is taken against: the log-probabilities recorded when the tokens were "
        "sampled, or those the trainer recomputes before its first update on a batch. The latter see no staleness: "
        "correct it by `train_infer_correction` or `pg_variant: decoupled_ppo`.",
    )
    train_infer_correction: dict[str, Any] = option(
        factory=dict,
        help="Importance weights and rejection for the distance between the trainer before its first update on a batch "
        "and the policy that sampled. See `docs/algorithms/correction.md`.",
    )
    allow_uncorrected_off_policy: bool = option(
        False, help="Start although stale tokens would be trained on as if they were fresh (for experiments)."
    )

    mismatch_alarm: float | None = option(
        None,
        help="Largest `mismatch/abs_mean`: nats per token between trainer and engine at equal weights. See "
        "`docs/mismatch.md`.",
        range=POSITIVE,
    )
    mismatch_action: Literal["warn", "stop"] = option(
        "warn", help="What a step does whose mismatch is above `mismatch_alarm`: say so, or end the run."
    )

    reward_clip: float | None = option(
        None, help="Scores are clipped to plus and minus this before anything else.", range=POSITIVE
    )
    norm_mean_type: Literal["none", "group", "tag", "batch", "running"] = option(
        "none",
        help="Whose mean is subtracted from the rewards, before the advantage estimator sees them. `tag`: of all "
        "samples in the batch with the same domain tag.",
    )
    norm_std_type: Literal["none", "group", "tag", "batch", "running"] = option(
        "none", help="By whose standard deviation the rewards are divided."
    )
    length_penalty: LengthPenaltyConfig | None = option(None, help="A penalty on long responses.")
    max_len_mask: bool = option(False, help="Leave responses that were cut at their longest length out of the loss.")
    difficulty_mask: bool = option(
        False, help="Leave groups out of the loss whose mean score lies outside the two thresholds."
    )
    zero_variance_mask: bool = option(
        False, help="Leave groups of equal scores out of the loss, and so out of what it is divided by."
    )
    difficulty_low_threshold: float = option(0.0, help="Smallest mean score of a group kept.", range=ANY_FINITE)
    difficulty_high_threshold: float = option(1.0, help="Largest mean score of a group kept.", range=ANY_FINITE)
    adv_estimator: str = option("grpo", help="Advantage estimator: a name from `docs/algorithms/advantages.md`.")
    adv_estimator_args: dict[str, Any] = option(factory=dict, help="Knobs of the advantage estimator.")
    whiten_advantages: bool = option(False, help="Give the advantages of a batch mean 0 and deviation 1 over tokens.")
    advantage_clip: float | None = option(
        None, help="Advantages are clipped to plus and minus this, last of all.", range=POSITIVE
    )
    ppo_epochs: int = option(1, help="Passes over each batch.", range=COUNT)
    loss_agg_mode: LossAggregation = option("token-mean", help="How per-token losses become one number.")
    use_kl_loss: bool = option(False, help="Add the KL divergence to the reference to the loss.")
    kl_loss_coef: float = option(0.001, help="Weight of the KL loss.", range=NOT_NEGATIVE)
    add_token_level_kl: bool = option(False, help="Subtract the KL divergence to the reference from the token rewards.")
    init_kl_coef: float = option(0.01, help="Weight of the KL penalty in the rewards, at first.", range=NOT_NEGATIVE)
    kl_controller: Literal["fixed", "adaptive"] = option(
        "fixed", help="Whether that weight stays, or is steered so that the KL divergence meets `target_kl`."
    )
    target_kl: float = option(0.1, help="Nats per response that the adaptive controller aims at.", range=POSITIVE)
    kl_horizon: int = option(10000, help="Samples over which the adaptive controller acts.", range=COUNT)
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k3_straight_through"] = option(
        "k3", help="Per-token KL estimator."
    )
    entropy_loss_coef: float = option(0.0, help="Weight of the entropy bonus.", range=NOT_NEGATIVE)


@dataclass
class RLVRConfig(PipelineConfig):
    """Prompts with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", help="Which pipeline runs.")
    val_batch_size: int = option(256, help="Validation requests in flight at a time.", range=COUNT)
    num_return_sequences_in_group: int = option(8, help="Samples per prompt in training.", range=COUNT)
    is_num_return_sequences_expand: bool = option(
        True, help="Send the samples of a group as separate requests, which may run on different replicas."
    )
    rewards: dict[str, RewardConfig] = option(factory=dict, help="Verifiers by name.")
    validation: ValidationConfig | None = option(None, help="Validation prompts. Needed with `eval_steps`.")


@dataclass
class AgenticConfig(PipelineConfig):
    """Multi-turn episodes in environments."""

    pipeline: Literal["agentic"] = option("agentic", help="Which pipeline runs.")
    template: Literal["chat", "raw"] = option(
        "chat",
        help="`chat`: the tokenizer's chat template writes what stands between turns; `raw`: observations follow "
        "responses as text, see `raw_turns`.",
    )
    chat_template_kwargs: dict[str, Any] = option(
        factory=dict, help="Variables of the chat template, such as `enable_thinking: false`."
    )
    raw_turns: RawTurnsConfig = option(factory=RawTurnsConfig, help="Between the turns of `template: raw`.")
    custom_envs: dict[str, CustomEnvConfig] = option(factory=dict, help="Kinds of environments by tag.")
    train_env_manager: EnvManagerConfig = option(
        factory=lambda: EnvManagerConfig(group_size=8), help="Environments of training."
    )
    val_env_manager: EnvManagerConfig | None = option(
        None, help="Environments of validation. Needed with `eval_steps`."
    )
    validation: ValidationSettings = option(factory=ValidationSettings, help="Sampling of validation.")
    env_workers: EnvWorkersConfig = option(factory=EnvWorkersConfig, help="Processes that hold the environments.")
    episode_reward_weight: float | None = option(
        None,
        help="Weight of the episode's reward, given at its last token. Default: 1, or 0 for estimators that count in "
        "turns.",
        range=NOT_NEGATIVE,
    )
    step_reward_weight: float | None = option(
        None,
        help="Weight of each turn's own reward, given at the turn's last token. Default: 0, or 1 for estimators that "
        "count in turns.",
        range=NOT_NEGATIVE,
    )


ROLES = ("actor_train", "actor_infer", "reference", "critic")
"""Roles that run a model on devices."""
TRAINED_ROLES = ("actor_train", "critic")
"""Those of them that learn."""
STRATEGIES_OF_ROLES = {
    "actor_train": TRAIN_STRATEGIES,
    "actor_infer": INFER_STRATEGIES,
    "reference": TRAIN_STRATEGIES + FORWARD_STRATEGIES,
    "critic": TRAIN_STRATEGIES,
}
"""What `strategy_args.strategy_name` may say."""

TRAINING_ONLY_KEYS = (
    "training_args",
    "data_args",
    "use_dynamic_batching_in_train",
    "max_tokens_per_microbatch_in_train",
)
FORWARD_ONLY_KEYS = ("infer_batch_size", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer")
UNREAD_KEYS: dict[str, tuple[str, ...]] = {
    "actor_train": ("generating_args",),
    "actor_infer": TRAINING_ONLY_KEYS + FORWARD_ONLY_KEYS + ("use_sequence_packing",),
    "reference": TRAINING_ONLY_KEYS + ("generating_args",),
    "critic": ("generating_args", "data_args"),
}
"""Keys that each role has by its type and that nothing reads there; setting one is an error."""
UNREAD_PATHS = tuple(f"{role}.{key}" for role, keys in UNREAD_KEYS.items() for key in keys)
"""Paths of these keys; neither documented nor suggested."""
