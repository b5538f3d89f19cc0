"""Rules about training: what trainers can do, staleness, batches, lengths, sampling, KL, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, COMPARE_SCORES
from roll.check.devices import adapters_cannot_travel, generating_arguments, readable_mappings
from roll.check.memory_parts import is_dense
from roll.configs import derived
from roll.configs.errors import ConfigProblem, count, shown, without_effect
from roll.configs.fields import changes
from roll.configs.roles import TRAINED_ROLES, UNREAD_KEYS
from roll.configs.run import AgenticConfig, PipelineConfig, RunConfig, SFTConfig
from roll.configs.strategies import ENGINES, FORWARD_STRATEGIES, TRAINERS, Engine, Options, Trainer, strategy_of


def trainers_can_train(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject features that the chosen trainer lacks, and adapters that name no layer.

    The features are sequence packing, adapters, float16, rows that Megatron's ranks split on CPUs, and bfloat16 with
    DeepSpeed's stage 0, which keeps no float32 gradients or master weights.
    """
    for name, role in derived.present_roles(config).items():
        strategy, chosen = strategy_of(name, role), role.strategy_args.strategy_name
        if role.use_sequence_packing is True and isinstance(strategy, Trainer) and not strategy.packs:
            message = f"true, but {chosen} computes on padded rows only"
            able = [f"`{each}`" for each, record in TRAINERS.built_in.items() if record.packs]
            yield ConfigProblem(f"{name}.use_sequence_packing", message, f"set it to false, or use {' or '.join(able)}")
        bfloat16 = chosen == "deepspeed_train" and role.model_args.dtype == "bfloat16" and name in TRAINED_ROLES
        if bfloat16 and Options.of(role).get("zero_optimization.stage", 0) == 0:
            path = f"{name}.strategy_args.strategy_config.zero_optimization.stage"
            remedy = f"write 1 (the same steps in less memory), or `{name}.model_args.dtype: float32`"
            yield ConfigProblem(path, "stage 0 adds bfloat16 gradients up in bfloat16, which loses small ones", remedy)
        if chosen == "megatron_train" and derived.context_ranks(role) > 1 and config.cluster.device == "cpu":
            path = f"{name}.strategy_args.strategy_config.context_parallel_size"
            message = f"{derived.context_ranks(role)}: it needs Transformer Engine's attention, which runs on GPUs only"
            yield ConfigProblem(path, message, "write 1, or use `fsdp2_train`")
        if role.model_args.dtype == "float16" and isinstance(strategy, Trainer):
            yield from _float16_problems(name, chosen)
        path, target = f"{name}.model_args.lora_target", role.model_args.lora_target
        if name != "actor_train" or target is None:
            continue
        if isinstance(strategy, Trainer) and not strategy.adapters:
            able = [f"`{each}`" for each, record in TRAINERS.built_in.items() if record.adapters]
            remedy = f"use {' or '.join(able)}, or remove the keys `lora_...`"
            yield ConfigProblem(path, f"{shown(target)}, but {chosen} trains no adapters", remedy)
        if not target:
            remedy = "name layers, for example `q_proj,v_proj` or `all-linear`, or remove this key"
            yield ConfigProblem(path, f"{shown(target)} names no layer", remedy)


def _float16_problems(role: str, strategy: str) -> Iterator[ConfigProblem]:
    """Yield the reason why a role cannot compute in float16, where small gradients become 0 without a loss scale."""
    if strategy in ("fsdp2_train", "hf_infer"):
        return
    scale = " and has no loss scale for float16" if role in TRAINED_ROLES else ""
    message = f"{strategy} computes in float32 and bfloat16 only{scale}"
    remedy = f"write `bfloat16`, or use `fsdp2_train`{'' if role in TRAINED_ROLES else ' or `hf_infer`'}"
    yield ConfigProblem(f"{role}.model_args.dtype", message, remedy)


def experts_can_be_replayed(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject router replay with a model, an engine, a trainer or settings that cannot have it."""
    if not derived.replays_routing(config):
        return
    path, remedy = "actor_train.router_replay", "set it to false"
    for role in ("actor_train", "actor_logp"):
        section = derived.present_roles(config).get(role)
        strategy = None if section is None else strategy_of(role, section)
        if section is not None and isinstance(strategy, Trainer) and not strategy.replays_routing:
            able = [f"`{each}`" for each, record in TRAINERS.built_in.items() if record.replays_routing]
            message = f"true, but {section.strategy_args.strategy_name} ({role}) chooses experts by itself"
            yield ConfigProblem(path, message, f"{remedy}, or use {' or '.join(able)}")
        if section is not None and derived.compiles_layers(section):
            message = f"true, but {role} compiles its layers (`compile`), in which no choice of experts is replaced"
            yield ConfigProblem(path, message, f"{remedy}, or `compile` to false")
    for message, other in _no_experts_recorded(config):
        yield ConfigProblem(path, f"true, but {message}", f"{remedy}, or {other}")


def _no_experts_recorded(config: PipelineConfig) -> Iterator[tuple[str, str]]:
    """Yield the reasons why no experts would be recorded, each with a remedy."""
    role = config.actor_infer
    engine, name = strategy_of("actor_infer", role), role.strategy_args.strategy_name
    model = derived.model_path(config, config.actor_train)
    if derived.picture_sampling(config) is not None or is_dense(model):
        yield f"the model has no experts ({model})", "train a mixture of experts"
        return
    if not isinstance(engine, Engine) or not engine.records_routing:
        able = [f"`{each}`" for each, record in ENGINES.built_in.items() if record.records_routing]
        yield f"{name} does not tell the experts of tokens", f"use {' or '.join(able)}"
    if name in ("vllm", "sglang") and role.generating_args.stop_strings:
        message = f"{name} tells experts when it ends a request itself, and `stop_strings` end it outside"
        yield message, "remove `actor_infer.generating_args.stop_strings`"
    if name == "vllm" and config.cluster.device == "cpu":
        yield "vLLM tells experts on GPUs only: its model runner for CPUs does not record them", "use `hf_infer`"
    if name == "vllm" and not Options.of(role).get("enable_prefix_caching", True):
        yield "vLLM keeps the experts of shared prompts with their caches", "remove `enable_prefix_caching`"


def schedule_is_possible(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject a `max_staleness` below what the ratio needs, an update interval longer than the run, and a critic warm-up
    as long as the run."""
    interval, least = config.weight_update.interval_steps, derived.least_staleness(config)
    if config.max_staleness is not None and config.max_staleness < least:
        ahead = math.ceil(config.async_generation_ratio)
        message = (
            f"{config.max_staleness} is impossible: a group may start ceil({config.async_generation_ratio:g}) = "
            f"{count(ahead, 'step')} ahead, with weights up to {interval} - 1 = {count(interval - 1, 'version')} old, "
            f"so tokens reach a lag of {ahead} + {interval - 1} = {least}"
        )
        remedy = f"set at least {least}, or lower `async_generation_ratio` or `weight_update.interval_steps`"
        yield ConfigProblem("max_staleness", message, remedy)
    if interval > config.max_steps:
        steps = count(config.max_steps, "step")
        message = f"{interval} is more than the {steps} of the run: no weights would be published"
        yield ConfigProblem("weight_update.interval_steps", message, f"set at most {config.max_steps}")
    if config.critic_warmup >= config.max_steps:
        message = f"{config.critic_warmup} of {count(config.max_steps, 'step')}: the policy would never learn"
        yield ConfigProblem("critic_warmup", message, f"set at most {config.max_steps - 1}")


def warmup_is_set_once(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject `warmup_ratio` beside `warmup_steps`."""
    for name, role in derived.trained_roles(config).items():
        arguments = role.training_args
        if arguments.warmup_steps and arguments.warmup_ratio:
            path, reason = f"{name}.training_args.warmup_ratio", f"warmup_steps is {arguments.warmup_steps}"
            yield without_effect(path, arguments.warmup_ratio, reason, "keep one of the two")


def batches_divide(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require a sample for every rank, and a batch that splits evenly into optimizer steps."""
    samples, mappings = derived.samples_per_step(config), readable_mappings(config)
    key, batch = "train_batch_size", count(samples, "sample")
    if isinstance(config, PipelineConfig):
        key, batch = "rollout_batch_size", f"{config.rollout_batch_size} x {derived.group_size(config)} = {batch}"
    for role, section in derived.present_roles(config).items():
        if role == "actor_infer" or role not in mappings:
            continue
        ranks = derived.data_parallel_ranks(section)
        if samples < ranks:
            message = f"a step has {batch}, fewer than the {ranks} ranks of {role} that share it"
            yield ConfigProblem(key, message, f"raise it, or give {role} fewer devices")
    for name, section in derived.trained_roles(config).items():
        accumulation = section.training_args.gradient_accumulation_steps
        if accumulation is None or name not in mappings:
            continue
        path = f"{name}.training_args.gradient_accumulation_steps"
        if isinstance(config, SFTConfig):
            reason = "an optimizer step takes `train_batch_size` examples, in as many micro-batches as they need"
            remedy = "remove it, and write the examples of an optimizer step as `train_batch_size`"
            yield without_effect(path, accumulation, reason, remedy)
            continue
        if isinstance(config, AgenticConfig) and any(
            env.env_manager_cls != "trajectory" for env in config.custom_envs.values()
        ):
            message = f"{accumulation}, but episodes fall into turns here, and a batch has no fixed number of samples"
            yield ConfigProblem(path, message, "remove this key: one optimizer step per batch")
            continue
        size = derived.optimizer_batch_size(config, section)
        if samples % size:
            message = (
                f"an optimizer step takes {section.training_args.per_device_train_batch_size} "
                f"(per_device_train_batch_size) x {accumulation} x {derived.data_parallel_ranks(section)} (ranks) = "
                f"{count(size, 'sample')}, which does not divide {batch}"
            )
            remedy = "change one of these numbers, or remove this key for one optimizer step per batch"
            yield ConfigProblem(path, message, remedy)


def lengths_fit(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require room for a response after the longest prompt, and a `max_new_tokens` within `response_length`."""
    if config.sequence_length is not None and config.sequence_length <= config.prompt_length:
        message = f"{config.sequence_length} leaves no token for the response to a prompt of {config.prompt_length}"
        remedy = f"set at least {config.prompt_length + 1}, or lower `prompt_length`"
        yield ConfigProblem("sequence_length", message, remedy)
    for path, sampling in generating_arguments(config).items():
        tokens = sampling.max_new_tokens
        if tokens is not None and tokens > config.response_length:
            message = f"{tokens} is more than response_length {config.response_length}"
            yield ConfigProblem(f"{path}.max_new_tokens", message, "lower it, or raise `response_length`")


def sampling_varies(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require that samples of a group can differ, and that groups of equal scores are either dropped or masked."""
    sampling, size, key = config.actor_infer.generating_args, derived.group_size(config), derived.group_size_key(config)
    if sampling.temperature == 0:
        message = "0 is greedy: all samples of a group are equal and nothing can be learned"
        yield ConfigProblem("actor_infer.generating_args.temperature", message, "set it above 0, for example 1.0")
    if sampling.num_return_sequences != 1:
        path = "actor_infer.generating_args.num_return_sequences"
        yield ConfigProblem(path, f"{sampling.num_return_sequences} has no effect in training", f"set `{key}` instead")
    if size == 1 and config.group_filter == "zero_variance":
        message = "zero_variance would drop every group: each has 1 sample"
        yield ConfigProblem("group_filter", message, f"set `{key}` to at least 2, or `none`")
    if config.zero_variance_mask and size == 1:
        message = "true would leave every group out of the loss: each has 1 sample"
        yield ConfigProblem("zero_variance_mask", message, f"set `{key}` to at least 2, or false")
    elif config.zero_variance_mask and config.group_filter == "zero_variance":
        message = "true has no effect: `group_filter: zero_variance` drops such groups before training"
        yield ConfigProblem("zero_variance_mask", message, "keep one of the two")


def kl_has_a_reference(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require a reference for a KL term, a KL term for a reference, and a positive start of an adaptive controller.

    The controller multiplies its coefficient, so it would stay at 0.
    """
    if config.reference is None:
        for key, value in changes(config, "use_kl_loss", "add_token_level_kl"):
            message = f"{shown(value)}, but there is no `reference` to measure the divergence from"
            yield ConfigProblem(key, message, "add `reference: {device_mapping: ...}`, or set false")
    elif not derived.uses_kl(config):
        message = "has no effect: no KL term uses it, yet it would be loaded"
        yield ConfigProblem("reference", message, "set `use_kl_loss` or `add_token_level_kl`, or remove this section")
    if config.add_token_level_kl and config.kl_controller == "adaptive" and config.init_kl_coef == 0:
        message = "0 with an adaptive controller, which multiplies it: it would stay 0"
        yield ConfigProblem("init_kl_coef", message, "set it above 0, for example 0.01")


def teacher_can_teach(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require a teacher for `distillation`, and the reverse. Reject keys that need scores if there are no rewards."""
    if config.teacher is None and config.distillation is not None:
        message = "there is no `teacher` to learn from"
        yield ConfigProblem("distillation", message, "add `teacher: {device_mapping: ...}`, or remove this section")
    elif config.teacher is not None and config.distillation is None:
        message = "has no effect: nothing is learned from it, yet it would be loaded"
        yield ConfigProblem("teacher", message, "add `distillation: {}`, or remove this section")
    if config.teacher is not None and config.teacher.prompt is not None and isinstance(config, AgenticConfig):
        message = "an episode begins with what its environment says"
        yield ConfigProblem("teacher.prompt", message, "use `pipeline: rlvr`, or remove this key")
    elif config.teacher is not None and config.teacher.prompt is None and derived.is_policy(config, "teacher"):
        message = "policy, and it sees the same prompt: the divergence would always be 0"
        yield ConfigProblem("teacher.weights", message, "give it a `prompt` of its own, or set `weights: frozen`")
    if derived.is_scored(config) or derived.learns_from_rewards(config):
        return
    scored = ("group_filter", "zero_variance_mask", "difficulty_mask", "validation")
    for key in dict.fromkeys(path.partition(".")[0] for path, _ in changes(config, *scored)):
        yield ConfigProblem(key, "looks at scores, and there are no `rewards`", "add `rewards`, or remove this key")


def log_probabilities_have_the_weights(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require devices of its own, and exactly the trainer's weights, for an `actor_logp` that is not the trainer."""
    role, trained = config.actor_logp, config.actor_train
    if role is None or derived.logp_is_trainer(config):
        return
    mappings, strategy = readable_mappings(config), strategy_of("actor_logp", role)
    own, path = set(mappings.pop("actor_logp", [])), "actor_logp.device_mapping"
    sharing = [name for name, devices in mappings.items() if own & set(devices)]
    if sharing:
        message = f"{shown(role.device_mapping)}: it would take turns with {' and '.join(sharing)}, and save no time"
        remedy = "give it devices of its own, or remove the mapping: then actor_train does its work"
        yield ConfigProblem(path, message, remedy)
    if isinstance(strategy, Trainer) and not strategy.receives:
        able = [f"`{name}`" for name, record in FORWARD_STRATEGIES.built_in.items() if record.receives]
        message = f"{role.strategy_args.strategy_name} takes no new weights while it runs"
        yield ConfigProblem("actor_logp.strategy_args.strategy_name", message, f"use {' or '.join(able)}")
    update = config.weight_update
    if update.interval_steps > 1:
        message = f"{update.interval_steps}, but actor_logp computes with the weights of every step"
        yield ConfigProblem("weight_update.interval_steps", message, "write 1, or remove `actor_logp`")
    if update.transport in ("nccl", "cuda_ipc"):
        message = f"{shown(update.transport)} reaches engines of vLLM only, and actor_logp needs the weights, too"
        yield ConfigProblem("weight_update.transport", message, "write `auto`, or remove `actor_logp`")
    model = derived.model_path(config, trained)
    if derived.model_path(config, role) != model:
        message = f"{shown(derived.model_path(config, role))}: it computes with the weights of actor_train, {model}"
        yield ConfigProblem("actor_logp.model_args.model_name_or_path", message, "remove this key")
    dtype = trained.model_args.dtype
    for name, section in (("actor_logp", role), ("actor_infer", config.actor_infer)):
        if section.model_args.dtype != dtype:
            carried = "weights travel in it, and " if name == "actor_infer" else ""
            message = f"{section.model_args.dtype}: {carried}actor_logp has to compute as actor_train does, in {dtype}"
            yield ConfigProblem(f"{name}.model_args.dtype", message, f"write {dtype}, or remove `actor_logp`")
    if trained.model_args.lora_target is not None and dtype != "float32":
        message = f"in {dtype} an adapter that is merged for actor_logp is rounded away in part"
        remedy = "write `dtype: float32` for all roles, or remove `actor_logp`"
        yield ConfigProblem("actor_train.model_args.lora_target", message, remedy)


def rewards_keep_a_meaning(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject reward shaping that leaves nothing to learn from."""
    if config.difficulty_mask and config.difficulty_low_threshold > config.difficulty_high_threshold:
        low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
        message = f"{low:g} is above difficulty_high_threshold {high:g}: every group would be left out"
        yield ConfigProblem("difficulty_low_threshold", message, f"set at most {high:g}")
    if config.difficulty_mask and (config.difficulty_low_threshold, config.difficulty_high_threshold) == (0, 1):
        message = "true, but the thresholds 0 and 1 keep every group whose scores lie between them"
        remedy = "set `difficulty_low_threshold` or `difficulty_high_threshold`, for example 0.1 and 0.95"
        yield ConfigProblem("difficulty_mask", message, remedy)
    penalty, longest = config.length_penalty, derived.max_new_tokens(config)
    if penalty is not None and penalty.buffer is not None and penalty.buffer > longest:
        message = f"{penalty.buffer} is more than the longest response of {count(longest, 'token')}"
        yield ConfigProblem("length_penalty.buffer", message, f"set at most {longest}")
    if derived.group_size(config) == 1:
        key = derived.group_size_key(config)
        if penalty is not None and penalty.kind == "relative":
            message = "relative compares the lengths of a group, and a group has 1 sample"
            yield ConfigProblem("length_penalty.kind", message, f"set `{key}` to at least 2, or `kind: overlong`")
        for norm in ("norm_mean_type", "norm_std_type"):
            if vars(config)[norm] == "group":
                message = "group, but a group has 1 sample: nothing to compare"
                yield ConfigProblem(norm, message, f"set `{key}` to at least 2, or `batch`")


def mismatch_can_be_measured(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require comparable log-probabilities for the mismatch alarm and the parity check."""
    if config.mismatch_alarm is not None and derived.truncates_sampling(config):
        message = (
            f"{config.mismatch_alarm:g} would compare unlike things: with top_p or top_k the engine records the "
            "log-probabilities of the truncated distribution, which the trainer does not know"
        )
        remedy = "remove it (the canaries of `weight_update.canary_interval` still compare), or set top_p 1 and top_k 0"
        yield ConfigProblem("mismatch_alarm", message, remedy)
    if config.weight_update.canary_interval > 0 and derived.canary_length(config) < 2:
        longest = count(derived.sequence_length(config), "token")
        message = f"sequences of {longest} leave no token for canaries to compare"
        yield ConfigProblem("weight_update.canary_interval", message, "set 0, or allow longer sequences")


def training_warnings(config: PipelineConfig) -> Iterator[str]:
    """Warn about models and arithmetic that work but may not be intended."""
    if config.actor_infer.model_args.model_name_or_path not in (None, derived.model_path(config, config.actor_train)):
        yield "actor_infer starts from another model than actor_train: version 0 is not the policy that is trained"
    if derived.truncates_sampling(config):
        yield (
            "training samples from a truncated distribution (top_p, top_k): its log-probabilities are recorded, but "
            "the trainer's own have no truncation, so the importance ratio is biased, and the train/inference mismatch "
            "is not reported"
        )
    estimator, drops = config.adv_estimator, config.group_filter == "zero_variance" or config.zero_variance_mask
    learns_from_equal = estimator in ADVANTAGE_ESTIMATORS.built_in and estimator not in COMPARE_SCORES
    if drops and learns_from_equal and config.norm_mean_type != "group":
        key = "zero_variance_mask" if config.zero_variance_mask else "group_filter"
        yield f"{key} drops groups of equal scores, and {estimator} can learn from them: it does not only compare"
    infer = config.actor_infer
    is_rounded = config.weight_update.content != "adapter" and infer.model_args.dtype != "float32"
    if is_rounded and not list(adapters_cannot_travel(config)):
        yield (
            f"adapters are added to weights in {infer.model_args.dtype}, whose rounding drops most of a small one: "
            "write `weight_update.content: adapter` (docs/weights.md, Adapters alone)"
        )
    if infer.silence_timeout_seconds >= infer.request_timeout_seconds:
        yield (
            f"actor_infer.silence_timeout_seconds {infer.silence_timeout_seconds:g} is not below "
            f"request_timeout_seconds {infer.request_timeout_seconds:g}: the requests of a stuck engine fail before it "
            "is replaced"
        )
    if config.stall_timeout_seconds <= infer.request_timeout_seconds:
        yield (
            f"stall_timeout_seconds {config.stall_timeout_seconds:g} is not above actor_infer.request_timeout_seconds "
            f"{infer.request_timeout_seconds:g}: a run whose last request is lost ends before that request can fail"
        )
    if config.sequence_length is not None:
        left = config.sequence_length - config.prompt_length
        if left < derived.max_new_tokens(config):
            yield f"sequence_length leaves {count(left, 'token')} for the response to a prompt of full length"
        if config.sequence_length > config.prompt_length + config.response_length:
            yield "sequence_length is never reached: prompt_length + response_length is less"
    least = derived.least_staleness(config)
    if config.async_generation_ratio == 0 and (config.max_staleness or 0) > least:
        yield f"max_staleness {config.max_staleness} is never reached: at ratio 0 the lag is {least}"
    longest = derived.sequence_length(config)
    for name, role in derived.present_roles(config).items():
        for mode, dynamic, budget in (
            ("train", role.use_dynamic_batching_in_train, role.max_tokens_per_microbatch_in_train),
            ("infer", role.use_dynamic_batching_in_infer, role.max_tokens_per_microbatch_in_infer),
        ):
            key = f"max_tokens_per_microbatch_in_{mode}"
            if dynamic and key not in UNREAD_KEYS[name] and budget < longest:
                yield f"{name}.{key} {budget} is less than one sequence of {longest}, which goes beyond it alone"
    for name, role in derived.trained_roles(config).items():
        if derived.warmup_steps(config, role) >= derived.total_optimizer_steps(config, role):
            yield f"warm-up of {name} lasts the whole run: its learning rate never reaches its peak"
    if config.use_kl_loss and config.kl_loss_coef == 0:
        yield "kl_loss_coef is 0: the KL divergence is measured but weighs nothing"
    if config.use_kl_loss and config.kl_estimator == "k1":
        yield "kl_estimator k1 as a loss has a gradient of mean 0; k2 and k3_straight_through have that of the KL"
    if config.add_token_level_kl and config.init_kl_coef == 0:
        yield "init_kl_coef is 0: the KL divergence is measured but weighs nothing"
