"""The loss of a value model, per token; callers choose the tokens and average them (`aggregate`)."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import keep


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of each value, (v - R)^2 / 2, and token metrics; all ``[batch, seq]``.

    With ``clip`` c: the maximum of the errors of v and of v clipped to old_value +- c, so that a value that has moved
    more than c towards its return gets no gradient (from the code published with PPO, not from its paper; Engstrom et
    al., arXiv 2005.12729). ``values`` carry the gradient; ``old_values`` (before the first update on the batch) and
    ``returns`` are targets and carry none. ``response_mask`` is bool; losses and metrics are 0 outside it, whatever the
    inputs held there. float32, or float64 if the values are. ``clip_fraction``: 1 where the gradient is cut.
    ``ValueError`` unless ``clip`` is above 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"the clip of a value loss must be above 0, not {clip}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = (
        keep(tensor.to(dtype), response_mask) for tensor in (values, old_values.detach(), returns.detach())
    )
    losses = (values - returns).square() / 2
    cut = torch.zeros_like(response_mask)
    if clip is not None:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square() / 2
        cut = clipped > losses
        losses = torch.where(cut, clipped, losses)
    return losses, {"clip_fraction": cut.to(dtype)}
