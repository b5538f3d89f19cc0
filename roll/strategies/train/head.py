"""The output head of a model, which can return something smaller than logits for one forward pass.

Logits of a large vocabulary are the largest tensor of training. The loss needs only two numbers per position from them,
and those can be computed inside the head. They must be computed there: sharded weights are gathered only inside the
forward pass of the whole model, and gradients flow back only from what that pass returns. The head keeps its
parameters, so names, tying, sharding and exports do not change.

Some models change logits after the head (a cap, a scale, a bias). They would also change the two numbers, so each model
is first tested: does it return what its head returned? If not, full logits are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states ``[rows, width, size]``, weight, bias) -> ``[rows, positions, results]``, in place of the logits."""


class OutputHead(nn.Linear):
    """A linear head over the parameters of another. Returns logits unless a function is set with `computing`."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight = head.weight
        self.bias = head.bias
        self._function: HeadFunction | None = None

    @contextmanager
    def computing(self, function: HeadFunction) -> Iterator[None]:
        """Let the model return the results of ``function`` instead of logits within the block."""
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., vocabulary]``, or the results of the function set with `computing`."""
        if self._function is None:
            return super().forward(hidden)
        return self._function(hidden, self.weight, self.bias)


def install_output_head(model: PreTrainedModel) -> OutputHead | None:
    """Replace the model's head by an `OutputHead`. Return ``None`` if the head is not a plain linear layer.

    Call this before sharding, which remembers the modules that hold a parameter.
    """
    plain = model.get_output_embeddings()
    if type(plain) is not nn.Linear:
        return None
    head = OutputHead(plain).train(plain.training)
    model.set_output_embeddings(head)
    return head if model.get_output_embeddings() is head else None


def gives_back_head_results(model: PreTrainedModel, head: OutputHead, device: torch.device) -> bool:
    """Return True if the model returns its head's results unchanged: logits, and results of another size. Collective.

    The test puts known numbers in place of the results, so no weight and no rounding can hide a change. It runs the
    model three times on three tokens, without gradients.
    """
    # Full size last: a pass that succeeds cleans up whatever a failed attempt left open in the sharding.
    sizes = (1, 2, head.out_features)
    unchanged = [_comes_back(model, head, size, device) for size in sizes]
    if not all(unchanged):
        logger.info("%s changes its logits after the head: log-probabilities need all of them", type(model).__name__)
    return all(unchanged)


def _comes_back(model: PreTrainedModel, head: OutputHead, size: int, device: torch.device) -> bool:
    tokens = torch.zeros((1, 3), dtype=torch.int64, device=device)
    # The numbers are neither small nor exact in a lower precision. There are fewer positions than tokens.
    sent = torch.linspace(-1001.3, 1001.3, 2 * size, device=device).reshape(1, 2, size)
    asked: list[torch.Size] = []

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(hidden.shape[:-1])
        return sent.clone()

    try:
        with torch.no_grad(), head.computing(answer):
            received = model(input_ids=tokens, use_cache=False).logits
    except Exception:
        logger.info("%s cannot do without full logits", type(model).__name__, exc_info=True)
        return False
    return asked == [tokens.shape] and received.shape == sent.shape and torch.equal(received.to(sent.dtype), sent)
