"""`sglang`: SGLang's server behind the `InferStrategy` interface.

Uses the server, not SGLang's in-process ``Engine``: pausing generation and aborting requests are available over HTTP
only, and the engine's control calls run their own event loop, so they cannot be called from async code. Only documented
calls are used: token ids in and out, pause and resume, weights from a checkpoint, release and restoration of memory.

Written against the source code of SGLang 0.5.23; tested only against a stand-in for the server
(tests/engines/sglang_stand_in), without a GPU. Not guaranteed: bitwise reproducibility, or equal samples without
``enable_deterministic_inference`` in `strategy_config`.

Weights are loaded as a checkpoint in memory: the files are anonymous shared memory, and a folder of symbolic links
gives them names. This way of loading needs no pickles (DESIGN §12), and SGLang itself splits the tensors over GPUs.
Plain log-probabilities (``return_logprob``) are those after temperature and before top-k and top-p. For a truncated
distribution, SGLang reports log-probabilities with the sampling mask, and only for a top-k within the server's limit.
Requests for which it would not report the log-probabilities of the sampled distribution are rejected.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import weakref
from base64 import b64decode
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.algorithms.routing import RoutingShape
from roll.data.records import derive_seed
from roll.engines.base import (
    EngineFailed,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    Layout,
    PauseMode,
    PreparedWeights,
    SamplingParams,
)
from roll.engines.options import SGLANG_MASK_LIMIT, server_arguments, stream_interval
from roll.engines.process_engine import ProcessEngine, Response, is_greedy, require_numbers
from roll.engines.sglang.loader import LoaderCheck, ParameterChecksums
from roll.engines.sglang.server import CallRefused, SGLangServer
from roll.runtime.placement import free_port
from roll.weights.buckets import DTYPES, HeldWeights, MemoryFile, WeightBucket, safetensors_file, tensor_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SGLangInferStrategy(ProcessEngine[SGLangServer]):
    """One SGLang replica. Weights are loaded from buckets, whatever the transport."""

    _loader: LoaderCheck | None = None
    """Verifies weight updates; created at the first one."""
    _reads_back = True
    _known_load = ("steps", "running", "waiting", "cache_use", "prompt_tokens", "shared_tokens")

    async def _launch(self, config: PretrainedConfig) -> tuple[SGLangServer, int]:
        arguments = server_arguments(
            self._strategy_config,
            self._spec,
            tensor_parallel_size=self._devices,
            sleeps=self._shares_devices,
            port=free_port(),
            api_key=secrets.token_hex(16),
            records_routing=self._records_routing,
        )
        self._overlaps = not arguments["disable_overlap_schedule"]
        self._mask_limit = arguments.get("sampling_mask_max_tokens", SGLANG_MASK_LIMIT)
        self._quantised = arguments.get("quantization") is not None
        self._tasks: set[asyncio.Task[None]] = set()
        server = await SGLangServer.start(arguments)
        self._in_background(self._read_loads(server))
        return server, arguments["max_running_requests"]

    def _check_sampling(self, request: GenerateRequest) -> None:
        check_recordable(request, self._mask_limit)

    async def _updates(self, response: Response) -> AsyncGenerator[Response, None]:
        server, max_length = self._live_engine(), self._spec.max_length
        body = generate_body(response.request, response.engine_id, self._loads, self._end_tokens, max_length)
        messages: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        response.wake = partial(messages.put_nowait, None)
        reading = self._in_background(_read(server, body, messages))
        ended = False
        try:
            while not ended:
                message = await messages.get()
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
                self._in_background(_report_abort(server, response.engine_id))

    def _take(self, response: Response, message: dict[str, Any] | Exception, most: int) -> bool:
        """Add a message to a response of at most ``most`` tokens. Return True if SGLang has ended the request."""
        name = response.request.request_id
        if isinstance(message, CallRefused):
            raise ValueError(f"request {name!r} cannot run: {message}") from message
        if isinstance(message, Exception):
            raise message
        known = len(response.token_ids)
        if self._routing is not None:
            response.routed_experts = told_experts(message, self._routing)
        stopped_here = take_message(response, message)
        self._generated_tokens += len(response.token_ids) - known
        if response.finish_reason is not None and not stopped_here:
            # A request that was put back finds its own tokens too: of the prompt no more than all is shared.
            prompt = len(response.request.prompt_token_ids)
            self._load_totals.prompt_tokens += prompt
            self._load_totals.shared_tokens += min(prompt, message["meta_info"].get("cached_tokens", 0))
        if response.finish_reason == "length" and len(response.token_ids) < most:
            raise ValueError(
                f"request {name!r} was cut at {len(response.token_ids)} of {most} tokens: SGLang has no memory for the "
                "caches of more. Raise `mem_fraction_static`, or lower `sequence_length`"
            )
        return response.finish_reason is not None and not stopped_here

    async def _read_loads(self, server: SGLangServer) -> None:
        """Add up SGLang's own load while it computes, read once per `_LOAD_SECONDS`. Runs until cancelled."""
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            if not self._paused and not self._asleep and self._requests.inside:
                with suppress(CallRefused, EngineFailed):  # a request reports a server that is dead
                    add_loads(self._load_totals, await server.call("/v1/loads"))

    async def _sign_of_life(self) -> None:
        await self._order("/server_info")

    async def _halt(self, mode: PauseMode) -> None:
        # With overlap, a step may still be running after an in-place pause, so caches are dropped in every mode.
        keeps_caches = mode != "resume" and not self._overlaps
        await self._order("/pause_generation", {"mode": "in_place" if keeps_caches else "retract"})
        # The server answers before its scheduler has received the order; the next answer comes from the scheduler.
        await self._sign_of_life()
        if not keeps_caches:
            # Without a timeout: with one, SGLang would wait until no request is left, retracted ones included.
            await self._order("/flush_cache", {})

    async def _continue(self) -> None:
        await self._order("/continue_generation", {"torch_empty_cache": False})

    async def _order(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make a call that must succeed. Raises ``EngineFailed`` if the server refuses it."""
        try:
            return await self._live_engine().call(path, body)
        except CallRefused as error:
            raise EngineFailed(f"SGLang cannot go on: {error}") from error

    def _stage(self, buckets: list[WeightBucket]) -> MemoryCheckpoint:
        return MemoryCheckpoint(buckets)

    async def _load(self, prepared: PreparedWeights) -> None:
        """Let SGLang load the checkpoint. A failure leaves mixed weights, because SGLang's rollback reads the same
        files."""
        checkpoint: MemoryCheckpoint = prepared.content
        with closing(checkpoint):
            await self._read_checkpoint(checkpoint, prepared.held.version)
            if not self._quantised:
                await self._check_loader(checkpoint, prepared.held)

    async def _read_checkpoint(self, checkpoint: MemoryCheckpoint, version: int) -> None:
        order = {
            "model_path": checkpoint.path,
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": False,
        }
        await self._live_engine().call("/update_weights_from_disk", order)

    async def _check_loader(self, checkpoint: MemoryCheckpoint, sent: HeldWeights) -> None:
        """Verify the update by SGLang's own checksums of its parameters; see `LoaderCheck`.

        At the first update, the checkpoint is loaded several times to find out which parameters each kind of tensor
        goes into. Later ones are only compared with the update before."""
        version, held = sent.version, await self._parameter_checksums()
        # Some of SGLang's models compute their buffers and ignore those in the update.
        checksums = {name: checksum for name, checksum in sent.checksums.items() if name not in self._buffers}
        if self._loader is not None:
            self._loader.compare(version, checksums, held)
            return
        loader = LoaderCheck(checksums, held)
        for names in loader.rounds():
            with checkpoint.altered(names):
                await self._read_checkpoint(checkpoint, version)
            loader.learn(version, names, await self._parameter_checksums())
        await self._order("/weights_checker", {"action": "reset_tensors", "selector": "target"})
        await self._read_checkpoint(checkpoint, version)
        loader.require_filled(version, await self._parameter_checksums())
        self._loader = loader

    async def _parameter_checksums(self) -> ParameterChecksums:
        """Return SGLang's checksum of each of its parameters (in its own layout) on each GPU."""
        reply = await self._order("/weights_checker", {"action": "checksum", "selector": "target"})
        return {
            (rank, name): checksum
            for rank, report in enumerate(reply["ranks"])
            for name, checksum in report["checksums"].items()
        }

    async def _inspected(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        checksums = dict(sent.checksums)
        for name in names_to_read(layout, sent.version) if self._reads_back else ():
            dtype, shape = layout[name]
            order = {"name": name, "truncate_size": shape[0]}
            try:
                reply = await self._live_engine().call("/get_weights_by_name", order)
            except CallRefused:  # most models do not support it
                self._reads_back = False
                break
            checksums[name] = checksum_of_values(reply["value"], dtype, shape) or checksums[name]
        version = (await self._order("/model_info"))["weight_version"]
        return HeldWeights(int(version), sent.parameter_count, checksums)

    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        body = score_body(tokens, self._requests.engine_id())
        return scores_of(await self._live_engine().call("/generate", body), tokens)

    async def _offload(self, discard: bool) -> bool:
        await self._halt("resume")
        if self._shares_devices:
            await self._order("/release_memory_occupation", {})
        return False

    async def _reload(self) -> None:
        if self._shares_devices:
            await self._order("/resume_memory_occupation", {})

    async def _stop(self, engine: SGLangServer, running: Sequence[Response]) -> None:
        await engine.stop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _read(
    server: SGLangServer, body: dict[str, Any], messages: asyncio.Queue[dict[str, Any] | Exception | None]
) -> None:
    """Put the messages of a streamed request, or its error, into a queue."""
    try:
        async with aclosing(server.stream("/generate", body)) as stream:
            async for message in stream:
                messages.put_nowait(message)
    except Exception as error:  # any error must reach the waiting request
        messages.put_nowait(error)


async def _report_abort(server: SGLangServer, engine_id: str) -> None:
    """Abort a request in SGLang. Ignores failures: if the server has ended, the next call reports it."""
    try:
        await server.call("/abort_request", {"rid": engine_id})
    except (CallRefused, EngineFailed):
        return


_LOAD_SECONDS = 0.5
"""Time between two readings of the load."""


def add_loads(total: EngineLoad, answer: Mapping[str, Any]) -> None:
    """Add one reading of SGLang's load, summed over its data-parallel schedulers. [] before its first step."""
    loads = answer["loads"]
    if loads:
        total.steps += 1
        total.running += sum(load["num_running_reqs"] for load in loads)
        total.waiting += sum(load["num_waiting_reqs"] for load in loads)
        total.cache_use += sum(load["token_usage"] for load in loads) / len(loads)


_READ_BACK_ELEMENTS = 8192
"""Maximum number of elements of a tensor to read back, because elements are sent as text."""
_READ_BACK_TENSORS = 8
"""Maximum number of tensors that are read back after an update."""


class MemoryCheckpoint:
    """A folder of safetensors files whose contents are in shared memory. It is removed together with the object."""

    def __init__(self, buckets: list[WeightBucket]) -> None:
        self.path = mkdtemp(prefix="roll-weights-")
        self.close = weakref.finalize(self, shutil.rmtree, self.path)
        """Removes the folder. Idempotent."""
        self._bytes: dict[str, np.ndarray] = {}
        """Name -> uint8 view of the tensor in its file."""
        self._dtypes = {name: dtype for bucket in buckets for name, dtype, _, _ in bucket.tensors}
        self._files: list[MemoryFile] = []
        for number, bucket in enumerate(buckets):
            file, tensors = safetensors_file([bucket])
            (Path(self.path) / f"model-{number:05d}.safetensors").symlink_to(file.path)
            self._files.append(file)
            self._bytes |= tensors

    @contextmanager
    def altered(self, names: Iterable[str]) -> Iterator[None]:
        """Within the block, flip a low mantissa bit in the first element of each of these tensors."""
        # A bit that survives rounding float32 to bfloat16. The bytes are little-endian.
        places = [self._bytes[name][2 if self._dtypes[name] == "float32" else 0 :][:1] for name in names]
        for place in places:
            place ^= 1
        try:
            yield
        finally:
            for place in places:
                place ^= 1


def names_to_read(layout: Layout, version: int) -> list[str]:
    """Return the names of a pseudorandom sample of small tensors, determined by ``version``."""
    small = [name for name, (_, shape) in layout.items() if shape and math.prod(shape) <= _READ_BACK_ELEMENTS]
    return sorted(small, key=lambda name: derive_seed(version, name))[:_READ_BACK_TENSORS]


def checksum_of_values(values: list[float] | list[list[float]], dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the checksum of a tensor given as numbers; None if they are only one GPU's part of the tensor."""
    tensor = torch.tensor(values, dtype=torch.float32).to(DTYPES[dtype])
    return tensor_checksum(tensor) if tuple(tensor.shape) == tuple(shape) else None


SMALLEST_TEMPERATURE = 1e-6
"""Temperature below which SGLang samples greedily."""


def needs_mask(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is truncated (top-k or top-p), so that log-probabilities need SGLang's
    sampling mask."""
    return not is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1)


def check_recordable(request: GenerateRequest, mask_limit: int) -> None:
    """Raise ``ValueError`` for sampling parameters with which SGLang would not report the right log-probabilities.

    ``mask_limit``: largest top-k for which it reports a sampling mask."""
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
    request: GenerateRequest, engine_id: str, loads: int, eos_token_ids: Sequence[int], max_length: int
) -> dict[str, Any]:
    """Return the body of a call to ``/generate``. ``loads``: number of weight updates so far, used as cache salt, so
    that only requests that began with the same weights share cached prefixes."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    mask = needs_mask(sampling)
    return {
        "rid": engine_id,
        "input_ids": prompt.tolist(),
        "stream": True,
        "return_logprob": not mask,
        "return_sampling_mask": mask,
        "return_routed_experts": request.with_routing,
        "cache_salt": f"weights {loads}",
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, max_length - len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Random numbers are determined by seed and position, so a continued response uses the same ones.
            "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
            "stream_interval": stream_interval(sampling.watches_text),
        },
    }


def score_body(tokens: np.ndarray, engine_id: str) -> dict[str, Any]:
    """Return the body of a call to ``/generate`` that scores given tokens. Uses no cached prefix."""
    return {
        "rid": engine_id,
        "input_ids": tokens.tolist(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": engine_id,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }


_NAN = "NaN happened"
"""Matched stop string that SGLang reports if the logits are NaN."""


def take_message(response: Response, message: Mapping[str, Any]) -> bool:
    """Add a streamed message to the response, and return the result of `Response.take`.

    Raises ``ValueError`` if SGLang rejects or aborts the request, ``EngineFailed`` if tokens or log-probabilities are
    missing.
    """
    name = response.request.request_id
    if "error" in message:
        raise ValueError(f"request {name!r} cannot run: {message['error']['message']}")
    report = message["meta_info"]
    reason = None if report["finish_reason"] is None else _finish_reason(report["finish_reason"], name)
    token_ids = message["output_ids"]
    if report["completion_tokens"] != len(response.token_ids) + len(token_ids):
        raise EngineFailed(
            f"SGLang counts {report['completion_tokens']} tokens of request {name!r}; "
            f"{len(response.token_ids)} and now {len(token_ids)} arrived"
        )
    versions = report.get("weight_versions", ())
    spans = [(int(span["version"]), span["start"], span["end"]) for span in versions]
    if needs_mask(response.request.sampling):
        logprobs = report.get("output_token_sampling_logprobs", [])
    else:
        logprobs = [entry[0] for entry in report.get("output_token_logprobs", [])]
    return response.take(token_ids, logprobs, int(report["weight_version"]), spans, reason)


def told_experts(message: Mapping[str, Any], shape: RoutingShape) -> np.ndarray | None:
    """Return the experts in a message, ``[tokens, layers, top_k]``; None if it has none.

    SGLang sends those of all tokens but the last, with the end of a request: int32, in base64."""
    text = message.get("meta_info", {}).get("routed_experts")
    return None if text is None else shape.record(np.frombuffer(b64decode(text), dtype=np.int32))


def scores_of(reply: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Read the log-probabilities of ``tokens`` from the reply, float32 ``[length]``, 0 for the first token. Raises
    `EngineFailed` if the reply is for other tokens."""
    entries = reply["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != tokens.tolist():
        raise EngineFailed(f"SGLang scored {len(entries)} tokens, not the {len(tokens)} that it was sent")
    values = np.zeros(len(tokens), dtype=np.float32)
    logprobs = [entry[0] for entry in entries[1:]]
    require_numbers(logprobs)
    values[1:] = logprobs
    return values


def _finish_reason(report: Mapping[str, Any], request_id: str) -> FinishReason:
    kind = report["type"]
    if kind == "abort":
        raise ValueError(f"request {request_id!r} was given up by SGLang: {report.get('message')}")
    if report.get("matched") == _NAN:
        raise EngineFailed("SGLang's logits are NaN: there is no distribution to sample from")
    if kind not in ("stop", "length"):
        raise EngineFailed(f"SGLang ended request {request_id!r} with {kind!r}")
    return kind
