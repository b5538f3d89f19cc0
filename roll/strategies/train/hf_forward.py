"""The forward pass of a Hugging Face causal model, as far as a trainer needs it: two numbers for each wanted token.

The same for every trainer that keeps the model's own modules. Where the model allows, both numbers are computed inside
its head, so that no logits of a whole micro-batch exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from roll.algorithms.logprobs import (
    LINEAR_CHUNK_ELEMENTS,
    linear_logprobs,
    linear_logprobs_and_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from roll.data.records import SampleBatch
from roll.strategies.train.checkpoint import ModelKind
from roll.strategies.train.head import OutputHead, gives_back_head_results
from roll.strategies.train.microbatches import MicroBatch, build_micro_batch, predicted_tokens, scatter_to_tokens
from roll.strategies.train.step import StepMetrics, TrainingStep


def hf_forward(
    kind: ModelKind,
    model: nn.Module,
    head: OutputHead | None,
    device: torch.device,
    signature_of: nn.Module | None = None,
    packed: bool = False,
) -> HfForward | HfValueForward:
    """The forward pass of a kind of model. Collective. ``packed``: samples share rows where there are no gradients."""
    if kind == "policy":
        return HfForward(model, head, device, signature_of, packed)
    return HfValueForward(model, device, packed)


def policy_forward(forward: HfForward | HfValueForward) -> HfForward:
    """The forward pass of a policy. ``RuntimeError`` if it is that of a value model."""
    if not isinstance(forward, HfForward):
        raise RuntimeError("this role has a value model, which gives no log-probabilities")
    return forward


def value_forward(forward: HfForward | HfValueForward) -> HfValueForward:
    """The forward pass of a value model. ``RuntimeError`` if it is that of a policy."""
    if not isinstance(forward, HfValueForward):
        raise RuntimeError("this role has a policy, which gives no values")
    return forward


class HfValueForward:
    """Calls a value model, which a trainer may have wrapped."""

    def __init__(self, model: nn.Module, device: torch.device, packed: bool = False) -> None:
        self.model = model
        self.device = device
        self.packed = packed

    def token_values(self, batch: SampleBatch, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """float32 ``[total_tokens]`` without gradients, for the micro-batches ``rows`` of the batch: the value before
        each token; 0 at the first token of a sample and at samples of other ranks."""
        return _for_each_token(batch, rows, self.device, self.packed, self.values)

    def loss(self, step: TrainingStep, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, StepMetrics]:
        """See `HfForward.loss`; values have no temperature."""
        return step.loss(micro_batch, self.values(micro_batch))

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """float32 ``[rows, kept]``: of the state before each target."""
        output = self.model(**micro_batch.model_arguments())
        return micro_batch.by_sample(output.logits[:, micro_batch.positions, 0].float())


def _for_each_token(
    batch: SampleBatch,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    packed: bool,
    compute: Callable[[MicroBatch], Tensor],
) -> np.ndarray:
    """What ``compute`` gives for the targets of each micro-batch, at their places: float32 ``[total_tokens]``."""
    wanted = predicted_tokens(batch)
    values = np.zeros(len(wanted), dtype=np.float32)
    for part in rows:
        micro_batch = build_micro_batch(batch, part, wanted, (), device, packed=packed)
        with torch.no_grad():
            computed = compute(micro_batch)
        scatter_to_tokens(computed.cpu().numpy(), micro_batch.mask.cpu().numpy(), batch, part, values)
    return values


class HfForward:
    """Calls a model, which a trainer may have wrapped. ``head``: what `install_output_head` gave for it."""

    def __init__(
        self,
        model: nn.Module,
        head: OutputHead | None,
        device: torch.device,
        signature_of: nn.Module | None = None,
        packed: bool = False,
    ) -> None:
        """Collective: the model is tried on a few tokens. ``signature_of``: the model itself, where a wrapper hides
        which arguments it takes. ``packed``: samples share rows where there are no gradients."""
        self.model = model
        self.device = device
        self.packed = packed
        arguments = inspect.signature((signature_of or model).forward).parameters
        self.keeps_positions = "logits_to_keep" in arguments
        self.head = head if head is not None and gives_back_head_results(model, head, device) else None
        self.chunk_elements = LINEAR_CHUNK_ELEMENTS
        """Logits that the head computes at a time."""

    def token_logprobs(self, batch: SampleBatch, rows: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """float32 ``[total_tokens]`` without gradients, for the micro-batches ``rows`` of the batch.

        0 at the first token of a sample, which nothing predicts, and at samples of other ranks.
        """

        def compute(micro_batch: MicroBatch) -> Tensor:
            return self.logprobs(micro_batch, temperature)

        return _for_each_token(batch, rows, self.device, self.packed, compute)

    def loss(self, step: TrainingStep, micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, StepMetrics]:
        """A micro-batch's contribution to the loss of the step, and to its metrics."""
        logprobs, entropy = self.logprobs_and_entropy(micro_batch, temperature, step.needs_entropy_gradient)
        return step.loss(micro_batch, logprobs, entropy)

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """``[rows, kept]``."""
        targets = micro_batch.targets
        if self.head is None:
            return micro_batch.by_sample(token_logprobs(self._logits(micro_batch), targets, temperature))

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            return linear_logprobs(kept, weight, bias, targets, temperature, self.chunk_elements).unsqueeze(-1)

        with self.head.computing(compute):
            output = self.model(**micro_batch.model_arguments())
        return micro_batch.by_sample(output.logits.squeeze(-1))

    def logprobs_and_entropy(
        self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """``[rows, kept]`` each, the entropy without a gradient unless asked for."""
        targets = micro_batch.targets
        if self.head is None:
            results = token_logprobs_and_entropy(self._logits(micro_batch), targets, temperature, entropy_gradient)
            return micro_batch.by_sample(results[0]), micro_batch.by_sample(results[1])

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            results = linear_logprobs_and_entropy(
                kept, weight, bias, targets, temperature, entropy_gradient, self.chunk_elements
            )
            return torch.stack(results, dim=-1)

        with self.head.computing(compute):
            output = self.model(**micro_batch.model_arguments())
        logprobs, entropy = (micro_batch.by_sample(values) for values in output.logits.unbind(-1))
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        """Those that predict the targets: ``[*targets, vocabulary]``."""
        arguments = micro_batch.model_arguments()
        if self.keeps_positions:
            return self.model(**arguments, logits_to_keep=micro_batch.positions).logits
        return self.model(**arguments).logits[:, micro_batch.positions]
