"""The keys of a run, and those of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from roll.configs.fields import (
    Count,
    Finite,
    LossAggregation,
    Natural,
    NotNegative,
    Nucleus,
    Positive,
    Range,
    Seed,
    option,
)
from roll.configs.plugins import Kind, PlugIn
from roll.configs.rewards import LengthPenaltyConfig, RepetitionPenaltyConfig, RewardConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorLogpConfig,
    ActorTrainConfig,
    PictureInferConfig,
    PictureReferenceConfig,
    PictureSampling,
    PictureTrainConfig,
    ReferenceConfig,
    SupervisedTrainConfig,
    SupervisedValidationConfig,
    TeacherConfig,
    ValidationConfig,
    ValidationSettings,
    WorkerConfig,
)

PUBLICATION_CHAOS = ("delay_publication", "corrupt_bucket")
"""Kinds of faults that affect a weight update, not a process."""
LARGEST_DELTA = 0.5
"""Largest share of the bytes of all weights that is sent as a delta; above it they are sent whole."""

TENSORBOARD = "tensorboard"
"""The tracker that the driver writes itself."""
TRACKERS = Kind(
    "tracker",
    "roll.trackers",
    {
        "swanlab": PlugIn("roll.tracking.plugins.libraries:SwanlabPlugIn"),
        "trackio": PlugIn("roll.tracking.plugins.libraries:TrackioPlugIn"),
        "wandb": PlugIn("roll.tracking.plugins.libraries:WandbPlugIn"),
    },
    PlugIn,
    "package.module:Class",
    members=("Options", "package", "install", "secret", "mode", "log", "finish"),
)
"""Trackers with a process of their own; see `roll.tracking.plugins.process.TrackerPlugIn`."""


@dataclass
class ChaosEvent:
    """A fault that is injected once in the life of a run."""

    kind: Literal["kill", "freeze", "fill_disk", "delay_publication", "corrupt_bucket"] = option(
        "kill",
        "`kill` (SIGKILL), `freeze` (SIGSTOP) or `fill_disk` (no file grows beyond 16 KiB any more) a process; "
        "`delay_publication` or `corrupt_bucket` (one byte changes on the way) for the weights of a version.",
    )
    at_step: Count = option(1, "Once so many training steps are over; of a publication: the version of this number.")
    role: str = option(
        "actor_train",
        "Role whose process is hit (`kill`, `freeze`, `fill_disk`): `driver`, `actor_train`, `actor_infer`, "
        "`actor_logp`, `reference`, `teacher`, `critic`, or `rewards.<name>` of a reward model.",
    )
    rank: Natural = option(0, "Rank of the process within its role.")
    seconds: Positive | None = option(
        None, "Seconds that a weight update is held back or a process is frozen. Default of `freeze`: forever."
    )


@dataclass
class ChaosConfig:
    """Fault injection, for tests of recovery only. See `docs/faults.md`."""

    enabled: bool = option(False, "Has to be `true` for events to be accepted.")
    events: list[ChaosEvent] = option(list, "Faults to inject. Each happens once, also in a run that is resumed.")


@dataclass
class ClusterConfig:
    """The devices of the run."""

    device: Literal["cpu", "cuda"] = option(
        "cpu", "Kind of device that `device_mapping` numbers: CPU slots or CUDA GPUs."
    )
    num_devices_per_node: Count = option(1, "Devices (CPU slots or GPUs) used on each node.")
    num_nodes: Count = option(1, "Nodes used. Device `i` lives on node `i // num_devices_per_node`.")
    shares: dict[str, float] = option(
        dict,
        "In place of `device_mapping`: the share of each node's devices that a role gets. `train` is for "
        "`actor_train`, and for `critic`, `reference` and `teacher` without a share of their own; `infer` is for "
        "`actor_infer`; others have the role's name. Whole devices, in the order written. See `docs/multi_node.md`.",
    )
    address: str | None = option(
        None, "Address of a running Ray cluster (`auto` or `host:port`). Empty: start a local one for this run."
    )
    device_memory_gib: Positive | None = option(
        None,
        "Memory of one GPU in GiB. With it, `roll check` and the start of a run say what will not fit.",
        needs="device: cuda",
    )
    device_tflops: Positive | None = option(
        None,
        "Peak of one device in 10^12 operations a second, of which `mfu/<role>` is a share. Default: NVIDIA's figure "
        "for dense bfloat16 by the GPU's name, for A100, H100, H800, H20, H200 and GB200; else no `mfu`.",
    )
    cpu_threads_per_device: Count | None = option(
        None, "Computing threads of a worker per CPU slot it owns. Default: cores of the node / slots of the node."
    )
    worker_start_timeout_seconds: Positive = option(
        300.0, "Longest wait for a worker to start and load its model before the run fails."
    )


@dataclass
class RestartsConfig:
    """Automatic restarts of a failed run from its newest checkpoint. See `docs/checkpoints.md`."""

    max_in_a_row: Natural = option(
        0,
        "Restarts in a row, without a new checkpoint in between, before the run stays failed; 0: it stays failed at "
        "once. Needs `save_steps`.",
    )
    synchronous_after: Count | None = option(
        None,
        "After so many failures in a row the run goes on with `async_generation_ratio: 0` to its last step, and says "
        "so. Default: never.",
        needs="max_in_a_row",
    )
    delay_seconds: Annotated[float, Range(at_least=0, at_most=300)] = option(
        5.0, "Wait before a restart.", needs="max_in_a_row"
    )


@dataclass
class WeightUpdateConfig:
    """Transfer of new weights to the engines."""

    interval_steps: Count = option(1, "Publish weights every n training steps.")
    content: Literal["full", "adapter", "delta"] = option(
        "full",
        "Content of a weight update. `full`: all weights, with adapters (LoRA) merged; every engine takes them, and "
        "computes at full speed, but in bfloat16 or float16 rounding loses most of a small adapter. `adapter`: the "
        "adapters alone, about a hundredth of the bytes; `hf_infer`, `diffusers_infer` and `vllm` add them to the base "
        "that they have loaded. `delta`: what changed in all weights since the last update, which each replica keeps "
        "on its host. It pays for engines in bfloat16 or float16 on other hosts, at a small learning rate.",
    )
    full_every: Natural = option(
        100,
        "One of n weight updates is sent whole; 0: only the first one of a trainer's process.",
        needs="content: delta",
    )
    mode: Literal["push", "pull"] = option(
        "push",
        "`push`: a publication is brought to the replicas at once, and groups start with it when all have it. `pull`: "
        "each replica takes the newest one when it has no request, or after `pull_after_seconds`; groups start with "
        "the version of the oldest replica.",
    )
    pull_after_seconds: NotNegative = option(
        30.0, "Longest time for which a replica with requests stays behind the newest publication.", needs="mode: pull"
    )
    in_flight: Literal["keep", "resume", "drain"] = option(
        "keep",
        "Requests running at an update: `keep` freezes them and goes on with their caches, `resume` continues them "
        "from prefix plus partial tokens with new caches, `drain` lets them finish first.",
    )
    transport: Literal["auto", "shared_memory", "object_store", "checkpoint", "nccl", "cuda_ipc"] = option(
        "auto",
        "Transport of the weights: `shared_memory` (one host), Ray's `object_store`, `checkpoint` (files on a disk "
        "that all hosts see), or by vLLM's own transfer from GPU to GPU: `nccl` (devices apart), `cuda_ipc` (the same "
        "devices). `auto`: shared memory on Linux if trainer and engines are on one node, else the object store.",
    )
    max_unavailable: Nucleus = option(
        0.25,
        "Share of the replicas that may take new weights at the same time, at least one replica; the others generate. "
        "With `nccl` and `cuda_ipc` one at a time.",
    )
    dual_buffer: bool = option(
        True,
        "Two buffers: a training step's weights are copied into one while engines use or load those in the other. One "
        "buffer takes half the memory; then each engine copies the weights out of it. With `cuda_ipc` there is always "
        "one: it is on the devices, where trainer and engines take turns.",
    )
    param_update_gather_bucket_size_mb: Positive = option(
        256.0, "Largest bucket that the trainer packs, in MiB (a larger tensor gets its own)."
    )
    param_update_load_bucket_size_mb: Positive = option(
        256.0, "Most weights that an engine is handed at a time, in MiB."
    )
    checkpoint_dir: str | None = option(
        None,
        "Folder for the transport `checkpoint`, seen by all hosts; what is written there is deleted again. Default: in "
        "the run's own folder.",
        needs="transport: checkpoint",
    )
    timeout_seconds: Positive = option(
        600.0,
        "Longest time for a replica to take new weights (with `drain`: to end its requests, too), to sleep or to wake; "
        "then its process is replaced.",
    )
    canary_interval: Natural = option(
        10,
        "The log-probabilities of fixed sequences are compared between trainer and engines at the first publication "
        "and every n; 0: never.",
    )
    canary_prompts: Annotated[int, Range(at_least=1, at_most=1024)] = option(
        8,
        "Canary sequences: training prompts, each followed by pseudo-random tokens up to 64 in all; of pictures "
        "denoising steps from pseudo-random latents.",
        needs="canary_interval",
    )
    canary_tolerance: Positive | None = option(
        None,
        "Largest mean absolute difference in nats per token before the run stops. Default: 0.001 if trainer and engine "
        "compute in float32. In lower precision: 0.1, or twice what the first publication shows; one comparison above "
        "that is a warning, two in a row or one above 0.5 stop the run. Of pictures, relative to the "
        "log-probability: 0.0001, 0.001 and 0.1.",
        needs="canary_interval",
    )


@dataclass
class DistillationConfig:
    """Learning from `teacher` by the reverse KL divergence, at the tokens that the policy sampled."""

    use: Literal["advantages", "rewards", "loss"] = option(
        "advantages",
        "Place of the KL divergence. `advantages`: it is subtracted from the advantage of its token; `rewards`: from "
        "the reward of its token, so that it also counts against earlier tokens; `loss`: it is a term of the loss. "
        "See `docs/algorithms/distillation.md`.",
    )
    coef: Positive = option(1.0, "Weight of the divergence.")
    reward_coef: NotNegative = option(
        1.0,
        "Weight of the advantages (with `use: rewards`: of the rewards) of the task beside it. 0: the policy learns "
        "from the teacher alone, and `rewards` may be left out.",
    )


@dataclass
class InsertedStage:
    """A user's own stage beside a built-in one. Its key is its name."""

    use: str = option("", "The stage: an import path `package.module:function`, or a name that a package gives.")
    after: str | None = option(None, "The stage whose batches it gets.")
    before: str | None = option(None, "The stage that gets its batches; in place of `after`.")


@dataclass
class RunConfig:
    """Keys that every pipeline has."""

    __pydantic_config__ = {"extra": "forbid"}

    pipeline: Literal["rlvr", "agentic", "image", "sft"] = option(
        "rlvr", "Pipeline that runs: `rlvr`, `agentic`, `image` or `sft`."
    )
    exp_name: str = option("run", "Name of the experiment.")
    seed: Seed = option(42, "Every random choice derives from it.")
    on_control_tokens: Literal["plain", "refuse"] = option(
        "plain",
        "Treatment of texts that spell control tokens, such as `<|im_end|>` in a message of `template: chat`, an "
        "observation, a tool's answer or an agent's request. `plain`: they are read as text; `refuse`: the row is a "
        "configuration error, the episode ends, the request is refused. See `docs/agentic_tokens.md`.",
    )
    output_dir: str | None = option(
        None, "Folder of the run. Default: `output/<exp_name>/<time>`, with a `latest` link."
    )
    pretrain: str = option("", "Folder or hub name of the model that is trained.")
    cluster: ClusterConfig = option(ClusterConfig, "Devices and nodes.")

    max_steps: Count = option(100, "Training steps.")
    save_steps: Natural = option(
        0, "Write a checkpoint every n steps, with which an interrupted run goes on; 0: only the model, at the end."
    )
    max_ckpt_to_keep: Natural = option(2, "Checkpoints that stay; older ones are deleted. 0: all.")
    resume_from_checkpoint: bool | str = option(
        False,
        "`true`: go on with the run in `output_dir` (without one: with the latest run of `exp_name`), or begin it if "
        "there is none; or the folder of a run, or of one of its checkpoints.",
    )
    accept_config_changes: bool = option(
        False, "Resume although keys that decide what is learned have changed. The run lists them."
    )
    restarts: RestartsConfig = option(RestartsConfig, "Automatic restarts of a failed run.")
    eval_steps: Natural = option(0, "Validate every n steps (and before the first and after the last); 0: never.")
    logging_steps: Count = option(1, "Print a console line every n steps. `metrics.jsonl` always has each step.")
    console_output: Literal["warnings", "all"] = option(
        "warnings",
        "Output of the roles' processes on the console, with the role's name: warnings and errors, or `all` that they "
        "and their libraries write. The files in the run's `logs/` have all of it in either case.",
    )
    track_with: list[str] | str = option(
        lambda: ["tensorboard"],
        "Trackers beside `metrics.jsonl`: `wandb`, `swanlab`, `trackio`, or several in a list; TensorBoard is written "
        "in any case, but with an empty list. See `docs/trackers.md`.",
    )
    tracker_kwargs: dict[str, dict[str, Any]] = option(
        dict, "Options by tracker, such as `wandb: {project: sums, mode: offline}`. See `docs/trackers.md`."
    )
    tracker_timeout_seconds: Annotated[float, Range(above=0, at_most=180)] = option(
        60.0, "Longest wait for `wandb`, `swanlab`, `trackio` at the end of a run. Before it they cost no time."
    )
    stall_timeout_seconds: Positive = option(
        900.0, "A run in which no stage makes progress for this long fails with a report of who waits for whom."
    )
    loss_agg_mode: LossAggregation = option("token-mean", "Aggregation of the per-token losses to one number.")
    actor_train: WorkerConfig = option(WorkerConfig, "The trained model.")


@dataclass
class PipelineConfig(RunConfig):
    """Keys of every pipeline of reinforcement learning."""

    pipeline: Literal["rlvr", "agentic", "image"] = option("rlvr", "Pipeline that runs: `rlvr`, `agentic` or `image`.")
    reward_pretrain: str | None = option(None, "Model of learned rewards.")
    num_logged_samples: Natural = option(4, "Readable rollouts written to `samples.jsonl` per step and per validation.")

    rollout_batch_size: Count = option(64, "Groups (prompts, or environment seeds) per training step.")
    prompt_length: Count = option(512, "Longest prompt in tokens; of an episode, what precedes its first response.")
    response_length: Count = option(512, "Longest response in tokens; of an episode, all that follows its prompt.")
    sequence_length: Count | None = option(None, "Longest prompt plus response. Default: their sum.")

    async_generation_ratio: NotNegative = option(
        0.0, "Groups generated ahead, in training steps: 0 is on-policy, 1 one step off, fractions are allowed."
    )
    max_staleness: Natural | None = option(
        None, "Oldest token trained on, in policy versions. Default: ceil(async_generation_ratio) + interval_steps - 1."
    )
    consumption: Literal["ready_first", "fifo"] | None = option(
        None, "Order in which finished groups are trained on. Default: `fifo` at ratio 0, else `ready_first`."
    )
    staleness_policy: Literal["wait", "drop"] = option(
        "wait", "A group at its deadline is waited for, or dropped as `stale` (which favours short answers)."
    )
    max_group_retries: Natural = option(2, "Attempts after the first for a group whose rollout failed.")
    max_consecutive_refunds: Count = option(
        64, "Groups dropped in a row, with none accepted in between, before the run fails."
    )
    group_filter: Literal["none", "zero_variance"] = option(
        "none", "`zero_variance` drops groups whose scores are all equal; each gives its slot back."
    )
    weight_update: WeightUpdateConfig = option(WeightUpdateConfig, "Weight publication.")
    chaos: ChaosConfig = option(ChaosConfig, "Faults injected on purpose, for tests of recovery only.")
    stages: dict[str, str | InsertedStage] = option(
        dict,
        "Stages of one's own: `advantage: package.module:function` replaces a built-in one, and `keep_hard: {after: "
        "rollout, use: package.module:function}` inserts one. See `docs/howto/stage.md`.",
    )

    actor_train: ActorTrainConfig = option(ActorTrainConfig, "The trained policy.")
    actor_infer: ActorInferConfig = option(ActorInferConfig, "The engine that generates.")
    actor_logp: ActorLogpConfig | None = option(
        None,
        "Devices on which the log-probabilities before the first update on a batch (`old_logprobs: recompute`, "
        "`train_infer_correction`) are computed, beside the training. The role gets every version of actor_train's "
        "weights. Without this section, or without a `device_mapping` in it, actor_train computes them itself.",
    )
    reference: ReferenceConfig | None = option(
        None,
        "The frozen reference policy. Needed for a KL term only. If `actor_train` trains adapters (LoRA) of the same "
        "model, and this section names the same devices or none, the reference is actor_train with its adapters "
        "switched off.",
    )
    teacher: TeacherConfig | None = option(
        None,
        "A model that the policy learns from, as `distillation` says. It has the policy's tokens. Without a model of "
        "its own it is `pretrain`.",
    )
    critic: WorkerConfig | None = option(
        None, "The value model. Needed for `adv_estimator: gae` only; it begins as the policy with a new head."
    )
    critic_warmup: Natural = option(
        0, "Training steps at the beginning in which only the critic learns.", needs="critic"
    )
    value_clip: Positive | None = option(
        None,
        "Largest distance that a value may move from the one before the first update on a batch; beyond it, it no "
        "longer learns. Default: unlimited.",
        needs="critic",
    )

    old_logprobs: Literal["behaviour", "recompute"] = option(
        "behaviour",
        "Denominator of the ratio in the loss: the log-probabilities recorded when the tokens were sampled, or those "
        "the trainer recomputes before its first update on a batch. The latter see no staleness: correct it by "
        "`train_infer_correction` or `pg_variant: decoupled_ppo`.",
    )
    train_infer_correction: dict[str, Any] = option(
        dict,
        "Importance weights and rejection for the distance between the trainer before its first update on a batch and "
        "the policy that sampled. See `docs/algorithms/correction.md`.",
    )
    allow_uncorrected_off_policy: bool = option(
        False, "Start although stale tokens would be trained on as if they were fresh (for experiments)."
    )

    mismatch_alarm: Positive | None = option(
        None,
        "Largest `mismatch/abs_mean`: nats per token between trainer and engine at equal weights. See "
        "`docs/mismatch.md`.",
    )
    mismatch_action: Literal["warn", "stop"] = option(
        "warn",
        "Reaction to a mismatch above `mismatch_alarm`: a warning, or the end of the run.",
        needs="mismatch_alarm",
    )

    reward_clip: Positive | None = option(None, "Scores are clipped to plus and minus this before anything else.")
    norm_mean_type: Literal["none", "group", "tag", "batch", "running"] = option(
        "none",
        "Samples whose mean is subtracted from the rewards, before the advantage estimator sees them. `tag`: all "
        "samples in the batch with the same domain tag.",
    )
    norm_std_type: Literal["none", "group", "tag", "batch", "running"] = option(
        "none", "Samples by whose standard deviation the rewards are divided."
    )
    length_penalty: LengthPenaltyConfig | None = option(None, "A penalty on long responses.")
    repetition_penalty: RepetitionPenaltyConfig | None = option(None, "A penalty on responses that repeat themselves.")
    max_len_mask: bool = option(False, "Leave responses that were cut at their longest length out of the loss.")
    difficulty_mask: bool = option(
        False, "Leave groups out of the loss whose mean score lies outside the two thresholds."
    )
    zero_variance_mask: bool = option(
        False, "Leave groups of equal scores out of the loss, and so out of what it is divided by."
    )
    difficulty_low_threshold: Finite = option(
        0.0, "Smallest mean score of a group kept.", needs="difficulty_mask: true"
    )
    difficulty_high_threshold: Finite = option(
        1.0, "Largest mean score of a group kept.", needs="difficulty_mask: true"
    )
    adv_estimator: str = option("grpo", "Advantage estimator: a name from `docs/algorithms/advantages.md`.")
    adv_estimator_args: dict[str, Any] = option(dict, "Arguments of the advantage estimator.")
    whiten_advantages: bool = option(False, "Give the advantages of a batch mean 0 and deviation 1 over tokens.")
    advantage_clip: Positive | None = option(None, "Advantages are clipped to plus and minus this, last of all.")
    ppo_epochs: Count = option(1, "Passes over each batch.")
    sample_weight: str | None = option(
        None,
        "Name of the number that multiplies the loss of a sample: a number that its verifier or environment returns "
        "beside the score, or else a field of the prompt's row. Default: all samples weigh 1.",
    )
    use_kl_loss: bool = option(False, "Add the KL divergence to the reference to the loss.")
    kl_loss_coef: NotNegative = option(0.001, "Weight of the KL loss.", needs="use_kl_loss: true")
    add_token_level_kl: bool = option(False, "Subtract the KL divergence to the reference from the token rewards.")
    init_kl_coef: NotNegative = option(
        0.01, "Weight of the KL penalty in the rewards, at first.", needs="add_token_level_kl: true"
    )
    kl_controller: Literal["fixed", "adaptive"] = option(
        "fixed",
        "`fixed`: `init_kl_coef` stays; `adaptive`: it is adjusted so that the KL divergence meets `target_kl`.",
        needs="add_token_level_kl: true",
    )
    target_kl: Positive = option(
        0.1, "Nats per response that the adaptive controller aims at.", needs="kl_controller: adaptive"
    )
    kl_horizon: Count = option(
        10000, "Samples over which the adaptive controller acts.", needs="kl_controller: adaptive"
    )
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k3_straight_through"] = option("k3", "Per-token KL estimator.")
    entropy_loss_coef: NotNegative = option(
        0.0, "Weight of the entropy bonus, over the tokens of the loss: rejected ones get none."
    )
    distillation: DistillationConfig | None = option(None, "On-policy distillation from `teacher`.")


@dataclass
class PromptConfig(PipelineConfig):
    """Keys of the pipelines whose groups are samples of a prompt, each judged by a reward."""

    pipeline: Literal["rlvr", "image"] = option("rlvr", "Pipeline that runs: `rlvr` or `image`.")
    val_batch_size: Count = option(256, "Validation requests in flight at a time.", needs="validation")
    num_return_sequences_in_group: Count = option(8, "Samples per prompt in training.")
    is_num_return_sequences_expand: bool = option(
        True, "Send the samples of a group as separate requests, which may run on different replicas."
    )
    rewards: dict[str, RewardConfig] = option(dict, "Verifiers by name.")
    validation: ValidationConfig | None = option(None, "Validation prompts. Needed with `eval_steps`.")


@dataclass
class RLVRConfig(PromptConfig):
    """Prompts with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Pipeline that runs.")


@dataclass
class ImageConfig(PromptConfig):
    """Pictures drawn by a flow-matching model. It has the keys of `rlvr`, and these. See `docs/images.md`."""

    pipeline: Literal["image"] = option("image", "Pipeline that runs.")
    prompt_length: Count = option(77, "Longest prompt in tokens of the model's first tokenizer.")
    sampling: PictureSampling = option(PictureSampling, "Settings of the sampler.")
    actor_train: PictureTrainConfig = option(PictureTrainConfig, "The model that is trained.")
    actor_infer: PictureInferConfig = option(PictureInferConfig, "The engine that draws.")
    reference: PictureReferenceConfig | None = option(
        None,
        "The frozen reference model, for `use_kl_loss`. If `actor_train` trains adapters (LoRA), and this section "
        "names the same devices or none, the reference is actor_train with its adapters switched off.",
    )


@dataclass
class EnvManagerConfig:
    """A set of environments: number, kinds and grouping of their episodes."""

    num_env_groups: Count | None = option(
        None,
        "Training: groups of episodes that run at once; default: all that may have started. Validation: groups in all, "
        "one seed each.",
    )
    group_size: Count = option(1, "Episodes of one group; they share tag and seed.")
    group_size_redundancy: Natural = option(
        0,
        "Episodes of a group that may fail (environment raised, hung, died): each is replaced by a new one. Unlike in "
        "ROLL they do not start with the others, so slow episodes are not left out for being slow.",
    )
    tags: list[str] = option(list, "Tags of `custom_envs` used. Default: all, in their order.")
    num_groups_partition: list[int] = option(
        list, "Groups of each tag in one cycle of groups, whose length is the sum of these numbers. Default: 1 each."
    )
    max_traj_per_env: Count | None = option(
        None,
        "Groups that one of the `num_env_groups` plays in a training step at most, in the mean; a configuration that "
        "needs more is refused.",
        needs="num_env_groups",
    )
    format_penalty: Annotated[float, Range(at_most=0)] = option(
        0.0, "Added to the reward of a turn whose action is not valid: 0 or less."
    )


AGENTS = ("agent", "verifiers")
"""Environments whose agents request the policy's turns over HTTP."""


@dataclass
class CustomEnvConfig:
    """One kind of environment; the key under `custom_envs` is its tag."""

    env_type: str = option(
        "",
        "A built-in environment, a gymnasium id, the name of an entry point of the group `roll.environments`, or an "
        "import path `package.module:Class`. See `docs/environments.md`.",
    )
    env_config: dict[str, Any] = option(dict, "Keyword arguments of the environment.")
    tools: list[str | dict[str, Any]] = option(
        list,
        "Tools that the policy may call in the environment, whatever it is: names, import paths, or mappings of `tool` "
        "and its options. See `docs/tools.md`.",
    )
    tool_settings: dict[str, Any] = option(
        dict, "Format in which the `tools` are offered and called. See `docs/tools.md`."
    )
    max_steps: Count = option(10, "Longest episode in turns; an agent's requests beyond them are refused.")
    max_tokens_per_step: Count | None = option(
        None,
        "Longest response of one turn in tokens; `generating_args.max_new_tokens` may be less. Default: what the "
        "sequence leaves.",
    )
    env_manager_cls: str = option(
        "",
        "`trajectory`: an episode is one sample; `step`: each turn is one, with a window of what came before; `agent`: "
        "an agent asks for turns by HTTP (see `docs/agents.md`); or the import path of an environment manager of one's "
        "own. Default: `agent` for the environments `agent` and `verifiers`, else `trajectory`.",
    )
    history_length: Natural = option(10, "Turns before the present one that the prompt of a turn shows (`step` only).")
    keep_first_observation: bool = option(
        True, "Begin each prompt with the episode's first observation, however long ago it was (`step` only)."
    )
    reset_timeout_seconds: Positive = option(60.0, "Longest time of a reset.")
    step_timeout_seconds: Positive = option(60.0, "Longest time of a step; of an agent, without a turn being sampled.")

    def __post_init__(self) -> None:
        if not self.env_manager_cls:
            self.env_manager_cls = "agent" if self.env_type in AGENTS else "trajectory"


@dataclass
class RawTurnsConfig:
    """Text between the turns of an episode, for a model without a chat template."""

    message_separator: str = option("\n", "Text between messages that follow each other.")
    prompt_end: str = option("\n", "Text between an observation and the response.")
    response_end: str = option("\n", "Text between a response and the next observation.")


@dataclass
class EnvWorkersConfig:
    """The processes that hold the environments of training and validation."""

    num_workers: Count = option(1, "Worker processes.")
    max_sessions: Count = option(4096, "Episodes in progress at most, over all workers.")
    max_failed_starts: Count = option(3, "Worker processes in a row that do not start before the run fails.")
    silence_timeout_seconds: Positive = option(60.0, "A worker process that does not answer for this long is replaced.")
    place_timeout_seconds: Positive = option(
        3600.0, "Longest time that an episode waits for one of the `max_sessions` places."
    )
    max_memory_growth_gib: Positive = option(
        4.0, "A worker process whose memory grew by more is replaced when its episodes have ended."
    )


@dataclass
class AgenticConfig(PipelineConfig):
    """Multi-turn episodes in environments."""

    pipeline: Literal["agentic"] = option("agentic", "Pipeline that runs.")
    template: Literal["chat", "raw"] = option(
        "chat",
        "`chat`: the tokenizer's chat template writes what stands between turns; `raw`: observations follow responses "
        "as text, see `raw_turns`.",
    )
    chat_template_kwargs: dict[str, Any] = option(
        dict, "Variables of the chat template, such as `enable_thinking: false`.", needs="template: chat"
    )
    raw_turns: RawTurnsConfig = option(RawTurnsConfig, "Between the turns of `template: raw`.", needs="template: raw")
    custom_envs: dict[str, CustomEnvConfig] = option(dict, "Kinds of environments by tag.")
    train_env_manager: EnvManagerConfig = option(lambda: EnvManagerConfig(group_size=8), "Environments of training.")
    val_env_manager: EnvManagerConfig | None = option(None, "Environments of validation. Needed with `eval_steps`.")
    validation: ValidationSettings = option(ValidationSettings, "Sampling of validation.", needs="val_env_manager")
    env_workers: EnvWorkersConfig = option(EnvWorkersConfig, "Processes that hold the environments.")
    episode_reward_weight: NotNegative | None = option(
        None,
        "Weight of the episode's reward, given at its last token. Default: 1, or 0 for estimators that count in turns.",
    )
    step_reward_weight: NotNegative | None = option(
        None,
        "Weight of each turn's own reward, given at the turn's last token. Default: 0, or 1 for estimators that count "
        "in turns.",
    )


@dataclass
class SFTConfig(RunConfig):
    """Supervised fine-tuning: the responses of examples are learned token by token. See `docs/sft.md`."""

    pipeline: Literal["sft"] = option("sft", "Pipeline that runs.")
    epochs: Count | None = option(
        None, "Passes over the examples, in place of `max_steps`; a last batch is filled up from the next pass."
    )
    train_batch_size: Count = option(64, "Examples per training step, which is one optimizer step.")
    sequence_length: Count = option(1024, "Longest example in tokens, prompt and response together.")
    actor_train: SupervisedTrainConfig = option(SupervisedTrainConfig, "The model that is fine-tuned.")
    validation: SupervisedValidationConfig | None = option(
        None, "Examples whose loss is measured. Needed with `eval_steps`."
    )
