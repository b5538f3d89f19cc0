"""`sglang`: SGLang's server behind the `InferStrategy` protocol.

Uses the server, not SGLang's in-process ``Engine``. Pausing generation and aborting requests are offered over HTTP
only, and the engine's own control calls run an event loop to its end, so they cannot be called from code that already
runs on one. Only documented calls are used: token ids in and out, pause and resume, weights from a checkpoint, release
and return of memory. Requests wait outside SGLang until a slot is free, so no update waits for a request that has not
begun.

Written against the sources of SGLang 0.5.23, without a GPU at hand: this module has run only against a stand-in for the
server (tests/engines/sglang_stand_in). Not promised: equal bits, or equal samples without
``enable_deterministic_inference`` in `strategy_config`.

Weights arrive as a checkpoint in memory: the files are anonymous shared memory, and a folder of links gives them names.
Of the ways that SGLang offers, this one needs no pickles (DESIGN §12) and splits tensors over GPUs by itself. Plain
log-probabilities (``return_logprob``) are those after temperature and before top-k and top-p. A truncated
distribution's come with the sampling mask, and only for a top-k within the server's limit. A request whose distribution
SGLang would not report is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from roll.engines.base import (
    BusyClock,
    Completion,
    EngineFailed,
    FinishReason,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    TokenChunk,
)
from roll.engines.hf.engine import check_request
from roll.engines.model_facts import ModelSpec, eos_token_ids, load_config, load_tokenizer, parameter_shapes
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
    is_greedy,
    new_tokens,
    sample_of,
)
from roll.engines.sglang.options import mask_limit, server_arguments, stream_interval
from roll.engines.sglang.server import CallRefused, SGLangServer
from roll.runtime.placement import free_port
from roll.weights.buckets import (
    DTYPES,
    HeldWeights,
    MemoryFile,
    WeightBucket,
    WeightMismatch,
    manifest,
    tensor_checksum,
    tensor_spans,
)


class SGLangInferStrategy:
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
        engine with ``shares_devices`` is started so that it can sleep. Weights are loaded from buckets for every
        ``transport``."""
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._own_eos_token_ids = eos_token_ids
        self._eos_token_ids: Sequence[int] = eos_token_ids or ()
        self._tensor_parallel_size = devices_per_engine if device == "cuda" else 1
        self._sleeps = shares_devices
        self._strategy_config = strategy_config
        self._server: SGLangServer | None = None
        self._numbers = itertools.count()
        self._drains = Drains()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._asleep = False
        self._version = 0
        self._prepared: Prepared | None = None
        self._held: tuple[str, str] | None = None
        """Fingerprint of the weight update that was loaded last, and SGLang's checksum of its weights after it."""
        self._reads_back = True
        self._stop_strings = StopStrings(lambda: load_tokenizer(self._spec))
        self._generated_tokens = 0
        self._clock = BusyClock()

    async def start(self) -> None:
        """Start the server, which loads the model (as version 0), and accept requests."""
        if self._server is not None:
            raise RuntimeError("this engine was started before")
        spec = self._spec
        config = load_config(spec.model_path, spec.trust_remote_code)
        self._shapes = parameter_shapes(config, spec.trust_remote_code)
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        if self._own_eos_token_ids is None:
            self._eos_token_ids = eos_token_ids(spec, config)
        arguments = server_arguments(
            self._strategy_config,
            model_path=spec.model_path,
            device=spec.device,
            dtype=spec.dtype,
            max_length=spec.max_length,
            trust_remote_code=spec.trust_remote_code,
            tensor_parallel_size=self._tensor_parallel_size,
            sleeps=self._sleeps,
            port=free_port(),
            api_key=secrets.token_hex(16),
        )
        self._overlaps = not arguments["disable_overlap_schedule"]
        self._mask_limit = mask_limit(arguments)
        self._quantised = arguments.get("quantization") is not None
        # One slot is kept for scoring: a score follows an update, which must not wait for requests that have not begun.
        places = arguments["max_running_requests"] - 1
        self._requests: AdmittedRequests[_Inside] = AdmittedRequests(places, self._requests_changed)
        self._scoring = asyncio.Semaphore(1)
        self._server = await SGLangServer.start(arguments)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. Raises ``ValueError`` for a request that cannot run, ``EngineFailed`` if the
        engine fails."""
        return await completion_of(self._responses(request), request)

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run a request like `generate`, a few tokens at a time. Leaving the iteration early aborts the request."""
        return chunks_of(self._responses(request), request)

    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return the new tokens of each running request beyond the first ``known[id]``.

        First asks SGLang's scheduler for a sign of life.
        """
        await self._sign_of_life()
        return new_tokens(self._requests.responses_inside(), known)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now, with the tokens that have arrived. Unknown ids are ignored."""
        self._live_server()
        for inside in self._requests.abort(request_ids):
            inside.end_as_aborted()

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; see the protocol.

        A `drain` raises ``RuntimeError`` if another `pause`, `resume` or `shutdown` interrupts it. With `keep`,
        requests that have tokens keep their caches. Later requests do not share what was cached before, because a
        request's cache salt names the version with which it began. With ``disable_overlap_schedule: false`` a step may
        be under way when SGLang stops in place, so `keep` then drops the caches like `resume`.
        """
        self._live_server()
        if mode not in ("keep", "resume", "drain"):
            raise ValueError(f"pause mode {mode!r} is unknown; one of keep, resume, drain")
        self._requests.gate.shut()
        if mode == "drain":
            await self._drain()
        else:
            self._drains.interrupt(f"pause({mode!r})")
        await self._halt(keeps_caches=mode != "resume" and not self._overlaps)
        self._paused = True
        self._tick()

    async def resume(self) -> None:
        """Resume decoding after `pause`. Raises ``RuntimeError`` while the engine sleeps."""
        self._live_server()
        if self._asleep:
            raise RuntimeError("the engine sleeps; wake it before resume")
        self._drains.interrupt("resume()")
        await self._go_on()
        self._paused = False
        self._tick()
        self._requests.gate.open()

    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Write a weight update where SGLang reads it, while requests run."""
        self._forget_prepared()
        self._prepared = await asyncio.to_thread(lambda: prepare(list(buckets), version, self._shapes))
        return self._prepared.receipt

    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones; only while paused or idle.

        The returned checksums are those of the loaded bytes. For some small tensors they are those of the values that
        SGLang reads back, if its model can. Raises ``WeightMismatch`` if SGLang's weights did not change although
        different ones were loaded, ``EngineFailed`` for a load that stopped halfway.
        """
        server = self._live_server()
        if self._prepared is None or self._prepared.version != version:
            held = "nothing" if self._prepared is None else f"version {self._prepared.version}"
            self._forget_prepared()
            raise RuntimeError(f"version {version} is to be loaded, but {held} was prepared")
        self._requests.require_none("load_weights", paused=self._paused)
        prepared = self._prepared
        try:
            async with self._still():
                self._begin_again()
                await self._load(server, prepared)
                return await self._inspected(server, prepared)
        finally:
            self._forget_prepared()

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities of given tokens; see the protocol."""
        return list(await asyncio.gather(*(self._score(tokens) for tokens in token_ids)))

    async def sleep(self) -> None:
        """Free the caches and move the weights to the host. An engine with its own devices only frees the caches. Pause
        first."""
        self._live_server()
        self._requests.require_none("sleep", paused=self._paused)
        if self._asleep:
            return
        self._requests.gate.shut()
        await self._halt(keeps_caches=False)
        if self._sleeps:
            await self._order("/release_memory_occupation", {})
        self._asleep = True
        self._tick()

    async def wake(self) -> None:
        """Undo `sleep`. The engine stays paused if it was."""
        self._live_server()
        if not self._asleep:
            return
        if self._sleeps:
            await self._order("/resume_memory_occupation", {})
        if not self._paused:
            await self._go_on()
            self._requests.gate.open()
        self._asleep = False
        self._tick()

    def stats(self) -> dict[str, Any]:
        """Return `running`, `waiting`, `version`, the totals `generated_tokens` and `busy_seconds`, and `busy_spans`.

        SGLang does not report how long it computed. The engine counts as busy while at least one request is inside and
        it is not paused.
        """
        self._live_server()
        return self._requests.counts() | {
            "version": self._version,
            "generated_tokens": self._generated_tokens,
            **self._clock.stats(),
        }

    async def shutdown(self) -> None:
        """End all requests as aborted, and stop the server. Harmless to repeat."""
        server, self._server = self._server, None
        if server is None:
            return
        self._drains.interrupt("shutdown()")
        self._requests.gate.turn_all_away()
        for inside in self._requests.inside.values():
            inside.end_as_aborted()
        self._forget_prepared()
        await server.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _responses(self, request: GenerateRequest) -> AsyncGenerator[Response, None]:
        """Yield the request's state after each message from SGLang; nothing if it was aborted before it began."""
        server = self._live_server()
        name = request.request_id
        self._requests.require_new(name)
        check_request(request, self._spec.max_length, self._vocabulary)
        check_recordable(request, self._mask_limit)
        matcher = self._stop_strings.matcher(request)

        def enter() -> _Inside:
            return _Inside(Response(request, self._engine_id(), matcher))

        async with aclosing(self._requests.run(name, enter, partial(self._updates, server))) as updates:
            async for update in updates:
                yield update

    async def _updates(self, server: SGLangServer, inside: _Inside) -> AsyncGenerator[Response, None]:
        """Run a request in SGLang until it ends or has to begin again."""
        response = inside.response
        body = generate_body(
            response.request, response.engine_id, self._version, self._eos_token_ids, self._spec.max_length
        )
        reading = self._in_background(_read(server, body, inside.messages))
        ended = False
        try:
            while not ended:
                message = await inside.messages.get()
                if response.begins_again and not response.aborted:
                    return
                if response.aborted or message is None:
                    response.finish_reason = "abort"
                    yield response
                    return
                ended = self._take(response, message, body["sampling_params"]["max_new_tokens"])
                yield response
                if response.finish_reason is not None:
                    return
        finally:
            if not ended:
                reading.cancel()
                self._in_background(_tell_of_abort(server, response.engine_id))

    def _take(self, response: Response, message: dict[str, Any] | Exception, most: int) -> bool:
        """Add a message to the response of at most ``most`` tokens. Return True if SGLang has ended the request."""
        name = response.request.request_id
        if isinstance(message, CallRefused):
            raise ValueError(f"request {name!r} cannot run: {message}") from message
        if isinstance(message, Exception):
            raise message
        known = len(response.token_ids)
        stopped_here = take_message(response, message)
        self._generated_tokens += len(response.token_ids) - known
        if response.finish_reason == "length" and len(response.token_ids) < most:
            raise ValueError(
                f"request {name!r} was cut at {len(response.token_ids)} of {most} tokens: SGLang has no memory for the "
                "caches of more. Raise `mem_fraction_static`, or lower `sequence_length`"
            )
        return response.finish_reason is not None and not stopped_here

    def _requests_changed(self) -> None:
        self._tick()
        if not self._requests.inside:
            self._drains.end(None)

    async def _halt(self, *, keeps_caches: bool) -> None:
        """Stop decoding: no step runs after this. Requests stay in SGLang, with their caches or with their tokens
        only."""
        await self._order("/pause_generation", {"mode": "in_place" if keeps_caches else "retract"})
        # The server answers before its scheduler has received the order; the scheduler's own answer comes after it.
        await self._sign_of_life()
        if not keeps_caches:
            # Without a time limit: with one, SGLang waits until no request is left, including those put back.
            await self._order("/flush_cache", {})

    async def _go_on(self) -> None:
        await self._order("/continue_generation", {"torch_empty_cache": False})

    async def _sign_of_life(self) -> None:
        """Wait for an answer from SGLang's scheduler, which it gives between two steps."""
        await self._order("/server_info")

    async def _order(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make a call without which the engine cannot continue. Raises ``EngineFailed`` if it is refused."""
        try:
            return await self._live_server().call(path, body)
        except CallRefused as error:
            raise EngineFailed(f"SGLang cannot go on: {error}") from error

    async def _drain(self) -> None:
        """Wait until the running requests have ended, unless the drain is interrupted."""
        if self._requests.inside:
            await self._drains.wait()

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Pause an idle, open engine for the block. It stays paused if the block fails."""
        if self._paused:
            yield
            return
        await self.pause("resume")
        yield
        await self.resume()

    def _begin_again(self) -> None:
        """Take requests without a token out of SGLang: its caches may hold their prompts as computed with the old
        weights.

        They enter again, before all others, when the engine resumes.
        """
        for inside in self._requests.inside.values():
            if not inside.response.token_ids:
                inside.begin_again()

    async def _load(self, server: SGLangServer, prepared: Prepared) -> None:
        """Let SGLang read the checkpoint.

        After a failure the weights are a mixture, because SGLang's way back reads the same files again.
        """
        order = {
            "model_path": prepared.checkpoint.path,
            "load_format": "safetensors",
            "weight_version": str(prepared.version),
            "flush_cache": False,
        }
        try:
            await server.call("/update_weights_from_disk", order)
        except CallRefused as error:
            raise EngineFailed(f"weights of version {prepared.version} were only partly loaded: {error}") from error
        self._version = prepared.version

    async def _inspected(self, server: SGLangServer, prepared: Prepared) -> HeldWeights:
        """Return the update's checksums, with what SGLang reports in place of what was sent to it."""
        sent = prepared.receipt
        if not self._quantised:
            await self._check_that_weights_changed(sent)
        checksums = dict(sent.checksums)
        for name in names_to_read(prepared.layout, sent.version):
            checksums[name] = await self._read_back(server, name, prepared.layout[name]) or checksums[name]
        version = (await self._order("/model_info"))["weight_version"]
        return HeldWeights(int(version), sent.parameter_count, checksums)

    async def _check_that_weights_changed(self, sent: HeldWeights) -> None:
        """Raise ``WeightMismatch`` if SGLang's checksum of its weights did not change although the weights did.

        SGLang's checksum is of its own layout, so it can be compared only with an earlier one of SGLang.
        """
        before, contents = self._held, fingerprint(sent.checksums)
        told = (await self._order("/weights_checker", {"action": "checksum"}))["per_engine_checksum"]
        self._held = (contents, told)
        if before is not None and before[0] != contents and before[1] == told:
            raise WeightMismatch(f"version {sent.version} brought other weights, but SGLang holds the same as before")

    async def _read_back(self, server: SGLangServer, name: str, layout: tuple[str, tuple[int, ...]]) -> int | None:
        """Return the checksum of a tensor as SGLang reports it; None if its model cannot (most cannot)."""
        if not self._reads_back:
            return None
        dtype, shape = layout
        try:
            values = (await server.call("/get_weights_by_name", {"name": name, "truncate_size": shape[0]}))["value"]
        except CallRefused:
            self._reads_back = False
            return None
        return checksum_of_values(values, dtype, shape)

    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        server = self._live_server()
        async with self._scoring:
            return scores_of(await server.call("/generate", score_body(tokens, self._engine_id())), tokens)

    def _forget_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.checkpoint.close()
        self._prepared = None

    def _engine_id(self) -> str:
        """Return a name that is no prefix of another one: SGLang aborts all requests whose names begin with a given
        one."""
        return f"roll-{next(self._numbers):016d}"

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _live_server(self) -> SGLangServer:
        if self._server is None:
            raise EngineFailed("the engine is not running: it was not started, or it was shut down")
        return self._server

    def _tick(self) -> None:
        """Record whether anything is being computed now."""
        self._clock.set(bool(self._requests.inside) and not self._paused and not self._asleep)


class _Inside:
    """A request that has a slot in SGLang, and the messages that arrive for it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.messages: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    def end_as_aborted(self) -> None:
        """End the request here. SGLang, which may be paused, is informed as well."""
        self.response.aborted = True
        self.messages.put_nowait(None)

    def begin_again(self) -> None:
        """Leave SGLang and enter again."""
        self.response.begins_again = True
        self.messages.put_nowait(None)


async def _read(
    server: SGLangServer, body: dict[str, Any], messages: asyncio.Queue[dict[str, Any] | Exception | None]
) -> None:
    """Put arriving messages, or the error, into the queue."""
    try:
        async with aclosing(server.stream("/generate", body)) as stream:
            async for message in stream:
                messages.put_nowait(message)
    except (CallRefused, EngineFailed) as error:
        messages.put_nowait(error)


async def _tell_of_abort(server: SGLangServer, engine_id: str) -> None:
    """Ask SGLang to stop computing a request that no caller waits for.

    Errors are ignored: a server that has ended computes nothing, and the next call reports it.
    """
    try:
        await server.call("/abort_request", {"rid": engine_id})
    except (CallRefused, EngineFailed):
        return


_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_READ_BACK_ELEMENTS = 8192
"""Number of elements of the largest tensor that is read back: its elements travel as text."""
_READ_BACK_TENSORS = 8
"""Most tensors that are read back after an update."""


class MemoryCheckpoint:
    """A folder of safetensors files whose bytes are in memory. It is removed with the object."""

    def __init__(self, buckets: list[WeightBucket]) -> None:
        self._folder = TemporaryDirectory(prefix="roll-weights-")
        self._files: list[MemoryFile] = []
        for number, bucket in enumerate(buckets):
            file = _safetensors_file(bucket)
            (Path(self.path) / f"model-{number:05d}.safetensors").symlink_to(file.path)
            self._files.append(file)

    @property
    def path(self) -> str:
        """The folder."""
        return self._folder.name

    def close(self) -> None:
        """Free the memory. Harmless to repeat."""
        self._folder.cleanup()
        self._files.clear()


@dataclass
class Prepared:
    """A weight update that fits, waiting to be loaded."""

    version: int
    receipt: HeldWeights
    layout: Layout
    checkpoint: MemoryCheckpoint


def prepare(buckets: list[WeightBucket], version: int, shapes: dict[str, tuple[int, ...]]) -> Prepared:
    """Check that a weight update is complete and fits, and write it down. Raises ``WeightMismatch`` naming the
    tensor."""
    layout = check_layout([entry[:3] for bucket in buckets for entry in bucket.tensors], shapes)
    parameter_count, checksums = manifest(buckets)
    checkpoint = MemoryCheckpoint(buckets)
    return Prepared(version, HeldWeights(version, parameter_count, checksums), layout, checkpoint)


def fingerprint(checksums: Mapping[str, int | None]) -> str:
    """Return one string that stands for the contents of a weight update."""
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


def names_to_read(layout: Layout, version: int) -> list[str]:
    """Return names of some small tensors. They differ from version to version."""
    small = {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for name, (dtype, shape) in layout.items()
        if shape and int(np.prod(shape)) <= _READ_BACK_ELEMENTS
    }
    return sample_of(small, version)[:_READ_BACK_TENSORS]


def checksum_of_values(values: list[float] | list[list[float]], dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the checksum of a tensor given as numbers; None if they are only a part of the tensor (one GPU's)."""
    tensor = torch.tensor(values, dtype=torch.float32).to(DTYPES[dtype])
    return tensor_checksum(tensor) if tuple(tensor.shape) == tuple(shape) else None


def _safetensors_file(bucket: WeightBucket) -> MemoryFile:
    """Write the bucket's tensors one after the other, without the gaps that a bucket has and the format forbids."""
    spans = tensor_spans(bucket)
    entries, offset = {}, 0
    for (name, dtype, shape, _), (start, end) in zip(bucket.tensors, spans, strict=True):
        entry = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape)}
        entries[name] = entry | {"data_offsets": [offset, offset + end - start]}
        offset += end - start
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file = MemoryFile(8 + len(header) + offset)
    file.data[:8] = np.frombuffer(len(header).to_bytes(8, "little"), dtype=np.uint8)
    place = 8 + len(header)
    file.data[8:place] = np.frombuffer(header, dtype=np.uint8)
    for start, end in spans:
        file.data[place : place + end - start] = bucket.data[start:end]
        place += end - start
    return file


SMALLEST_TEMPERATURE = 1e-6
"""Temperature below which SGLang samples greedily."""


def needs_mask(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is truncated."""
    return not is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1)


def check_recordable(request: GenerateRequest, mask_limit: int) -> None:
    """Raise ``ValueError`` for parameters under which SGLang would not report the log-probabilities of the sampling
    distribution."""
    sampling, problem = request.sampling, None
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        problem = f"SGLang samples at {SMALLEST_TEMPERATURE} or more, or greedily at 0; its temperature is lower"
    elif needs_mask(sampling) and not 1 < sampling.top_k <= mask_limit:
        problem = (
            "SGLang tells the log-probabilities of a truncated distribution for 1 < top_k <= "
            f"{mask_limit} only; top_p is {sampling.top_p}, top_k {sampling.top_k}"
        )
    if problem is not None:
        raise ValueError(f"request {request.request_id!r} cannot run: {problem}")


def generate_body(
    request: GenerateRequest, engine_id: str, version: int, eos_token_ids: Sequence[int], max_length: int
) -> dict[str, Any]:
    """Return the body of a call to ``/generate``. A prompt's cache is shared only by requests that began with the same
    version."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    mask = needs_mask(sampling)
    return {
        "rid": engine_id,
        "input_ids": prompt.tolist(),
        "stream": True,
        "return_logprob": not mask,
        "return_sampling_mask": mask,
        "cache_salt": f"version {version}",
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, max_length - len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Random numbers are drawn by seed and position, so a continued response continues with the same ones.
            "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
            "stream_interval": stream_interval(sampling.watches_text),
        },
    }


def score_body(tokens: np.ndarray, engine_id: str) -> dict[str, Any]:
    """Return the body of a call to ``/generate`` for the log-probabilities of given tokens. It uses nothing cached."""
    return {
        "rid": engine_id,
        "input_ids": tokens.tolist(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": engine_id,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }


_NAN = "NaN happened"
"""Text that SGLang reports as matched if the logits are NaN."""


def take_message(response: Response, message: Mapping[str, Any]) -> bool:
    """Add a message of the stream to the response; see `Response.take`.

    Raises ``ValueError`` for a request that SGLang refuses or gives up, ``EngineFailed`` if tokens or log-probabilities
    are missing.
    """
    name = response.request.request_id
    if "error" in message:
        raise ValueError(f"request {name!r} cannot run: {message['error']['message']}")
    told = message["meta_info"]
    reason = _finish_reason(told["finish_reason"], name)
    token_ids = message["output_ids"]
    if told["completion_tokens"] != len(response.token_ids) + len(token_ids):
        raise EngineFailed(
            f"SGLang counts {told['completion_tokens']} tokens of request {name!r}; "
            f"{len(response.token_ids)} and now {len(token_ids)} arrived"
        )
    spans = [VersionSpan(int(span["version"]), span["start"], span["end"]) for span in told.get("weight_versions", ())]
    logprobs = _sampled_logprobs(response, told, len(token_ids))
    return response.take(token_ids, logprobs, int(told["weight_version"]), spans, reason)


def scores_of(reply: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return the log-probability of each of these tokens, float32 ``[length]``, 0 at the first.

    Raises `EngineFailed` if the reply is about other tokens.
    """
    entries = reply["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != tokens.tolist():
        raise EngineFailed(f"SGLang scored {len(entries)} tokens, not the {len(tokens)} that it was sent")
    values = np.zeros(len(tokens), dtype=np.float32)
    values[1:] = _numbers([entry[0] for entry in entries[1:]])
    return values


def _sampled_logprobs(response: Response, told: Mapping[str, Any], count: int) -> list[float]:
    """Return log-probabilities of the sampling distribution, one for each of ``count`` new tokens."""
    sampling = response.request.sampling
    if needs_mask(sampling):
        logprobs = told.get("output_token_sampling_logprobs", [])
    else:
        logprobs = [entry[0] for entry in told.get("output_token_logprobs", [])]
    if len(logprobs) != count:
        raise EngineFailed(f"SGLang gave {len(logprobs)} log-probabilities for {count} tokens")
    return [0.0] * count if is_greedy(sampling) else _numbers(logprobs)


def _numbers(logprobs: list[float | None]) -> list[float]:
    """Return the numbers. Raise ``EngineFailed`` if one is NaN, which JSON does not know and which arrives as null."""
    numbers = [logprob for logprob in logprobs if logprob is not None and logprob == logprob]
    if len(numbers) != len(logprobs):
        raise EngineFailed("SGLang's logits are NaN: there is no distribution to sample from")
    return numbers


def _finish_reason(told: Mapping[str, Any] | None, request_id: str) -> FinishReason | None:
    if told is None:
        return None
    kind = told["type"]
    if kind == "abort":
        raise ValueError(f"request {request_id!r} was given up by SGLang: {told.get('message')}")
    if told.get("matched") == _NAN:
        raise EngineFailed("SGLang's logits are NaN: there is no distribution to sample from")
    if kind not in ("stop", "length"):
        raise EngineFailed(f"SGLang ended request {request_id!r} with {kind!r}")
    return kind
