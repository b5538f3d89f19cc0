"""The interface of every generation engine: many independent requests at once.

An engine knows nothing of groups, batches or training steps. Each request joins and leaves on its own. Its tokens carry
the log-probability of the distribution they were sampled from and the version of the weights that produced them. All
methods belong to one event loop; an engine that computes in a thread hides it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from roll.tracking.timeline import BusySpans
from roll.weights.buckets import HeldWeights, TransferStep, WeightBucket

PauseMode = Literal["keep", "resume", "drain"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Equal parameters, seed, prompt and weights give equal tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy. Every recorded log-probability is then 0, because the distribution is a point."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request when sampled; the token is part of the response."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Continue to `max_new_tokens`, whatever is sampled."""

    @property
    def watches_text(self) -> bool:
        """True if a stop string may end the response."""
        return bool(self.stop_strings) and not self.ignore_eos


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt to continue, and how to sample."""

    request_id: str
    prompt_token_ids: np.ndarray
    """int32 ``[prompt]``. For a request that is issued again after its engine died: the prompt plus the partial
    response."""
    sampling: SamplingParams
    first_token_index: int = 0
    """Number of response tokens that earlier attempts have produced. They do not count against any limit. The random
    stream resumes at this index, so a continued response is sampled like an uninterrupted one."""


@dataclass
class Completion:
    """The result of a request: the sampled tokens, their log-probabilities and the weight versions that produced
    them."""

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
    """New tokens of a running request since its last chunk. The last chunk carries the finish reason."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None


class InferStrategy(Protocol):
    """One engine replica."""

    async def start(self) -> None:
        """Load the model (as version 0) and accept requests."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. An aborted request returns normally, with `finish_reason='abort'` and its
        tokens."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run a request like `generate`, yielding one token (or a few) at a time."""

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return the new tokens of each running request beyond the first ``known[id]`` (absent: 0).

        A request without new tokens may be left out, and so may one that has not begun. A chunk that ends its request
        carries the finish reason.

        The answer is also the engine's sign of life: it comes from the decoding loop, between two steps, so an engine
        that is stuck in a step does not answer. Paused and sleeping engines do. Raises `EngineFailed`.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now. Unknown ids are ignored: they may just have finished."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. Return when no step runs; new requests are queued.

        `drain` waits for the running requests and starts no queued one. `keep` freezes running requests with their
        caches. `resume` drops the caches, which are rebuilt from prompts and partial tokens when the engine resumes.
        """

    async def resume(self) -> None:
        """Resume decoding after `pause`."""

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Take in a weight update while requests run, and return what the engine would hold.

        The weights in use do not change. An update that was prepared before is discarded. Raises `WeightMismatch`
        naming the tensor if a name is unknown or missing, or a shape differs.
        """

    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones; only while paused or idle.

        Raises ``RuntimeError`` if this version is not the one prepared. Never reports success for a half-loaded
        version.
        """

    async def sleep(self) -> None:
        """Release the devices: free the caches, move the weights off the device. Pause first."""

    async def wake(self) -> None:
        """Undo `sleep`. Requests that had tokens continue from prompt plus partial tokens."""

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probability of each token given those before it, under the current weights, at temperature 1
        and without truncation.

        ``token_ids`` is int32 ``[length]`` for each sequence, with at least one token and fewer than the engine's
        longest sequence. Returns float32 ``[length]`` for each, 0 at the first token. May run beside requests; the
        engine must be awake and not paused.
        """

    def stats(self) -> dict[str, Any]:
        """Return at least `running`, `waiting`, `version`, `generated_tokens` (total), `busy_seconds` (total) and
        `busy_spans` (the latest ones, in seconds since the epoch; see `BusySpans`)."""

    async def shutdown(self) -> None:
        """End all requests as aborted and free everything."""


@runtime_checkable
class PushedStrategy(Protocol):
    """An engine whose library receives weights straight from the trainer, by NCCL or CUDA IPC. See `RemoteCalls`."""

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Make one call of the weight transfer of the engine's library."""

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> HeldWeights:
        """Record a completed push of this version and return what the engine holds. ``layout``: name -> (dtype name,
        shape)."""


class EngineFailed(RuntimeError):
    """The engine has failed for good. Every request fails with this error, which carries the cause."""


@dataclass
class BusyClock:
    """Total seconds of computing, and when they were."""

    total: float = 0.0
    since: float | None = None
    spans: BusySpans = field(default_factory=BusySpans)

    def set(self, busy: bool) -> None:
        """Record that the engine is busy, or idle, from now on."""
        now = time.perf_counter()
        if self.since is not None:
            self.total += now - self.since
            ended = time.time()
            self.spans.add(ended - (now - self.since), ended)
        self.since = now if busy else None

    def read(self) -> float:
        """Return the busy seconds so far."""
        self.set(self.since is not None)
        return self.total

    def stats(self) -> dict[str, Any]:
        """Return `busy_seconds` and `busy_spans` for the engine's stats."""
        return {"busy_seconds": self.read(), "busy_spans": self.spans.recent()}
