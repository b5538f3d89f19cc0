"""Train with a plain synchronous GRPO loop in one file: the yardstick for the quick start.

It uses torch and transformers only, and does one thing after the other: sample, judge, take one optimizer step. Compare
the pipeline's results with this loop on the same model, prompts, batch and threads. `--lag` lets old weights generate,
as asynchronous training does, to find hyper-parameters that tolerate this.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Problem = dict[str, str]


@dataclass
class Rollouts:
    """One batch of samples. ``R`` is the longest response."""

    token_ids: torch.Tensor
    """int64 ``[samples, prompt + R]``, prompts padded on the left."""
    attention_mask: torch.Tensor
    """int64, like ``token_ids``."""
    response_mask: torch.Tensor
    """bool ``[samples, R]``: true up to and including the end of the sequence."""
    behaviour_logprobs: torch.Tensor
    """float32 ``[samples, R]``."""
    scores: torch.Tensor
    """float32 ``[samples]``: 1 if the text equals the ground truth, else 0."""


def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    samples_per_prompt: int,
    temperature: float,
    max_new_tokens: int,
) -> Rollouts:
    """Sample responses (greedy at temperature 0) and judge them; the samples of a problem are neighbours."""
    prompts = tokenizer([problem["prompt"] for problem in problems], return_tensors="pt", padding=True)
    prompt_width = prompts["input_ids"].shape[1]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    generated = model.generate(
        **prompts,
        **(sampling if temperature > 0 else {"do_sample": False}),
        num_return_sequences=samples_per_prompt,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    responses = generated.sequences[:, prompt_width:]
    ended_before = (responses == tokenizer.eos_token_id).cumsum(dim=1) - (responses == tokenizer.eos_token_id).long()
    response_mask = ended_before == 0
    logits = torch.stack(generated.logits, dim=1).float() / (temperature or 1.0)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    truths = [problem["ground_truth"] for problem in problems for _ in range(samples_per_prompt)]
    prompt_mask = prompts["attention_mask"].repeat_interleave(samples_per_prompt, dim=0)
    return Rollouts(
        token_ids=generated.sequences,
        attention_mask=torch.cat([prompt_mask, response_mask.long()], dim=1),
        response_mask=response_mask,
        behaviour_logprobs=logits.log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1),
        scores=torch.tensor([float(text == truth) for text, truth in zip(texts, truths, strict=True)]),
    )


def group_advantages(scores: torch.Tensor, samples_per_prompt: int, divide_by_deviation: bool) -> torch.Tensor:
    """Return score minus group mean, divided by the deviation on request: ``[samples]`` (GRPO, arXiv 2402.03300)."""
    groups = scores.view(-1, samples_per_prompt)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if divide_by_deviation:
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-6)
    return centred.flatten()


def policy_loss(
    model: PreTrainedModel, rollouts: Rollouts, advantages: torch.Tensor, temperature: float, clip: float
) -> torch.Tensor:
    """Return PPO's clipped loss (arXiv 1707.06347), averaged over the response tokens of the batch."""
    responses = rollouts.token_ids[:, -rollouts.response_mask.shape[1] :]
    logits = model(
        rollouts.token_ids,
        attention_mask=rollouts.attention_mask,
        position_ids=(rollouts.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=responses.shape[1] + 1,
    ).logits[:, :-1]
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - rollouts.behaviour_logprobs).exp()
    per_sample = advantages.unsqueeze(1)
    loss = -torch.minimum(ratio * per_sample, ratio.clamp(1 - clip, 1 + clip) * per_sample)
    return loss[rollouts.response_mask].sum() / rollouts.response_mask.sum()


def read_problems(path: Path) -> list[Problem]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(arguments: argparse.Namespace) -> None:
    """Run the loop. Reported seconds are those of rollout and training, without validation."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    generator = AutoModelForCausalLM.from_pretrained(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    training, validation = (read_problems(arguments.data / name) for name in ("train.jsonl", "val.jsonl"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, arguments.beta2), weight_decay=0.0)
    warm_up = max(arguments.warmup, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    published = deque([{name: value.clone() for name, value in model.state_dict().items()}], maxlen=arguments.lag + 1)
    shuffler = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    seconds = 0.0
    for step in range(arguments.steps + 1):
        if step % arguments.eval_steps == 0 or step == arguments.steps:
            judged = rollout(model, tokenizer, validation, 1, 0.0, arguments.max_new_tokens)
            rate = step * arguments.prompts * arguments.group_size / seconds if step else 0.0
            accuracy = judged.scores.mean().item()
            print(f"step {step:4d}  {seconds:6.1f} s  accuracy {accuracy:6.1%}  {rate:6.0f} samples/s", flush=True)
        if step == arguments.steps:
            break
        started = time.monotonic()
        generator.load_state_dict(published[0])
        problems = shuffler.sample(training, arguments.prompts)
        rollouts = rollout(
            generator, tokenizer, problems, arguments.group_size, arguments.temperature, arguments.max_new_tokens
        )
        advantages = group_advantages(rollouts.scores, arguments.group_size, arguments.divide_by_deviation)
        loss = policy_loss(model, rollouts, advantages, arguments.temperature, arguments.clip)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        published.append({name: value.clone() for name, value in model.state_dict().items()})
        seconds += time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("examples/quickstart/model"))
    parser.add_argument("--data", type=Path, default=Path("examples/quickstart/data"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval-steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--beta2", type=float, default=0.95, help="AdamW's second-moment decay")
    parser.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=0.2, help="PPO's epsilon")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--divide-by-deviation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--lag", type=int, default=0, help="generate with the weights of this many steps ago")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
