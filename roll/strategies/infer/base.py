"""What every generation engine offers: many independent requests at once.

An engine never learns about groups, batches or training steps. A request joins and leaves on its own; its tokens
carry the log-probability of the distribution they were sampled from and the version of the weights that produced
them. All methods are coroutines of one event loop; an engine that computes in a thread hides it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

PauseMode = Literal["keep", "resume", "drain"]
FinishReason = Literal["stop", "length", "abort"]
TransferStep = Literal["init", "start", "update", "finish"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Equal parameters, seed, prompt and weights give equal tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy (every recorded log-probability is then 0: the distribution is a point)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request; the token is part of the response."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Go on to `max_new_tokens` whatever is sampled."""

    @property
    def watches_text(self) -> bool:
        """Whether a text may end the response."""
        return bool(self.stop_strings) and not self.ignore_eos


@dataclass(frozen=True)
class GenerateRequest:
    """What is to go on, and how it is sampled."""

    request_id: str
    prompt_token_ids: np.ndarray
    """int32 ``[prompt]``. At a re-issue after a dead engine: prompt plus the partial response."""
    sampling: SamplingParams
    first_token_index: int = 0
    """Number of response tokens that earlier attempts already produced (they count against nothing here, but the
    random stream goes on at this index, so a continued response is sampled as an uninterrupted one would be)."""


@dataclass
class Completion:
    """The end of a request: what was sampled, from which distribution, by which weights."""

    request_id: str
    token_ids: np.ndarray
    """int32 ``[new]``."""
    logprobs: np.ndarray
    """float32 ``[new]``."""
    versions: np.ndarray
    """int32 ``[new]``."""
    finish_reason: FinishReason


@dataclass
class TokenChunk:
    """Tokens a running request gained since the last chunk; the last one carries the finish reason."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class BucketLocation:
    """Where another process of this host finds a bucket's data."""

    path: str
    """A file to open and map, read-only."""
    offset: int
    """First byte of the data in that file."""


@dataclass
class WeightBucket:
    """Some tensors of one publication, as bytes.

    ``tensors`` holds (Hugging Face name, dtype name such as ``float32``, shape, byte offset); ``data`` is uint8
    ``[bytes]``. A tensor is never split over buckets.
    """

    tensors: list[tuple[str, str, tuple[int, ...], int]]
    data: np.ndarray
    location: BucketLocation | None = None
    """None where the bytes are in no file."""
    lasting: bool = False
    """Whether ``data`` stays as it is until the engine has loaded the next version; if not, it may change as soon as
    `InferStrategy.load_weights` has returned."""


@dataclass
class WeightReceipt:
    """What an engine says it holds (or is about to hold); compared with the trainer's own (attestation)."""

    version: int
    parameter_count: int
    """Elements over all named parameters, tied ones counted once."""
    checksums: Mapping[str, int | None] = field(default_factory=dict)
    """Name of each tensor -> xxh3_64 of its bytes as the engine holds it; None where that cannot be read back."""
    in_place: bool = False
    """Whether the engine computes with the publication's own memory, which must then stay as it is."""


class InferStrategy(Protocol):
    """One engine replica."""

    async def start(self) -> None:
        """Load the model (as version 0) and accept requests."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. An aborted one ends normally with `finish_reason='abort'` and its tokens."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Like `generate`, token by token (or a few at a time)."""

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """The new tokens of each running request beyond the first ``known[id]`` (absent: 0); one without any may be
        left out, as may one that has not begun. A chunk that ends its request carries the finish reason.

        Also the engine's sign of life: the answer comes from what decodes, between two steps, so an engine that is
        stuck in a step does not answer. Paused and sleeping engines do. Raises `EngineFailed`."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are ignored (they may just have finished)."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. Returns when no step runs; new requests queue up. `drain` waits for the running ones (and
        starts no queued one), `keep` freezes them with their caches, `resume` drops the caches, which are rebuilt
        from prompt and partial tokens when the engine goes on."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> WeightReceipt:
        """Take a publication in beside whatever runs, and say what would be held. Raises `WeightMismatch` naming the
        tensor if a name is unknown or missing, or a shape differs. The weights in use do not change; a publication
        that was prepared before is forgotten."""

    async def load_weights(self, version: int) -> WeightReceipt:
        """Replace all weights by the prepared ones; only while paused or idle. Raises ``RuntimeError`` if this version
        is not the one prepared, and leaves no half-loaded version behind a success."""

    async def sleep(self) -> None:
        """Give the devices up (caches freed, weights off the device). Pause first."""

    async def wake(self) -> None:
        """Undo `sleep`. Requests that had tokens go on from prompt plus partial tokens."""

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probability of each token given those before it, under the weights held now, at temperature 1 and with
        nothing truncated.

        ``token_ids`` int32 ``[length]`` each, at least one token and fewer than the engine's longest sequence. Returns
        float32 ``[length]`` each, 0 at the first token. May run beside requests; the engine is awake and not paused.
        """

    def stats(self) -> dict[str, Any]:
        """At least `running`, `waiting`, `version`, `generated_tokens` (total), `busy_seconds` (total), `busy_spans`
        (the last ones, in seconds since the epoch, see `BusySpans`)."""

    async def shutdown(self) -> None:
        """End all requests as aborted and free everything."""


@runtime_checkable
class PushedStrategy(Protocol):
    """An engine whose library takes weights straight from the trainer: by NCCL or CUDA IPC. See `RemoteCalls`."""

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """One call of the engine library's weight transfer."""

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> WeightReceipt:
        """What is held after a push of this version, of tensors of this layout: name -> dtype name, shape."""


class WeightMismatch(ValueError):
    """A publication does not fit the engine's model. The message names the tensor."""


class EngineFailed(RuntimeError):
    """The engine cannot go on; every request ends with this error, which carries the cause."""
