"""Translation of slime's flags, including those of Megatron and SGLang; agrees with `docs/migration/slime.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roll.configs.dialects.rules import (
    RETURN_ARGUMENTS,
    Path,
    Translation,
    in_epochs,
    later,
    lost,
    none,
    table,
    to,
    translation,
    whole,
)

ORIGIN = "slime"
_OPTIONS = "actor_train.strategy_args.strategy_config"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_MODEL = "the model's own files say it"
_TRAINERS = "the trainer's own affair"
_SCHEDULER = "the scheduler's own affair"

_MODEL_FLAGS = (
    "swiglu num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups "
    "use-rotary-position-embeddings disable-bias-linear add-qkv-bias normalization norm-epsilon rotary-base "
    "rotary-percent rotary-scaling-factor vocab-size kv-channels qk-layernorm qk-layernorm-hidden-dim "
    "untie-embeddings-and-output-weights position-embedding-type num-experts spec make-vocab-size-divisible-by "
    "attention-output-gate post-self-attn-layernorm post-mlp-layernorm padded-vocab-size model-name moe-* "
    "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim apply-layernorm-1p"
)
_TRAINER_FLAGS = (
    "attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend "
    "optimizer bf16 overlap-cpu-optimizer-d2h-h2d optimizer-cpu-offload use-precision-aware-optimizer "
    "decoder-last-pipeline-num-layers no-check-for-nan-in-loss-and-grad train-env-vars megatron-to-hf-mode "
    "deterministic-mode use-distributed-optimizer log-probs-chunk-size train-memory-margin-bytes offload* "
    "distributed-backend distributed-timeout-minutes recompute-loss-function transformer-impl cross-entropy-* "
    "grad-reduce-in-bf16 overlap-grad-reduce overlap-param-gather data-pad-size-multiplier train-backend"
)
_SCHEDULER_FLAGS = (
    "balance-data balance-by-flops over-sampling-batch-size over-sampling-filter-path use-fault-tolerance "
    "rollout-health-check-* num-gpus-per-node rollout-data-transport update-weight-transport update-weight-mode "
    "use-distributed-post buffer-filter-path rollout-skip-special-tokens start-rollout-id async-save "
    "sglang-server-concurrency sglang-router-* use-slime-router log-passrate log-multi-turn log-reward-category "
    "skip-eval-before-train rollout-global-dataset"
)

_TABLE = {
    "entry": later(),
    "hf-checkpoint": to("pretrain"),
    "ref-load": none("the reference starts as `pretrain`"),
    "load": later("write `resume_from_checkpoint`"),
    "save": to("output_dir"),
    "save-interval": to("save_steps"),
    "no-save-optim": none("a checkpoint has the whole state"),
    "save-hf": none("a checkpoint has the model in the form of Hugging Face"),
    "seed": to("seed"),
    "rollout-seed": to("seed"),
    # data
    "prompt-data": later("write `actor_train.data_args.file_name`"),
    "input-key": later("write `columns: {messages}`"),
    "label-key": later("write `columns: {ground_truth}`"),
    "metadata-key": none("all other columns are metadata"),
    "apply-chat-template": later("write `template: chat`"),
    "apply-chat-template-kwargs": later("write `chat_template_kwargs`"),
    "tool-key": lost("write `pipeline: agentic`, with tools (docs/tools.md)"),
    "multimodal-keys": lost("pictures are no input here"),
    "rollout-shuffle": later("write `actor_train.data_args.shuffle`"),
    "rollout-max-prompt-len": to("prompt_length"),
    "rollout-max-response-len": to("response_length"),
    "rollout-max-context-len": to("sequence_length"),
    # batches
    "num-rollout": to("max_steps"),
    "num-epoch": later("write `max_steps`"),
    "rollout-batch-size": to("rollout_batch_size"),
    "n-samples-per-prompt": to("num_return_sequences_in_group"),
    "global-batch-size": later("write `gradient_accumulation_steps`: samples there, micro-batches here"),
    "num-steps-per-rollout": later("write `gradient_accumulation_steps`"),
    "micro-batch-size": later("write `per_device_train_batch_size`"),
    "use-dynamic-batch-size": later("write `use_dynamic_batching_in_train`"),
    "max-tokens-per-gpu": later("write `max_tokens_per_microbatch_in_train`"),
    "log-probs-max-tokens-per-gpu": later("write `max_tokens_per_microbatch_in_infer`"),
    # sampling
    "rollout-temperature": to("actor_infer.generating_args.temperature"),
    "rollout-top-p": to("actor_infer.generating_args.top_p"),
    "rollout-top-k": to("actor_infer.generating_args.top_k", {-1: 0}),
    "rollout-stop": later("write `generating_args.stop_strings`"),
    "rollout-stop-token-ids": lost("the tokenizer's end-of-sequence tokens end a response"),
    # validation
    "eval-interval": later("write `eval_steps`"),
    "eval-prompt-data": later("write `validation.data_args.file_name`"),
    "eval-input-key eval-label-key": later("write `validation.data_args.columns`"),
    "n-samples-per-eval-prompt": later("write `validation.generating_args.num_return_sequences`"),
    "eval-temperature": later("write `validation.generating_args.temperature`"),
    "eval-top-p": later("write `validation.generating_args.top_p`"),
    "eval-top-k": later("write `validation.generating_args.top_k`"),
    "eval-max-response-len": later("write `validation.generating_args.max_new_tokens`"),
    "eval-max-context-len": none("prompts of validation have the length of those of training"),
    # algorithm
    "advantage-estimator": later("write `adv_estimator`"),
    "eps-clip": later("write `pg_variant_args: {clip_low}`"),
    "eps-clip-high": later("write `pg_variant_args: {clip_high}`"),
    "eps-clip-c": later("write `pg_variant_args: {dual_clip}`"),
    "value-clip": later("write `value_clip`"),
    "use-kl-loss": later("write `use_kl_loss`"),
    "kl-loss-coef": later("write `kl_loss_coef`"),
    "kl-loss-type": later("write `kl_estimator`"),
    "kl-coef": later("write `add_token_level_kl` and `init_kl_coef`"),
    "use-unbiased-kl": lost("there is no such estimator; see `kl_estimator`"),
    "use-opd": later("write `teacher` and `distillation`"),
    "opd-kl-coef": later("write `distillation.coef`"),
    "opd-type": later("the teacher is a role on devices of this run"),
    "opd-teacher-load": later("write `teacher.model_args.model_name_or_path`"),
    "opd-teacher-ckpt-step": lost("name the folder of one model"),
    "entropy-coef": to("entropy_loss_coef"),
    "critic-lr": to("critic.training_args.learning_rate"),
    "critic-lr-warmup-iters": to("critic.training_args.warmup_steps"),
    "num-critic-only-steps": to("critic_warmup"),
    "gamma": later("write `adv_estimator_args: {gamma}`"),
    "lambd": later("write `adv_estimator_args: {lambda_}`"),
    "normalize-advantages": to("whiten_advantages"),
    "disable-grpo-std-normalization": later("write `adv_estimator_args: {normalize_by_std: false}`"),
    "calculate-per-token-loss": later("write `loss_agg_mode: token-mean`"),
    "use-tis": later("write `old_logprobs: recompute` and `train_infer_correction`"),
    "tis-clip": later("write `train_infer_correction.weight.upper`"),
    "tis-clip-low": later("write `train_infer_correction.weight.lower`"),
    "use-opsm opsm-delta": later("write `train_infer_correction.reject` (docs/algorithms/correction.md)"),
    "custom-tis-function-path": lost("write `train_infer_correction` (docs/algorithms/correction.md)"),
    "custom-config-path": lost("what its functions read is not known here"),
    "use-rollout-logprobs": to("old_logprobs", {True: "behaviour"}),
    "get-mismatch-metrics": none("they are always computed"),
    "dynamic-sampling-filter-path": later("write `group_filter: zero_variance`"),
    "partial-rollout": to(
        "weight_update.in_flight", {True: "resume"}, "the default here, `keep`, also keeps the caches"
    ),
    "mask-offpolicy-in-partial-rollout": lost("stale tokens are bounded by `max_staleness` and corrected"),
    "update-weights-interval": to("weight_update.interval_steps"),
    "update-weight-buffer-size": later("write `weight_update.param_update_gather_bucket_size_mb`"),
    # optimizer
    "lr": to("actor_train.training_args.learning_rate"),
    "lr-decay-style": to("actor_train.training_args.lr_scheduler_type"),
    "lr-warmup-iters": to("actor_train.training_args.warmup_steps"),
    "lr-warmup-fraction": to("actor_train.training_args.warmup_ratio"),
    "weight-decay": to("actor_train.training_args.weight_decay"),
    "adam-beta1": to("actor_train.training_args.adam_beta1"),
    "adam-beta2": to("actor_train.training_args.adam_beta2"),
    "clip-grad": to("actor_train.training_args.max_grad_norm"),
    # devices
    "actor-num-nodes": later("write `cluster.num_nodes` and `actor_train.device_mapping`"),
    "actor-num-gpus-per-node": later("write `cluster.num_devices_per_node`"),
    "rollout-num-gpus": later("write `actor_infer.device_mapping`"),
    "rollout-num-gpus-per-engine": to("actor_infer.num_gpus_per_engine"),
    "colocate": later("write the same `device_mapping` for both roles"),
    "tensor-model-parallel-size": to(f"{_OPTIONS}.tensor_model_parallel_size"),
    "pipeline-model-parallel-size": to(f"{_OPTIONS}.pipeline_model_parallel_size"),
    "expert-model-parallel-size": to(f"{_OPTIONS}.expert_model_parallel_size"),
    "expert-tensor-parallel-size": to(f"{_OPTIONS}.expert_tensor_parallel_size"),
    "context-parallel-size": to(f"{_OPTIONS}.context_parallel_size"),
    "sequence-parallel": later("write `strategy_config: {sequence_parallel}`"),
    "recompute-granularity": to(f"{_OPTIONS}.recompute_granularity"),
    "recompute-method": to(f"{_OPTIONS}.recompute_method"),
    "recompute-num-layers": to(f"{_OPTIONS}.recompute_num_layers"),
    "enable-mtp-training mtp-num-layers mtp-loss-scaling-factor": lost("heads for several tokens are not trained"),
    "use-routing-replay": lost("passes of the trainer choose their experts anew"),
    "use-rollout-routing-replay": to("actor_train.router_replay"),
    # rewards and rollouts
    "rm-type": later("write `rewards.<name>.verifier`"),
    "custom-rm-path": later("write `rewards.<name>.verifier: module:function`"),
    "rm-url": lost("write a function that asks the address, or a `judge` (docs/rewards.md)"),
    "reward-key eval-reward-key": none("a verifier returns one score, and what else it names becomes metrics"),
    "group-rm": lost("a verifier judges one response"),
    "custom-generate-function-path": lost("write `pipeline: agentic`, with an environment (docs/agentic.md)"),
    "rollout-function-path": later("write `pipeline: agentic`, or `async_generation_ratio`"),
    "custom-loss-function-path": lost("write `actor_train.pg_variant: module:function` (docs/howto/algorithm.md)"),
    "custom-reward-post-process-path": lost("write a stage (docs/howto/stage.md)"),
    # trackers
    "use-wandb": later("write `track_with: wandb`"),
    "wandb-project": later("write `tracker_kwargs.wandb.project`"),
    "wandb-group": later("write `exp_name`"),
    "wandb-*": none("options of wandb are in `tracker_kwargs.wandb`; its key comes from the environment"),
    "disable-wandb-random-suffix": none("a run has the name that it is given"),
    "use-tensorboard": none("TensorBoard is written in any case"),
    "tb-*": none("TensorBoard's files are in the run's folder"),
    "sglang-speculative-*": lost("log-probabilities under speculative decoding are not those of one distribution"),
    "sglang-dp-size": none("each `num_gpus_per_engine` devices are an engine"),
    "sglang-ep-size": to(f"{_ENGINE}.ep_size"),
    "sglang-*": later("write it, with `_` for `-` and without `sglang`, in `strategy_config`"),
    _MODEL_FLAGS: none(_MODEL),
    _TRAINER_FLAGS: none(_TRAINERS),
    _SCHEDULER_FLAGS: none(_SCHEDULER),
}
RULES = table(_TABLE)
"""Flag of slime, without its dashes -> its rule."""

_ESTIMATORS = {
    "grpo": "grpo", "gspo": "grpo", "ppo": "gae", "cispo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
_VERIFIERS = {"math": "math", "deepscaler": "math", "dapo": "math"}
_SCORES_OF_TEACHER = "slime.rollout.on_policy_distillation.reward_func"
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "kl": "k1", "abs": "abs", "mse": "k2"}


def translate(given: Mapping[Path, Any]) -> Translation:
    """Return the translation of slime's flags."""
    steps = (_data, _devices, _trainer, _batches, _loss, _engine, _validation, _rewards, _teacher, _running)
    return translation(ORIGIN, RULES, steps, given)


def _columns(done: Translation, section: str, prefix: str = "") -> None:
    prompt = done.get(f"{prefix}input-key") or done.get("input-key", "input")
    label = done.get(f"{prefix}label-key") or done.get("label-key")
    chat = done.flag("apply-chat-template")
    done.put(f"{section}.template", "chat" if chat else "raw")
    variables = done.get("apply-chat-template-kwargs")
    if chat and variables is not None:
        done.put(f"{section}.chat_template_kwargs", json.loads(variables) if isinstance(variables, str) else variables)
    note = "a list of messages; write `prompt` in place of `messages` where it is text" if chat else ""
    done.put(f"{section}.columns.{'messages' if chat else 'prompt'}", prompt, note)
    done.put_given(f"{section}.columns.ground_truth", label)


def _data(done: Translation) -> None:
    files = done.get("prompt-data")
    if files is None:
        done.lack("actor_train.data_args", "slime's `--prompt-data` was not given")
    else:
        done.put("actor_train.data_args.file_name", [str(files)])
    _columns(done, "actor_train.data_args")
    done.put("actor_train.data_args.shuffle", done.flag("rollout-shuffle"))
    if done.ours("prompt_length") is None:
        context, response = whole(done.ours("sequence_length")), whole(done.ours("response_length"))
        if context is not None and response is None:
            done.put("response_length", context - 1, "slime bounds prompt and response together")
            done.put("prompt_length", context - 1, "slime bounds prompt and response together")
        else:
            done.put("prompt_length", 2048, "slime has no bound without `--rollout-max-prompt-len`")
    done.put("actor_train.data_args.overlong_prompts", "drop")
    stop = done.get("rollout-stop")
    if stop is not None:
        done.put("actor_infer.generating_args.stop_strings", [str(each) for each in _listed(stop)])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _devices(done: Translation) -> None:
    nodes, per_node = whole(done.get("actor-num-nodes", 1)), whole(done.get("actor-num-gpus-per-node", 8))
    if nodes is None or per_node is None:
        done.lack("cluster", "how many nodes and GPUs there are was not a plain number; one node of 8 is written")
        nodes, per_node = nodes or 1, per_node or 8
    rollout = done.get("rollout-num-gpus")
    trains = nodes * per_node
    if done.flag("colocate") or rollout is None:
        generates, total = f"0-{trains - 1}", trains
    else:
        own = whole(rollout)
        if own is None:
            done.lack("actor_infer.device_mapping", "`--rollout-num-gpus` was not a plain number; as many as train")
            own = trains
        generates, total = f"{trains}-{trains + own - 1}", trains + own
    size = total if total <= 8 else max(per_node, 8)
    done.put_cluster(size, -(-total // size))
    done.put("actor_train.device_mapping", f"0-{trains - 1}")
    done.put("actor_infer.device_mapping", generates)


def _trainer(done: Translation) -> None:
    done.put("actor_train.strategy_args.strategy_name", "megatron_train")
    done.put_precision("bfloat16")
    done.put_adamw("actor_train", 0.01)
    tensor = whole(done.ours(f"{_OPTIONS}.tensor_model_parallel_size")) or 1
    if done.flag("sequence-parallel"):
        if tensor > 1:
            done.put(f"{_OPTIONS}.sequence_parallel", True)
        else:
            done.no_effect("sequence-parallel", True, "it shares out over tensor-parallel ranks, and there is one")
    if done.ours(f"{_OPTIONS}.recompute_granularity") != "full":
        for key in ("recompute_method", "recompute_num_layers"):
            done.values.pop((*_OPTIONS.split("."), key), None)


def _batches(done: Translation) -> None:
    """Translate batch sizes. `--global-batch-size` counts the samples of an optimizer step."""
    prompts, samples = whole(done.ours("rollout_batch_size")), whole(done.ours("num_return_sequences_in_group", 1))
    steps, size = whole(done.get("num-steps-per-rollout")), whole(done.get("global-batch-size"))
    micro, dynamic = whole(done.get("micro-batch-size", 1)) or 1, done.flag("use-dynamic-batch-size")
    done.put("num_return_sequences_in_group", samples)
    context = whole(done.ours(f"{_OPTIONS}.context_parallel_size")) or 1
    note = f"the tokens of {context} ranks, which split the same rows" if context > 1 else ""
    for key, use in (("max-tokens-per-gpu", "train"), ("log-probs-max-tokens-per-gpu", "infer")):
        tokens = whole(done.get(key))
        if tokens is not None and (dynamic or use == "infer"):
            done.put(f"actor_train.max_tokens_per_microbatch_in_{use}", tokens * context, note)
    if not dynamic:
        done.put("actor_train.use_dynamic_batching_in_train", False)
    if prompts is None or samples is None:
        return
    total = prompts * samples
    size = total // steps if steps is not None and total % steps == 0 else size or total
    trains = (whole(done.get("actor-num-nodes", 1)) or 1) * (whole(done.get("actor-num-gpus-per-node", 8)) or 8)
    split = context
    for way in ("tensor", "pipeline"):
        split *= whole(done.ours(f"{_OPTIONS}.{way}_model_parallel_size", 1)) or 1
    ranks = max(1, trains // split)
    micro = 1 if dynamic else micro
    if total % size or size % (ranks * micro):
        path = "actor_train.training_args.gradient_accumulation_steps"
        done.lack(path, f"{size} samples of an optimizer step do not divide {total}, or over {ranks} ranks x {micro}")
        return
    done.put("actor_train.training_args.per_device_train_batch_size", micro)
    note = f"an optimizer step of {size} samples = {ranks} ranks x {micro} x this"
    done.put("actor_train.training_args.gradient_accumulation_steps", size // (ranks * micro), note)


def _loss(done: Translation) -> None:
    name = done.get("advantage-estimator", "grpo")
    if name not in _ESTIMATORS:
        done.lose("advantage-estimator", name, "there is no such estimator; `grpo` is written")
    done.put("adv_estimator", _ESTIMATORS.get(name, "grpo"))
    loss = name if name in ("gspo", "cispo") else "ppo"
    done.put("actor_train.pg_variant", loss)
    low = done.get("eps-clip", 0.2)
    high, dual = done.get("eps-clip-high"), done.get("eps-clip-c")
    bounds = ("epsilon_low", "epsilon_high") if loss == "cispo" else ("clip_low", "clip_high")
    done.put(f"actor_train.pg_variant_args.{bounds[0]}", low)
    done.put(f"actor_train.pg_variant_args.{bounds[1]}", low if high is None else high)
    if dual is not None and loss == "ppo":
        done.put("actor_train.pg_variant_args.dual_clip", dual)
    per_token = done.flag("calculate-per-token-loss")
    done.put(
        "loss_agg_mode", "token-mean" if per_token else "seq-mean-token-mean", "" if per_token else "slime's default"
    )
    if done.flag("disable-grpo-std-normalization") and done.ours("adv_estimator") == "grpo":
        done.put("adv_estimator_args.normalize_by_std", False)
    for key, argument in (("gamma", "gamma"), ("lambd", "lambda_")):
        value = done.number(key, 1.0)
        if argument in RETURN_ARGUMENTS.get(str(done.ours("adv_estimator")), ()):
            done.put(f"adv_estimator_args.{argument}", value)
    in_loss, coefficient = done.flag("use-kl-loss"), done.get("kl-loss-coef", 0.0)
    kind = done.choice("kl-loss-type", _KL, "k1")
    penalty, bound = done.get("kl-coef", 0.0), done.get("value-clip")
    if in_loss and coefficient:
        done.put("use_kl_loss", True)
        done.put("kl_loss_coef", coefficient)
    elif in_loss:
        done.no_effect("use-kl-loss", True, "its coefficient is 0; no reference is loaded for a metric")
    if penalty:
        done.put("add_token_level_kl", True)
        done.put("init_kl_coef", penalty)
    if (in_loss and coefficient) or penalty:
        done.put("kl_estimator", kind)
        _beside(done, "reference")
    if done.ours("adv_estimator") == "gae":
        _beside(done, "critic")
        _critic(done)
        done.put("value_clip", 0.2 if bound is None else bound, "slime's default" if bound is None else "")
    else:
        for parts in [parts for parts in done.values if parts[0] in ("critic", "critic_warmup")]:
            done.drop(".".join(parts), "only `adv_estimator: gae` has a critic")
    clip, least, delta = done.get("tis-clip", 2.0), done.get("tis-clip-low", 0), done.get("opsm-delta", 1e-4)
    if done.flag("use-tis"):
        weight = {"level": "token", "mode": "truncate", "upper": clip, **({"lower": least} if least else {})}
        done.put("old_logprobs", "recompute")
        done.put("train_infer_correction.weight", weight)
        if _updates(done) == 1:
            done.values.pop(("old_logprobs",))
            done.without_ratio(f"with one optimizer step a batch the ratio of `{loss}` is 1, and this is the same")
    if done.flag("use-opsm"):
        rejected = {"level": "geometric", "divergence": "k1", "threshold": delta, "only_negative": True}
        note = "OPSM: decided once, by the distance from the policy that sampled; slime decides at each update"
        done.put("train_infer_correction.reject", [rejected], note)
    path = done.get("dynamic-sampling-filter-path")
    if path is not None and str(path).endswith("check_reward_nonzero_std"):
        done.put("group_filter", "zero_variance")
    elif path is not None:
        done.lose("dynamic-sampling-filter-path", path, "write a stage (docs/howto/stage.md)")


def _critic(done: Translation) -> None:
    """Train the critic as the actor is trained, but for the settings that it has of its own."""
    done.put_given("critic.training_args.warmup_steps", done.ours("critic.training_args.warmup_steps", 0))
    for parts, value in list(done.values.items()):
        shared = parts[1:2] == ("training_args",) or parts[1:] in _BATCHING
        if parts[0] == "actor_train" and shared and parts[-1] != "warmup_ratio":
            done.put(("critic", *parts[1:]), done.ours(".".join(("critic", *parts[1:])), value))


_BATCHING = (("use_dynamic_batching_in_train",), ("max_tokens_per_microbatch_in_train",))


def _updates(done: Translation) -> int | None:
    """Return the optimizer steps per rollout batch; None if that is not a whole number."""
    samples = (whole(done.ours("rollout_batch_size")) or 0) * (whole(done.ours("num_return_sequences_in_group")) or 0)
    steps, size = whole(done.get("num-steps-per-rollout")), whole(done.get("global-batch-size", samples))
    return steps or (samples // size if size and samples % size == 0 else None)


def _beside(done: Translation, role: str) -> None:
    """Add a role that takes turns with the trainer on its devices."""
    done.put(f"{role}.strategy_args.strategy_name", "megatron_train")
    for key, value in list(done.values.items()):
        if key[:3] == ("actor_train", "strategy_args", "strategy_config"):
            done.put((role, *key[1:]), value)
    done.put(f"{role}.device_mapping", done.ours("actor_train.device_mapping"))
    done.put(f"{role}.model_args.dtype", "bfloat16")


def _engine(done: Translation) -> None:
    done.put("actor_infer.strategy_args.strategy_name", "sglang")
    for parts in done.given:
        name = parts[0].removeprefix("sglang-").replace("-", "_")
        if parts in done.unread and parts[0].startswith("sglang-"):
            value = done.get(parts[0])
            done.put((*_ENGINE.split("."), name), value)
    entry, rollout = str(done.get("entry", "")), str(done.get("rollout-function-path", ""))
    if "fully_async" in rollout:
        done.put("async_generation_ratio", 1, "slime's fully asynchronous rollout has no bound; 1 is one step off")
    elif entry.endswith("train_async.py"):
        done.put("async_generation_ratio", 1, "train_async.py: one step off")
    elif rollout:
        done.lose("rollout-function-path", rollout, "write `pipeline: agentic`, with an environment (docs/agentic.md)")
    size = whole(done.get("update-weight-buffer-size"))
    if size is not None:
        done.put("weight_update.param_update_gather_bucket_size_mb", size / 2**20, "bytes there, MiB here")


def _validation(done: Translation) -> None:
    rhythm, data = whole(done.get("eval-interval")), done.get("eval-prompt-data")
    number = done.get("n-samples-per-eval-prompt", 1)
    temperature = done.get("eval-temperature", done.ours("actor_infer.generating_args.temperature", 1.0))
    others = {"top_p": done.get("eval-top-p"), "top_k": done.get("eval-top-k")}
    longest = whole(done.get("eval-max-response-len"))
    if rhythm is None or data is None:
        return
    words = _listed(data)
    files = [str(word) for word in (words[1::2] if len(words) > 1 else words)]
    done.put("eval_steps", rhythm)
    done.put("validation.data_args.file_name", files)
    _columns(done, "validation.data_args", "eval-")
    done.put("validation.data_args.overlong_prompts", "drop")
    done.put("validation.generating_args.temperature", temperature)
    if temperature:
        done.put("validation.generating_args.num_return_sequences", number)
        for key, value in others.items():
            if value is not None:
                done.put(f"validation.generating_args.{key}", max(0, value) if key == "top_k" else value)
    response = whole(done.ours("response_length"))
    if longest is not None and response is not None and longest <= response:
        done.put("validation.generating_args.max_new_tokens", longest)
    elif longest is not None:
        done.lose("eval-max-response-len", longest, f"no response is longer than `response_length: {response}` here")


def _rewards(done: Translation) -> None:
    kind, path = done.get("rm-type"), done.get("custom-rm-path")
    if path == _SCORES_OF_TEACHER and done.flag("use-opd"):
        done.put("distillation.reward_coef", 0, "the teacher is the only judge")
    elif path is not None:
        module, _, function = str(path).rpartition(".")
        note = "its parameters are `response`, `ground_truth`, `domain`, `metadata`; it returns a number"
        done.put("rewards.custom.verifier", f"{module}:{function}", note)
        done.put("rewards.custom.tag_included", ["default"])
    elif kind in _VERIFIERS:
        note = f"as near as there is to `{kind}`" if kind != "math" else ""
        done.put("rewards.math.verifier", _VERIFIERS[kind], note)
        done.put("rewards.math.tag_included", ["default"], "the domain of rows without one")
    else:
        if kind is not None:
            done.lose("rm-type", kind, "there is no such verifier")
        done.lack("rewards", "name a verifier, with `tag_included: [default]` for rows without a domain")


def _teacher(done: Translation) -> None:
    if not done.flag("use-opd"):
        return
    kind, folder = done.get("opd-type"), done.get("opd-teacher-load")
    where = f"a Megatron checkpoint ({folder})" if folder is not None else f"a server of its own ({kind})"
    _beside(done, "teacher")
    done.lack("teacher.model_args.model_name_or_path", f"slime has {where}; name a model of Hugging Face")
    done.put("distillation.coef", done.get("opd-kl-coef", 1.0))


def _running(done: Translation) -> None:
    project, group = done.get("wandb-project"), done.get("wandb-group")
    if done.flag("use-wandb"):
        done.put("track_with", ["wandb"])
        done.put_given("tracker_kwargs.wandb.project", project)
    done.put_name(group)
    done.keep_all_checkpoints()
    load = done.get("load")
    if load is not None and done.ours("output_dir") is not None and str(load) == str(done.ours("output_dir")):
        done.put("resume_from_checkpoint", True, "goes on with what is in `output_dir`")
    epochs = done.get("num-epoch")
    if done.ours("max_steps") is None:
        done.lack("max_steps", in_epochs(ORIGIN, epochs))
