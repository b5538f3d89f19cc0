"""Reading values under a mask, so that entries outside it cannot matter.

Multiplying by a mask is not enough: ``0 * nan`` is ``nan``, in values and in gradients. Every public function of this
package passes its inputs through here first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where ``mask`` (bool, same shape) is true, else 0. The gradient outside is exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def last_true(mask: Tensor) -> Tensor:
    """Keep only the last true entry of each row of ``mask``, bool ``[batch, seq]``; a row without one stays false."""
    later = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (later == 1)
