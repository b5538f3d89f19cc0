"""The forward pass of a Hugging Face causal model for a trainer: two numbers for each wanted token.

Every trainer that keeps the model's own modules uses this code. If the model allows it, both numbers are computed
inside its head, so that the logits of a whole micro-batch never exist.
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
from roll.trainers.model import ModelKind, OutputHead, gives_back_head_results
from roll.trainers.step import (
    MicroBatch,
    build_micro_batch,
    predicted_tokens,
    scatter_to_tokens,
)


def hf_forward(
    kind: ModelKind,
    model: nn.Module,
    head: OutputHead | None,
    device: torch.device,
    signature_of: nn.Module | None = None,
    packed: bool = False,
) -> HfForward | HfValueForward:
    """Return the forward pass for a kind of model. Collective.

    ``packed``: samples share rows in passes without gradients.
    """
    if kind == "policy":
        return HfForward(model, head, device, signature_of, packed)
    return HfValueForward(model, device, packed)


def policy_forward(forward: HfForward | HfValueForward) -> HfForward:
    """Return the forward pass if it is a policy's. Raises ``RuntimeError`` if it is a value model's."""
    if not isinstance(forward, HfForward):
        raise RuntimeError("this role has a value model, which gives no log-probabilities")
    return forward


def value_forward(forward: HfForward | HfValueForward) -> HfValueForward:
    """Return the forward pass if it is a value model's. Raises ``RuntimeError`` if it is a policy's."""
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
        """Return the value before each token, without gradients, for the micro-batches ``rows`` of the batch.

        Returns float32 ``[total_tokens]``; 0 at the first token of a sample and at samples of other ranks.
        """
        return _for_each_token(batch, rows, self.device, self.packed, self.values)

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor]:
        """Return what the loss is computed from: the values. Temperature and entropy are those of a policy."""
        return (self.values(micro_batch),)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return float32 ``[rows, kept]``: the value of the state before each target."""
        output = self.model(**micro_batch.model_arguments())
        return micro_batch.by_sample(output.logits[:, micro_batch.positions, 0].float())


def _for_each_token(
    batch: SampleBatch,
    rows: Sequence[Sequence[int]],
    device: torch.device,
    packed: bool,
    compute: Callable[[MicroBatch], Tensor],
) -> np.ndarray:
    """Return ``compute``'s results for the targets of each micro-batch, at the targets' places: float32
    ``[total_tokens]``."""
    wanted = predicted_tokens(batch)
    values = np.zeros(len(wanted), dtype=np.float32)
    for part in rows:
        micro_batch = build_micro_batch(batch, part, wanted, (), device, packed=packed)
        with torch.no_grad():
            computed = compute(micro_batch)
        scatter_to_tokens(computed.cpu().numpy(), micro_batch.mask.cpu().numpy(), batch, part, values)
    return values


class HfForward:
    """Calls a policy, which a trainer may have wrapped. ``head`` is the result of `install_output_head`."""

    def __init__(
        self,
        model: nn.Module,
        head: OutputHead | None,
        device: torch.device,
        signature_of: nn.Module | None = None,
        packed: bool = False,
    ) -> None:
        """Test the model on a few tokens. Collective.

        ``signature_of``: the model itself, if a wrapper hides which arguments it takes. ``packed``: samples share rows
        in passes without gradients.
        """
        self.model = model
        self.device = device
        self.packed = packed
        arguments = inspect.signature((signature_of or model).forward).parameters
        self.keeps_positions = "logits_to_keep" in arguments
        self.head = head if head is not None and gives_back_head_results(model, head, device) else None
        self.chunk_elements = LINEAR_CHUNK_ELEMENTS
        """Number of logits that the head computes at a time."""

    def token_logprobs(self, batch: SampleBatch, rows: Sequence[Sequence[int]], temperature: float) -> np.ndarray:
        """Return log-probabilities, without gradients, for the micro-batches ``rows`` of the batch.

        Returns float32 ``[total_tokens]``; 0 at the first token of a sample, which nothing predicts, and at samples of
        other ranks.
        """

        def compute(micro_batch: MicroBatch) -> Tensor:
            return self.logprobs(micro_batch, temperature)

        return _for_each_token(batch, rows, self.device, self.packed, compute)

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the targets, ``[rows, kept]``."""
        targets = micro_batch.targets
        if self.head is None:
            return micro_batch.by_sample(token_logprobs(self._logits(micro_batch), targets, temperature))

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            return linear_logprobs(kept, weight, bias, targets, temperature, self.chunk_elements).unsqueeze(-1)

        with self.head.computing(compute):
            output = self.model(**micro_batch.model_arguments())
        return micro_batch.by_sample(output.logits.squeeze(-1))

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return what the loss is computed from: log-probabilities and entropies of the targets, ``[rows, kept]`` each.

        Entropies have a gradient only if asked for.
        """
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
        """Return the logits that predict the targets: ``[*targets, vocabulary]``."""
        arguments = micro_batch.model_arguments()
        if self.keeps_positions:
            return self.model(**arguments, logits_to_keep=micro_batch.positions).logits
        return self.model(**arguments).logits[:, micro_batch.positions]
