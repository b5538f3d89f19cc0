"""verl's keys, with those of its asynchronous recipes and of dots. The tables agree with `docs/migration/verl.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.dialects.rules import Path, Rule, Translation, accounted, later, lost, none, to, translated, whole

ORIGIN = "verl"
_AR = "actor_rollout_ref"
_MEMORY = "memory: states that are not needed leave shared devices by themselves"
_LOGPROBS = "log-probabilities of the reference use the trainer's token budget"
_ALWAYS = "always so here"
_OFF = {-1: 0}
_ADAMW = "the optimizer is AdamW"
_MEGATRON = f"{_AR}.actor.megatron"
_OPTIONS = "actor_train.strategy_args.strategy_config"

RULES: dict[str, Rule] = {
    "entry": later(),
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
    "data.filter_overlong_prompts_workers": none("prompts are read once"),
    "data.dataloader_num_workers": none("prompts are read once"),
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
    f"{_AR}.actor.optim.lr_decay_style": to("actor_train.training_args.lr_scheduler_type"),
    f"{_AR}.actor.optim.warmup_style": to("actor_train.training_args.lr_scheduler_type"),
    f"{_AR}.actor.optim.optimizer": none(_ADAMW),
    f"{_AR}.actor.grad_clip": to("actor_train.training_args.max_grad_norm"),
    f"{_AR}.actor.strategy": to(
        "actor_train.strategy_args.strategy_name",
        {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train"},
        closed=True,
    ),
    f"{_AR}.actor.fsdp_config.strategy": none("FSDP2 is the only one"),
    f"{_AR}.actor.fsdp_config.**": none(_MEMORY),
    f"{_AR}.actor.megatron.*_offload": none(_MEMORY),
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
    f"{_AR}.actor.ulysses_sequence_parallel_size": later("remove it: long samples are shared out by Megatron only"),
    f"{_AR}.ref.ulysses_sequence_parallel_size": later("remove it"),
    # batches
    f"{_AR}.actor.ppo_mini_batch_size": later("write `actor_train.training_args.gradient_accumulation_steps`"),
    f"{_AR}.actor.ppo_micro_batch_size": later("write `actor_train.training_args.per_device_train_batch_size`"),
    f"{_AR}.actor.ppo_micro_batch_size_per_gpu": later("write `per_device_train_batch_size`"),
    f"{_AR}.actor.use_dynamic_bsz": later("write `use_dynamic_batching_in_train`"),
    f"{_AR}.actor.ppo_max_token_len_per_gpu": later("write `max_tokens_per_microbatch_in_train`"),
    f"{_AR}.actor.ppo_epochs": to("ppo_epochs"),
    f"{_AR}.actor.shuffle": none(_ALWAYS),
    f"{_AR}.rollout.log_prob_*": none(_LOGPROBS),
    f"{_AR}.ref.log_prob_*": none(_LOGPROBS),
    f"{_AR}.ref.**": none("the reference is a trainer without an optimizer; see `reference`"),
    # algorithm
    "algorithm.adv_estimator": to("adv_estimator", {"reinforce_plus_plus": "reinforce_plus_plus"}),
    "algorithm.norm_adv_by_std_in_grpo": to("adv_estimator_args.normalize_by_std"),
    "algorithm.gamma": later("write `adv_estimator_args: {gamma}`"),
    "algorithm.lam": later("write `adv_estimator_args: {lambda_}`"),
    "algorithm.use_kl_in_reward": later("write `add_token_level_kl`"),
    "algorithm.kl_penalty": later("write `kl_estimator`"),
    "algorithm.kl_ctrl.**": later("write `init_kl_coef`, `kl_controller`, `target_kl` and `kl_horizon`"),
    "algorithm.filter_groups.enable": to("group_filter", {True: "zero_variance", False: "none"}),
    "algorithm.filter_groups.**": none("a filtered group's slot is given back"),
    "algorithm.rollout_correction.**": later("write `old_logprobs: recompute` and `train_infer_correction`"),
    f"{_AR}.actor.policy_loss.loss_mode": later("write `actor_train.pg_variant`"),
    f"{_AR}.actor.clip_ratio": later("write `pg_variant_args: {clip_low, clip_high}`"),
    f"{_AR}.actor.clip_ratio_low": later("write `pg_variant_args: {clip_low}`"),
    f"{_AR}.actor.clip_ratio_high": later("write `pg_variant_args: {clip_high}`"),
    f"{_AR}.actor.clip_ratio_c": later("write `pg_variant_args: {dual_clip}`"),
    f"{_AR}.actor.tau_pos": later("write `pg_variant_args`"),
    f"{_AR}.actor.tau_neg": later("write `pg_variant_args`"),
    f"{_AR}.actor.loss_agg_mode": later("write `loss_agg_mode`"),
    f"{_AR}.actor.use_kl_loss": later("write `use_kl_loss`"),
    f"{_AR}.actor.kl_loss_coef": later("write `kl_loss_coef`"),
    f"{_AR}.actor.kl_loss_type": later("write `kl_estimator`"),
    f"{_AR}.actor.entropy_coeff": to("entropy_loss_coef"),
    f"{_AR}.actor.entropy_checkpointing": none("the entropy is computed in chunks"),
    f"{_AR}.actor.entropy_from_logits_with_chunking": none(_ALWAYS),
    f"{_AR}.actor.use_torch_compile": none("nothing is compiled"),
    f"{_AR}.actor.checkpoint.**": none("a checkpoint has the whole state"),
    # generation
    f"{_AR}.rollout.name": to("actor_infer.strategy_args.strategy_name", {"hf": "hf_infer"}),
    f"{_AR}.rollout.n": to("num_return_sequences_in_group"),
    f"{_AR}.rollout.tensor_model_parallel_size": to("actor_infer.num_gpus_per_engine"),
    f"{_AR}.rollout.gpu_memory_utilization": later("write `strategy_config: {gpu_memory_utilization}`"),
    f"{_AR}.rollout.max_num_batched_tokens": later("write it in `strategy_config`"),
    f"{_AR}.rollout.max_num_seqs": later("write it in `strategy_config`"),
    f"{_AR}.rollout.enforce_eager": later("write it in `strategy_config`"),
    f"{_AR}.rollout.enable_chunked_prefill": later("write it in `strategy_config`"),
    f"{_AR}.rollout.engine_kwargs.**": later("write it in `actor_infer.strategy_args.strategy_config`"),
    f"{_AR}.rollout.temperature": to("actor_infer.generating_args.temperature"),
    f"{_AR}.rollout.top_p": to("actor_infer.generating_args.top_p"),
    f"{_AR}.rollout.top_k": to("actor_infer.generating_args.top_k", _OFF),
    f"{_AR}.rollout.dtype": to("actor_infer.model_args.dtype", {"bf16": "bfloat16", "fp16": "float16"}),
    f"{_AR}.rollout.val_kwargs.**": later("write `validation.generating_args`"),
    f"{_AR}.rollout.free_cache_engine": none("an engine sleeps where it shares its devices"),
    f"{_AR}.rollout.load_format": none("an engine starts with the weights of the model itself"),
    f"{_AR}.rollout.layered_summon": none("weights travel in buckets"),
    f"{_AR}.rollout.calculate_log_probs": none(_ALWAYS),
    f"{_AR}.rollout.prompt_length": none("`data.max_prompt_length` says it"),
    f"{_AR}.rollout.response_length": none("`data.max_response_length` says it"),
    f"{_AR}.rollout.max_model_len": none("the lengths of prompt and response say it"),
    f"{_AR}.rollout.ignore_eos": to("actor_infer.generating_args.ignore_eos"),
    f"{_AR}.rollout.expert_parallel_size": later("write the engine's own option in `strategy_config`"),
    f"{_AR}.rollout.data_parallel_size": none("each `num_gpus_per_engine` devices are an engine"),
    f"{_AR}.rollout.multi_turn.**": lost("write `pipeline: agentic`, with environments and tools (docs/agentic.md)"),
    f"{_AR}.rollout.agent.**": lost("write `pipeline: agentic`, with environments and tools (docs/agentic.md)"),
    # asynchrony, dots' among it
    "**.hybrid_engine": later("write the same `device_mapping` for `actor_train` and `actor_infer`"),
    f"{_AR}.rollout.mode": none("each request is on its own, at every ratio"),
    "**.async_strategy": later("write `async_generation_ratio: 1`"),
    "**.async_pipeline": later("write `async_generation_ratio: 1`"),
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
    "rollout.nnodes": later("write `actor_infer.device_mapping`"),
    "rollout.n_gpus_per_node": later("write `actor_infer.device_mapping`"),
    "rollout.n": none("`actor_rollout_ref.rollout.n` says it"),
    "rollout.total_rollout_steps": later("write `max_steps`"),
    "rollout.total_epochs": none("steps are counted, not epochs"),
    "async_training.staleness_threshold": to("async_generation_ratio", note="how much may be generated ahead"),
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
    "trainer.total_training_steps": to("max_steps", {None: 100}),
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
    "reward_model.enable": later("write a reward with `verifier: reward_model`"),
    "reward_model.model.path": later("write `reward_pretrain`"),
    "reward_model.reward_manager": none("each reward has worker processes of its own"),
    "reward_model.launch_reward_fn_async": none(_ALWAYS),
    "reward_model.reward_kwargs.overlong_buffer_cfg.**": later("write `length_penalty: {kind: overlong}`"),
    "reward_model.reward_kwargs.max_resp_len": none("`response_length` says it"),
    "reward_model.**": none("how a reward model is run is a matter of `rewards.<name>`"),
    "critic.optim.lr": to("critic.training_args.learning_rate"),
    "critic.optim.lr_warmup_steps": to("critic.training_args.warmup_steps", _OFF),
    "critic.optim.lr_warmup_steps_ratio": to("critic.training_args.warmup_ratio"),
    "critic.model.path": to("critic.model_args.model_name_or_path"),
    "critic.strategy": later("write `critic.strategy_args.strategy_name`"),
    "critic.**": later("write it under `critic`"),
    # distillation
    "distillation.**.inference.**": none("the teacher computes as a trainer's model does, without an engine"),
    "distillation.**": later("write `teacher` and `distillation`"),
}
"""verl's key -> what becomes of it."""

_LOSSES = {
    "vanilla": "ppo", "cispo": "cispo", "gspo": "gspo", "sapo": "sapo", "geo_mean": "gmpo", "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}  # fmt: skip
_SEQUENCE_LOSSES = ("gspo", "sapo", "gmpo")
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
COLUMNS = {"messages": "prompt", "domain": "data_source", "ground_truth": "reward_model.ground_truth"}
"""Our fields -> the columns of verl's data sets."""


def translate(given: Mapping[Path, Any]) -> Translation:
    """Return our configuration of verl's keys."""
    return accounted(_translate, given)


def _translate(given: Mapping[Path, Any]) -> Translation:
    keys = {parts: value for parts, value in given.items() if len(parts) > 1 or parts == ("entry",)}
    done = translated(ORIGIN, keys, RULES, unknown_is_ours=False)
    done.take(_data, _devices, _trainer, _batches, _loss, _kl, _critic, _teacher, _engine, _asynchrony, _validation)
    done.take(_rewards, _running)
    return done


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
    cut = done.get("data.truncation", "error")
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
    done.put("cluster.device", "cuda")
    if nodes is None or per_node is None:
        done.lack("cluster", "how many nodes and GPUs there are was not a plain number; one node of 8 is written")
        nodes, per_node = nodes or 1, per_node or 8
    apart = whole(done.get("rollout.n_gpus_per_node"))
    apart_nodes = whole(done.get("rollout.nnodes", 0)) or 0
    ratios = next((done.get(".".join(parts)) for parts in done.given if parts[-1] == "use_nodes_ratios"), None)
    total_nodes, devices = nodes, per_node
    if apart is not None and apart_nodes == nodes:  # on the same nodes, beside the trainer
        devices = per_node + apart
    elif apart is not None and apart_nodes and apart == per_node:  # on nodes of their own
        total_nodes = nodes + apart_nodes
    elif apart is not None and apart_nodes:
        done.lack("cluster", f"the trainer has {nodes} x {per_node} GPUs, the rollouts {apart_nodes} x {apart}")
    done.put("cluster.num_devices_per_node", devices)
    if total_nodes > 1:
        done.put("cluster.num_nodes", total_nodes)
        done.put("cluster.address", "auto")
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
    hybrid = next((done.get(".".join(parts)) for parts in done.given if parts[-1] == "hybrid_engine"), None)
    if hybrid is False and apart is None and not ratios:
        done.lack("actor_infer.device_mapping", "`hybrid_engine: false` separates the roles, but says not where")


def _ranks(done: Translation) -> int:
    """Return the data-parallel ranks of the trainer."""
    nodes, per_node = whole(done.get("trainer.nnodes", 1)) or 1, whole(done.get("trainer.n_gpus_per_node", 8)) or 8
    share = done.ours("cluster.shares.train")
    devices = nodes * per_node
    if share is not None:
        devices = nodes * round(share * done.ours("cluster.num_devices_per_node"))
    split = 1
    if done.ours("actor_train.strategy_args.strategy_name") == "megatron_train":
        split = (whole(done.ours(f"{_OPTIONS}.tensor_model_parallel_size")) or 1) * (
            whole(done.ours(f"{_OPTIONS}.pipeline_model_parallel_size")) or 1
        )
    return max(1, devices // split)


def _trainer(done: Translation) -> None:
    megatron = any(parts[:3] == (_AR, "actor", "megatron") for parts in done.given)
    name = "megatron_train" if megatron else "fsdp2_train"
    done.put("actor_train.strategy_args.strategy_name", done.ours("actor_train.strategy_args.strategy_name", name))
    done.put("actor_train.model_args.dtype", "bfloat16")
    done.put("actor_infer.model_args.dtype", done.ours("actor_infer.model_args.dtype", "bfloat16"))
    checkpointing = done.flag(f"{_AR}.model.enable_gradient_checkpointing", True)
    if done.ours("actor_train.strategy_args.strategy_name") == "fsdp2_train":
        done.put(f"{_OPTIONS}.gradient_checkpointing", checkpointing)
    else:
        done.values.pop(("actor_train", "use_sequence_packing"), None)
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
        if alpha is not None:
            done.put("actor_train.model_args.lora_alpha", alpha)
    for role in ("actor", "ref"):
        key = f"{_AR}.{role}.ulysses_sequence_parallel_size"
        if done.has(key) and done.get(key) not in (1, None):
            done.lose(
                key, done.get(key), "there is no Ulysses; Megatron's sequence parallelism shares out long samples"
            )
    warmup = done.ours("actor_train.training_args.warmup_steps")
    if warmup and done.ours("actor_train.training_args.warmup_ratio") is not None:
        done.values.pop(("actor_train", "training_args", "warmup_ratio"))


def _batches(done: Translation) -> None:
    """A mini-batch counts prompts in verl and micro-batches here."""
    prompts, samples = whole(done.ours("rollout_batch_size")), whole(done.ours("num_return_sequences_in_group"))
    mini = whole(done.get(f"{_AR}.actor.ppo_mini_batch_size", 256))
    micro = done.get(f"{_AR}.actor.ppo_micro_batch_size_per_gpu") or done.get(f"{_AR}.actor.ppo_micro_batch_size")
    dynamic = done.flag(f"{_AR}.actor.use_dynamic_bsz")
    tokens = done.get(f"{_AR}.actor.ppo_max_token_len_per_gpu")
    if samples is None:
        samples = 1
        done.put("num_return_sequences_in_group", 1, "verl's default of `rollout.n`")
    size = 1 if dynamic else whole(micro) or 1
    if not dynamic:
        done.put("actor_train.use_dynamic_batching_in_train", False)
    elif whole(tokens) is not None:
        done.put("actor_train.max_tokens_per_microbatch_in_train", tokens)
    if prompts is None or mini is None:
        return
    ranks = _ranks(done)
    while mini * samples % (size * ranks) and size > 1:
        size -= 1
    if mini * samples % (size * ranks) or prompts % mini:
        done.lack("actor_train.training_args.gradient_accumulation_steps", f"{mini} prompts do not divide over {ranks}")
        return
    done.put("actor_train.training_args.per_device_train_batch_size", size)
    note = f"an optimizer step of {mini} prompts x {samples} samples = {ranks} ranks x {size} x this"
    done.put("actor_train.training_args.gradient_accumulation_steps", mini * samples // (size * ranks), note)


def _loss(done: Translation) -> None:
    mode = done.get(f"{_AR}.actor.policy_loss.loss_mode", "vanilla")
    loss = _LOSSES.get(mode)
    arguments = "actor_train.pg_variant_args"
    if loss is None:
        done.lose(f"{_AR}.actor.policy_loss.loss_mode", mode, "there is no such loss here; `ppo` is written")
        loss = "ppo"
    note = "`vanilla` here would be the loss without a ratio" if mode == "vanilla" else ""
    done.put("actor_train.pg_variant", loss, note)
    clip = done.number(f"{_AR}.actor.clip_ratio", 0.2)
    low = done.number(f"{_AR}.actor.clip_ratio_low", clip)
    high = done.number(f"{_AR}.actor.clip_ratio_high", clip)
    dual = done.get(f"{_AR}.actor.clip_ratio_c", 3.0)
    if loss in ("ppo", "gspo", "gmpo"):
        done.put(f"{arguments}.clip_low", low)
        done.put(f"{arguments}.clip_high", high)
    if loss == "ppo" and isinstance(dual, int | float) and dual > 1:
        done.put(f"{arguments}.dual_clip", dual, "" if done.has(f"{_AR}.actor.clip_ratio_c") else "verl's default")
    if loss == "cispo":
        done.put(f"{arguments}.epsilon_low", low)
        done.put(f"{arguments}.epsilon_high", high)
    if loss == "dppo":
        done.put(f"{arguments}.divergence", mode.removeprefix("dppo_"))
    for key, ours in (("tau_pos", "tau_positive"), ("tau_neg", "tau_negative")):
        value = done.get(f"{_AR}.actor.{key}")
        if value is not None and loss == "sapo":
            done.put(f"{arguments}.{ours}", value)
    agg = done.get(f"{_AR}.actor.loss_agg_mode", "token-mean")
    if loss in _SEQUENCE_LOSSES:
        done.put("loss_agg_mode", "seq-mean-token-mean", "what verl takes for this loss")
    else:
        done.put("loss_agg_mode", agg)
    estimator = done.ours("adv_estimator", "gae")
    done.put("adv_estimator", estimator)
    if estimator != "grpo" and done.ours("adv_estimator_args.normalize_by_std") is not None:
        done.values.pop(("adv_estimator_args", "normalize_by_std"))
    for key, name in (("gamma", "gamma"), ("lam", "lambda_")):
        value = done.get(f"algorithm.{key}", 1.0)
        if value != 1.0:
            done.put(f"adv_estimator_args.{name}", value)
    correction = {parts[-1]: done.get(".".join(parts)) for parts in done.given if "rollout_correction" in parts}
    level, bound = correction.get("rollout_is"), correction.get("rollout_is_threshold", 2.0)
    if level in ("token", "sequence"):
        done.put("old_logprobs", "recompute")
        done.put("train_infer_correction.weight", {"level": level, "mode": "truncate", "upper": bound})


def _kl(done: Translation) -> None:
    uses_loss, uses_reward = done.flag(f"{_AR}.actor.use_kl_loss"), done.flag("algorithm.use_kl_in_reward")
    kind, penalty = done.get(f"{_AR}.actor.kl_loss_type", "low_var_kl"), done.get("algorithm.kl_penalty", "kl")
    coefficient = done.get(f"{_AR}.actor.kl_loss_coef", 0.001)
    control = {parts[-1]: done.get(".".join(parts)) for parts in done.given if "kl_ctrl" in parts}
    if uses_loss:
        done.put("use_kl_loss", True)
        done.put("kl_loss_coef", coefficient)
    if uses_reward:
        done.put("add_token_level_kl", True)
        done.put("init_kl_coef", control.get("kl_coef", 0.001))
        if control.get("type") == "adaptive":
            done.put("kl_controller", "adaptive")
            done.put("target_kl", control.get("target_kl", 0.1))
            done.put("kl_horizon", control.get("horizon", 10000))
    if uses_loss or uses_reward:
        done.put("kl_estimator", _KL.get(str(kind if uses_loss else penalty), "k3"))
        _frozen(done, "reference")


def _frozen(done: Translation, role: str) -> None:
    """Write a role that takes turns with the trainer on its devices."""
    done.put(f"{role}.strategy_args.strategy_name", done.ours("actor_train.strategy_args.strategy_name"))
    for way in ("tensor", "pipeline"):
        size = done.ours(f"{_OPTIONS}.{way}_model_parallel_size")
        if size is not None:
            done.put(f"{role}.strategy_args.strategy_config.{way}_model_parallel_size", size)
    mapping = done.ours("actor_train.device_mapping")
    if mapping is not None:
        done.put(f"{role}.device_mapping", mapping)
    done.put(f"{role}.model_args.dtype", "bfloat16")


def _critic(done: Translation) -> None:
    keys = {parts: done.get(".".join(parts)) for parts in done.given if parts[0] == "critic"}
    if done.ours("adv_estimator") != "gae":
        for parts in [parts for parts in done.values if parts[0] == "critic"]:
            done.values.pop(parts)
        for parts, value in keys.items():
            done.no_effect(".".join(parts), value, "only `adv_estimator: gae` has a critic")
        if done.ours("critic_warmup") is not None:
            done.values.pop(("critic_warmup",))
        return
    _frozen(done, "critic")
    if done.ours("critic.strategy_args.strategy_name") == "fsdp2_train":
        done.put("critic.strategy_args.strategy_config.gradient_checkpointing", True)


_DISTILLED_AT_SAMPLES = ("kl", "k1", "k2", "k3", "low_var_kl", "mse", "abs")
"""verl's distillation losses that know only the tokens that the student sampled."""


def _teacher(done: Translation) -> None:
    if not done.flag("distillation.enabled"):
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
    last = {parts[-1]: ".".join(parts) for parts in done.given}
    ahead = whole(done.get(last["generate_ahead_steps"])) if "generate_ahead_steps" in last else None
    if ahead is not None:
        note = "2 steps ahead there are one step off" if ahead == 2 else f"{ahead} steps ahead there, one less here"
        done.put("async_generation_ratio", max(0, ahead - 1), note)
    for key in ("async_pipeline", "async_strategy"):
        value = done.get(last[key]) if key in last else None
        if value not in (None, False, "none", "sync") and done.ours("async_generation_ratio") is None:
            done.put("async_generation_ratio", 1, f"`{key}`: one step off")
    if "one_step_off" in str(done.get("entry", "")):
        done.put("async_generation_ratio", 1, "verl's recipe is one step off")
    steps = whole(done.get("rollout.total_rollout_steps"))
    prompts = whole(done.ours("rollout_batch_size"))
    if steps is not None and prompts is not None and done.ours("max_steps") is None:
        done.put("max_steps", max(1, steps // prompts), f"{steps} prompts are so many steps of {prompts}")


def _validation(done: Translation) -> None:
    rhythm, files = done.get("trainer.test_freq", -1), done.get("data.val_files")
    settings = {parts[-1]: done.get(".".join(parts)) for parts in done.given if "val_kwargs" in parts}
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
    sampled = settings.get("do_sample", False)
    temperature = settings.get("temperature", 0) if sampled else 0
    done.put("validation.generating_args.temperature", temperature)
    if temperature:
        done.put("validation.generating_args.top_p", settings.get("top_p", 1.0))
        done.put("validation.generating_args.top_k", max(0, settings.get("top_k", -1)))
        done.put("validation.generating_args.num_return_sequences", settings.get("n", 1))


def _rewards(done: Translation) -> None:
    last = {parts[-2:]: ".".join(parts) for parts in done.given}
    key = ("custom_reward_function", "path")
    path = done.get(last[key]) if key in last else None
    key = ("custom_reward_function", "name")
    name = done.get(last[key]) if key in last else None
    if path:
        module = str(path).rpartition("/")[2].removesuffix(".py")
        note = f"{path} has to be importable; its parameters are `response`, `ground_truth`, `domain`, `metadata`"
        done.put("rewards.custom.verifier", f"{module}:{name or 'compute_score'}", note)
        done.lack("rewards.custom.tag_included", "the `data_source` values of the data that it judges")
    else:
        done.lack("rewards", "verl chooses a built-in reward by `data_source`; name one for each, by `tag_included`")
    model, enabled = done.get("reward_model.model.path"), done.flag("reward_model.enable")
    if enabled and model:
        done.put("rewards.model.verifier", "reward_model")
        done.put("rewards.model.device_mapping", done.ours("actor_train.device_mapping"))
        done.put("reward_pretrain", model)
    overlong = {parts[-1]: done.get(".".join(parts)) for parts in done.given if "overlong_buffer_cfg" in parts}
    if overlong.get("enable", False):
        done.put("length_penalty.kind", "overlong")
        done.put("length_penalty.weight", overlong.get("penalty_factor", 1.0))
        done.put("length_penalty.buffer", overlong.get("len", 4096))


def _running(done: Translation) -> None:
    loggers = done.get("trainer.logger", [])
    names = loggers if isinstance(loggers, list) else [loggers]
    known = [name for name in names if name in ("wandb", "swanlab", "trackio", "tensorboard")]
    done.put("track_with", known or ["tensorboard"])
    for name in set(map(str, names)) - set(known) - {"console"}:
        done.lose("trainer.logger", name, "there is no such tracker")
    project, experiment = done.get("trainer.project_name"), done.get("trainer.experiment_name")
    if experiment is not None:
        done.put("exp_name", str(experiment).replace("/", "-"))
    for name in ("wandb", "swanlab"):
        if project is not None and name in known:
            done.put(f"tracker_kwargs.{name}.project", project)
    epochs = done.get("trainer.total_epochs")
    if done.ours("max_steps") is None:
        done.lack("max_steps", f"verl counts {epochs} epochs: prompts of the data x epochs / `rollout_batch_size`")
    resume = done.get("trainer.resume_mode", "auto")
    if resume == "auto" and done.ours("output_dir") is not None:
        done.put("resume_from_checkpoint", True)
