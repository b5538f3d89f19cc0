"""An engine that computes in processes of its own: what `vllm` and `sglang` share.

`ProcessEngine` keeps the state of such an engine; the adapter of a library makes the calls. Requests wait outside the
library until a slot is free, so no update waits for a request that has not begun. A weight update is checked for being
complete and fitting before the engine is paused.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import numpy as np
import torch

from roll.data.records import derive_seed
from roll.engines.base import (
    BusyClock,
    Completion,
    EngineFailed,
    GenerateRequest,
    InferStrategy,
    ModelSpec,
    PauseMode,
    StopStrings,
    TokenChunk,
    check_complete,
    check_request,
    check_tensor,
    eos_token_ids,
    load_config,
    load_tokenizer,
    no_tokens,
    parameter_shapes,
)
from roll.engines.requests import AdmittedRequests, Response
from roll.weights.buckets import HeldWeights, WeightBucket, manifest

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""

_INSPECTED_BYTES = 64 * 1024**2
"""Most bytes of weights that are read back from the engine after an update."""


def check_layout(entries: Iterable[tuple[str, str, Sequence[int]]], shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Check a weight update against the model's ``shapes`` and return its layout.

    Raises ``WeightMismatch`` naming a tensor that does not fit or is missing.
    """
    layout: Layout = {}
    for name, dtype, shape in entries:
        check_tensor(name, dtype, shape, shapes, layout)
        layout[name] = (dtype, tuple(shape))
    check_complete(shapes, layout)
    return layout


def sample_of(tensors: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """Return names of some tensors to read back, together at most `_INSPECTED_BYTES` (or one tensor). They differ from
    version to version."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample


@dataclass
class Prepared:
    """A weight update that fits, waiting to be loaded."""

    receipt: HeldWeights
    layout: Layout
    staged: Any
    """Result of the adapter's `ProcessEngine._stage`."""


Engine = TypeVar("Engine")
"""Type of the object through which a library is called."""


class ProcessEngine(InferStrategy, Generic[Engine]):
    """One engine replica whose library computes in its own processes. An adapter implements the methods from `_launch`
    on."""

    def __init__(
        self,
        model_path: str,
        *,
        device: str,
        dtype: str,
        attn_implementation: str,
        max_length: int,
        trust_remote_code: bool = False,
        eos_token_ids: Sequence[int] | None = None,
        devices_per_engine: int = 1,
        shares_devices: bool = False,
        transport: str = "object_store",
        strategy_config: dict[str, Any],
    ) -> None:
        """``eos_token_ids`` defaults to the model's own. On GPUs the model is split over ``devices_per_engine``. An
        engine with ``shares_devices`` is started so that it can sleep. ``transport`` is the way that weights come."""
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._eos_token_ids = eos_token_ids
        self._tensor_parallel_size = devices_per_engine if device == "cuda" else 1
        self._sleeps = shares_devices
        self._transport = transport
        self._strategy_config = strategy_config
        self._engine: Engine | None = None
        self._numbers = itertools.count()
        self._scoring = asyncio.Lock()
        self._paused = False
        self._asleep = False
        self._version = 0
        self._prepared: Prepared | None = None
        self._stop_strings = StopStrings(lambda: load_tokenizer(self._spec))
        self._generated_tokens = 0
        self._clock = BusyClock()

    async def start(self) -> None:
        if self._engine is not None:
            raise RuntimeError("this engine was started before")
        spec = self._spec
        config = load_config(spec.model_path, spec.trust_remote_code)
        self._shapes = parameter_shapes(config, spec.trust_remote_code)
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        if self._eos_token_ids is None:
            self._eos_token_ids = eos_token_ids(spec, config)
        self._engine, slots = await self._launch(config)
        # One slot is kept for scoring: a score follows an update, which must not wait for requests that have not begun.
        self._requests = AdmittedRequests(slots - 1, self._tick)

    async def generate(self, request: GenerateRequest) -> Completion:
        last: Response | None = None
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                last = response
        return no_tokens(request) if last is None else last.completion()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        known = 0
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                ended = response.finish_reason
                if ended is not None or len(response.token_ids) > known:
                    yield response.chunk(known, ended)
                known = len(response.token_ids)
                if ended is not None:
                    return
        empty = no_tokens(request)
        yield TokenChunk(empty.token_ids, empty.logprobs, empty.versions, "abort")

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        await self._sign_of_life()
        return {
            name: response.chunk(known.get(name, 0), response.finish_reason)
            for name, response in self._requests.inside.items()
            if len(response.token_ids) > known.get(name, 0)
        }

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._live_engine()
        await self._withdraw(self._requests.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see `InferStrategy.pause`. Later requests do not share what was cached before, because a
        request's cache salt names the version with which it began."""
        self._live_engine()
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause mode {mode!r} is unknown; one of {', '.join(get_args(PauseMode))}")
        self._requests.gate.shut()
        if mode == "drain":
            if self._paused and self._requests.inside:
                await self._continue()  # frozen requests would never end
                self._paused = False
            await self._requests.drained()
        else:
            self._requests.interrupt_drains(f"pause({mode!r})")
        await self._halt(mode)
        self._paused = True
        self._tick()

    async def resume(self) -> None:
        self._live_engine()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._requests.interrupt_drains("resume()")
        await self._continue()
        self._paused = False
        self._tick()
        self._requests.gate.open()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Check a weight update, and put it where the library can read it, while requests run."""
        self._prepared = None
        self._prepared = await asyncio.to_thread(lambda: self._prepare(list(buckets), version))
        return self._prepared.receipt

    def _prepare(self, buckets: list[WeightBucket], version: int) -> Prepared:
        layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], self._shapes)
        return Prepared(HeldWeights(version, *manifest(buckets)), layout, self._stage(buckets))

    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones; only while paused or idle.

        The returned checksums are those of the loaded bytes. For some tensors, which change with the version, they are
        those of what the engine holds, as far as it can read them back. Raises ``WeightMismatch`` if the update did not
        reach the engine's weights, ``EngineFailed`` for a load that stopped halfway. If it fails, the engine stays
        paused.
        """
        self._live_engine()
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.receipt.version != version:
            held = "nothing" if prepared is None else f"version {prepared.receipt.version}"
            raise RuntimeError(f"version {version} is to be loaded, but {held} was prepared")
        self._requests.require_none("load_weights", paused=self._paused)
        was_open = not self._paused
        if was_open:
            await self.pause("resume")
        await self._begin_again()
        try:
            await self._load(prepared)
        except EngineFailed:
            raise
        except Exception as error:
            raise EngineFailed(f"weights of version {version} were only partly loaded: {error!r}") from error
        self._version = version
        held_weights = await self._inspected(prepared.receipt, prepared.layout)
        if was_open:
            await self.resume()
        return held_weights

    async def _begin_again(self) -> None:
        """Take requests without a token out of the library: its caches may hold their prompts as computed with the old
        weights."""
        await self._withdraw(self._requests.begin_again())

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        async with self._scoring:
            return [await self._score(tokens) for tokens in token_ids]

    async def sleep(self) -> None:
        """Free the caches and move the weights to the host. An engine with its own devices only frees the caches."""
        self._live_engine()
        self._requests.require_none("sleep", paused=self._paused)
        if self._asleep:
            return
        self._requests.gate.shut()
        await self._offload()
        self._asleep = True
        self._tick()

    async def wake(self) -> None:
        self._live_engine()
        if not self._asleep:
            return
        await self._reload()
        if not self._paused:
            await self._continue()
            self._requests.gate.open()
        self._asleep = False
        self._tick()

    def stats(self) -> dict[str, Any]:
        """Return `running`, `waiting`, `version`, the totals `generated_tokens` and `busy_seconds`, and `busy_spans`.

        Libraries do not report how long they computed. The engine counts as busy while at least one request is inside
        and it is not paused.
        """
        self._live_engine()
        self._tick()
        return {
            "running": len(self._requests.inside),
            "waiting": self._requests.gate.waiting,
            "version": self._version,
            "generated_tokens": self._generated_tokens,
            **self._clock.stats(),
        }

    async def shutdown(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._requests.interrupt_drains("shutdown()")
        self._prepared = None
        await self._stop(engine, self._requests.abort_all())

    async def _responses(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from the library; nothing if it was aborted before it began."""
        self._live_engine()
        name = request.request_id
        self._requests.require_new(name)
        check_request(request, self._spec.max_length, self._vocabulary)
        self._check_sampling(request)
        matcher = self._stop_strings.matcher(request)

        def enter() -> Response:
            return Response(request, self._engine_id(), matcher)

        async with aclosing(self._requests.run(name, enter, self._updates)) as updates:
            async for update in updates:
                yield update

    def _engine_id(self) -> str:
        """Return a name that is no prefix of another one: SGLang aborts all requests whose names begin with a given
        one."""
        return f"roll-{next(self._numbers):016d}"

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineFailed("the engine is not running: it was not started, or it was shut down")
        return self._engine

    def _tick(self) -> None:
        """Record whether anything is being computed now."""
        self._clock.set(bool(self._requests.inside) and not self._paused and not self._asleep)

    @abstractmethod
    async def _launch(self, config: PretrainedConfig) -> tuple[Engine, int]:
        """Start the library. Return the object to call it by, and the number of requests that it runs at once."""

    @abstractmethod
    def _check_sampling(self, request: GenerateRequest) -> None:
        """Raise ``ValueError`` for parameters that the library would change, or not report the distribution of."""

    @abstractmethod
    def _updates(self, response: Response) -> AsyncGenerator[Response, None]:
        """Run a request in the library until it ends or has to begin again. Yield it after each message."""

    @abstractmethod
    async def _sign_of_life(self) -> None:
        """Wait for an answer from the library's own process, which it gives between two steps."""

    async def _withdraw(self, responses: Sequence[Response]) -> None:
        """End requests in the library that were marked as aborted or beginning again. Nothing is to be done if
        `_updates` does so when it is woken."""

    @abstractmethod
    async def _halt(self, mode: PauseMode) -> None:
        """Stop decoding in this mode: no step runs after this. For a drain, no request is inside any more."""

    @abstractmethod
    async def _continue(self) -> None:
        """Undo `_halt`."""

    @abstractmethod
    def _stage(self, buckets: list[WeightBucket]) -> Any:
        """Put a weight update that fits where the library can read it. Runs in a thread of its own."""

    @abstractmethod
    async def _load(self, prepared: Prepared) -> None:
        """Let the halted library take a weight update."""

    @abstractmethod
    async def _inspected(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        """Return what the library holds after an update. A tensor that cannot be read back has the checksum that was
        sent."""

    @abstractmethod
    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        """Score one sequence; see `InferStrategy.score`."""

    @abstractmethod
    async def _offload(self) -> None:
        """Stop decoding and free the caches; free the devices if other roles use them too."""

    @abstractmethod
    async def _reload(self) -> None:
        """Undo `_offload`, but for decoding."""

    @abstractmethod
    async def _stop(self, engine: Engine, running: Sequence[Response]) -> None:
        """End the library's processes, and before that the requests still ``running``, which are marked as aborted."""
