"""Train the picture example with a plain loop: sample, judge, compare, take one optimizer step.

    python examples/image-shapes-cpu/make_model.py
    python benchmarks/plain_pictures.py [--lag 1] [--kind flow_sde --noise 1.0] ...

The yardstick of `examples/image-shapes-cpu/image.yaml`: the same settings, without a pipeline. With ``--lag`` pictures
are drawn by weights that many steps old, as in asynchronous training.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging
from torch import Tensor

from roll.algorithms import PolicyInputs, make_policy_loss
from roll.algorithms.flow import log_prob, per_row, step_moments, window
from roll.rewards.pictures import Shapes

WORLD = Path(__file__).parents[1] / "examples" / "image-shapes-cpu"


class Steps(NamedTuple):
    """Trained steps of pictures, one row each."""

    before: Tensor
    after: Tensor
    index: Tensor
    tokens: Tensor
    pooled: Tensor
    logprobs: Tensor


class Painter:
    """A model folder, its schedule, and the steps that are random."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pipe = StableDiffusion3Pipeline.from_pretrained(options.world / "model")
        self.model = self.pipe.transformer.eval()
        self.pipe.scheduler.set_timesteps(options.steps)
        self.levels = self.pipe.scheduler.sigmas
        self.checker = Shapes()

    @torch.no_grad()
    def embed(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Return embeddings of tokens and of whole prompts, one row each."""
        settings = {"do_classifier_free_guidance": False, "max_sequence_length": 1}
        tokens, _, pooled, _ = self.pipe.encode_prompt(prompts, prompts, prompts, **settings)
        return tokens, pooled

    def moments(self, steps: Steps, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the latents after the steps, with gradient."""
        level, to = self.levels[steps.index], self.levels[steps.index + 1]
        v = self.model(steps.before, steps.tokens, steps.pooled, 1000 * level, return_dict=False)[0]
        return step_moments(self.options.kind, steps.before, v, level, to, noise, self.levels[1].item())

    @torch.no_grad()
    def paint(self, prompts: list[str], windows: Tensor, generator: torch.Generator) -> tuple[Tensor, list[Steps]]:
        """Return the scores of pictures, and all steps; ``windows`` ``[rows, steps]`` says which are random."""
        tokens, pooled = self.embed(prompts)
        x = torch.randn(len(prompts), 3, 12, 12, generator=generator)
        path = []
        for number in range(self.options.steps):
            index = torch.full((len(prompts),), number)
            step = Steps(x, x, index, tokens, pooled, torch.empty(0))
            mean, std = self.moments(step, self.options.noise * windows[:, number].float())
            x = mean + per_row(std, mean) * torch.randn(x.shape, generator=generator)
            path.append(step._replace(after=x, logprobs=log_prob(x, mean, std, self.options.reduce)))
        pictures = self.pipe.image_processor.postprocess(self.pipe.vae.decode(x).sample)
        scores = [self.checker(picture, prompt) for picture, prompt in zip(pictures, prompts, strict=True)]
        partly = self.options.parts
        return torch.tensor([(1 - partly) * each["score"] + partly * each["parts"] for each in scores]), path


def train(painter: Painter, options: argparse.Namespace) -> None:
    """Run the loop; every line of output is one evaluation."""
    rows = {
        name: [json.loads(line)["prompt"] for line in (options.world / f"data/{name}.jsonl").open()]
        for name in ("train", "validation")
    }
    optimizer = torch.optim.AdamW(
        painter.model.parameters(), lr=options.lr, betas=(0.9, options.beta2), weight_decay=0.0
    )
    loss_function = make_policy_loss(options.loss, json.loads(options.loss_args))
    generator, chance = torch.Generator().manual_seed(options.seed), random.Random(options.seed)
    batches: deque[tuple[Tensor, Steps]] = deque()
    started, spent = time.monotonic(), {"paint": 0.0, "learn": 0.0}
    for step in range(options.updates + options.lag + 1):
        done = max(step - options.lag, 0)
        if done % options.every == 0 and (step == 0 or done):
            held_out = [prompt for prompt in rows["validation"] for _ in range(8)]
            off = torch.zeros(len(held_out), options.steps, dtype=torch.bool)
            accuracy = painter.paint(held_out, off, torch.Generator().manual_seed(1))[0].eq(1).float().mean()
            print(
                f"{done:4d} {accuracy:.3f} {time.monotonic() - started:6.1f}s",
                {k: round(t, 1) for k, t in spent.items()},
                flush=True,
            )
        begun = time.monotonic()
        prompts = chance.sample(rows["train"], options.groups)
        windows = torch.zeros(options.groups, options.steps, dtype=torch.bool)
        for group in range(options.groups):
            windows[group, list(window(options.steps, options.size, options.within, (options.seed, step, group)))] = (
                True
            )
        windows = windows.repeat_interleave(options.samples, 0)
        scores, path = painter.paint([p for p in prompts for _ in range(options.samples)], windows, generator)
        score = scores.view(options.groups, options.samples)
        spread = score.std(-1, keepdim=True)
        advantages = ((score - score.mean(-1, keepdim=True)) / (spread + 1e-6)).flatten()
        kept = (spread > 0).expand_as(score).flatten()
        steps = Steps(
            *(
                torch.cat([getattr(each, name)[windows[:, n] & kept] for n, each in enumerate(path)])
                for name in Steps._fields
            )
        )
        batches.append((torch.cat([advantages[windows[:, n] & kept] for n in range(options.steps)]), steps))
        spent["paint"] += time.monotonic() - begun
        if len(batches) <= options.lag:
            continue
        begun = time.monotonic()
        advantages, steps = batches.popleft()
        for settings in optimizer.param_groups:
            rise = min(1.0, (done + 1) / options.warmup)
            settings["lr"] = options.lr * rise * (1 - (1 - options.lr_end) * done / options.updates)
        total, report = len(advantages), {}
        for part in torch.arange(total).split(256):
            mean, std = painter.moments(Steps(*(each[part] for each in steps)), options.noise)
            current = log_prob(steps.after[part], mean, std, options.reduce)[:, None]
            inputs = PolicyInputs(
                current, steps.logprobs[part, None], advantages[part, None], torch.ones(len(part), 1, dtype=torch.bool)
            )
            losses, metrics = loss_function(inputs)
            (losses.sum() / total).backward()
            ratio = current.detach()[:, 0] - steps.logprobs[part]
            report = {"clip": metrics["clip_fraction"].mean().item(), "log_ratio": ratio.abs().mean().item()}
        norm = torch.nn.utils.clip_grad_norm_(painter.model.parameters(), options.max_norm) if total else 0.0
        if total:
            optimizer.step()
        optimizer.zero_grad()
        spent["learn"] += time.monotonic() - begun
        if options.verbose:
            print(
                f"     {score.mean():.3f} norm {float(norm):.2e}",
                {k: f"{v:.2e}" for k, v in report.items()},
                f"groups {total // options.size // options.samples}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path, default=WORLD)
    for name, value in {
        **{
            "seed": 0,
            "updates": 54,
            "every": 18,
            "lag": 0,
            "groups": 32,
            "samples": 8,
            "steps": 8,
            "size": 2,
            "within": 3,
        },
        **{
            "kind": "cps",
            "noise": 0.8,
            "reduce": "mean",
            "lr": 4e-4,
            "lr_end": 0.1,
            "warmup": 1,
            "beta2": 0.999,
            "parts": 0.0,
            "max_norm": 1.0,
        },
        **{"loss": "ppo", "loss_args": '{"clip_low": 1e-3, "clip_high": 1e-3}', "verbose": 0},
    }.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    np.random.seed(options.seed)
    train(Painter(options), options)


if __name__ == "__main__":
    main()
