"""Time TRL's `GRPOTrainer` on the quick start's model, as the other side of `trl_comparison.py`.

It runs as its own process or, started by `torch.distributed.run`, as several processes that share each batch. Settings
that both sides have are those of the pipeline's run. All others are the fast choice on a CPU: no gradient
checkpointing, float32, no logging, no checkpoints, the whole batch generated at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from _rewards import digit_share, waiting_digit_share
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

Problem = dict[str, str]


def exact(completions: list[str], ground_truth: list[str], **_: object) -> list[float]:
    """Return 1 for each completion that equals the ground truth."""
    return [float(given == wanted) for given, wanted in zip(completions, ground_truth, strict=True)]


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the scores of the throughput runs."""
    return [digit_share(completion) for completion in completions]


async def digits_after_a_wait(completions: list[str], prompts: list[str], **_: object) -> list[float]:
    """Return scores after the waits of `waiting_digit_share`, for all completions at once: the best that TRL allows."""
    return await asyncio.gather(*map(waiting_digit_share, completions, prompts))


class Stopwatch(TrainerCallback):
    """Seconds of each training step, and greedy evaluations every ``eval_steps``, whose time is left out."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], options: argparse.Namespace
    ) -> None:
        self.step_seconds: list[float] = []
        self.evaluations: list[tuple[int, float, float]] = []
        self._tokenizer = tokenizer
        self._problems = problems
        self._options = options
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._began = time.perf_counter()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        **_: object,
    ) -> None:
        self.step_seconds.append(time.perf_counter() - self._began)
        if self._options.eval_steps and state.global_step % self._options.eval_steps == 0:
            accuracy = self._accuracy(model)
            self.evaluations.append((state.global_step, sum(self.step_seconds), accuracy))
            control.should_training_stop |= accuracy >= self._options.stop_at
        self._began = time.perf_counter()

    @torch.no_grad()
    def _accuracy(self, model: PreTrainedModel) -> float:
        prompts = self._tokenizer([each["prompt"] for each in self._problems], return_tensors="pt", padding=True)
        model.eval()
        tokens = model.generate(**prompts, do_sample=False, max_new_tokens=self._options.response_length)
        model.train()
        texts = self._tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(exact(texts, [each["ground_truth"] for each in self._problems])) / len(texts)


def trainer_config(options: argparse.Namespace, folder: str) -> GRPOConfig:
    """Return the quick start's hyper-parameters as TRL names them; `dapo` averages the loss over the batch's tokens."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    samples = options.prompts * options.group_size
    return GRPOConfig(
        output_dir=folder,
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=samples // (options.micro_batch * processes),
        num_generations=options.group_size,
        max_completion_length=options.response_length,
        temperature=1.0,
        generation_kwargs={"min_new_tokens": options.response_length} if options.forced else None,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=3e-4,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        ddp_find_unused_parameters=False if processes > 1 else None,
        bf16=options.bf16,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(options: argparse.Namespace, folder: str) -> Stopwatch:
    """Run one training; the stopwatch has its times."""
    model = AutoModelForCausalLM.from_pretrained(
        options.task / "model", dtype=torch.float32, attn_implementation="eager" if options.bf16 else "sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(options.task / "model")
    training, held_out = (_read(options.task / "data" / name) for name in ("train.jsonl", "val.jsonl"))
    stopwatch = Stopwatch(tokenizer, held_out, options)
    forced_reward = digits_after_a_wait if options.waits else digits
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=forced_reward if options.forced else exact,
        args=trainer_config(options, folder),
        train_dataset=Dataset.from_list(training),
        processing_class=tokenizer,
        callbacks=[stopwatch],
    )
    trainer.train()
    return stopwatch


def _read(path: Path) -> list[Problem]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, required=True, help="folder with model/ and data/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file that gets the figures")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="prompts per step")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--response-length", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="samples per pass of a process")
    parser.add_argument("--forced", action="store_true", help="no response ends before its full length")
    parser.add_argument("--waits", action="store_true", help="rewards wait without computing")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--eval-steps", type=int, default=0, help="0: never")
    parser.add_argument("--stop-at", type=float, default=2.0, help="accuracy that ends the training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = train(options, folder)
    if int(os.environ.get("RANK", 0)) == 0:
        figures = {"step_seconds": stopwatch.step_seconds, "evaluations": stopwatch.evaluations}
        options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
