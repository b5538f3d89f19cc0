"""Train the quick start's model on samples from weights that are a fixed number of steps old.

This takes one process and one thread, and uses the pipeline's own loss. Nothing runs in parallel, so every token has
the requested lag, from the first step that can have it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from plain_loop import Rollouts, group_advantages, read_problems, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from roll.algorithms.logprobs import token_logprobs_and_entropy
from roll.algorithms.objective import PolicyObjective


@dataclass(frozen=True)
class LaggedRun:
    """One training."""

    method: str
    pg_variant: str
    old_policy: str
    lag: int
    seed: int
    steps: int
    prompts: int
    group_size: int
    learning_rate: float
    updates_per_batch: int
    eval_steps: int

    @property
    def name(self) -> str:
        """Name of the run with its settings, used for its file."""
        return "-".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class LaggedResult:
    """Measurements of one training."""

    steps: list[int]
    accuracy: list[float]
    """Greedy accuracy on held-out problems, at those steps."""
    ess: list[float]
    """Effective sample size of the behaviour weights, for each training step."""
    grad_norm: list[float]
    """Gradient norm before clipping, for each training step: the mean over its updates."""


def train_lagged(run: LaggedRun, model_path: Path, data: Path) -> LaggedResult:
    """Run the loop: sample with old weights, score, update, and evaluate from time to time."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    shuffler = random.Random(run.seed)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    generator = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    training, held_out = (read_problems(data / name) for name in ("train.jsonl", "val.jsonl"))
    objective = PolicyObjective(max_response_length=4, pg_variant=run.pg_variant, old_policy=run.old_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    published = deque([_copy(model)], maxlen=run.lag + 1)
    result = LaggedResult([], [], [], [])
    for step in range(run.steps + 1):
        if step % run.eval_steps == 0 or step == run.steps:
            result.steps.append(step)
            result.accuracy.append(rollout(model, tokenizer, held_out, 1, 0.0, 4).scores.mean().item())
        if step == run.steps:
            return result
        generator.load_state_dict(published[0])
        problems = shuffler.sample(training, run.prompts)
        rollouts = rollout(generator, tokenizer, problems, run.group_size, 1.0, 4)
        ess, norm = _update(model, optimizer, objective, rollouts, run)
        result.ess.append(ess)
        result.grad_norm.append(norm)
        published.append(_copy(model))
    return result


def _copy(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    objective: PolicyObjective,
    rollouts: Rollouts,
    run: LaggedRun,
) -> tuple[float, float]:
    """Take the updates on one batch. Return the effective sample size before the first, and the mean gradient norm."""
    advantages = group_advantages(rollouts.scores, run.group_size, True)[:, None].expand(rollouts.response_mask.shape)
    fields = {
        "behaviour_logprobs": rollouts.behaviour_logprobs,
        "advantages": advantages,
        "scores": rollouts.scores,
    }
    with torch.no_grad():
        fields["proximal_logprobs"] = _logprobs(model, rollouts)[0]
    mask = rollouts.response_mask
    ratio = (fields["proximal_logprobs"] - rollouts.behaviour_logprobs)[mask].double().exp()
    norms = []
    order = torch.randperm(len(mask))
    for rows in order.chunk(run.updates_per_batch):
        part = Rollouts(**{name: value[rows] for name, value in vars(rollouts).items()})
        logprobs, entropy = _logprobs(model, part)
        normalizers = objective.normalizers(part.response_mask.sum(-1).tolist())
        part_fields = {name: value[rows] for name, value in fields.items()}
        loss, _ = objective(logprobs, entropy, part.response_mask, normalizers, part_fields)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return (ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())).item(), sum(norms) / len(norms)


def _logprobs(model: PreTrainedModel, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each response token, and the entropy there, ``[samples, responses]``."""
    responses = rollouts.token_ids[:, -rollouts.response_mask.shape[1] :]
    logits = model(
        rollouts.token_ids,
        attention_mask=rollouts.attention_mask,
        position_ids=(rollouts.attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=responses.shape[1] + 1,
    ).logits[:, :-1]
    return token_logprobs_and_entropy(logits, responses)
