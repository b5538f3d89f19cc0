"""The running requests as a table: one row per request, arrays instead of objects, so a step needs no loop over
requests.

Rows 0 to n are in use. The last row takes the place of a row that ends, in the table and in the cache alike; the table
reports which rows moved. It knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from roll.strategies.infer.base import Completion, FinishReason, GenerateRequest, TokenChunk
from roll.strategies.infer.stop_strings import StopStringMatcher

_PARAMETERS = np.dtype(
    [
        ("length", np.int64),
        ("prompt_length", np.int64),
        ("limit", np.int64),
        ("first_token_index", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
    ]
)
_NO_TOKEN = -1
_SEED_MASK = (1 << 64) - 1


@dataclass
class ActiveRequest:
    """Data of a request that is not in its table row."""

    key: int
    """The engine's own number of the request; unlike request ids, never used again."""
    request: GenerateRequest
    streaming: bool = False
    matcher: StopStringMatcher | None = None
    streamed: int = 0
    """Number of new tokens already handed out as chunks."""
    row: int = field(default=-1)


class RequestTable:
    """Tokens, log-probabilities, versions and parameters of the running requests."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self.requests: list[ActiveRequest] = []
        self._parameters = np.zeros(0, dtype=_PARAMETERS)
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._logprobs = np.zeros((0, 0), dtype=np.float32)
        self._versions = np.zeros((0, 0), dtype=np.int32)
        self._stop_ids = np.zeros((0, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def column(self, name: str) -> np.ndarray:
        """Return one parameter of all rows, ``[rows]``, as a view."""
        return self._parameters[name][: len(self)]

    def add(self, active: ActiveRequest, stop_token_ids: tuple[int, ...]) -> None:
        """Append a row. ``stop_token_ids`` are all token ids that end this request."""
        prompt, sampling = active.request.prompt_token_ids, active.request.sampling
        row = len(self)
        self._reserve(row + 1, len(prompt) + 1, len(stop_token_ids))
        self._parameters[row] = (
            len(prompt),
            len(prompt),
            min(len(prompt) + sampling.max_new_tokens, self._max_length),
            active.request.first_token_index,
            sampling.seed & _SEED_MASK,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        self._tokens[row, : len(prompt)] = prompt
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(stop_token_ids)] = stop_token_ids
        active.row = row
        self.requests.append(active)

    def cached_tokens(self, row: int) -> np.ndarray:
        """Return the tokens whose keys and values must be in the cache before the next step: all but the last."""
        return self._tokens[row, : self._parameters["length"][row] - 1]

    def last_tokens(self) -> np.ndarray:
        """Return the input of the next step, int64 ``[rows]``."""
        return self._tokens[np.arange(len(self)), self.column("length") - 1]

    def token_indices(self) -> np.ndarray:
        """Return the index of each row's next response token in its random stream, int64 ``[rows]``."""
        return self.column("length") - self.column("prompt_length") + self.column("first_token_index")

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one token to every row."""
        self._reserve(len(self), int(self.column("length").max()) + 1, 0)
        lengths = self.column("length")
        rows = np.arange(len(self))
        self._tokens[rows, lengths] = tokens
        self._logprobs[rows, lengths] = logprobs
        self._versions[rows, lengths] = version
        lengths += 1

    def ended(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows end with these last ``tokens``: (sampled a stop token, reached the limit), each bool
        ``[rows]``."""
        stopped = (self._stop_ids[: len(self)] == tokens[:, None]).any(axis=1)
        return stopped, self.column("length") >= self.column("limit")

    def completion(self, row: int, finish_reason: FinishReason) -> Completion:
        """Return the tokens that the row has produced."""
        new = slice(self._parameters["prompt_length"][row], self._parameters["length"][row])
        return Completion(
            request_id=self.requests[row].request.request_id,
            token_ids=self._tokens[row, new].astype(np.int32),
            logprobs=self._logprobs[row, new].copy(),
            versions=self._versions[row, new].copy(),
            finish_reason=finish_reason,
        )

    def next_chunk(self, row: int, finish_reason: FinishReason | None) -> TokenChunk:
        """Return the row's tokens since its last chunk."""
        active = self.requests[row]
        chunk = self.chunk(row, active.streamed, finish_reason)
        active.streamed += len(chunk.token_ids)
        return chunk

    def chunk(self, row: int, start: int, finish_reason: FinishReason | None) -> TokenChunk:
        """Return the row's new tokens from number ``start`` on."""
        new = slice(int(self._parameters["prompt_length"][row]) + start, int(self._parameters["length"][row]))
        return TokenChunk(
            token_ids=self._tokens[row, new].astype(np.int32),
            logprobs=self._logprobs[row, new].copy(),
            versions=self._versions[row, new].copy(),
            finish_reason=finish_reason,
        )

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Remove rows and fill the gaps from the end. Return (sources, targets) of the rows that moved."""
        remaining = len(self) - len(rows)
        leaving = np.zeros(len(self), dtype=bool)
        leaving[rows] = True
        targets = np.flatnonzero(leaving[:remaining])
        sources = remaining + np.flatnonzero(~leaving[remaining:])
        for array in (self._parameters, self._tokens, self._logprobs, self._versions, self._stop_ids):
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
            self.requests[target].row = int(target)
        del self.requests[remaining:]
        return sources, targets

    def _reserve(self, rows: int, length: int, stop_ids: int) -> None:
        """Grow the arrays where needed, at least doubling those that grow."""
        row_capacity, length_capacity = self._tokens.shape
        stop_capacity = self._stop_ids.shape[1]
        if rows <= row_capacity and length <= length_capacity and stop_ids <= stop_capacity:
            return
        if rows > row_capacity:
            row_capacity = max(rows, 2 * row_capacity, 8)
        if length > length_capacity:
            length_capacity = max(length, 2 * length_capacity, 64)
        self._parameters = _enlarged(self._parameters, (row_capacity,))
        self._tokens = _enlarged(self._tokens, (row_capacity, length_capacity))
        self._logprobs = _enlarged(self._logprobs, (row_capacity, length_capacity))
        self._versions = _enlarged(self._versions, (row_capacity, length_capacity))
        stop_shape = (row_capacity, max(stop_ids, stop_capacity))
        self._stop_ids = _enlarged(self._stop_ids, stop_shape, fill=_NO_TOKEN)


def _enlarged(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
    grown = np.full(shape, fill, dtype=array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown
