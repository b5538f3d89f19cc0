"""Translation of verl's keys, those of its asynchronous recipes and of dots; agrees with `docs/migration/verl.md`."""

from __future__ import annotations

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
    put_trackers,
    rule_of,
    table,
    to,
    translation,
    whole,
)

ORIGIN = "verl"
_AR = "actor_rollout_ref"
_MEMORY = "memory: states that are not needed leave shared devices by themselves"
_LOGPROBS = "log-probabilities of the reference use the trainer's token budget"
_ALWAYS = "always so here"
_TEACHER = "the teacher computes as a trainer's model does, without an engine"
_MANAGERS = "each reward has worker processes of its own"
_OFF = {-1: 0}
_ADAMW = "the optimizer is AdamW"
_CORRECT = "write `old_logprobs: recompute` and `train_infer_correction`"
_MEGATRON = f"{_AR}.actor.megatron"
_OPTIONS = "actor_train.strategy_args.strategy_config"

_TABLE = {
    "entry": later(),
    "config-path config-name hydra.**": none("a run is one file"),
    # data
    "data.train_files": later("write `actor_train.data_args.file_name`"),
    "data.val_files": later("write `validation.data_args.file_name`"),
    "data.train_batch_size": later("write `rollout_batch_size`"),
    "data.gen_batch_size": later("write `rollout_batch_size`: filtered groups are generated again by themselves"),
    "data.max_prompt_length": to("prompt_length"),
    "data.max_response_length": to("response_length"),
    "data.prompt_key": to("actor_train.data_args.columns.messages"),
    "data.reward_fn_key": to("actor_train.data_args.columns.domain"),
    "data.shuffle": to("actor_train.data_args.shuffle"),
    "data.seed": to("seed"),
    "data.apply_chat_template_kwargs": to("actor_train.data_args.chat_template_kwargs"),
    "data.apply_chat_template_kwargs.*": to("actor_train.data_args.chat_template_kwargs.*"),
    "data.filter_overlong_prompts": later("write `overlong_prompts: drop`"),
    "data.truncation": later("write `overlong_prompts: error`: prompts are never cut"),
    "data.train_max_samples": to("actor_train.data_args.max_samples", {-1: None}),
    "data.trust_remote_code": to("actor_train.model_args.trust_remote_code"),
    "data.return_raw_chat": none(_ALWAYS),
    "data.return_raw_input_ids": none("requests are token ids"),
    "data.filter_overlong_prompts_workers data.dataloader_num_workers": none("prompts are read once"),
    "data.val_batch_size": to("val_batch_size", note="requests in flight; all prompts are answered"),
    "data.image_key": lost("pictures are no input here"),
    # model and optimizer
    f"{_AR}.model.path": to("pretrain"),
    f"{_AR}.model.use_remove_padding": to("actor_train.use_sequence_packing"),
    f"{_AR}.model.enable_gradient_checkpointing": later("write `gradient_checkpointing` in `strategy_config`"),
    f"{_AR}.model.trust_remote_code": to("actor_train.model_args.trust_remote_code"),
    f"{_AR}.model.lora_rank": later("write `actor_train.model_args.lora_rank` and `lora_target`"),
    f"{_AR}.model.lora_alpha": later("write `actor_train.model_args.lora_alpha`"),
    f"{_AR}.model.target_modules": later("write `actor_train.model_args.lora_target`"),
    f"{_AR}.model.use_shm": none("weights are read once"),
    f"{_AR}.model.torch_dtype": none("weights are kept in float32"),
    f"{_AR}.model.override_config.**": lost("a model is what its own files say"),
    f"{_AR}.actor.optim.lr": to("actor_train.training_args.learning_rate"),
    f"{_AR}.actor.optim.lr_warmup_steps": to("actor_train.training_args.warmup_steps", _OFF),
    f"{_AR}.actor.optim.lr_warmup_steps_ratio": to("actor_train.training_args.warmup_ratio"),
    f"{_AR}.actor.optim.weight_decay": to("actor_train.training_args.weight_decay"),
    f"{_AR}.actor.optim.clip_grad": to("actor_train.training_args.max_grad_norm"),
    **{
        f"{_AR}.actor.optim.{name}": to("actor_train.training_args.lr_scheduler_type")
        for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")
    },
    f"{_AR}.actor.optim.betas": later("write `adam_beta1` and `adam_beta2`"),
    f"{_AR}.actor.optim.optimizer": none(_ADAMW),
    f"{_AR}.actor.grad_clip": to("actor_train.training_args.max_grad_norm"),
    f"{_AR}.actor.strategy": to(
        "actor_train.strategy_args.strategy_name",
        {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train"},
        closed=True,
    ),
    f"{_AR}.actor.fsdp_config.strategy": none("FSDP2 is the only one"),
    f"{_AR}.actor.fsdp_config.** {_AR}.actor.megatron.*_offload": none(_MEMORY),
    f"{_MEGATRON}.use_mbridge": none(_ALWAYS),
    f"{_MEGATRON}.use_dist_checkpointing": none("checkpoints are those of Hugging Face"),
    f"{_MEGATRON}.context_parallel_size": to(f"{_OPTIONS}.context_parallel_size"),
    f"{_MEGATRON}.override_transformer_config.recompute_granularity": to(f"{_OPTIONS}.recompute_granularity"),
    f"{_MEGATRON}.override_transformer_config.recompute_method": to(f"{_OPTIONS}.recompute_method"),
    f"{_MEGATRON}.override_transformer_config.recompute_num_layers": to(f"{_OPTIONS}.recompute_num_layers"),
    f"{_MEGATRON}.override_transformer_config.**": none("fused kernels and precisions of parts are the trainer's"),
    **{
        f"{_MEGATRON}.{way}_parallel_size": to(f"{_OPTIONS}.{way}_parallel_size")
        for way in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "virtual_pipeline_model")
    },
    f"{_AR}.actor.ulysses_sequence_parallel_size": later("write `context_parallel_size` in `strategy_config`"),
    f"{_AR}.ref.ulysses_sequence_parallel_size": later("write `context_parallel_size` in `strategy_config`"),
    # batches
    f"{_AR}.actor.ppo_mini_batch_size": later("write `actor_train.training_args.gradient_accumulation_steps`"),
    f"{_AR}.actor.ppo_micro_batch_size": later("write `actor_train.training_args.per_device_train_batch_size`"),
    f"{_AR}.actor.ppo_micro_batch_size_per_gpu": later("write `per_device_train_batch_size`"),
    f"{_AR}.actor.use_dynamic_bsz": later("write `use_dynamic_batching_in_train`"),
    f"{_AR}.actor.ppo_max_token_len_per_gpu": later("write `max_tokens_per_microbatch_in_train`"),
    f"{_AR}.actor.ppo_epochs": to("ppo_epochs"),
    f"{_AR}.actor.shuffle": none(_ALWAYS),
    f"{_AR}.rollout.log_prob_* {_AR}.ref.log_prob_*": none(_LOGPROBS),
    f"{_AR}.ref.**": none("the reference is a trainer without an optimizer; see `reference`"),
    # algorithm
    "algorithm.adv_estimator": later("write `adv_estimator`"),
    "algorithm.norm_adv_by_std_in_grpo": to("adv_estimator_args.normalize_by_std"),
    "algorithm.gamma": later("write `adv_estimator_args: {gamma}`"),
    "algorithm.lam": later("write `adv_estimator_args: {lambda_}`"),
    "algorithm.use_kl_in_reward": later("write `add_token_level_kl`"),
    f"algorithm.kl_penalty {_AR}.actor.kl_loss_type": later("write `kl_estimator`"),
    "algorithm.kl_ctrl.*": later("write `init_kl_coef`, `kl_controller`, `target_kl` and `kl_horizon`"),
    "algorithm.filter_groups.enable": to("group_filter", {True: "zero_variance", False: "none"}),
    "algorithm.filter_groups.metric": none("groups are filtered by their scores"),
    "algorithm.filter_groups.max_num_gen_batches": none("a filtered group's slot is given back"),
    "algorithm.rollout_correction.* algorithm.rollout_is*": later(_CORRECT),
    f"{_AR}.actor.policy_loss.loss_mode": later("write `actor_train.pg_variant`"),
    f"{_AR}.actor.policy_loss.clip_cov_*": later("write `pg_variant_args: {share, cov_low, cov_high}`"),
    f"{_AR}.actor.policy_loss.*": later("write `pg_variant_args: {share, beta}`"),
    f"{_AR}.actor.clip_ratio": later("write `pg_variant_args: {clip_low, clip_high}`"),
    f"{_AR}.actor.clip_ratio_low": later("write `pg_variant_args: {clip_low}`"),
    f"{_AR}.actor.clip_ratio_high": later("write `pg_variant_args: {clip_high}`"),
    f"{_AR}.actor.clip_ratio_c": later("write `pg_variant_args: {dual_clip}`"),
    f"{_AR}.actor.tau_pos {_AR}.actor.tau_neg": later("write `pg_variant_args`"),
    f"{_AR}.actor.loss_agg_mode": later("write `loss_agg_mode`"),
    f"{_AR}.actor.use_kl_loss": later("write `use_kl_loss`"),
    f"{_AR}.actor.kl_loss_coef": later("write `kl_loss_coef`"),
    f"{_AR}.actor.entropy_coeff": to("entropy_loss_coef"),
    f"{_AR}.actor.entropy_checkpointing": none("the entropy is computed in chunks"),
    f"{_AR}.actor.entropy_from_logits_with_chunking": none(_ALWAYS),
    f"{_AR}.actor.use_torch_compile": none(
        "losses are not compiled; `strategy_config: {compile: true}` compiles the layers"
    ),
    f"{_AR}.actor.router_replay.mode {_AR}.actor.**.router_replay_mode": to(
        "actor_train.router_replay", {"R3": True, "disabled": False}, "R2 has no counterpart here", closed=True
    ),
    f"{_AR}.actor.checkpoint.**": none("a checkpoint has the whole state"),
    # generation
    f"{_AR}.rollout.name": to("actor_infer.strategy_args.strategy_name", {"hf": "hf_infer"}),
    f"{_AR}.rollout.n": to("num_return_sequences_in_group"),
    f"{_AR}.rollout.tensor_model_parallel_size": to("actor_infer.num_gpus_per_engine"),
    f"{_AR}.rollout.gpu_memory_utilization": later("write `strategy_config: {gpu_memory_utilization}`"),
    f"{_AR}.rollout.max_num_batched_tokens {_AR}.rollout.max_num_seqs": later("write it in `strategy_config`"),
    f"{_AR}.rollout.enforce_eager {_AR}.rollout.enable_chunked_prefill": later("write it in `strategy_config`"),
    f"{_AR}.rollout.engine_kwargs.**": later("write it in `actor_infer.strategy_args.strategy_config`"),
    f"{_AR}.rollout.temperature": to("actor_infer.generating_args.temperature"),
    f"{_AR}.rollout.top_p": to("actor_infer.generating_args.top_p"),
    f"{_AR}.rollout.top_k": to("actor_infer.generating_args.top_k", _OFF),
    f"{_AR}.rollout.dtype": to("actor_infer.model_args.dtype", {"bf16": "bfloat16", "fp16": "float16"}),
    f"{_AR}.rollout.val_kwargs.*": later("write `validation.generating_args`"),
    f"{_AR}.rollout.free_cache_engine": none("an engine sleeps where it shares its devices"),
    f"{_AR}.rollout.load_format": none("an engine starts with the weights of the model itself"),
    f"{_AR}.rollout.layered_summon": none("weights travel in buckets"),
    f"{_AR}.rollout.enable_rollout_routing_replay": none("engines record experts if `router_replay` is true"),
    f"{_AR}.rollout.calculate_log_probs": none(_ALWAYS),
    f"{_AR}.rollout.prompt_length": none("`data.max_prompt_length` says it"),
    f"{_AR}.rollout.response_length": none("`data.max_response_length` says it"),
    f"{_AR}.rollout.max_model_len": none("the lengths of prompt and response say it"),
    f"{_AR}.rollout.ignore_eos": to("actor_infer.generating_args.ignore_eos"),
    f"{_AR}.rollout.expert_parallel_size": later("write the engine's own option in `strategy_config`"),
    f"{_AR}.rollout.data_parallel_size": none("each `num_gpus_per_engine` devices are an engine"),
    f"{_AR}.rollout.multi_turn.**": lost("write `pipeline: agentic`, with environments and tools (docs/agentic.md)"),
    f"{_AR}.rollout.agent.**": lost("write `pipeline: agentic`, with environments and tools (docs/agentic.md)"),
    # asynchrony, including that of dots
    "**.hybrid_engine": later("write the same `device_mapping` for `actor_train` and `actor_infer`"),
    f"{_AR}.rollout.mode": none("each request is on its own, at every ratio"),
    "**.async_strategy **.async_pipeline": later("write `async_generation_ratio: 1`"),
    "**.with_reward": none("rewards are computed while others are generated"),
    "**.use_nodes_ratios": later("write `cluster.shares: {train: 0.5, infer: 0.5}`"),
    "**.enable_dual_buffer": to("weight_update.dual_buffer"),
    "**.enable_param_async": none("weights are sent while training goes on"),
    "**.param_update_preduce_bucket_size_mb": to("weight_update.param_update_gather_bucket_size_mb"),
    "**.param_update_consume_bucket_size_mb": to("weight_update.param_update_load_bucket_size_mb"),
    "**.param_update_gather_bucket_size_mb": to("weight_update.param_update_gather_bucket_size_mb"),
    "**.param_update_load_bucket_size_mb": to("weight_update.param_update_load_bucket_size_mb"),
    "**.update_weights_bucket_megabytes": to("weight_update.param_update_gather_bucket_size_mb"),
    "**.generate_ahead_steps": later("write `async_generation_ratio`, one less: 2 there is one step off"),
    "rollout.nnodes rollout.n_gpus_per_node": later("write `actor_infer.device_mapping`"),
    "rollout.n": none("`actor_rollout_ref.rollout.n` says it"),
    "rollout.total_rollout_steps": later("write `max_steps`"),
    "rollout.total_epochs": none("steps are counted, not epochs"),
    "async_training.staleness_threshold": later("write `async_generation_ratio`, in training steps"),
    "async_training.trigger_parameter_sync_step": to("weight_update.interval_steps"),
    "async_training.partial_rollout": to(
        "weight_update.in_flight",
        {True: "resume", False: "drain"},
        note="the default here, `keep`, also keeps the caches",
    ),
    "async_training.require_batches": none("a step takes `rollout_batch_size` groups"),
    "async_training.use_rollout_log_probs": to("old_logprobs", {True: "behaviour", False: "recompute"}),
    # the run
    "trainer.nnodes": later("write `cluster.num_nodes`"),
    "trainer.n_gpus_per_node": later("write `cluster.num_devices_per_node`"),
    "trainer.save_freq": to("save_steps", _OFF),
    "trainer.test_freq": later("write `eval_steps`"),
    "trainer.total_training_steps": to("max_steps"),
    "trainer.total_epochs": later("write `max_steps`"),
    "trainer.max_actor_ckpt_to_keep": to("max_ckpt_to_keep", {None: 0}),
    "trainer.max_critic_ckpt_to_keep": none("a checkpoint has all roles"),
    "trainer.default_local_dir": to("output_dir"),
    "trainer.resume_mode": later("write `resume_from_checkpoint`"),
    "trainer.experiment_name": later("write `exp_name`"),
    "trainer.project_name": later("write `tracker_kwargs.wandb.project`"),
    "trainer.logger": later("write `track_with`"),
    "trainer.critic_warmup": to("critic_warmup"),
    "trainer.val_before_train": none("a run with `eval_steps` validates before its first step"),
    "trainer.val_only": lost("a run trains"),
    "trainer.log_val_generations": none("validation answers are in `samples.jsonl`"),
    "trainer.balance_batch": none("samples are shared out by their lengths"),
    "trainer.use_legacy_worker_impl": none("there is one implementation"),
    "trainer.rollout_data_dir": none("rollouts are in `samples.jsonl`"),
    "trainer.device": none("`cluster.device` says it"),
    # rewards and critic
    "**.custom_reward_function.path": later("write `rewards.<domain>.verifier: module:function`"),
    "**.custom_reward_function.name": later("write `rewards.<domain>.verifier: module:function`"),
    "reward_model.enable reward.reward_model.enable": later("write a reward with `verifier: reward_model`"),
    "reward_model.model.path reward.reward_model.model_path": later("write `reward_pretrain`"),
    "reward_model.launch_reward_fn_async reward_model.use_reward_loop": none(_ALWAYS),
    "**.overlong_buffer_cfg.* **.overlong_buffer.*": later("write `length_penalty: {kind: overlong}`"),
    "**.max_resp_len": none("`response_length` says it"),
    "**.reward_manager reward.reward_manager.name reward.num_workers reward_model.num_workers": none(_MANAGERS),
    "reward.reward_model.**": none("how a reward model is run is a matter of `rewards.<name>`"),
    "**.sandbox_fusion.*": lost("write `verifier: code`, which has a sandbox of its own"),
    **{
        f"reward_model.{name}": none("how a reward model is run is a matter of `rewards.<name>`")
        for name in "strategy micro_batch_size* use_dynamic_bsz forward_* max_length model.* model.fsdp_config.* "
        "megatron.* n_gpus_per_node nnodes enable_resource_pool ulysses_sequence_parallel_size rollout.**".split()
    },
    "critic.optim.lr": to("critic.training_args.learning_rate"),
    "critic.optim.lr_warmup_steps": to("critic.training_args.warmup_steps", _OFF),
    "critic.optim.lr_warmup_steps_ratio": to("critic.training_args.warmup_ratio"),
    "critic.optim.weight_decay": to("critic.training_args.weight_decay"),
    "critic.optim.betas": later("write `adam_beta1` and `adam_beta2`"),
    **{
        f"critic.optim.{name}": to("critic.training_args.lr_scheduler_type")
        for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")
    },
    "critic.ppo_mini_batch_size": later("write `critic.training_args.gradient_accumulation_steps`"),
    "critic.grad_clip": to("critic.training_args.max_grad_norm"),
    "critic.model.path": to("critic.model_args.model_name_or_path"),
    "critic.cliprange_value": to("value_clip"),
    **{
        f"critic.{name}": none("the critic is trained and split up as the actor is")
        for name in "strategy ppo_* use_dynamic_bsz forward_* shuffle rollout_n loss_agg_mode enable optim.* model.* "
        "model.fsdp_config.** fsdp_config.** megatron.** checkpoint.** ulysses_sequence_parallel_size".split()
    },
    # distillation
    "distillation.teacher_model.inference.** distillation.teacher_models.*.inference.**": none(_TEACHER),
    "distillation.**": later("write `teacher` and `distillation`"),
}
RULES = table(_TABLE)
"""verl's key -> its rule."""

_LOSSES = {
    "vanilla": "ppo", "cispo": "cispo", "gspo": "gspo", "sapo": "sapo", "geo_mean": "gmpo", "dppo_tv": "dppo",
    "dppo_kl": "dppo", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
}  # fmt: skip
_SEQUENCE_LOSSES = ("gspo", "sapo", "gmpo")
_LOSS_ARGUMENTS = {
    "policy_loss.clip_cov_ratio": ("clip_cov", "share"), "policy_loss.clip_cov_lb": ("clip_cov", "cov_low"),
    "policy_loss.clip_cov_ub": ("clip_cov", "cov_high"), "policy_loss.kl_cov_ratio": ("kl_cov", "share"),
    "policy_loss.ppo_kl_coef": ("kl_cov", "beta"), "tau_pos": ("sapo", "tau_positive"),
    "tau_neg": ("sapo", "tau_negative"),
}  # fmt: skip
"""Key below `actor` -> our policy loss, and its argument."""
_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "gdpo")},
    **{name: name for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")},
    "grpo_vectorized": "grpo", "rloo_vectorized": "rloo", "grpo_passk": "pass_at_k",
}  # fmt: skip
_KL = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    "low_var_kl+": "k3_straight_through", "k3+": "k3_straight_through",
}  # fmt: skip
COLUMNS = {"messages": "prompt", "domain": "data_source", "ground_truth": "reward_model.ground_truth"}
"""Our field -> the column of verl's data sets."""


def translate(given: Mapping[Path, Any]) -> Translation:
    """Return the translation of verl's keys."""
    first = (_data, _devices, _trainer, _batches, _loss, _advantages, _asynchrony, _correction, _kl)
    steps = (*first, _critic, _teacher, _engine, _validation, _rewards, _running)
    return translation(ORIGIN, RULES, steps, given)


def _files(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _data(done: Translation) -> None:
    files = done.get("data.train_files")
    if files is None:
        done.lack("actor_train.data_args", "verl's data set was not given")
    else:
        done.put("actor_train.data_args.file_name", _files(files))
    done.put("actor_train.data_args.template", "chat")
    for field, column in COLUMNS.items():
        if done.ours(f"actor_train.data_args.columns.{field}") is None:
            done.put(f"actor_train.data_args.columns.{field}", column)
    cut = done.choice("data.truncation", {name: name for name in ("error", "left", "right", "middle")}, "error")
    drops = done.flag("data.filter_overlong_prompts")
    note = f"`truncation: {cut}` cuts prompts in verl; here they are never cut" if cut != "error" and not drops else ""
    done.put("actor_train.data_args.overlong_prompts", "drop" if drops or cut != "error" else "error", note)
    batch, generated = done.get("data.train_batch_size"), done.get("data.gen_batch_size")
    mini = done.get(f"{_AR}.actor.ppo_mini_batch_size")
    if whole(batch) is not None:
        done.put("rollout_batch_size", batch)
    elif whole(mini) is not None:
        wanted = whole(done.get("async_training.require_batches")) or 1
        note = f"{wanted} x the {mini} prompts of `ppo_mini_batch_size`, as `train_batch_size` is not used there"
        done.put("rollout_batch_size", wanted * mini, note)
    if whole(generated) is not None and whole(batch) is not None:
        done.no_effect("data.gen_batch_size", generated, "filtered groups are generated again by themselves")


def _devices(done: Translation) -> None:
    nodes, per_node = whole(done.get("trainer.nnodes", 1)), whole(done.get("trainer.n_gpus_per_node", 8))
    if nodes is None or per_node is None:
        done.lack("cluster", "how many nodes and GPUs there are was not a plain number; one node of 8 is written")
        nodes, per_node = nodes or 1, per_node or 8
    apart = whole(done.get("rollout.n_gpus_per_node"))
    apart_nodes = whole(done.get("rollout.nnodes", 0)) or 0
    ratios = done.anywhere("use_nodes_ratios")
    total_nodes, devices = nodes, per_node
    if apart is not None and apart_nodes == nodes:  # on the same nodes, beside the trainer
        devices = per_node + apart
    elif apart is not None and apart_nodes and apart == per_node:  # on nodes of their own
        total_nodes = nodes + apart_nodes
    elif apart is not None and apart_nodes:
        done.lack("cluster", f"the trainer has {nodes} x {per_node} GPUs, the rollouts {apart_nodes} x {apart}")
    done.put_cluster(devices, total_nodes)
    if isinstance(ratios, list) and ratios and all(isinstance(each, int | float) for each in ratios):
        note = "the first of verl's ratios is the trainer's; the rest of each node generates"
        done.put("cluster.shares.train", ratios[0], note)
        done.put("cluster.shares.infer", round(1 - ratios[0], 6))
    elif apart is not None and apart_nodes == nodes:
        done.put("cluster.shares.train", round(per_node / devices, 4))
        done.put("cluster.shares.infer", round(apart / devices, 4))
    elif apart is not None and total_nodes > nodes:
        done.put("actor_train.device_mapping", f"0-{nodes * per_node - 1}")
        done.put("actor_infer.device_mapping", f"{nodes * per_node}-{total_nodes * per_node - 1}")
    else:
        everything = f"0-{total_nodes * devices - 1}"
        done.put("actor_train.device_mapping", everything)
        done.put("actor_infer.device_mapping", everything)
    if done.anywhere("hybrid_engine") is False and apart is None and not ratios:
        done.lack("actor_infer.device_mapping", "`hybrid_engine: false` separates the roles, but says not where")


def _ranks(done: Translation) -> int:
    """Return the data-parallel ranks of the trainer."""
    nodes, per_node = whole(done.get("trainer.nnodes", 1)) or 1, whole(done.get("trainer.n_gpus_per_node", 8)) or 8
    share = done.ours("cluster.shares.train")
    devices = nodes * per_node
    if share is not None:
        devices = nodes * round(share * done.ours("cluster.num_devices_per_node"))
    split = whole(done.ours(f"{_OPTIONS}.context_parallel_size")) or 1
    if done.ours("actor_train.strategy_args.strategy_name") == "megatron_train":
        for way in ("tensor", "pipeline"):
            split *= whole(done.ours(f"{_OPTIONS}.{way}_model_parallel_size")) or 1
    return max(1, devices // split)


def _trainer(done: Translation) -> None:
    megatron = any(parts[:3] == (_AR, "actor", "megatron") for parts in done.given)
    name = "megatron_train" if megatron else "fsdp2_train"
    done.put("actor_train.strategy_args.strategy_name", done.ours("actor_train.strategy_args.strategy_name", name))
    done.put_precision("bfloat16")
    checkpointing = done.flag(f"{_AR}.model.enable_gradient_checkpointing", True)
    if done.ours("actor_train.strategy_args.strategy_name") == "fsdp2_train":
        done.put(f"{_OPTIONS}.gradient_checkpointing", checkpointing)
    else:
        if done.has(f"{_AR}.model.enable_gradient_checkpointing"):
            done.no_effect(
                f"{_AR}.model.enable_gradient_checkpointing", checkpointing, "`recompute_granularity` says it"
            )
        if whole(done.ours(f"{_OPTIONS}.context_parallel_size")) == 1:
            done.values.pop((*_OPTIONS.split("."), "context_parallel_size"))
    rank, target = done.get(f"{_AR}.model.lora_rank", 0), done.get(f"{_AR}.model.target_modules", "all-linear")
    alpha = done.get(f"{_AR}.model.lora_alpha")
    if whole(rank) is not None:
        done.put("actor_train.model_args.lora_rank", rank)
        done.put("actor_train.model_args.lora_target", target)
        done.put("actor_train.model_args.lora_alpha", 16 if alpha is None else alpha, "" if alpha else "verl's default")
    for theirs in ("actor", "ref"):
        key = f"{_AR}.{theirs}.ulysses_sequence_parallel_size"
        if done.get(key) in (1, None):
            continue
        if megatron:
            done.lose(key, done.get(key), "Megatron's sequence parallelism shares out long samples")
        elif theirs == "actor":
            done.put(f"{_OPTIONS}.context_parallel_size", done.get(key))
    _optimizer(done, "actor_train", f"{_AR}.actor.optim")


def _optimizer(done: Translation, role: str, theirs: str) -> None:
    """Set the optimizer of a role, whose keys of verl are below ``theirs``."""
    if done.ours(f"{role}.training_args.warmup_steps"):
        done.values.pop((role, "training_args", "warmup_ratio"), None)
    betas = done.get(f"{theirs}.betas")
    if betas is not None:
        done.put(f"{role}.training_args.adam_beta1", betas[0])
        done.put(f"{role}.training_args.adam_beta2", betas[1])
    done.put_adamw(role, 0.01)


def _batches(done: Translation) -> None:
    """Translate batch sizes. A mini-batch counts prompts in verl, and micro-batches here."""
    prompts, samples = whole(done.ours("rollout_batch_size")), whole(done.ours("num_return_sequences_in_group"))
    mini = whole(done.get(f"{_AR}.actor.ppo_mini_batch_size", 256))
    ranks = _ranks(done)
    micro = whole(done.get(f"{_AR}.actor.ppo_micro_batch_size_per_gpu"))
    shared = whole(done.get(f"{_AR}.actor.ppo_micro_batch_size"))  # of all ranks together
    if micro is None and shared is not None:
        micro = max(1, shared // ranks)
    dynamic = done.flag(f"{_AR}.actor.use_dynamic_bsz")
    tokens = done.get(f"{_AR}.actor.ppo_max_token_len_per_gpu")
    if samples is None:
        samples = 1
        done.put("num_return_sequences_in_group", 1, "verl's default of `rollout.n`")
    size = 1 if dynamic else micro or 1
    if not dynamic:
        done.put("actor_train.use_dynamic_batching_in_train", False)
    elif whole(tokens) is not None:
        context = whole(done.ours(f"{_OPTIONS}.context_parallel_size")) or 1
        note = f"the tokens of {context} ranks, which split the same rows" if context > 1 else ""
        done.put("actor_train.max_tokens_per_microbatch_in_train", tokens * context, note)
    if prompts is None or mini is None:
        return
    _warm_up(done, "actor_train", prompts, mini)
    while mini * samples % (size * ranks) and size > 1:
        size -= 1
    if mini * samples % (size * ranks) or prompts % mini:
        done.lack("actor_train.training_args.gradient_accumulation_steps", f"{mini} prompts do not divide over {ranks}")
        return
    done.put("actor_train.training_args.per_device_train_batch_size", size)
    note = f"an optimizer step of {mini} prompts x {samples} samples = {ranks} ranks x {size} x this"
    done.put("actor_train.training_args.gradient_accumulation_steps", mini * samples // (size * ranks), note)


def _warm_up(done: Translation, role: str, prompts: int, mini: int) -> None:
    """Turn training steps of warm-up, which verl counts, into optimizer steps: one for each ``mini`` prompts."""
    updates = -(-prompts // mini) * (whole(done.ours("ppo_epochs", 1)) or 1)
    parts, steps = (role, "training_args", "warmup_steps"), whole(done.ours(f"{role}.training_args.warmup_steps"))
    if steps is not None and updates > 1:
        del done.values[parts]
        done.put(parts, steps * updates, f"{steps} training steps of {updates} optimizer steps")


def _loss(done: Translation) -> None:
    actor, arguments = f"{_AR}.actor", "actor_train.pg_variant_args"
    mode = done.get(f"{actor}.policy_loss.loss_mode", "vanilla")
    loss = done.choice(f"{actor}.policy_loss.loss_mode", _LOSSES, "vanilla")
    note = "`vanilla` here would be the loss without a ratio" if mode == "vanilla" else ""
    done.put("actor_train.pg_variant", loss, note)
    clip = done.number(f"{actor}.clip_ratio", 0.2)
    low = done.number(f"{actor}.clip_ratio_low", clip)
    high = done.number(f"{actor}.clip_ratio_high", clip)
    dual = done.number(f"{actor}.clip_ratio_c", 3.0)
    bounds = {"cispo": ("epsilon_low", "epsilon_high"), "dppo": ("threshold", "threshold_high")}
    if loss in ("ppo", "gspo", "gmpo", "clip_cov", *bounds):
        names = bounds.get(loss, ("clip_low", "clip_high"))
        done.put(f"{arguments}.{names[0]}", low)
        done.put(f"{arguments}.{names[1]}", high)
    if loss == "ppo" and dual > 1:
        done.put(f"{arguments}.dual_clip", dual, "" if done.has(f"{actor}.clip_ratio_c") else "verl's default")
    if loss == "dppo":
        done.put(f"{arguments}.divergence", mode.removeprefix("dppo_"))
    for key, (owner, ours) in _LOSS_ARGUMENTS.items():
        value = done.get(f"{actor}.{key}")
        if value is not None and loss == owner:
            done.put(f"{arguments}.{ours}", value)
    agg = done.get(f"{actor}.loss_agg_mode", "token-mean")
    if loss in _SEQUENCE_LOSSES:
        done.put("loss_agg_mode", "seq-mean-token-mean", "what verl takes for this loss")
    else:
        done.put("loss_agg_mode", agg)


def _advantages(done: Translation) -> None:
    key = "algorithm.adv_estimator"
    estimator = done.choice(key, _ESTIMATORS, "grpo" if done.has(key) else "gae")
    samples = whole(done.ours("num_return_sequences_in_group")) or 1
    done.put("adv_estimator", estimator)
    if estimator == "pass_at_k":
        note = "verl divides the lead of the best sample by the deviation and gives the others 0; here they share it"
        done.put("adv_estimator_args.k", max(1, samples - 1), note)
        done.put("adv_estimator_args.baseline", "leave_one_out")
    if estimator != "grpo" and done.ours("adv_estimator_args.normalize_by_std") is not None:
        done.values.pop(("adv_estimator_args", "normalize_by_std"))
    for key, name in (("gamma", "gamma"), ("lam", "lambda_")):
        value = done.get(f"algorithm.{key}", 1.0)
        if name in RETURN_ARGUMENTS.get(estimator, ()):
            done.put(f"adv_estimator_args.{name}", value)
    if estimator == "gae":
        done.put("whiten_advantages", True, "verl always whitens those of `gae`")


def _correction(done: Translation) -> None:
    """Translate importance weights and rejection. Until 0.6 verl had separate keys for them in `algorithm`."""
    new, old = "algorithm.rollout_correction", "algorithm"
    levels = {name: name for name in ("token", "sequence", "geometric", None)}
    switch = {True: True, False: None, None: None, "token": "token", "sequence": "sequence"}
    weighs = done.choice(f"{old}.rollout_is", switch, None)
    level = done.choice(f"{old}.rollout_is_level", levels, "token")
    mode = done.choice(f"{old}.rollout_is_mode", {"truncate": "truncate", "mask": "mask", "clip": "mask"}, "truncate")
    level = done.choice(f"{new}.rollout_is", levels, level if weighs is True else weighs)
    upper: Any = done.get(f"{new}.rollout_is_threshold", done.get(f"{old}.rollout_is_threshold", 2.0))
    lower = done.get(f"{old}.rollout_is_threshold_lower")
    if isinstance(upper, str):  # "0.5_5.0"
        mode, (lower, upper) = "mask", map(float, upper.split("_"))
    elif upper is None:
        level, upper = None, 2.0
    lower = 1 / upper if lower is None else lower
    rejects = done.choice(f"{new}.rollout_rs", levels, None)
    most = done.number(f"{new}.rollout_rs_threshold", upper)
    least = done.number(f"{new}.rollout_rs_threshold_lower", 1 / most if most else 0)
    veto = done.get(f"{new}.rollout_token_veto_threshold", done.get(f"{old}.rollout_is_veto_threshold"))
    bypass = done.flag(f"{new}.bypass_mode") or done.flag(f"{new}.bypass_old_logprob_for_rollout")
    plain = done.choice(f"{new}.loss_type", {"ppo_clip": False, "reinforce": True}, "ppo_clip")
    plain = any([plain, done.flag(f"{new}.use_policy_gradient"), done.flag(f"{new}.use_pure_rollout_correction")])
    if bypass and plain:
        done.without_ratio("verl's `reinforce` in bypass mode")
    elif bypass:
        level = None  # the loss's own ratio is already taken against the policy that sampled
    if done.flag(f"{new}.rollout_is_batch_normalize") and level is not None:
        done.put("train_infer_correction.normalize", True)
    if level is not None:
        weight = {"level": level, "mode": mode, "upper": upper, **({"lower": lower} if mode == "mask" else {})}
        done.put("train_infer_correction.weight", weight)
        if not bypass:
            done.put("old_logprobs", "recompute")
    found = [{"level": rejects, "lower": least, "upper": most}] if rejects is not None else []
    found += [{"level": "veto", "lower": veto}] if veto else []
    if found:
        done.put("train_infer_correction.reject", found)
    prompts, mini = done.ours("rollout_batch_size"), done.get(f"{_AR}.actor.ppo_mini_batch_size", 256)
    once = prompts == mini and done.ours("ppo_epochs", 1) == 1
    loss, fresh = done.ours("actor_train.pg_variant"), done.ours("async_generation_ratio", 0) == 0
    if once and loss not in ("clip_cov", "vanilla") and (level is not None or (loss == "kl_cov" and fresh)):
        done.without_ratio(f"with one optimizer step a batch the ratio of `{loss}` is 1, and this is the same")
        done.values.pop(("old_logprobs",), None)


def _kl(done: Translation) -> None:
    uses_loss, uses_reward = done.flag(f"{_AR}.actor.use_kl_loss"), done.flag("algorithm.use_kl_in_reward")
    in_loss = done.choice(f"{_AR}.actor.kl_loss_type", _KL, "low_var_kl")
    in_reward = done.choice("algorithm.kl_penalty", _KL, "kl")
    coefficient, control = done.get(f"{_AR}.actor.kl_loss_coef", 0.001), "algorithm.kl_ctrl"
    adaptive = done.choice(f"{control}.type", {"adaptive": True, "fixed": False}, "fixed")
    weight, target = done.get(f"{control}.kl_coef", 0.001), done.get(f"{control}.target_kl", 0.1)
    horizon = done.get(f"{control}.horizon", 10000)
    if uses_loss:
        done.put("use_kl_loss", True)
        done.put("kl_loss_coef", coefficient)
    if uses_reward:
        done.put("add_token_level_kl", True)
        done.put("init_kl_coef", weight)
        if adaptive:
            done.put("kl_controller", "adaptive")
            done.put("target_kl", target, "nats per response here, per token in verl")
            done.lack("target_kl", f"verl aims at {target} nats per token: multiply it by the mean length of responses")
            done.put("kl_horizon", horizon)
    if uses_loss or uses_reward:
        done.put("kl_estimator", in_loss if uses_loss else in_reward)
        _frozen(done, "reference")


def _frozen(done: Translation, role: str) -> None:
    """Add a role that takes turns with the trainer on its devices."""
    done.put(f"{role}.strategy_args.strategy_name", done.ours("actor_train.strategy_args.strategy_name"))
    for way in ("tensor", "pipeline"):
        size = done.ours(f"{_OPTIONS}.{way}_model_parallel_size")
        done.put_given(f"{role}.strategy_args.strategy_config.{way}_model_parallel_size", size)
    size = done.ours(f"{_OPTIONS}.context_parallel_size")
    if role == "reference" and done.ours("actor_train.strategy_args.strategy_name") == "fsdp2_train":
        own = done.get(f"{_AR}.ref.ulysses_sequence_parallel_size", size)
        size = None if own == 1 else own
    done.put_given(f"{role}.strategy_args.strategy_config.context_parallel_size", size)
    done.put_given(f"{role}.device_mapping", done.ours("actor_train.device_mapping"))
    done.put(f"{role}.model_args.dtype", "bfloat16")


def _critic(done: Translation) -> None:
    if done.ours("adv_estimator") != "gae":
        for parts in [parts for parts in done.values if parts[0] in ("critic", "critic_warmup", "value_clip")]:
            del done.values[parts]
        for parts, value in done.given.items():
            rule = rule_of(parts, RULES)
            if parts[0] == "critic" and rule is not None and rule[1].to is not None:
                done.no_effect(".".join(parts), value, "only `adv_estimator: gae` has a critic")
        return
    done.put("value_clip", done.ours("value_clip", 0.5), "" if done.has("critic.cliprange_value") else "verl's default")
    _frozen(done, "critic")
    done.put_default("critic.training_args.learning_rate", 1e-5)
    _optimizer(done, "critic", "critic.optim")
    _critic_batches(done)
    if done.ours("critic.strategy_args.strategy_name") == "fsdp2_train":
        done.put("critic.strategy_args.strategy_config.gradient_checkpointing", True)


def _critic_batches(done: Translation) -> None:
    """Give the critic the actor's batches, with the mini-batch of its own that verl may have."""
    for key in ("use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train"):
        done.put_given(f"critic.{key}", done.ours(f"actor_train.{key}"))
    prompts, actors = whole(done.ours("rollout_batch_size")), done.get(f"{_AR}.actor.ppo_mini_batch_size", 256)
    mini = whole(done.get("critic.ppo_mini_batch_size", actors))
    steps = whole(done.ours("actor_train.training_args.gradient_accumulation_steps"))
    if prompts is None or mini is None:
        return
    _warm_up(done, "critic", prompts, mini)
    if steps is None:
        return
    path = "critic.training_args.gradient_accumulation_steps"
    if prompts % mini or steps * mini % actors:
        done.lack(path, f"{mini} prompts of `critic.ppo_mini_batch_size` do not divide {prompts}, or over the ranks")
        return
    size = done.ours("actor_train.training_args.per_device_train_batch_size")
    done.put("critic.training_args.per_device_train_batch_size", size)
    done.put(path, steps * mini // actors, f"an optimizer step of {mini} prompts")


_DISTILLED_AT_SAMPLES = ("kl", "k1", "k2", "k3", "low_var_kl", "mse", "abs")
"""verl's distillation losses that use only the tokens that the student sampled."""


def _teacher(done: Translation) -> None:
    if not done.flag("distillation.enabled"):
        done.unnamed -= {parts for parts in done.given if parts[0] == "distillation"}
        return
    _frozen(done, "teacher")
    loss = "distillation.distillation_loss"
    models = [path for path in map(".".join, done.given) if path.startswith("distillation.teacher_model")]
    models = [path for path in models if path.endswith(".model_path")]
    if models:
        done.put("teacher.model_args.model_name_or_path", done.get(models[0]))
    else:
        done.lack("teacher.model_args.model_name_or_path", "verl's `distillation.teacher_models` names no `model_path`")
    for path in models[1:]:
        done.lose(path, done.get(path), "a run has one teacher")
    devices = "a teacher takes turns with the trainer; give it its own with `teacher.device_mapping`"
    for key in ("n_gpus_per_node", "nnodes", "enable_resource_pool"):
        if done.has(f"distillation.{key}"):
            done.no_effect(f"distillation.{key}", done.get(f"distillation.{key}"), devices)
    mode = done.get(f"{loss}.loss_mode", "k3")
    if mode not in _DISTILLED_AT_SAMPLES:
        done.lose(f"{loss}.loss_mode", mode, "learned is the reverse KL divergence at the sampled tokens")
    if not done.flag(f"{loss}.use_policy_gradient", True):
        done.put("distillation.use", "loss")
    done.put("distillation.coef", done.get(f"{loss}.distillation_loss_coef", 1.0))
    if not done.flag(f"{loss}.use_task_rewards", done.flag(f"{loss}.use_policy_loss", True)):
        done.put("distillation.reward_coef", 0)
    for key in ("loss_max_clamp", "log_prob_min_clamp"):
        value = done.get(f"{loss}.{key}")
        if value is not None:
            done.lose(f"{loss}.{key}", value, "the divergence is not clamped")


def _engine(done: Translation) -> None:
    options = "actor_infer.strategy_args.strategy_config"
    engine = done.ours("actor_infer.strategy_args.strategy_name", "vllm")
    done.put("actor_infer.strategy_args.strategy_name", engine)
    if engine not in ("vllm", "sglang", "hf_infer"):
        done.values[("actor_infer", "strategy_args", "strategy_name")] = "vllm"
        done.lose(f"{_AR}.rollout.name", engine, "there is no such engine; `vllm` is written")
        engine = "vllm"
    share = done.get(f"{_AR}.rollout.gpu_memory_utilization", 0.5)
    if engine == "vllm":
        done.put(f"{options}.gpu_memory_utilization", share)
    elif engine == "sglang":
        done.put(f"{options}.mem_fraction_static", share)
    for key in ("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "enable_chunked_prefill"):
        value = done.get(f"{_AR}.rollout.{key}")
        if value is not None and engine == "vllm":
            done.put(f"{options}.{key}", value)
        elif value is not None:
            done.no_effect(f"{_AR}.rollout.{key}", value, f"it is an option of vLLM, and the engine is {engine}")
    for parts in done.given:
        if parts[:3] == (_AR, "rollout", "engine_kwargs") and len(parts) > 4:
            value = done.get(".".join(parts))
            if parts[3] == engine:
                done.put((*options.split("."), *parts[4:]), value)
            else:
                done.no_effect(".".join(parts), value, f"the engine is {engine}")
    experts = done.get(f"{_AR}.rollout.expert_parallel_size", 1)
    if experts not in (1, None):
        done.lose(f"{_AR}.rollout.expert_parallel_size", experts, "set the engine's own option in `strategy_config`")


def _asynchrony(done: Translation) -> None:
    ahead = whole(done.anywhere("generate_ahead_steps"))
    if ahead is not None:
        note = "2 steps ahead there are one step off" if ahead == 2 else f"{ahead} steps ahead there, one less here"
        done.put("async_generation_ratio", max(0, ahead - 1), note)
    for key in ("async_pipeline", "async_strategy"):
        value = done.anywhere(key)
        if value not in (None, False, "none", "sync") and done.ours("async_generation_ratio") is None:
            done.put("async_generation_ratio", 1, f"`{key}`: one step off")
    share, interval = done.get("async_training.staleness_threshold"), done.ours("weight_update.interval_steps", 1)
    if share is not None:
        note = f"{share} of the {interval} training steps between two updates of the weights" if interval != 1 else ""
        done.put("async_generation_ratio", share * interval, note or "how much may be generated ahead")
    if "one_step_off" in str(done.get("entry", "")):
        done.put("async_generation_ratio", 1, "verl's recipe is one step off")
    steps = whole(done.get("rollout.total_rollout_steps"))
    prompts = whole(done.ours("rollout_batch_size"))
    if steps is not None and prompts is not None and done.ours("max_steps") is None:
        done.put("max_steps", max(1, steps // prompts), f"{steps} prompts are so many steps of {prompts}")


def _validation(done: Translation) -> None:
    rhythm, files = done.get("trainer.test_freq", -1), done.get("data.val_files")
    options = f"{_AR}.rollout.val_kwargs"
    sampled, temperature = done.flag(f"{options}.do_sample"), done.get(f"{options}.temperature", 0)
    top_p, top_k = done.get(f"{options}.top_p", 1.0), done.get(f"{options}.top_k", -1)
    number = done.get(f"{options}.n", 1)
    if whole(rhythm) is None:
        done.values.pop(("val_batch_size",), None)
        return
    if files is None:
        done.lack("validation.data_args", "verl's validation data was not given")
        return
    done.put("eval_steps", rhythm)
    done.put("validation.data_args.file_name", _files(files))
    done.put("validation.data_args.template", "chat")
    for key in done.given:
        if key[:2] == ("data", "apply_chat_template_kwargs") and len(key) == 3:
            done.put(f"validation.data_args.chat_template_kwargs.{key[2]}", done.get(".".join(key)))
    for field, column in COLUMNS.items():
        done.put(f"validation.data_args.columns.{field}", column)
    done.put("validation.data_args.overlong_prompts", done.ours("actor_train.data_args.overlong_prompts"))
    done.put("validation.generating_args.temperature", temperature if sampled else 0)
    if sampled and temperature:
        done.put("validation.generating_args.top_p", top_p)
        done.put("validation.generating_args.top_k", max(0, top_k))
        done.put("validation.generating_args.num_return_sequences", number)


def _rewards(done: Translation) -> None:
    path, name = done.anywhere("custom_reward_function.path"), done.anywhere("custom_reward_function.name")
    if path:
        module = str(path).rpartition("/")[2].removesuffix(".py")
        note = f"{path} has to be importable; its parameters are `response`, `ground_truth`, `domain`, `metadata`"
        done.put("rewards.custom.verifier", f"{module}:{name or 'compute_score'}", note)
        done.lack("rewards.custom.tag_included", "the `data_source` values of the data that it judges")
    else:
        done.lack("rewards", "verl chooses a built-in reward by `data_source`; name one for each, by `tag_included`")
    model = done.get("reward.reward_model.model_path", done.get("reward_model.model.path"))
    enabled = any([done.flag("reward_model.enable"), done.flag("reward.reward_model.enable")])
    if enabled and model:
        done.put("rewards.model.verifier", "reward_model")
        done.put("rewards.model.device_mapping", done.ours("actor_train.device_mapping"))
        done.put("reward_pretrain", model)
    for section in ("overlong_buffer_cfg", "overlong_buffer"):
        weight, buffer = done.anywhere(f"{section}.penalty_factor", 1.0), done.anywhere(f"{section}.len", 4096)
        done.anywhere(f"{section}.log")
        if done.anywhere(f"{section}.enable", False):
            done.put("length_penalty.kind", "overlong")
            done.put("length_penalty.weight", weight)
            done.put("length_penalty.buffer", buffer)


def _running(done: Translation) -> None:
    put_trackers(done, "trainer.logger", done.get("trainer.project_name"), ("console",))
    experiment, epochs = done.get("trainer.experiment_name"), done.get("trainer.total_epochs")
    done.put_name(experiment)
    done.keep_all_checkpoints()
    if done.ours("max_steps") is None:
        done.lack("max_steps", in_epochs(ORIGIN, epochs))
    resumes = done.choice("trainer.resume_mode", {"auto": True, "disable": False}, "auto")
    if resumes and done.ours("output_dir") is not None:
        done.put("resume_from_checkpoint", True)
