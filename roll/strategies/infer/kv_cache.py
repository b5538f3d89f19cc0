"""Keys and values of the running requests, one row per request, in rows 0 to n.

The running rows are a compact prefix, so a decoding step attends to plain views ``[:rows, :, :kv_length]`` and gathers
nothing. The buffers grow geometrically in rows and length, and never shrink until `release`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache

LENGTH_MULTIPLE = 16
"""Multiple to which the lengths that a kernel sees are rounded up. Its vectorised loops then never end in a remainder,
whose sums are ordered differently, so a row's result does not depend on the length of its neighbours."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


class SlotCache(Cache):
    """A transformers cache in which every row has its own length.

    Tensors are ``[rows, kv_heads, length, head_dim]`` per layer. `begin_step` names the rows and positions that the
    next forward pass writes, one token per row. The model then calls `update` for each layer. New memory is zeroed:
    masked positions have weight 0, and 0 times an old NaN would be NaN.
    """

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._max_rows = max_rows
        self._max_length = round_up(max_length, LENGTH_MULTIPLE)
        self._rows_capacity = 0
        self._length_capacity = 0
        self._step_rows = torch.zeros(0, dtype=torch.int64)
        self._step_positions = torch.zeros(0, dtype=torch.int64)
        self._step_kv_length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return sum(tensor.nbytes for tensor in self._keys + self._values if tensor is not None)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens, keeping stored values."""
        if rows <= self._rows_capacity and length <= self._length_capacity:
            return
        if rows > self._rows_capacity:
            self._rows_capacity = min(max(rows, 2 * self._rows_capacity), max(rows, self._max_rows))
        if length > self._length_capacity:
            grown = round_up(max(length, 2 * self._length_capacity), LENGTH_MULTIPLE)
            self._length_capacity = min(grown, self._max_length)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                if tensor is not None:
                    tensors[layer] = self._grown(tensor)

    def begin_step(self, rows: torch.Tensor, positions: torch.Tensor, kv_length: int) -> None:
        """Announce a forward pass of one token per row, for rows ``0..n`` at ``positions`` (int64 ``[n]``)."""
        self._step_rows, self._step_positions, self._step_kv_length = rows, positions, kv_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values ``[n, kv_heads, 1, head_dim]`` and return the views. Called by the model."""
        rows, positions = self._step_rows, self._step_positions
        keys, values = self._allocate(layer_idx, key_states, value_states)
        keys[rows, :, positions] = key_states[:, :, 0]
        values[rows, :, positions] = value_states[:, :, 0]
        count = len(rows)
        return keys[:count, :, : self._step_kv_length], values[:count, :, : self._step_kv_length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the current step, as one number for all rows."""
        return max(self._step_kv_length - 1, 0)

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Copy prefilled ``keys[sources]`` and ``values[sources]`` (``[prompts, kv_heads, length, head_dim]``) to the
        start of ``rows``. One source may go to many rows."""
        held_keys, held_values = self._allocate(layer, keys, values)
        length = keys.shape[2]
        held_keys[rows, :, :length] = keys[sources]
        held_values[rows, :, :length] = values[sources]

    def move(self, sources: Sequence[int] | np.ndarray, targets: Sequence[int] | np.ndarray, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` to rows ``targets``. The two sets are disjoint."""
        for tensor in self._keys + self._values:
            if tensor is not None:
                source = torch.as_tensor(sources, device=tensor.device)
                target = torch.as_tensor(targets, device=tensor.device)
                tensor[target, :, :length] = tensor[source, :, :length]

    def release(self) -> None:
        """Free all memory."""
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        self._rows_capacity = self._length_capacity = 0

    def _allocate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's tensors. They are created at the layer's first use, when the number and size of its heads
        are known."""
        held_keys, held_values = self._keys[layer], self._values[layer]
        if held_keys is None or held_values is None:
            held_keys = self._keys[layer] = self._zeros_like(keys)
            held_values = self._values[layer] = self._zeros_like(values)
        return held_keys, held_values

    def _zeros_like(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self._rows_capacity, states.shape[1], self._length_capacity, states.shape[3])

    def _grown(self, tensor: torch.Tensor) -> torch.Tensor:
        grown = self._zeros_like(tensor)
        grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
        return grown
