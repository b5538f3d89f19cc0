"""The keys of a run, and those of each pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.environments import CustomEnvConfig, EnvManagerConfig, EnvWorkersConfig, RawTurnsConfig
from roll.configs.fields import ANY_FINITE, COUNT, NOT_NEGATIVE, POSITIVE, SEED, LossAggregation, Range, option
from roll.configs.plugins import Kind, PlugIn
from roll.configs.rewards import LengthPenaltyConfig, RewardConfig
from roll.configs.roles import (
    ActorInferConfig,
    ActorTrainConfig,
    CriticConfig,
    ReferenceConfig,
    ValidationConfig,
    ValidationSettings,
)

PUBLICATION_CHAOS = ("delay_publication", "corrupt_bucket")
"""Kinds of faults that affect a weight update, not a process."""

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
)
"""Trackers with a process of their own; see `roll.tracking.plugins.process.TrackerPlugIn`."""


@dataclass
class ChaosEvent:
    """A fault that is injected once in the life of a run."""

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
        None,
        help="How long a publication is held back, or a process stands still. `freeze` without: for good.",
        range=POSITIVE,
    )


@dataclass
class ChaosConfig:
    """Fault injection, for tests of recovery only. See `docs/faults.md`."""

    enabled: bool = option(False, help="Has to be `true` for events to be accepted.")
    events: list[ChaosEvent] = option(factory=list, help="What happens, each once, however often the run is resumed.")


@dataclass
class ClusterConfig:
    """The devices of the run."""

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
class RestartsConfig:
    """Automatic restarts of a failed run from its newest checkpoint. See `docs/checkpoints.md`."""

    max_in_a_row: int = option(
        0,
        help="Restarts in a row, without a new checkpoint in between, before the run stays failed; 0: it stays failed "
        "at once. Needs `save_steps`.",
        range=NOT_NEGATIVE,
    )
    synchronous_after: int | None = option(
        None,
        help="After so many failures in a row the run goes on with `async_generation_ratio: 0` to its last step, and "
        "says so. Default: never.",
        range=COUNT,
    )
    delay_seconds: float = option(5.0, help="Wait before a restart.", range=Range(at_least=0, at_most=300))


@dataclass
class WeightUpdateConfig:
    """Transfer of new weights to the engines."""

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
class InsertedStage:
    """A stage of one's own beside a built-in one. Its key is its name."""

    use: str = option("", help="The stage: an import path `package.module:function`, or a name that a package gives.")
    after: str | None = option(None, help="The stage whose batches it gets.")
    before: str | None = option(None, help="The stage that gets its batches; in place of `after`.")


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
    restarts: RestartsConfig = option(factory=RestartsConfig, help="Whether a failed run begins again by itself.")
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
        60.0,
        help="Longest wait for `wandb`, `swanlab`, `trackio` at the end of a run. Before it they cost no time.",
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
        0.0,
        help="Groups generated ahead, in training steps: 0 is on-policy, 1 one step off, fractions are allowed.",
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
        900.0,
        help="A run in which no stage makes progress for this long fails with a report of who waits for whom.",
        range=POSITIVE,
    )
    chaos: ChaosConfig = option(factory=ChaosConfig, help="Faults injected on purpose, for tests of recovery only.")
    stages: dict[str, str | InsertedStage] = option(
        factory=dict,
        help="Stages of one's own: `advantage: package.module:function` replaces a built-in one, and "
        "`keep_hard: {after: rollout, use: package.module:function}` inserts one. See `docs/howto/stage.md`.",
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
    adv_estimator_args: dict[str, Any] = option(factory=dict, help="Arguments of the advantage estimator.")
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
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k3_straight_through"] = option("k3", help="Per-token KL estimator.")
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
