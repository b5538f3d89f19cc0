"""ROLL's dialect: its spellings, and the defaults and units in which it differs from ours.

A file is read in this dialect if it is recognisably ROLL's (`is_roll`). In any other file, ROLL's keys are unknown keys
with advice (`ADVICE`). The tables agree with `docs/migration/roll.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roll.configs.devices import DeviceMappingError, parse_device_mapping
from roll.configs.dialects.rules import Path, Translation, accounted, later, leaves, none, table, to, translated
from roll.configs.errors import ConfigProblem, shown
from roll.configs.given import is_given

ORIGIN = "ROLL"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
TEMPLATES = (
    "native", "qwen2_5", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_nothink", "qwen-vl", "chatml",
    "deepseekr1", "deepseekcoder", "llama2", "llama3", "empty", "default",
)  # fmt: skip
"""ROLL's names of chat templates. Here each tokenizer brings its own."""
REWARD_WORKERS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code", "LLMJudgeRewardWorker": "judge"}
"""ROLL's class of a reward worker -> our verifier."""
_ROLLS_CLASSES = "roll.pipeline."
"""Import-path prefix of ROLL's own workers and environment managers; ours are elsewhere."""
GPUS_PER_NODE = 8
"""Number of GPUs per node assumed for a file that does not give it; ROLL asks Ray."""
OWN_KEYS = ("pipeline", "cluster")
"""Keys that ROLL does not have and that nearly all files of ours have."""
AGENTIC_KEYS = ("custom_envs", "train_env_manager", "val_env_manager")
RLVR_KEYS = ("rewards", "num_return_sequences_in_group", "prompt_length", "validation")

_OWN_WEIGHTS = "an engine starts with the weights of the model itself"

_ADVICE = {
    "base_dir logging_dir": "write `output_dir`: logs, metrics and checkpoints are in the run's one folder",
    "checkpoint_config": "write `save_steps`, `max_ckpt_to_keep` and `output_dir`; nothing is uploaded",
    "hydra defaults": "remove it: a run is one file",
    "use_local": "remove it: `verifier: code` runs programs in the sandbox of its own machine",
    "pipeline_cls": "write `pipeline: rlvr` or `pipeline: agentic`",
    "rpc_timeout backend_timeout": "remove it: each wait has a deadline of its own (docs/faults.md)",
    "system_envs": "set these variables before `roll train`, and before `ray start` on each node of a cluster",
    "pg_clip pg_clip_low pg_clip_high use_pg_clip_range": "write `actor_train.pg_variant_args: {clip_low, clip_high}`",
    "dual_clip_loss": "write `actor_train.pg_variant_args: {dual_clip: 1.4}`: ROLL's bound is 1 + 2 x `pg_clip`",
    "importance_sampling": "for `seq` write `actor_train.pg_variant: gspo`, for `token` nothing",
    "ratio_type": "remove it; a ratio for each turn is `pg_variant: gspo` with `pg_variant_args: {level: segment}`",
    "use_topr_loss use_topr_neg_loss_coef": "write `actor_train.pg_variant: topr`",
    "use_policy_loss_type": "write `actor_train.pg_variant: ppo`, or `vanilla` for `PG`",
    "gamma": "write `adv_estimator_args: {gamma}`",
    "lambd": "write `adv_estimator_args: {lambda_}`",
    "kl_penalty": "write `kl_estimator`: `k1` for `kl`, `abs`, `k2` for `mse`",
    "enable_reference": "write a section `reference`, where there is a KL term",
    "enable_old_logprobs_recompute force_disable_old_logprobs_recompute": (
        "write `old_logprobs: recompute`, or `behaviour` for those recorded at sampling"
    ),
    "whiten_rewards use_reward_scaling use_reward_norm": (
        "write `norm_mean_type: batch` and `norm_std_type: batch`, which act on the scores of responses"
    ),
    "reward_normalization reward_norm reward_shift reward_scale": "write `norm_mean_type` and `norm_std_type`",
    "difficulty_loss_weight length_loss_weight": (
        "remove it; see `difficulty_mask` and `length_penalty`, or return a weight from the verifier: `sample_weight`"
    ),
    "add_len_reward": "write `length_penalty`",
    "mask_type": "remove it: a mask takes samples out of the loss, and nothing else",
    "postive_loss_coef rl_loss_coef sft_loss_coef user_defined_rollout_loop_cls rollout_mock": (
        "remove it: it has no counterpart (docs/migration/roll.md)"
    ),
    "query_filter_config": "write `group_filter: zero_variance`",
    "generate_opt_level": "remove it: requests always go through the scheduler",
    "is_use_additional_prompts max_additional_running_prompts": (
        "remove it: the slot of a filtered group is given back; `async_generation_ratio` says how much runs ahead"
    ),
    "max_running_requests": "write `max_num_seqs` (vLLM) or `max_running_requests` (`hf_infer`) in `strategy_config`",
    "router_args": "remove it: requests go to the replica with the least to do, turns of an episode to the same one",
    "sequence_packing_args": "write `use_sequence_packing: true`; rows are as long as micro-batches may be",
    "batch_adjust_mode": "remove it: a batch may have any number of samples",
    "val_greedy": "write `validation.generating_args: {temperature: 0}`, which is the default",
    "val_n_sample": "write `validation.generating_args.num_return_sequences`",
    "val_prompt_length val_sequence_length": (
        "write `validation.generating_args.max_new_tokens`; prompts have one length"
    ),
    "render_save_dir": "remove it: episodes are kept in the run's folder, under `episodes`",
    "is_offload_states offload_nccl": "remove it: roles that share devices make room for each other",
    "is_offload_optimizer_states_in_train_step": "remove it; `deepspeed_train` has `offload_optimizer`",
    "model_update_frequency": "write `weight_update.interval_steps`",
    "model_update_buffer_size_mb": "write `weight_update.param_update_gather_bucket_size_mb`",
    "num_gpus_per_worker": "write `actor_infer.num_gpus_per_engine`",
    "disable_gradient_checkpointing": "write `gradient_checkpointing` in `strategy_config`, which is off by default",
    "custom_env": "write `custom_envs`",
    "max_env_num_per_worker": "write `env_workers.num_workers` and `env_workers.max_sessions`",
    "judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key": (
        "write `rewards.<name>.judge: {base_url, model}`"
    ),
}
"""Names of ROLL's keys, separated by spaces -> remedy for one in a file of ours. None of the names is a key of ours."""
ADVICE = {name: advice for names, advice in _ADVICE.items() for name in names.split()}

CLIPPING = ("pg_clip", "pg_clip_low", "pg_clip_high", "use_pg_clip_range", "dual_clip_loss")

_TABLE = {
    "hydra hydra.** defaults": none("a run is one file"),
    "pipeline_cls": none("the pipeline follows from the other keys"),
    "num_gpus_per_node": to("cluster.num_devices_per_node"),
    "num_nodes": to("cluster.num_nodes"),
    "base_dir logging_dir": none("all files of the run are in `output_dir`"),
    "checkpoint_config.**": none("checkpoints are in the run's folder; see `save_steps` and `max_ckpt_to_keep`"),
    "rpc_timeout backend_timeout": none("each wait has a deadline of its own (docs/faults.md)"),
    "system_envs.**": none("set this variable before `roll train`, and before `ray start` on each node"),
    "generate_opt_level": none("requests always go through the scheduler"),
    "is_use_additional_prompts": none("a filtered group's slot is given back"),
    "max_additional_running_prompts": none("`async_generation_ratio` says how much runs ahead"),
    "router_args.**": none("requests go to the replica with the least to do"),
    "batch_adjust_mode": none("a batch may have any number of samples"),
    "mask_type": none("a mask takes samples out of the loss, and does nothing else"),
    "enable_reference": none("a `reference` is loaded where there is a KL term"),
    "use_local rewards.*.use_local": none("programs run in the sandbox of their own machine"),
    "is_offload_states offload_nccl": none("roles that share devices make room for each other"),
    "**.is_offload_optimizer_states_in_train_step": none("optimizer states stay where they are"),
    "**.rollout_mock": none("nothing is mocked"),
    "**.model_update_frequency": to("weight_update.interval_steps"),
    "**.model_update_buffer_size_mb": to("weight_update.param_update_gather_bucket_size_mb"),
    "actor_infer.num_gpus_per_worker": to("actor_infer.num_gpus_per_engine"),
    "*.num_gpus_per_worker": none("a rank has one device"),
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size": to("actor_infer.num_gpus_per_engine"),
    "actor_infer.strategy_args.strategy_config.tp_size": to("actor_infer.num_gpus_per_engine"),
    "actor_infer.strategy_args.strategy_config.load_format": none(_OWN_WEIGHTS),
    "*.strategy_args.strategy_name": to(
        "=", {"deepspeed_infer": "deepspeed_train", "megatron_infer": "megatron_train", "fsdp2_infer": "fsdp2_train"}
    ),
    "*.model_args.dtype": to("=", DTYPES),
    "*.model_args.attn_implementation": to("=", {"fa2": "flash_attention_2"}),
    "*.model_args.model_type": none("the model's own files say what it is"),
    "rewards.*.model_args.dtype": to("=", DTYPES),
    "rewards.*.model_args.attn_implementation": to("=", {"fa2": "flash_attention_2"}),
    "rewards.*.model_args.disable_gradient_checkpointing": none("nothing is trained"),
    "rewards.*.data_args.**": none("a reward judges texts"),
    "rewards.*.generating_args.**": none("a reward does not generate"),
    "rewards.*.world_size": to("rewards.*.num_workers"),
    "rewards.*.reward_type": none("each reward is a number"),
    "*.data_args.template": to("=", dict.fromkeys(TEMPLATES, "chat")),
    "validation.data_args.template": to("=", dict.fromkeys(TEMPLATES, "chat")),
    "**.preprocessing_num_workers": none("prompts are read once, in the driver"),
    "**.num_train_epochs": none("`max_steps` is the length of the run"),
    "*.data_args.messages": to("*.data_args.columns.messages"),
    "*.data_args.prompt": to("*.data_args.columns.prompt"),
    "use_policy_loss_type": to("actor_train.pg_variant", {"PPO": "ppo", "PG": "vanilla"}, closed=True),
    "train_env_manager.max_env_num_per_worker": none("the number of worker processes is `env_workers.num_workers`"),
    "val_env_manager.max_env_num_per_worker": none("the number of worker processes is `env_workers.num_workers`"),
    "importance_sampling gamma lambd kl_penalty whiten_rewards reward_normalization.grouping **.num_beams "
    "reward_normalization.method enable_old_logprobs_recompute force_disable_old_logprobs_recompute val_batch_size "
    "actor_infer.generating_args.num_return_sequences *.model_args.disable_gradient_checkpointing rewards.*.worker_cls "
    f"custom_envs.*.env_manager_cls {' '.join(CLIPPING)}": later(),
}
RULES = table(_TABLE)
"""Key of ROLL -> its rule. All other keys are the same here, or unknown."""


def marks(tree: Mapping[str, Any]) -> set[str]:
    """Return the names of the keys in a file that only ROLL has, or that have a value only ROLL has."""
    found = set()
    for parts, value in leaves(tree):
        name, section = parts[-1], parts[-2] if len(parts) > 1 else ""
        spelling = {"dtype": DTYPES, "attn_implementation": ("fa2",), "template": TEMPLATES}.get(name, ())
        own_class = name in ("worker_cls", "env_manager_cls") and str(value).startswith(_ROLLS_CLASSES)
        foreign = name in ADVICE or name in ("num_gpus_per_node", "num_beams")
        if foreign or own_class or (isinstance(value, str) and value in spelling and section.endswith("_args")):
            found.add(name)
    return found


def is_roll(tree: Mapping[str, Any]) -> bool:
    """Return True if a file is recognisably ROLL's: at least two `marks`, and neither `pipeline` nor `cluster`.

    A single mark may be a slip in a file of ours.
    """
    return not any(key in tree for key in OWN_KEYS) and len(marks(tree)) >= 2


def translate(tree: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> Translation:
    """Return the translation of a tree in ROLL's dialect.

    Unknown keys and keys of ours stay in it, so an override may be written in either dialect. ``file``: the tree before
    overrides, if there are any.
    """
    written = dict(leaves(tree if file is None else file))
    return accounted(lambda given: _translate(given, written), dict(leaves(tree)))


def _translate(given: Mapping[Path, Any], file: Mapping[Path, Any]) -> Translation:
    others = _of_another_engine(given, file)
    done = translated(
        ORIGIN, {parts: value for parts, value in given.items() if parts not in others}, RULES, unknown_is_ours=True
    )
    for parts, strategy in others.items():
        done.no_effect(".".join(parts), given[parts], f"it is an option of the file's `{strategy}`")
    steps = (_pipeline, _switched_off, _policy_loss, _advantages, _kl, _scores)
    done.take(*steps, _devices, _roles, _data, _lengths, _episodes, _rewards, _defaults)
    for parts in sorted(done.unread):
        done.values[parts] = given[parts]  # the loader refuses it, with advice
    return done


def _of_another_engine(given: Mapping[Path, Any], file: Mapping[Path, Any]) -> dict[Path, str]:
    """Return the file's options of each engine that an override replaces, with the name of that engine."""
    replaced: dict[Path, str] = {}
    for parts, strategy in file.items():
        if parts[1:] == ("strategy_args", "strategy_name") and given.get(parts) != strategy:
            options = (*parts[:2], "strategy_config")
            replaced |= {key: strategy for key, value in file.items() if key[:3] == options and given.get(key) == value}
    return replaced


def pipeline_of(given: Mapping[Path, Any]) -> str:
    """Return the pipeline of a file in ROLL's dialect, from its values by path."""
    top = {parts[0] for parts in given}
    has_prompts = bool(given.get(("actor_train", "data_args", "file_name")))
    return "agentic" if top & {*AGENTIC_KEYS} or not (has_prompts or top & {*RLVR_KEYS}) else "rlvr"


def _pipeline(done: Translation) -> None:
    top = {parts[0] for parts in done.given}
    if "pipeline" in top:
        return
    pipeline = pipeline_of(done.given)
    reason = "it names no prompts" if pipeline == "agentic" and not top & {*AGENTIC_KEYS} else ""
    done.put("pipeline", pipeline, reason)


def _switched_off(done: Translation) -> None:
    """Report keys of ROLL that are switched off as without effect."""
    for parts, value in list(done.values.items()):
        if parts[-1] in ADVICE and value in (False, None, "none", "null"):
            done.drop(".".join(parts), "it is off")


def _policy_loss(done: Translation) -> None:
    forced, recomputes = done.flag("force_disable_old_logprobs_recompute"), done.flag("enable_old_logprobs_recompute")
    if forced or recomputes:
        origin = "force_disable_old_logprobs_recompute" if forced else "enable_old_logprobs_recompute"
        done.put("old_logprobs", "behaviour" if forced else "recompute", origin=f"{origin}: true")
    if _is_replaced(done, "actor_train.pg_variant", (*CLIPPING, "importance_sampling")):
        return
    clip, low, high = done.number("pg_clip", 0.2), done.number("pg_clip_low", 0.2), done.number("pg_clip_high", 0.2)
    if not done.flag("use_pg_clip_range"):
        low, high = clip, clip
    sequences = done.get("importance_sampling") == "seq"
    if sequences:
        done.put("actor_train.pg_variant", "gspo", origin="importance_sampling: seq")
    if sequences or (low, high) != (0.2, 0.2):
        note = "ROLL's bounds, not those of the paper" if sequences else ""
        done.put("actor_train.pg_variant_args.clip_low", low, note, "pg_clip")
        done.put("actor_train.pg_variant_args.clip_high", high, note, "pg_clip")
    if done.flag("dual_clip_loss"):
        bound = 1 + 2 * clip
        done.put("actor_train.pg_variant_args.dual_clip", bound, "ROLL's bound is 1 + 2 x `pg_clip`", "dual_clip_loss")


def _advantages(done: Translation) -> None:
    if _is_replaced(done, "adv_estimator", ("gamma", "lambd")):
        return
    gamma, decay = done.number("gamma", 1.0), done.number("lambd", 1.0)
    if gamma != 1.0:
        done.put("adv_estimator_args.gamma", gamma, origin="gamma")
    if done.has("lambd") and done.ours("adv_estimator", "gae") == "gae":
        done.put("adv_estimator_args.lambda_", decay, origin="lambd")


def _is_replaced(done: Translation, path: str, keys: Sequence[str]) -> bool:
    """Return True if a Python program passed an object for ``path``; then report ROLL's ``keys`` as without effect."""
    if not is_given(str(done.ours(path, ""))):
        return False
    for key in keys:
        if done.has(key):
            done.no_effect(key, done.get(key), f"`{path}` was given from Python")
    return True


def _kl(done: Translation) -> None:
    """Translate `kl_penalty`: ROLL's KL estimator in token rewards. ROLL's KL loss always uses k3."""
    in_loss, in_rewards = done.ours("use_kl_loss") is True, done.ours("add_token_level_kl") is True
    penalty, target = done.get("kl_penalty", "kl"), done.ours("target_kl")
    if in_rewards and target is not None and done.ours("kl_controller") is None:
        message = f"ROLL's controller aims at {target} nats per token, and the one here at nats per response"
        remedy = "write `kl_controller: adaptive`, and `target_kl` times the mean length of responses"
        done.problems.append(ConfigProblem("target_kl", message, remedy))
    if done.ours("kl_estimator") is not None or not (in_loss or in_rewards):
        return
    estimator = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}.get(penalty)
    if in_rewards and estimator is None:
        done.refuse("kl_penalty", penalty, "write `kl`, `abs` or `mse`")
    elif in_rewards and in_loss and estimator != "k3":
        message = f"ROLL's KL loss is `k3` and its penalty `{penalty}`; here both have one estimator"
        done.problems.append(ConfigProblem("kl_penalty", message, "write `kl_estimator`, or leave one of them out"))
    elif in_loss:
        done.put("kl_estimator", "k3", "ROLL's KL loss always takes it")
    else:
        note = "" if done.has("kl_penalty") else "ROLL's default"
        done.put("kl_estimator", estimator, note, f"kl_penalty: {penalty}" if done.has("kl_penalty") else "")


def _scores(done: Translation) -> None:
    if done.flag("whiten_rewards"):
        note = "acts on the scores of responses"
        done.put("norm_mean_type", "batch", note, "whiten_rewards")
        done.put("norm_std_type", "batch", note, "whiten_rewards")
    grouping = done.get("reward_normalization.grouping", "batch")
    method = done.get("reward_normalization.method", "identity")
    types = {"traj_group_id": "group", "batch": "batch", "tags": "tag"}
    if method in ("mean", "mean_std") and grouping in types:
        done.put("norm_mean_type", types[grouping], origin=f"reward_normalization: {grouping}, {method}")
        if method == "mean_std":
            done.put("norm_std_type", types[grouping], origin=f"reward_normalization: {grouping}, {method}")
    elif method != "identity":
        done.unread |= {("reward_normalization", "grouping"), ("reward_normalization", "method")} & done.given.keys()


def _devices(done: Translation) -> None:
    """Set the cluster's devices from the device mappings; ROLL asks Ray for them."""
    if done.ours("cluster.device") is None:
        done.put("cluster.device", "cuda", "ROLL computes on GPUs")
    mappings = [value for parts, value in done.values.items() if parts[-1] == "device_mapping"]
    devices = [device for mapping in mappings for device in _devices_of(mapping)]
    if not devices or done.ours("cluster.shares"):
        return
    total = max(devices) + 1
    if done.ours("cluster.num_devices_per_node") is None:
        per_node = min(total, GPUS_PER_NODE)
        done.put("cluster.num_devices_per_node", per_node, f"the mappings name {total} devices; ROLL asks Ray")
    per_node = done.ours("cluster.num_devices_per_node")
    if done.ours("cluster.num_nodes") is None and isinstance(per_node, int) and 0 < per_node < total:
        nodes = math.ceil(total / per_node)
        done.put("cluster.num_nodes", nodes, f"{nodes} x {per_node} are the {total} devices of the mappings")
    if isinstance(done.ours("cluster.num_nodes"), int) and done.ours("cluster.num_nodes") > 1:
        if done.ours("cluster.address") is None:
            done.put("cluster.address", "auto", "several nodes need the Ray cluster that ROLL starts or joins, too")


def _devices_of(mapping: Any) -> list[int]:
    try:
        return parse_device_mapping(mapping)
    except DeviceMappingError:
        return []  # a rule reports it


def _roles(done: Translation) -> None:
    on_cpu = done.ours("cluster.device") == "cpu"
    for role in ("actor_train", "actor_infer", "reference", "critic"):
        written = any(parts[0] == role for parts in done.values)
        strategy = done.ours(f"{role}.strategy_args.strategy_name")
        attention = f"{role}.model_args.attn_implementation"
        if on_cpu and done.ours(attention) == "flash_attention_2":
            done.values.pop(tuple(attention.split(".")))
            done.put(attention, "sdpa", "there is no flash attention on CPUs")
        _checkpointing(done, role, strategy, written)
        options = f"{role}.strategy_args.strategy_config"
        if strategy == "megatron_train" and done.ours(f"{options}.recompute_granularity") == "full":
            note = "what Megatron does where only `recompute_granularity: full` is given"
            if done.ours(f"{options}.recompute_method") is None:
                done.put(f"{options}.recompute_method", "uniform", note)
            if done.ours(f"{options}.recompute_num_layers") is None:
                done.put(f"{options}.recompute_num_layers", 1, note)
        if not written or role == "actor_infer":
            continue
        for use, size in (("train", "training_args.per_device_train_batch_size"), ("infer", "infer_batch_size")):
            dynamic = f"{role}.use_dynamic_batching_in_{use}"
            if done.ours(f"{role}.{size}") is not None and done.ours(dynamic) is None:
                done.put(dynamic, False, f"ROLL's default, with which `{size}` counts")
    running = "actor_infer.strategy_args.strategy_config.max_running_requests"
    if done.ours("actor_infer.strategy_args.strategy_name") == "vllm" and done.ours(running) is not None:
        value = done.values.pop(tuple(running.split(".")))
        done.put("actor_infer.strategy_args.strategy_config.max_num_seqs", value, origin="max_running_requests")


def _checkpointing(done: Translation, role: str, strategy: str | None, written: bool) -> None:
    """Translate `disable_gradient_checkpointing`, in ROLL an argument of the model, into an option of the trainer."""
    key = f"{role}.model_args.disable_gradient_checkpointing"
    disabled = done.get(key)
    trains = role in ("actor_train", "critic") and written
    option = f"{role}.strategy_args.strategy_config.gradient_checkpointing"
    if trains and strategy in ("fsdp2_train", "deepspeed_train") and done.ours(option) is None:
        if disabled is None:
            done.put(option, True, "ROLL's default")
        else:
            done.put(option, not disabled, origin=f"{key}: {str(disabled).lower()}")
    elif disabled is not None:
        reason = "`recompute_granularity` of `strategy_config` decides it" if trains else "nothing is trained there"
        done.no_effect(key, disabled, reason)


def _data(done: Translation) -> None:
    for path in ("actor_train.data_args", "validation.data_args"):
        folder, files = done.ours(f"{path}.dataset_dir"), done.ours(f"{path}.file_name")
        if folder is None:
            continue
        done.values.pop((*path.split("."), "dataset_dir"))
        names = [files] if isinstance(files, str) else files or []
        done.values[(*path.split("."), "file_name")] = [f"{folder.rstrip('/')}/{name}" for name in names]
        done.lines.append(f"{path}.dataset_dir: {folder} is put before each `file_name`")


def _lengths(done: Translation) -> None:
    """Set the limits of prompt and response from `sequence_length`, the only limit in ROLL."""
    longest = done.ours("sequence_length")
    if not isinstance(longest, int) or longest < 2:
        return
    note = f"ROLL bounds the whole by `sequence_length: {longest}`"
    if done.ours("pipeline") == "agentic":
        turn = done.ours("actor_infer.generating_args.max_new_tokens")
        room = turn if isinstance(turn, int) and 0 < turn < longest else 1
        if done.ours("prompt_length") is None:
            done.put("prompt_length", longest - room, f"{note}; room for a first turn of {room} is left")
        if done.ours("response_length") is None:
            done.put("response_length", max(longest - 1, turn if isinstance(turn, int) else 0), note)
    elif done.ours("response_length") is None:
        prompt = done.ours("prompt_length")
        if isinstance(prompt, int) and prompt < longest:
            done.put("response_length", longest - prompt, note)


def _episodes(done: Translation) -> None:
    """Translate environment managers and agentic batch sizes; ROLL counts trajectories, here groups are counted."""
    for parts, value in done.given.items():
        if parts[0] == "custom_envs" and parts[-1] == "env_manager_cls":
            kept = done.get(".".join(parts))
            own = {"TrajEnvManager": "trajectory", "StepEnvManager": "step"}.get(str(value).rpartition(".")[2])
            done.put(parts, own or kept, origin=f"{'.'.join(parts)}: {value}" if own else "")
    if done.ours("pipeline") != "agentic":
        if done.has("val_batch_size"):
            done.put("val_batch_size", done.get("val_batch_size"))
        return
    for key, manager, ours in (
        ("rollout_batch_size", "train_env_manager", "rollout_batch_size"),
        ("val_batch_size", "val_env_manager", "val_env_manager.num_env_groups"),
    ):
        trajectories = done.get(key)
        if trajectories is None:
            continue
        size = done.ours(f"{manager}.group_size", 8 if manager == "train_env_manager" else 1)
        whole = all(isinstance(number, int) and number > 0 for number in (trajectories, size))
        if ours != key and done.ours(ours) is not None:
            done.no_effect(key, trajectories, f"`{ours}` counts the groups of a validation")
        elif whole and trajectories % size == 0:
            done.values.pop((key,), None)
            note = f"{trajectories} trajectories are {trajectories // size} groups of {size}"
            if not done.has(f"{manager}.group_size"):
                note += f", the default of `{manager}.group_size` here"
            done.put(ours, trajectories // size, note, f"{key}: {trajectories}")
        else:
            message = f"{shown(trajectories)} trajectories are no whole number of groups of {shown(size)}"
            remedy = f"change it or `{manager}.group_size`, or write `{ours}` into a file of ours (`roll convert`)"
            done.problems.append(ConfigProblem(key, message, remedy))
    for name in ("train_env_manager", "val_env_manager"):
        path = f"{name}.num_groups_partition"
        if done.ours(path) is not None and done.ours(f"{name}.num_env_groups") is None:
            done.put(f"{name}.num_env_groups", sum(done.ours(path)), "the sum of `num_groups_partition`")


def _rewards(done: Translation) -> None:
    for parts, value in done.given.items():
        if parts[0] != "rewards" or parts[-1] != "worker_cls":
            continue
        verifier = REWARD_WORKERS.get(str(value).rpartition(".")[2])
        if verifier is not None:
            done.get(".".join(parts))
            done.put((*parts[:-1], "verifier"), verifier, origin=f"{'.'.join(parts)}: {value}")
    group = done.ours("num_return_sequences_in_group")
    samples = "actor_infer.generating_args.num_return_sequences"
    for parts, value in done.given.items():
        path = ".".join(parts)
        if parts[-1] == "num_beams" and value == 1:
            done.no_effect(path, done.get(path), "responses are sampled, never searched for")
    if not done.has(samples):
        return
    number = done.get(samples)
    if done.ours("pipeline") == "agentic":
        done.no_effect(samples, number, "`train_env_manager.group_size` counts the episodes of a group")
    elif group is None:
        done.put("num_return_sequences_in_group", number, origin=samples)
    else:
        done.no_effect(samples, number, "`num_return_sequences_in_group` counts the samples of a prompt")


def _defaults(done: Translation) -> None:
    """Set ROLL's defaults where ours differ."""
    if done.ours("adv_estimator") is None:
        done.put("adv_estimator", "gae", "ROLL's default")
    if done.ours("loss_agg_mode") is None:
        done.put("loss_agg_mode", "seq-mean-token-mean", "ROLL's default")
