"""Translation of TRL's arguments: `GRPOConfig`, `RLOOConfig`, `AsyncGRPOConfig`, their trainers and `trl grpo`.

The tables agree with `docs/migration/trl.md`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from roll.configs.dialects.rules import (
    Path,
    Translation,
    in_epochs,
    later,
    lost,
    none,
    put_trackers,
    table,
    to,
    translation,
    whole,
)
from roll.configs.errors import ConfigProblem, count

ORIGIN = "TRL"
COMPUTED = ("model", "reward_funcs", "train_dataset", "eval_dataset", "model_init_kwargs")
"""Arguments whose source text is useful even where it is not a literal."""
_ENGINE = "actor_infer.strategy_args.strategy_config"
_TRAIN = "actor_train.training_args"
_HUB = "nothing is pushed to the hub"
_LOG = "metrics are in `metrics.jsonl`, rollouts in `samples.jsonl`"
_DATA = "prompts are read once, in the driver"
_SAMPLING = "sampling has temperature, top-p, top-k and stop strings"
_LIGER = "the loss is computed in chunks in any case"

_TABLE = {
    "entry": none("the command is `roll train`"),
    # model and data
    "model": later("write `pretrain`"),
    "model_name_or_path": to("pretrain"),
    "model_init_kwargs model_init_kwargs.*": later("write `actor_train.model_args`"),
    "model_init_kwargs.attn_implementation": to("actor_train.model_args.attn_implementation"),
    "model_init_kwargs.trust_remote_code": to("actor_train.model_args.trust_remote_code"),
    "dtype torch_dtype": later("write `actor_train.model_args.dtype`"),
    "attn_implementation": to("actor_train.model_args.attn_implementation"),
    "trust_remote_code": to("actor_train.model_args.trust_remote_code"),
    "dataset_name dataset_config dataset_split dataset_train_split": later("write `actor_train.data_args.hub`"),
    "dataset_test_split": later("write `validation.data_args.hub`"),
    "train_dataset": later("write `actor_train.data_args`"),
    "eval_dataset": later("write `validation.data_args`"),
    "shuffle_dataset": to("actor_train.data_args.shuffle"),
    "processing_class": none("the model's own files have the tokenizer"),
    "reward_funcs": later("write `rewards`"),
    "reward_weights": lost("weigh the parts within one function (docs/migration/trl.md)"),
    "reward_model_name_or_path": later("write `verifier: reward_model` and `reward_pretrain`"),
    "use_peft lora_target_modules peft_config.target_modules": later("write `actor_train.model_args.lora_target`"),
    "lora_r peft_config.r": later("write `actor_train.model_args.lora_rank`"),
    "lora_alpha peft_config.lora_alpha": later("write `actor_train.model_args.lora_alpha`"),
    "lora_dropout": later("remove it: adapters have no dropout"),
    "peft_config.*": none("adapters have rank, alpha and layers"),
    "tools": lost("write `pipeline: agentic`, with tools (docs/tools.md)"),
    "environment_factory rollout_func": lost("write `pipeline: agentic`, with an environment (docs/agentic.md)"),
    "callbacks": lost("write a stage (docs/howto/stage.md)"),
    "chat_template_kwargs": to("actor_train.data_args.chat_template_kwargs"),
    "chat_template_kwargs.*": to("actor_train.data_args.chat_template_kwargs.*"),
    # batches
    "num_generations": to("num_return_sequences_in_group"),
    "per_device_train_batch_size": later("write `rollout_batch_size`, which counts prompts of a training step"),
    "gradient_accumulation_steps": later("write `rollout_batch_size`, which counts prompts of a training step"),
    "steps_per_generation": later("write `gradient_accumulation_steps`"),
    "generation_batch_size": later("write `rollout_batch_size`"),
    "num_processes": later("write `actor_train.device_mapping`"),
    "num_machines": later("write `cluster.num_nodes`"),
    "num_iterations": to("ppo_epochs"),
    "max_prompt_length": to("prompt_length"),
    "max_completion_length": to("response_length"),
    "response_length": to("response_length"),
    "token_budget": to("actor_train.max_tokens_per_microbatch_in_train"),
    # optimizer
    "learning_rate": to(f"{_TRAIN}.learning_rate"),
    "weight_decay": to(f"{_TRAIN}.weight_decay"),
    "adam_beta1": to(f"{_TRAIN}.adam_beta1"),
    "adam_beta2": to(f"{_TRAIN}.adam_beta2"),
    "adam_epsilon": to(f"{_TRAIN}.adam_epsilon"),
    "max_grad_norm": to(f"{_TRAIN}.max_grad_norm"),
    "lr_scheduler_type": to(f"{_TRAIN}.lr_scheduler_type", {"constant_with_warmup": "constant"}),
    "warmup_steps": later("write `training_args.warmup_steps`"),
    "warmup_ratio": to(f"{_TRAIN}.warmup_ratio"),
    "optim": none("the optimizer is AdamW"),
    "gradient_checkpointing": to(
        "actor_train.strategy_args.strategy_config.gradient_checkpointing", note="on by default in TRL, off here"
    ),
    "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.*": none("recomputing has no variants"),
    "bf16": later("write `actor_train.model_args.dtype: bfloat16`"),
    "fp16": later("write `actor_train.model_args.dtype`"),
    "use_liger_kernel use_liger_loss": none(_LIGER),
    "cast_lm_head_to_fp32": none("log-probabilities are computed in float32"),
    "ds3_gather_for_generation": none("weights travel in buckets"),
    # sampling
    "temperature": to("actor_infer.generating_args.temperature"),
    "top_p": to("actor_infer.generating_args.top_p"),
    "top_k": to("actor_infer.generating_args.top_k", {None: 0, -1: 0}),
    "min_p": lost("sampling has top-p and top-k"),
    "repetition_penalty": later("remove it: what is sampled is the policy's distribution"),
    "generation_kwargs generation_kwargs.*": lost(_SAMPLING),
    "use_vllm": later("write `actor_infer.strategy_args.strategy_name`"),
    "vllm_mode": later("write `actor_infer.device_mapping`"),
    "vllm_gpu_memory_utilization": later("write `strategy_config: {gpu_memory_utilization}`"),
    "vllm_tensor_parallel_size": to("actor_infer.num_gpus_per_engine"),
    "vllm_max_model_length": none("prompt and response say it"),
    "vllm_enable_sleep_mode": none("an engine sleeps where it shares its devices"),
    "vllm_server_*": none("the run starts its engines itself"),
    "vllm_model_impl": later("write `strategy_config: {model_impl}`"),
    "vllm_importance_sampling_correction": later("write `old_logprobs: recompute` and `train_infer_correction`"),
    "vllm_importance_sampling_*": later("write `train_infer_correction`"),
    "use_transformers_continuous_batching use_transformers_paged": none("`hf_infer` batches continuously"),
    "transformers_continuous_batching_config": none("`hf_infer` has options of its own"),
    "transformers_continuous_batching_config.*": none("`hf_infer` has options of its own"),
    "cache_implementation": none("`hf_infer` has a cache of its own"),
    "mask_truncated_completions": to("max_len_mask"),
    # loss
    "loss_type": later("write `loss_agg_mode` and `actor_train.pg_variant`"),
    "importance_sampling_level": later("write `actor_train.pg_variant: gspo`"),
    "epsilon": later("write `pg_variant_args: {clip_low, clip_high}`"),
    "epsilon_high": later("write `pg_variant_args: {clip_high}`"),
    "delta": later("write `pg_variant_args: {dual_clip}`"),
    "sapo_temperature_pos sapo_temperature_neg": later("write `pg_variant_args`"),
    "beta": later("write `use_kl_loss`, `kl_loss_coef` and `reference`"),
    "use_bias_correction_kl": lost("there is no such estimator; see `kl_estimator`"),
    "sync_ref_model": lost("the reference stays what it is"),
    "ref_model_*": none("the reference stays what it is"),
    "scale_rewards": later("write `adv_estimator_args: {normalize_by_std}`, or `norm_std_type: batch`"),
    "normalize_advantages": to("whiten_advantages"),
    "reward_clip_range": later("write `reward_clip`"),
    "entropy_coef": to("entropy_loss_coef"),
    "use_adaptive_entropy entropy_target entropy_coef_*": lost("the coefficient of the entropy stays what it is"),
    "top_entropy_quantile": lost("all tokens learn"),
    "vespo_* luspo_*": lost("there is no such loss"),
    "off_policy_mask_threshold": lost("write `train_infer_correction.reject` (docs/algorithms/correction.md)"),
    # the run
    "output_dir": to("output_dir"),
    "run_name": later("write `exp_name`"),
    "max_steps num_train_epochs": later("write `max_steps`"),
    "save_steps": later("write `save_steps`, which counts training steps"),
    "save_strategy": later("write `save_steps`; 0 is only at the end"),
    "save_total_limit": to("max_ckpt_to_keep"),
    "eval_steps eval_strategy": later("write `eval_steps`"),
    "num_generations_eval": later("write `validation.generating_args.num_return_sequences`"),
    "per_device_eval_batch_size": none("all prompts of validation are in flight at once"),
    "logging_steps": to("logging_steps"),
    "report_to": later("write `track_with`"),
    "seed": to("seed"),
    "resume_from_checkpoint": to("resume_from_checkpoint"),
    "push_to_hub hub_*": none(_HUB),
    "trackio_space_id": later("write `tracker_kwargs.trackio.space_id`"),
    "project": later("write `tracker_kwargs.<tracker>.project`"),
    "log_completions num_completions_to_print log_unique_prompts logging_*": none(_LOG),
    "remove_unused_columns": none("all columns are kept as metadata"),
    "dataloader_*": none(_DATA),
    "config_file": none("devices are in the file"),
    "ddp_*": none("gradients are added up by the trainer"),
    # asynchrony
    "max_staleness": to("max_staleness", note="TRL discards older samples; here training waits for groups in time"),
    "weight_sync_steps": to("weight_update.interval_steps"),
    "max_inflight_tasks": later("write `async_generation_ratio`"),
    "queue_maxsize": none("`async_generation_ratio` is the one budget"),
    "request_timeout": to("actor_infer.request_timeout_seconds"),
    "weight_sync_timeout": to("weight_update.timeout_seconds"),
}
RULES = table(_TABLE)
"""Argument of TRL -> its rule."""

_OTHERS = ("sft", "dpo", "kto", "ppo", "reward", "prm", "orpo", "cpo", "bco", "gkd", "xpo", "nashmd", "onlinedpo")
"""Names of TRL's other trainers, in lower case."""
_VERIFIERS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}


def translate(given: Mapping[Path, Any]) -> Translation:
    """Return the translation of TRL's arguments."""
    steps = (_trainer_is_known, _model, _data, _devices, _batches, _loss, _engine, _rewards, _validation, _running)
    return translation(ORIGIN, RULES, steps, given)


def _trainer_is_known(done: Translation) -> None:
    """Add a problem for any other trainer: its arguments have the same names and another meaning."""
    for name in str(done.get("entry", "")).split():
        other = name.endswith("Trainer") or name.removesuffix("Config").lower().replace("_", "") in _OTHERS
        if other and not re.search("GRPO|RLOO", name):
            remedy = "give a script of `GRPOTrainer` or `RLOOTrainer`"
            if "sft" in name.lower():
                remedy = "write a file with `pipeline: sft` (docs/sft.md)"
            done.problems.append(ConfigProblem(name, f"`roll convert` does not read {ORIGIN}'s `{name}`", remedy))


def _model(done: Translation) -> None:
    model = done.get("model")
    if model is not None and done.ours("pretrain") is None:
        if str(model).isidentifier():
            done.lack("pretrain", f"the script computes the model (`{model}`)")
        else:
            done.put("pretrain", model)
    elif done.ours("pretrain") is None:
        done.lack("pretrain", "TRL's model was not given")
    kwargs = str(done.get("model_init_kwargs", ""))
    named = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    words = [kwargs, *(str(done.get(name)) for name in named)]
    half = done.flag("fp16") or any("float16" in word and "bfloat16" not in word for word in words)
    plain = any("float32" in word for word in words) or not done.flag("bf16", True)
    dtype = "float16" if half else "float32" if plain else "bfloat16"
    done.put_precision(dtype)
    by_hand = _makes_adapters(done)
    rank = whole(done.get("lora_r", done.get("peft_config.r", 8 if by_hand else 16)))
    target = done.get("lora_target_modules", done.get("peft_config.target_modules"))
    alpha = done.get("lora_alpha", done.get("peft_config.lora_alpha"))
    dropout = done.get("lora_dropout", 0.0)
    if _has_adapters(done) and rank is not None:
        done.put("actor_train.model_args.lora_rank", rank)
        done.put(
            "actor_train.model_args.lora_target", target or "all-linear", "" if target else "PEFT chooses by model"
        )
        default = 8 if by_hand else 32
        note = "" if alpha is not None else "PEFT's default" if by_hand else "TRL's default"
        done.put("actor_train.model_args.lora_alpha", default if alpha is None else alpha, note)
        if dropout:
            done.lose("lora_dropout", dropout, "adapters have no dropout")


def _has_adapters(done: Translation) -> bool:
    named = any(parts[0] in ("lora_r", "lora_target_modules") for parts in done.given)
    return done.flag("use_peft") or named or _makes_adapters(done)


def _makes_adapters(done: Translation) -> bool:
    """Return True if there is an object of PEFT, which has PEFT's defaults."""
    return "LoraConfig" in str(done.get("entry", "")) or any(parts[0] == "peft_config" for parts in done.given)


def _split(value: Any) -> str | None:
    return next((str(each) for each in (value if isinstance(value, list) else [value]) if each), None)


def _data(done: Translation) -> None:
    name, subset = done.get("dataset_name"), done.get("dataset_config")
    split = _split(done.get("dataset_train_split", done.get("dataset_split", "train")))
    variable = done.get("train_dataset")
    if name is not None:
        source = {"dataset": name, **({"subset": subset} if subset else {}), "split": split}
        note = "the script may rename columns: see `columns`" if variable is not None else ""
        done.put("actor_train.data_args.hub", [source], note)
    else:
        done.lack(
            "actor_train.data_args", "TRL's data set was not given" if variable is None else "the script makes it"
        )
    done.put("actor_train.data_args.template", "chat")
    if done.ours("prompt_length") is None:
        done.put("prompt_length", 512, "TRL has no bound of prompts")
        done.put("actor_train.data_args.overlong_prompts", "drop")


def _devices(done: Translation) -> None:
    processes = whole(done.get("num_processes"))
    nodes = whole(done.get("num_machines", 1)) or 1
    if processes is None:
        done.lack("cluster.num_devices_per_node", "`accelerate launch` decides the number of processes; 8 are written")
        processes = 8
    apart = done.choice("vllm_mode", {"server": True, "colocate": False}, "colocate") or _is_async(done)
    per_node, generates, note = -(-processes // nodes), f"0-{processes - 1}", ""
    if apart:
        own = whole(done.ours("actor_infer.num_gpus_per_engine")) or 1
        generates = f"{processes}-{processes + own - 1}"
        note = "vLLM's server has devices of its own, of which only it knows"
        per_node, nodes = (per_node + own, 1) if nodes == 1 else (per_node, nodes + 1)
    done.put_cluster(per_node, nodes)
    done.put("actor_train.device_mapping", f"0-{processes - 1}")
    done.put("actor_infer.device_mapping", generates, note)


def _is_async(done: Translation) -> bool:
    keys = {"max_staleness", "weight_sync_steps", "max_inflight_tasks", "queue_maxsize", "token_budget"}
    return bool(keys & {parts[0] for parts in done.given}) or "async" in str(done.get("entry", "")).lower()


def _batches(done: Translation) -> None:
    """Translate batch sizes. TRL counts completions per device; here the prompts of a training step are counted."""
    micro = whole(done.get("per_device_train_batch_size", 8)) or 8
    accumulation = whole(done.get("gradient_accumulation_steps", 1)) or 1
    steps, generated = whole(done.get("steps_per_generation")), whole(done.get("generation_batch_size"))
    processes = whole(done.get("num_processes")) or 8
    samples = whole(done.ours("num_return_sequences_in_group", 2 if _is_rloo(done) else 8)) or 8
    done.put("num_return_sequences_in_group", samples)
    optimizer = micro * accumulation * processes
    step = generated or micro * (steps or accumulation) * processes
    note = f"{step} completions of a generation are {count(step // samples, 'prompt')} x {samples}"
    if step % samples or step < samples:
        done.lack("rollout_batch_size", f"{step} completions are no whole number of groups of {samples}")
        return
    done.put("rollout_batch_size", step // samples, note)
    if step != optimizer and step % optimizer == 0:
        done.put("actor_train.use_dynamic_batching_in_train", False)
        done.put(f"{_TRAIN}.per_device_train_batch_size", micro)
        done.put(f"{_TRAIN}.gradient_accumulation_steps", accumulation)
    elif step != optimizer:
        path = f"{_TRAIN}.gradient_accumulation_steps"
        done.lack(path, f"an optimizer step of {optimizer} completions does not divide the {step} of a generation")


def _is_rloo(done: Translation) -> bool:
    return (
        "rloo" in str(done.get("entry", "")).lower()
        or done.has("normalize_advantages")
        or done.has("reward_clip_range")
    )


def _loss(done: Translation) -> None:
    kind = done.get("loss_type", "dapo")
    sequence = done.choice("importance_sampling_level", {"token": False, "sequence": True}, "token")
    arguments, rloo = "actor_train.pg_variant_args", _is_rloo(done)
    low = done.number("epsilon", 0.2)
    high, delta = done.get("epsilon_high"), done.get("delta")
    modes = {
        "grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm", "sapo":
        "seq-mean-token-mean", "cispo": "token-mean", "bnpo": "token-mean",
    }  # fmt: skip
    if kind not in modes:
        done.lose("loss_type", kind, "there is no such loss; `ppo` with `loss_agg_mode: token-mean` is written")
    loss = "gspo" if sequence else kind if kind in ("cispo", "sapo") else "ppo"
    note = "`bnpo` divides by the tokens of a micro-batch, this by those of the batch" if kind == "bnpo" else ""
    done.put("actor_train.pg_variant", loss)
    done.put("loss_agg_mode", modes.get(kind, "token-mean"), note)
    if loss in ("ppo", "gspo"):
        done.put(f"{arguments}.clip_low", min(low, 1))
        done.put(f"{arguments}.clip_high", low if high is None else high)
    if loss == "cispo" and high is not None:
        done.put(f"{arguments}.epsilon_high", max(high - 1, 0), "TRL bounds the ratio itself, this its distance from 1")
    if delta is not None and loss == "ppo":
        done.put(f"{arguments}.dual_clip", delta)
    for key, ours in (("sapo_temperature_pos", "tau_positive"), ("sapo_temperature_neg", "tau_negative")):
        value = done.get(key)
        if value is not None and loss == "sapo":
            done.put(f"{arguments}.{ours}", value)
    done.put("adv_estimator", "rloo" if rloo else "grpo")
    scales = {True: "group", "group": "group", False: "none", "none": "none", "batch": "batch"}
    scale = done.choice("scale_rewards", scales, "group")
    if not rloo and scale != "group":
        done.put("adv_estimator_args.normalize_by_std", False)
        if scale == "batch":
            done.put("norm_std_type", "batch")
    beta = done.number("beta", 0.05 if rloo else 0.0)
    if beta and rloo:
        done.put("add_token_level_kl", True)
        done.put("init_kl_coef", beta, "" if done.has("beta") else "TRL's default")
        done.put("kl_estimator", "k1")
    elif beta:
        done.put("use_kl_loss", True)
        done.put("kl_loss_coef", beta)
    if beta and _has_adapters(done):
        done.put("reference.device_mapping", done.ours("actor_train.device_mapping"))
    elif beta:
        done.put("reference.device_mapping", done.ours("actor_train.device_mapping"))
        done.put("reference.model_args.dtype", done.ours("actor_train.model_args.dtype"))
    clip = done.get("reward_clip_range")
    if isinstance(clip, list | tuple) and len(clip) == 2:
        done.put("reward_clip", max(abs(each) for each in clip))


def _engine(done: Translation) -> None:
    vllm = done.get("use_vllm", done.has("vllm_mode") or _is_async(done))
    share, implementation = done.get("vllm_gpu_memory_utilization", 0.3), done.get("vllm_model_impl")
    done.put("actor_infer.strategy_args.strategy_name", "vllm" if vllm else "hf_infer")
    if vllm:
        done.put(f"{_ENGINE}.gpu_memory_utilization", share)
        done.put_given(f"{_ENGINE}.model_impl", implementation)
    else:
        done.values.pop(("actor_infer", "num_gpus_per_engine"), None)
    penalty = done.get("repetition_penalty", 1.0)
    if penalty != 1.0:
        done.lose("repetition_penalty", penalty, "what is sampled is the policy's distribution")
    corrects = done.get("vllm_importance_sampling_correction", bool(vllm) and not _is_async(done))
    modes = {f"{level}_{kind}": (level, kind) for level in ("token", "sequence") for kind in ("mask", "truncate")}
    level, mode = done.choice("vllm_importance_sampling_mode", modes, "sequence_mask")
    cap = done.get("vllm_importance_sampling_clip_max", done.get("vllm_importance_sampling_cap", 3.0))
    if corrects and done.has("vllm_importance_sampling_mode"):
        done.put("train_infer_correction.weight", {"level": level, "mode": mode, "upper": cap})
        if _updates(done) == 1:
            loss = done.ours("actor_train.pg_variant")
            done.without_ratio(f"with one optimizer step a batch the ratio of `{loss}` is 1, and this is the same")
        else:
            done.put("old_logprobs", "recompute")
    ahead, batch = whole(done.get("max_inflight_tasks")), whole(done.ours("rollout_batch_size"))
    if _is_async(done):
        group = whole(done.ours("num_return_sequences_in_group")) or 1
        ratio = round(ahead / group / batch, 2) if ahead and batch else 1
        staleness = done.ours("max_staleness")
        if isinstance(staleness, int):
            ratio = min(ratio, staleness)
        done.put("async_generation_ratio", ratio, "how many steps may be generated ahead; TRL counts tasks")


def _rewards(done: Translation) -> None:
    functions, model = done.get("reward_funcs"), done.get("reward_model_name_or_path")
    if model is not None:
        done.put("rewards.model.verifier", "reward_model")
        done.put("rewards.model.tag_included", ["default"])
        done.put("rewards.model.device_mapping", done.ours("actor_train.device_mapping"))
        done.put("reward_pretrain", model)
        return
    names = _elements(functions) if isinstance(functions, str) else [str(each) for each in functions or ()]
    known = [_VERIFIERS[name] for name in names if name in _VERIFIERS]
    for name in names:
        if name not in _VERIFIERS:
            done.lose("reward_funcs", name, "write a function of one response (docs/howto/reward.md)")
    if known:
        done.put("rewards.math.verifier", known[0])
        done.put("rewards.math.tag_included", ["default"], "the domain of rows without one")
    else:
        done.lack("rewards", "name a verifier or a function, with `tag_included: [default]` for rows without a domain")


def _elements(source: str) -> list[str]:
    """Return the source of each element of a Python list, without quotes; for other sources a list of just that one."""
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return [source]
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part) for part in parts]


def _validation(done: Translation) -> None:
    rhythm, strategy = whole(done.get("eval_steps")), done.get("eval_strategy", "no")
    name, split, variable = done.get("dataset_name"), _split(done.get("dataset_test_split")), done.get("eval_dataset")
    number = done.get("num_generations_eval")
    if strategy in ("no", None, False):
        return
    if name is None or split is None or rhythm is None:
        done.lack("validation.data_args", f"the script makes it ({variable or 'no test split is named'})")
        return
    updates = _updates(done)
    done.put("eval_steps", -(-rhythm // updates), f"{rhythm} optimizer steps" if updates > 1 else "")
    done.put("validation.data_args.hub", [{"dataset": name, "split": split}])
    done.put("validation.data_args.template", "chat")
    if whole(number) is not None and number != 1:
        done.put("validation.generating_args.num_return_sequences", number)
        done.put("validation.generating_args.temperature", done.ours("actor_infer.generating_args.temperature", 1.0))


def _running(done: Translation) -> None:
    done.put("actor_train.strategy_args.strategy_name", "fsdp2_train")
    done.put_adamw("actor_train")
    if _is_async(done):
        done.put_default("response_length", 2048)
    done.put("actor_train.strategy_args.strategy_config.gradient_checkpointing", True, "TRL's default")
    if done.ours(f"{_TRAIN}.lr_scheduler_type") is None:
        done.put(f"{_TRAIN}.lr_scheduler_type", "linear", "TRL's default")
    warmup = done.number("warmup_steps", 0)
    if 0 < warmup < 1:
        done.put(f"{_TRAIN}.warmup_ratio", warmup)
    elif warmup:
        done.put(f"{_TRAIN}.warmup_steps", int(warmup))
    steps, epochs = whole(done.get("max_steps")), done.get("num_train_epochs", 3.0)
    updates = _updates(done)
    if steps is not None:
        note = f"{steps} optimizer steps, {updates} in a training step" if updates > 1 else ""
        done.put("max_steps", -(-steps // updates), note)
    else:
        done.lack("max_steps", in_epochs(ORIGIN, epochs))
    given, at_steps = done.get("save_steps", 500), done.get("save_strategy", "steps") not in ("no", "epoch")
    saves = whole(given)
    if at_steps and saves is not None:
        note = "" if done.has("save_steps") else "TRL's default"
        done.put("save_steps", -(-saves // updates), f"{saves} optimizer steps" if updates > 1 else note)
    elif at_steps:
        done.lose("save_steps", given, "write a number of training steps")
    done.keep_all_checkpoints()
    name, output = done.get("run_name"), done.ours("output_dir")
    if name or output:
        done.put("exp_name", str(name or str(output).rstrip("/").rpartition("/")[2]).replace("/", "-"))
    known = put_trackers(done, "report_to", done.get("project"), ("none", "all"))
    space = done.get("trackio_space_id")
    if space is not None and "trackio" in known:
        done.put("tracker_kwargs.trackio.space_id", space)


def _updates(done: Translation) -> int:
    """Return the optimizer steps of a training step: those of one pass over its batch, times the passes."""
    passes = whole(done.ours("ppo_epochs", 1)) or 1
    accumulation = done.ours(f"{_TRAIN}.gradient_accumulation_steps")
    prompts, samples = done.ours("rollout_batch_size"), done.ours("num_return_sequences_in_group")
    if accumulation is None or prompts is None:
        return passes
    processes = whole(done.get("num_processes")) or 8
    size = accumulation * done.ours(f"{_TRAIN}.per_device_train_batch_size") * processes
    return passes * max(1, prompts * samples // size)
