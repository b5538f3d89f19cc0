"""Translation of prime-rl's keys, those of the TOML file of its `rl` command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.dialects.rules import Path, Translation, later, lost, none, table, to, translation, whole
from roll.configs.errors import count

ORIGIN = "prime-rl"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_TRAIN = "actor_train.training_args"
_MANAGER = "train_env_manager"

_TABLE = {
    "entry": none("the command is `roll train`"),
    "max_steps": to("max_steps"),
    "seq_len orchestrator.seq_len": later("write `sequence_length`"),
    "trainer.model.seq_len": none("`sequence_length` holds for both sides"),
    "output_dir": to("output_dir"),
    "model.name": to("pretrain"),
    "trainer.model.name": to("pretrain"),
    "trainer.model.attn": to(
        "actor_train.model_args.attn_implementation",
        {name: name for name in ("sdpa", "flash_attention_2", "flash_attention_3")},
        closed=True,
    ),
    "trainer.model.ac trainer.model.ac.**": later("write `strategy_config: {gradient_checkpointing: true}`"),
    "trainer.model.ac_offloading.**": lost("activations are recomputed, not moved to the host"),
    "trainer.model.compile trainer.model.compile.**": none("`strategy_config: {compile: true}` compiles the layers"),
    "trainer.model.ep": later("write `strategy_name: megatron_train` with `expert_model_parallel_size`"),
    "trainer.model.cp": later("write `strategy_config: {context_parallel_size}`"),
    "trainer.model.impl": none("a model is that of transformers"),
    "trainer.model.lora trainer.model.lora.dropout": later("remove it: adapters have no dropout"),
    "trainer.model.lora.rank": to("actor_train.model_args.lora_rank"),
    "trainer.model.lora.alpha": later("write `actor_train.model_args.lora_alpha`"),
    "trainer.model.lora.target_modules": to("actor_train.model_args.lora_target"),
    "trainer.optim.type": later("remove it: the optimizer is AdamW"),
    "trainer.optim.lr": to(f"{_TRAIN}.learning_rate"),
    "trainer.optim.weight_decay": to(f"{_TRAIN}.weight_decay", {"auto": 0.0}),
    "trainer.optim.max_norm": to(f"{_TRAIN}.max_grad_norm", {None: 0}),
    "trainer.optim.betas1": to(f"{_TRAIN}.adam_beta1"),
    "trainer.optim.betas2": to(f"{_TRAIN}.adam_beta2"),
    "trainer.scheduler.type": to(f"{_TRAIN}.lr_scheduler_type"),
    "trainer.scheduler.warmup_steps": to(f"{_TRAIN}.warmup_steps"),
    "trainer.loss.**": lost("name a loss: `actor_train.pg_variant` (docs/algorithms/policy_losses.md)"),
    "trainer inference": none("its defaults are those of ours"),
    "trainer_gpu_ids deployment.num_train_gpus deployment.num_train_nodes": later("write `actor_train.device_mapping`"),
    "inference_gpu_ids deployment.num_infer_gpus": later("write `actor_infer.device_mapping`"),
    "orchestrator.batch_size": later("write `rollout_batch_size`: rollouts there, groups here"),
    "orchestrator.group_size orchestrator.rollouts_per_example": later(f"write `{_MANAGER}.group_size`"),
    "orchestrator.max_off_policy_steps": later("write `max_staleness`"),
    "orchestrator.max_async_level max_async_level": later("write `async_generation_ratio`"),
    "orchestrator.concurrency.**": none("`async_generation_ratio` says how much runs at a time"),
    "orchestrator.oversampling_factor": none("`async_generation_ratio` says how much runs ahead"),
    "orchestrator.algo.type": later("write `adv_estimator`"),
    "orchestrator.renderer.**": none("the tokenizer's own chat template writes the turns"),
    "orchestrator.train.sampling.max_completion_tokens": to("actor_infer.generating_args.max_new_tokens"),
    "orchestrator.train.sampling.temperature": to("actor_infer.generating_args.temperature"),
    "orchestrator.sampling.max_tokens": to("actor_infer.generating_args.max_new_tokens"),
    "orchestrator.sampling.temperature": to("actor_infer.generating_args.temperature"),
    "orchestrator.train.source orchestrator.env": later("write `custom_envs`"),
    "orchestrator.eval.interval": later("write `eval_steps`"),
    "orchestrator.eval.num_examples": later("write `val_env_manager.num_env_groups`"),
    "orchestrator.eval.group_size": later("write `val_env_manager.group_size`"),
    "orchestrator.eval.source": later("write `custom_envs`, and their tags in `val_env_manager`"),
    "orchestrator.eval.sampling.temperature": later("write `validation.generating_args.temperature`"),
    "orchestrator.eval.sampling.max_completion_tokens": later("write `validation.generating_args.max_new_tokens`"),
    "deployment.type": none("nodes and devices say it"),
    "deployment.num_infer_nodes": later("write `actor_infer.device_mapping`"),
    "deployment.gpus_per_node": later("write `cluster.num_devices_per_node`"),
    "weight_broadcast.type": to("weight_update.transport", {"filesystem": "checkpoint", "nccl": "nccl"}, closed=True),
    "ckpt": none("the model is written at the end"),
    "ckpt.interval": to("save_steps"),
    "ckpt.keep_last": to("max_ckpt_to_keep"),
    "ckpt.**": none("checkpoints are in the run's folder"),
    "inference.vllm.tensor_parallel_size": to("actor_infer.num_gpus_per_engine"),
    "inference.vllm.data_parallel_size inference.parallel.dp": none("each `num_gpus_per_engine` devices are an engine"),
    "inference.vllm.max_model_len": none("`sequence_length` says it"),
    "inference.vllm.*": to(f"{_ENGINE}.*"),
    "inference.parallel.tp": to("actor_infer.num_gpus_per_engine"),
    "monitors.wandb.project wandb.project": later("write `tracker_kwargs.wandb.project`"),
    "monitors.wandb.name wandb.name": later("write `exp_name`"),
    "log.**": none("logs are in the run's folder"),
    "slurm.**": none("start the run in a job of your own"),
}
RULES = table(_TABLE)
"""Key of prime-rl -> its rule."""


def translate(given: Mapping[Path, Any]) -> Translation:
    """Return the translation of prime-rl's keys."""
    steps = (_lengths, _devices, _trainer, _batches, _asynchrony, _environments, _validation, _running)
    return translation(ORIGIN, RULES, steps, given)


def _lengths(done: Translation) -> None:
    done.put("pipeline", "agentic", "prime-rl's tasks are environments")
    longest = whole(done.get("orchestrator.seq_len", done.get("seq_len", 2048))) or 2048
    note = "prime-rl bounds the whole by `seq_len`"
    turn = whole(done.ours("actor_infer.generating_args.max_new_tokens")) or 1
    done.put("sequence_length", longest)
    done.put("prompt_length", longest - turn if turn < longest else longest - 1, note)
    done.put("response_length", max(longest - 1, turn), note)


def _devices(done: Translation) -> None:
    nodes = [whole(done.get(f"deployment.num_{use}_nodes")) for use in ("train", "infer")]
    per_node = whole(done.get("deployment.gpus_per_node", 8)) or 8
    sizes = [whole(done.get(f"deployment.num_{use}_gpus")) for use in ("train", "infer")]
    train, infer = [(size or (count_ or 0) * per_node) or 1 for size, count_ in zip(sizes, nodes, strict=True)]
    tensor = whole(done.ours("actor_infer.num_gpus_per_engine")) or 1
    ids = {key: done.get(key) for key in ("trainer_gpu_ids", "inference_gpu_ids")}
    said = any(sizes) or any(nodes)
    infer = infer if said else max(infer, tensor)
    mappings: list[Any] = [f"0-{train - 1}", f"{train}-{train + infer - 1}"]
    total = train + infer
    if all(isinstance(each, list) and each and all(whole(one + 1) for one in each) for each in ids.values()):
        mappings, said = [*ids.values()], True
        total = 1 + max(max(each) for each in mappings)
    else:
        for key, each in ids.items():
            if each is not None:
                done.lose(key, each, "name the devices of both sides, by their numbers")
    done.put_cluster(min(total, per_node), -(-total // per_node))
    done.put("actor_train.device_mapping", mappings[0])
    done.put("actor_infer.device_mapping", mappings[1])
    if not said:
        done.lack(
            "cluster", f"prime-rl's default is written: one GPU for the trainer, {count(infer, 'GPU')} for engines"
        )


def _trainer(done: Translation) -> None:
    done.put("actor_train.strategy_args.strategy_name", "fsdp2_train")
    recomputes = any(parts[:3] == ("trainer", "model", "ac") for parts in done.given)
    for parts in done.given:
        if parts[:3] == ("trainer", "model", "ac"):
            done.get(".".join(parts))
    if recomputes:
        done.put("actor_train.strategy_args.strategy_config.gradient_checkpointing", True)
    experts, context = done.get("trainer.model.ep", 1), done.get("trainer.model.cp", 1)
    if experts != 1:
        done.lose("trainer.model.ep", experts, "`fsdp2_train` does not split experts; see `megatron_train`")
    if context != 1:
        done.put("actor_train.strategy_args.strategy_config.context_parallel_size", context)
    optimizer = done.get("trainer.optim.type", "adamw")
    if optimizer != "adamw":
        done.lose("trainer.optim.type", optimizer, "the optimizer is AdamW")
    done.put_precision("bfloat16")
    done.put_adamw("actor_train")
    if any(parts[:3] == ("trainer", "model", "lora") for parts in done.given):
        _adapters(done)
    done.put("actor_train.pg_variant", "ppo", "prime-rl has a loss of its own")
    done.put("actor_infer.strategy_args.strategy_name", "vllm")


def _adapters(done: Translation) -> None:
    alpha, dropout = done.get("trainer.model.lora.alpha"), done.get("trainer.model.lora.dropout", 0.0)
    done.get("trainer.model.lora")
    done.put_default("actor_train.model_args.lora_rank", 16)
    done.put_default("actor_train.model_args.lora_target", "all-linear")
    if alpha is None:
        done.put_default("actor_train.model_args.lora_alpha", 32)
    elif alpha == int(alpha):
        done.put("actor_train.model_args.lora_alpha", int(alpha))
    else:
        done.lose("trainer.model.lora.alpha", alpha, "`lora_alpha` is a whole number")
    if dropout:
        done.lose("trainer.model.lora.dropout", dropout, "adapters have no dropout")


def _batches(done: Translation) -> None:
    rollouts = whole(done.get("orchestrator.batch_size", 128)) or 128
    size = whole(done.get("orchestrator.group_size", done.get("orchestrator.rollouts_per_example", 1))) or 1
    done.put(f"{_MANAGER}.group_size", size)
    if rollouts % size:
        done.lack("rollout_batch_size", f"{rollouts} rollouts are no whole number of groups of {size}")
        return
    done.put(
        "rollout_batch_size", rollouts // size, f"{rollouts} rollouts are {count(rollouts // size, 'group')} of {size}"
    )
    algorithm = done.get("orchestrator.algo.type", "grpo")
    if algorithm != "grpo":
        done.lose("orchestrator.algo.type", algorithm, "there is no such algorithm; `grpo` is written")
    done.put("adv_estimator", "grpo")
    done.put("adv_estimator_args.normalize_by_std", False, "prime-rl subtracts the mean only")


def _asynchrony(done: Translation) -> None:
    ahead = done.get("orchestrator.max_async_level", done.get("max_async_level", 1))
    oldest = done.get("orchestrator.max_off_policy_steps")
    if isinstance(ahead, int | float) and not isinstance(ahead, bool):
        done.put("async_generation_ratio", ahead, "steps that may be generated ahead")
    if isinstance(oldest, int) and oldest >= (ahead if isinstance(ahead, int) else 1):
        done.put("max_staleness", oldest, "older rollouts are cancelled there; here training waits for them in time")


def _environments(done: Translation) -> None:
    sources = done.get("orchestrator.train.source", done.get("orchestrator.env", []))
    names = [str(each.get("name", each.get("id", "?"))) for each in sources if isinstance(each, dict)]
    named = ", ".join(f"`{name}`" for name in names) or "none is named"
    done.lack("custom_envs", f"environments of ours in place of those of `verifiers` ({named}); docs/environments.md")


def _validation(done: Translation) -> None:
    rhythm, number = whole(done.get("orchestrator.eval.interval")), whole(done.get("orchestrator.eval.num_examples"))
    sources = done.get("orchestrator.eval.source", [])
    temperature = done.get("orchestrator.eval.sampling.temperature")
    longest, size = (
        done.get("orchestrator.eval.sampling.max_completion_tokens"),
        done.get("orchestrator.eval.group_size"),
    )
    if rhythm is None:
        return
    names = ", ".join(f"`{each.get('name', '?')}`" for each in sources if isinstance(each, dict))
    done.put("eval_steps", rhythm, f"of {names}: name their tags in `val_env_manager`" if names else "")
    done.put("val_env_manager.num_env_groups", number or 64, "" if number else "prime-rl takes all examples")
    done.put_given("val_env_manager.group_size", whole(size))
    done.put_given("validation.generating_args.temperature", temperature)
    done.put_given("validation.generating_args.max_new_tokens", longest)


def _running(done: Translation) -> None:
    project = done.get("monitors.wandb.project", done.get("wandb.project"))
    name = done.get("monitors.wandb.name", done.get("wandb.name"))
    if project is not None:
        done.put("track_with", ["wandb"])
        done.put("tracker_kwargs.wandb.project", project)
    done.put_name(name)
    done.keep_all_checkpoints()
    if done.ours("max_steps") is None:
        done.lack("max_steps", "prime-rl trains until it is stopped")
    if done.ours("pretrain") is None:
        done.lack("pretrain", "prime-rl's default model is not known here")
