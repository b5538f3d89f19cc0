"""`vllm`: vLLM's asynchronous engine behind the `InferStrategy` protocol, on CPUs and GPUs alike.

Only public interfaces are used: token ids in and out, pause and resume of generation, sleep and wake, weight updates in
checkpoint names. vLLM computes in its own processes; this object belongs to one event loop. Requests wait outside vLLM
until a slot is free, so no update waits for a request that has not begun. A weight update is checked for being complete
and fitting before the engine is paused.

Not promised: equal bits whatever runs beside a request (vLLM's kernels depend on the batch), and the same random stream
for a response that is continued elsewhere (it gets a stream of its own).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import numpy as np

from roll.data.records import derive_seed
from roll.engines.base import BusyClock, Completion, EngineFailed, FinishReason, GenerateRequest, PauseMode, TokenChunk
from roll.engines.hf.engine import check_request
from roll.engines.model_facts import (
    ModelSpec,
    cache_bytes_per_token,
    eos_token_ids,
    load_config,
    load_tokenizer,
    parameter_shapes,
)
from roll.engines.requests import (
    AdmittedRequests,
    Drains,
    Layout,
    Response,
    StopStrings,
    VersionSpan,
    check_layout,
    chunks_of,
    completion_of,
    new_tokens,
)
from roll.engines.vllm.options import BUCKET_BACKEND, OWNER_VARIABLE, engine_arguments, stream_interval
from roll.weights.buckets import (
    ALIGNMENT,
    BucketLocation,
    HeldWeights,
    MemoryFile,
    TransferStep,
    WeightBucket,
    WeightMismatch,
    manifest,
)
from roll.weights.publisher import WEIGHT_BACKENDS

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.inputs.engine import TokensInput
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_FAREWELL_SECONDS = 5.0
"""Longest time that a shutdown waits for aborted requests to end."""
Result = TypeVar("Result")


class VLLMInferStrategy:
    """One engine replica; implements `InferStrategy`."""

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
        engine with ``shares_devices`` is started so that it can sleep. With the transports ``nccl`` and ``cuda_ipc``
        weights are pushed (`transfer_step`); with all others they are loaded from buckets."""
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._own_eos_token_ids = eos_token_ids
        self._eos_token_ids: Sequence[int] = eos_token_ids or ()
        self._tensor_parallel_size = devices_per_engine if device == "cuda" else 1
        self._sleeps = shares_devices and device == "cuda"
        self._weight_backend = WEIGHT_BACKENDS.get(transport, BUCKET_BACKEND)
        self._strategy_config = strategy_config
        self._engine: AsyncLLM | None = None
        self._numbers = itertools.count()
        self._drains = Drains()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._asleep = False
        self._version = 0
        self._prepared: Prepared | None = None
        self._stop_strings = StopStrings(lambda: load_tokenizer(self._spec))
        self._generated_tokens = 0
        self._clock = BusyClock()

    async def start(self) -> None:
        """Load the model (as version 0) and accept requests. Blocks the event loop meanwhile, because vLLM's start
        does."""
        if self._engine is not None:
            raise RuntimeError("this engine was started before")
        spec = self._spec
        config = load_config(spec.model_path, spec.trust_remote_code)
        self._shapes = parameter_shapes(config, spec.trust_remote_code)
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        if self._own_eos_token_ids is None:
            self._eos_token_ids = eos_token_ids(spec, config)
        arguments = engine_arguments(
            self._strategy_config,
            model_path=spec.model_path,
            device=spec.device,
            dtype=spec.dtype,
            max_length=spec.max_length,
            trust_remote_code=spec.trust_remote_code,
            tensor_parallel_size=self._tensor_parallel_size,
            weight_backend=self._weight_backend,
            sleeps=self._sleeps,
            cache_bytes_per_token=cache_bytes_per_token(config, spec.dtype),
        )
        _set_environment(arguments)
        self._engine = _start_engine(arguments)
        places = self._engine.vllm_config.scheduler_config.max_num_seqs
        # One slot is kept for scoring: a score follows an update, which must not wait for requests that have not begun.
        self._requests: AdmittedRequests[_Inside] = AdmittedRequests(places - 1, self._tick)
        self._scoring = asyncio.Semaphore(1)
        await self._answer(self._engine.update_weight_version("0"))

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. Raises ``ValueError`` for a request that cannot run, ``EngineFailed`` if the
        engine fails."""
        return await completion_of(self._responses(request), request)

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run a request like `generate`, a few tokens at a time. Leaving the iteration early aborts the request."""
        return chunks_of(self._responses(request), request)

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return the new tokens of each running request beyond the first ``known[id]``.

        First asks vLLM's own process for a sign of life.
        """
        await self._answer(self._live_engine().get_weight_version())
        return new_tokens(self._requests.responses_inside(), known)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now. Unknown ids are ignored."""
        engine = self._live_engine()
        inside = self._requests.abort(request_ids)
        for each in inside:
            # vLLM ignores names that it does not know yet; such a request ends at its first message.
            each.response.aborted = True
        if inside:
            await self._answer(engine.abort([each.response.engine_id for each in inside]))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see the protocol.

        A `drain` raises ``RuntimeError`` if another `pause`, `resume` or `shutdown` interrupts it. With `keep`,
        requests that have tokens keep their caches. Later requests do not share what was cached before, because a
        request's cache key names the version with which it began.
        """
        engine = self._live_engine()
        if mode not in ("keep", "resume", "drain"):
            raise ValueError(f"pause mode {mode!r} is unknown; one of keep, resume, drain")
        self._requests.gate.shut()
        if mode == "drain":
            await self._drain(engine)
        else:
            self._drains.interrupt(f"pause({mode!r})")
            await self._answer(engine.pause_generation(mode="keep", clear_cache=mode == "resume"))
        self._paused = True
        self._tick()

    async def resume(self) -> None:
        """Resume decoding after `pause`. Raises ``RuntimeError`` while the engine sleeps."""
        engine = self._live_engine()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._drains.interrupt("resume()")
        await self._answer(engine.resume_generation())
        self._paused = False
        self._tick()
        self._requests.gate.open()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Check a weight update while requests run. The engine copies it in `load_weights`."""
        self._prepared = None
        self._prepared = await asyncio.to_thread(lambda: prepare(list(buckets), version, self._shapes))
        return self._prepared.receipt

    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones; only while paused or idle.

        The returned checksums are those of the loaded bytes. For a sample of tensors that changes with the version,
        they are those of what the engine holds, as far as kernels have left it readable. Raises ``WeightMismatch``
        naming a parameter that the update did not reach, ``EngineFailed`` for a load that stopped halfway.
        """
        engine = self._live_engine()
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.version != version:
            held = "nothing" if prepared is None else f"version {prepared.version}"
            raise RuntimeError(f"version {version} is to be loaded, but {held} was prepared")
        self._requests.require_none("load_weights", paused=self._paused)
        async with self._still(engine):
            try:
                await self._load(engine, prepared)
            except EngineFailed:
                raise
            except Exception as error:
                raise EngineFailed(f"weights of version {version} were only partly loaded: {error!r}") from error
        return await self._inspected(engine, prepared.receipt, prepared.layout)

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Make one call of vLLM's weight transfer. The trainer's end of the transfer makes it while the engine is
        paused."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        engine = self._live_engine()
        if step == "init":
            await self._answer(engine.init_weight_transfer_engine(WeightTransferInitRequest(payload)))
        elif step == "start":
            await self._begin_again(engine)
            await self._answer(engine.start_weight_update())
        elif step == "update":
            await self._answer(engine.update_weights(WeightTransferUpdateRequest(payload)))
        elif step == "finish":
            await self._answer(engine.finish_weight_update(payload))
        else:
            raise ValueError(f"step {step!r} of a weight transfer is unknown; one of init, start, update, finish")

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> HeldWeights:
        """Record a completed transfer of this version and return what vLLM holds.

        ``layout`` is what the trainer sent: name -> (dtype name, shape). The result has checksums of a sample of
        tensors that could be read back, None for all others. Raises ``WeightMismatch`` naming the tensor if the model
        has different tensors.
        """
        engine = self._live_engine()
        check_layout([(name, dtype, shape) for name, (dtype, shape) in layout.items()], self._shapes)
        await self._answer(engine.update_weight_version(str(version)))
        self._version = version
        count = sum(math.prod(shape) for _, shape in layout.values())
        sent = HeldWeights(version, count, dict.fromkeys(layout))
        return await self._inspected(engine, sent, dict(layout))

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities of given tokens; see the protocol."""
        return list(await asyncio.gather(*(self._score(tokens) for tokens in token_ids)))

    async def sleep(self) -> None:
        """Free the caches and move the weights to the host (only free the caches on a CPU). Pause first."""
        engine = self._live_engine()
        self._requests.require_none("sleep", paused=self._paused)
        if self._asleep:
            return
        self._requests.gate.shut()
        if self._sleeps:
            await self._answer(engine.sleep(level=1, mode="keep"))
        else:
            await self._answer(engine.pause_generation(mode="keep", clear_cache=True))
        self._asleep = True
        self._tick()

    async def wake(self) -> None:
        """Undo `sleep`. The engine stays paused if it was."""
        engine = self._live_engine()
        if not self._asleep:
            return
        if self._sleeps:
            await self._answer(engine.wake_up())
        if self._paused:
            await self._answer(engine.pause_generation(mode="keep", clear_cache=False))
        else:
            await self._answer(engine.resume_generation())
            self._requests.gate.open()
        self._asleep = False
        self._tick()

    def stats(self) -> dict[str, Any]:
        """Return `running`, `waiting`, `version`, the totals `generated_tokens` and `busy_seconds`, and `busy_spans`.

        vLLM does not report how long it computed. The engine counts as busy while at least one request is inside and it
        is not paused.
        """
        self._live_engine()
        return self._requests.counts() | {
            "version": self._version,
            "generated_tokens": self._generated_tokens,
            **self._clock.stats(),
        }

    async def shutdown(self) -> None:
        """End all requests as aborted, and vLLM's processes. Harmless to repeat."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._drains.interrupt("shutdown()")
        self._requests.gate.turn_all_away()
        if not engine.errored:
            await self._end_all(engine)
        # On the loop itself: vLLM ends its own tasks there before its processes end, and would otherwise report a
        # death.
        engine.shutdown()

    async def _responses(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from vLLM; nothing if it was aborted before it began."""
        engine = self._live_engine()
        name = request.request_id
        self._requests.require_new(name)
        check_request(request, self._spec.max_length, self._vocabulary)
        params = sampling_params(request, self._eos_token_ids)
        matcher = self._stop_strings.matcher(request)

        def enter() -> _Inside:
            return _Inside(Response(request, f"{name}:{next(self._numbers)}", matcher), params)

        async with aclosing(self._requests.run(name, enter, partial(self._updates, engine))) as updates:
            async for update in updates:
                yield update

    async def _updates(self, engine: AsyncLLM, inside: _Inside) -> AsyncGenerator[Response, None]:
        """Run a request in vLLM until it ends or has to begin again."""
        response, params = inside.response, inside.params
        prompt = prompt_input(response.request, self._version)
        try:
            # Leaving the iteration is what aborts the request inside vLLM.
            async with aclosing(engine.generate(prompt, params, response.engine_id)) as outputs:
                async for output in outputs:
                    if response.begins_again and not response.aborted:
                        return
                    (completion,) = output.outputs
                    self._generated_tokens += len(completion.token_ids)
                    stopped = take_output(response, completion, self._version)
                    if response.aborted and response.finish_reason is None:
                        response.finish_reason, stopped = "abort", True
                    yield response
                    if stopped:
                        return
        except _vllm_failures() as error:
            raise _engine_failed(engine, error) from error

    async def _drain(self, engine: AsyncLLM) -> None:
        """Wait until the running requests have ended, unless the drain is interrupted."""

        async def wait(end: Callable[[Exception | None], None]) -> None:
            error: Exception | None = None
            try:
                await self._answer(engine.pause_generation(mode="wait", clear_cache=True))
            except EngineFailed as failure:
                error = failure
            end(error)

        def begin(end: Callable[[Exception | None], None]) -> None:
            task = asyncio.get_running_loop().create_task(wait(end))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        await self._drains.wait(begin)

    @asynccontextmanager
    async def _still(self, engine: AsyncLLM) -> AsyncIterator[None]:
        """Pause an idle, open engine for the block."""
        if self._paused:
            yield
            return
        self._requests.gate.shut()
        await self._answer(engine.pause_generation(mode="keep", clear_cache=True))
        try:
            yield
        finally:
            await self._answer(engine.resume_generation())
            self._requests.gate.open()

    async def _begin_again(self, engine: AsyncLLM) -> None:
        """Take requests without a token out of vLLM: its caches may hold their prompts as computed with the old
        weights.

        They enter again, before all others, when the engine resumes.
        """
        waiting = [response for response in self._requests.responses_inside() if not response.token_ids]
        for response in waiting:
            response.begins_again = True
        if waiting:
            await self._answer(engine.abort([response.engine_id for response in waiting]))

    async def _end_all(self, engine: AsyncLLM) -> None:
        """Abort the running requests and give them a moment to end."""
        inside = self._requests.responses_inside()
        for response in inside:
            response.aborted = True
        await engine.abort([response.engine_id for response in inside])
        deadline = asyncio.get_running_loop().time() + _FAREWELL_SECONDS
        while self._requests.inside and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    async def _load(self, engine: AsyncLLM, prepared: Prepared) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._begin_again(engine)
        await self._answer(engine.start_weight_update())
        for bucket in prepared.buckets:
            await self._answer(engine.update_weights(WeightTransferUpdateRequest(bucket_info(bucket))))
        await self._answer(engine.finish_weight_update(str(prepared.version)))
        self._version = prepared.version

    async def _inspected(
        self, engine: AsyncLLM, sent: HeldWeights, layout: dict[str, tuple[str, tuple[int, ...]]]
    ) -> HeldWeights:
        """Return the update's checksums, with what can be read back from the engine in place of what was sent to it."""
        version = sent.version
        for unloaded in await self._answer(engine.collective_rpc("roll_unloaded_parameters")):
            if unloaded:
                raise WeightMismatch(
                    f"parameter {unloaded[0]!r} of vLLM's model got no weights from version {version} "
                    f"({len(unloaded)} such parameters)"
                )
        checksums = dict(sent.checksums)
        for held in await self._answer(engine.collective_rpc("roll_held_checksums", args=(layout, version))):
            checksums |= held
        held_version = int(await self._answer(engine.get_weight_version()))
        return HeldWeights(held_version, sent.parameter_count, checksums)

    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs.engine import tokens_input

        engine = self._live_engine()
        params = VLLMSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        name = f"score:{next(self._numbers)}"
        values = np.zeros(len(tokens), dtype=np.float32)
        try:
            async with self._scoring:
                async for output in engine.generate(tokens_input(tokens.tolist()), params, name):
                    if output.prompt_logprobs is not None:
                        pairs = zip(tokens[1:].tolist(), output.prompt_logprobs[1:], strict=True)
                        values[1:] = [position[token].logprob for token, position in pairs]
        except _vllm_failures() as error:
            raise _engine_failed(engine, error) from error
        return values

    async def _answer(self, call: Awaitable[Result]) -> Result:
        """Return vLLM's answer. Raise ``EngineFailed`` if its engine is dead."""
        try:
            return await call
        except _vllm_failures() as error:
            raise _engine_failed(self._live_engine(), error) from error

    def _live_engine(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineFailed("the engine is not running: it was not started, or it was shut down")
        return self._engine

    def _tick(self) -> None:
        """Record whether anything is being computed now."""
        self._clock.set(bool(self._requests.inside) and not self._paused and not self._asleep)


@dataclass(frozen=True)
class _Inside:
    """A request that has a slot in vLLM."""

    response: Response
    params: VLLMSamplingParams


def _set_environment(arguments: dict[str, Any]) -> None:
    """Set what vLLM reads from the environment. The process belongs to the engine alone."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments["weight_transfer_config"]["backend"] == "ipc":
        # A handle of device memory has no plain form. It travels only to the engine's own process.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if arguments.get("distributed_executor_backend") == "uni":
        # Otherwise vLLM starts one more process on a CPU, which takes ten more seconds and binds to all cores.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import torch

        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def _start_engine(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _vllm_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions after which vLLM serves no request any more."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return EngineDeadError, EngineGenerateError


def _engine_failed(engine: AsyncLLM, error: Exception) -> EngineFailed:
    cause = error.__cause__ or error
    return EngineFailed(f"vLLM cannot go on: {type(cause).__name__}: {cause}")


@dataclass
class Prepared:
    """A weight update that fits, waiting to be loaded."""

    version: int
    buckets: list[WeightBucket]
    receipt: HeldWeights
    layout: Layout
    staging: MemoryFile | None = None
    """Shared memory with copies of those buckets that no other process could have read."""


def prepare(buckets: list[WeightBucket], version: int, shapes: dict[str, tuple[int, ...]]) -> Prepared:
    """Check that a weight update is complete and fits. Raises ``WeightMismatch`` naming the tensor."""
    layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], shapes)
    parameter_count, checksums = manifest(buckets)
    located, staging = locate(buckets)
    return Prepared(version, located, HeldWeights(version, parameter_count, checksums), layout, staging)


def locate(buckets: list[WeightBucket]) -> tuple[list[WeightBucket], MemoryFile | None]:
    """Return the buckets where vLLM's processes can read them: unchanged, or copied into shared memory."""
    homeless = [bucket for bucket in buckets if bucket.location is None]
    if not homeless:
        return buckets, None
    memory = MemoryFile(sum(_aligned(len(bucket.data)) for bucket in homeless))
    offset = 0
    located = []
    for bucket in buckets:
        if bucket.location is None:
            memory.data[offset : offset + len(bucket.data)] = bucket.data
            location = BucketLocation(memory.path, offset)
            bucket = WeightBucket(bucket.tensors, bucket.data, location)
            offset += _aligned(len(bucket.data))
        located.append(bucket)
    return located, memory


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def bucket_info(bucket: WeightBucket) -> dict[str, Any]:
    """Return the location and the tensors of a bucket, for vLLM's processes.

    Raises ``ValueError`` for a bucket that is in no file; `locate` copies it into one.
    """
    if bucket.location is None:
        raise ValueError("this bucket is in no file, so other processes cannot read it")
    return {
        "path": bucket.location.path,
        "offset": bucket.location.offset,
        "size": len(bucket.data),
        "tensors": bucket.tensors,
    }


_SMALLEST_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures to this one."""


def sampling_params(request: GenerateRequest, eos_token_ids: Sequence[int]) -> VLLMSamplingParams:
    """Return vLLM's parameters of a request. Raises ``ValueError`` for a temperature that vLLM would change."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    if 0 < sampling.temperature < _SMALLEST_TEMPERATURE:
        raise ValueError(
            f"request {request.request_id!r} cannot run: vLLM samples at a temperature of {_SMALLEST_TEMPERATURE} "
            f"or more, or greedily at 0; it is {sampling.temperature}"
        )
    return VLLMSamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=_seed(request),
        stop_token_ids=[] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval(sampling.watches_text),
    )


def prompt_input(request: GenerateRequest, version: int) -> TokensInput:
    """Return the prompt's tokens for vLLM. Their cache is shared only by requests that began with the same version."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(request.prompt_token_ids.tolist(), cache_salt=f"version {version}")


def _seed(request: GenerateRequest) -> int:
    """Return the seed of vLLM's random stream. vLLM starts at the seed, so a continued response gets a stream of its
    own."""
    if not request.first_token_index:
        return request.sampling.seed
    return derive_seed(request.sampling.seed, "continued", request.first_token_index)


def take_output(response: Response, output: CompletionOutput, version: int) -> bool:
    """Add vLLM's message to the response; the engine holds ``version``. See `Response.take`.

    Raises `EngineFailed` if vLLM gave the request up.
    """
    reason = output.finish_reason
    return response.take(
        output.token_ids,
        _sampled_logprobs(output),
        version,
        [VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
        None if reason is None else _finish_reason(reason, response.request.request_id),
    )


def _sampled_logprobs(output: CompletionOutput) -> list[float]:
    """Return the log-probability of each new token. Without alternatives, vLLM gives one number per position."""
    if not output.token_ids:
        return []
    logprobs = output.logprobs.logprobs if output.logprobs is not None else []
    if len(logprobs) != len(output.token_ids):
        raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(output.token_ids)} tokens")
    if any(math.isnan(logprob) for logprob in logprobs):
        raise EngineFailed("vLLM's logits are NaN: there is no distribution to sample from")
    return logprobs


def _finish_reason(reason: str, request_id: str) -> FinishReason:
    if reason not in get_args(FinishReason):
        raise EngineFailed(f"vLLM ended request {request_id!r} with {reason!r}")
    return cast(FinishReason, reason)
