"""`vllm`: vLLM's asynchronous engine behind the `InferStrategy` interface, on CPUs and GPUs.

Only public interfaces of vLLM are used: token ids in and out, pause and resume of generation, sleep and wake, weight
updates under checkpoint names. vLLM computes in its own processes; this object belongs to one event loop.

Not guaranteed: bitwise results independent of the batch (vLLM's kernels depend on it), and the same random stream for a
response that is continued on another replica (it gets a new one).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, fields
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import numpy as np
import torch

from roll.data.pictures import PictureProcessor, decoded, digest
from roll.data.records import derive_seed
from roll.engines.base import (
    EngineFailed,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    Layout,
    PauseMode,
    PreparedWeights,
    checked,
)
from roll.engines.options import VLLM_BUCKET_BACKEND, VLLM_OWNER_VARIABLE, engine_arguments, stream_interval
from roll.engines.process_engine import ProcessEngine, Response
from roll.weights.adapters import adapted_layers, adapter_config, adapter_folder
from roll.weights.buckets import (
    BucketLocation,
    HeldWeights,
    MemoryFile,
    TransferStep,
    WeightBucket,
    WeightMismatch,
    safetensors_file,
)
from roll.weights.publisher import WEIGHT_BACKENDS

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig
    from vllm import AsyncEngineArgs
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.config import VllmConfig
    from vllm.inputs import TokensPrompt
    from vllm.inputs.engine import TokensInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

_FAREWELL_SECONDS = 5.0
"""Maximum wait of a shutdown for aborted requests to end."""
_LOOK_SECONDS = 1.0
"""Interval at which a call that has no answer yet looks whether the engine is alive."""
_MEMORY_SECONDS = 2.0
"""Longest wait for what vLLM's workers tell of their memory."""
_DECODED_PICTURES = 16
"""Decoded pictures that are kept for the next requests."""
Result = TypeVar("Result")


class VLLMInferStrategy(ProcessEngine["AsyncLLM"]):
    """One vLLM replica.

    With the transports ``nccl`` and ``cuda_ipc``, the trainer pushes weights (`transfer_step`); with all others, they
    are loaded from buckets. Adapter updates use vLLM's LoRA support, with one adapter for all requests, replaced in
    place."""

    _policy: LoRARequest | None = None
    """vLLM's handle of the adapter; None before the first one is loaded."""

    _memory: Mapping[str, float] = MappingProxyType({})
    """As last told."""

    async def memory(self) -> Mapping[str, float]:
        """See `InferStrategy.memory`; of the worker that has most. A step that lasts long is not waited for: then it
        is what was last told."""
        with suppress(TimeoutError, EngineFailed):  # a death is noticed elsewhere
            async with asyncio.timeout(_MEMORY_SECONDS):
                workers = await self._answer(self._live_engine().collective_rpc("roll_memory"))
                names = dict.fromkeys(name for worker in workers for name in worker)
                self._memory = {name: max(worker.get(name, 0.0) for worker in workers) for name in names}
        return self._memory

    async def _launch(self, config: PretrainedConfig) -> tuple[AsyncLLM, int]:
        """Start vLLM. Blocks the event loop, because vLLM's start does."""
        self._sleeps = self._shares_devices and self._spec.device == "cuda"  # vLLM's CPU engine cannot sleep
        arguments = engine_arguments(
            self._strategy_config,
            self._spec,
            tensor_parallel_size=self._devices,
            weight_backend=WEIGHT_BACKENDS.get(self._transport, VLLM_BUCKET_BACKEND),
            sleeps=self._sleeps,
            cache_bytes_per_token=cache_bytes_per_token(config, self._spec.dtype),
            adapter_rank=self._adapter_rank,
            records_routing=self._records_routing,
        )
        if not arguments["disable_log_stats"]:
            self._known_load = tuple(field.name for field in fields(EngineLoad))
        _set_environment(arguments)
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # vLLM's defaults for the size of a batch depend on who asks. These are those of its own server.
        context = UsageContext.OPENAI_API_SERVER
        engine_args = AsyncEngineArgs(**arguments)
        try:
            loggers = [_load_logger(self._load_totals)] if self._known_load else []
            engine = AsyncLLM.from_engine_args(engine_args, usage_context=context, stat_loggers=loggers)
        except Exception as error:
            if self._adapter_rank is not None:
                _require_adapters(engine_args, error)
            raise
        try:
            await self._answer(engine.update_weight_version("0"))
        except BaseException:
            engine.shutdown()
            raise
        try:
            return engine, engine.vllm_config.scheduler_config.max_num_seqs
        finally:
            del engine  # vLLM keeps an error of its imports, which keeps this frame: the engine would never be freed

    def _check_sampling(self, request: GenerateRequest) -> None:
        temperature = request.sampling.temperature
        if 0 < temperature < _SMALLEST_TEMPERATURE:
            raise ValueError(
                f"request {request.request_id!r} cannot run: vLLM samples at a temperature of {_SMALLEST_TEMPERATURE} "
                f"or more, or greedily at 0; it is {temperature}"
            )

    async def _updates(self, response: Response) -> AsyncGenerator[Response, None]:
        request = response.request
        images = [await self._image(picture) for picture in request.prompt_pictures]
        if response.withdrawn:
            return
        prompt = self._prompt(request, images)  # not before: it names the weights
        params = sampling_params(request, self._end_tokens)
        engine = self._live_engine()
        # Leaving the iterator aborts the request inside vLLM.
        with _failures_reported():
            updates = engine.generate(prompt, params, response.engine_id, lora_request=self._policy)
            async with aclosing(updates) as outputs:
                async for output in outputs:
                    if response.begins_again and not response.aborted:
                        return
                    (completion,) = output.outputs
                    self._generated_tokens += len(completion.token_ids)
                    if self._routing is not None and completion.routed_experts is not None:
                        response.routed_experts = self._routing.record(completion.routed_experts)
                    stopped = take_output(response, completion, self._version)
                    # vLLM ignores an abort of an id that it does not know yet; such a request is ended here.
                    if response.aborted and response.finish_reason is None:
                        response.finish_reason, stopped = "abort", True
                    yield response
                    if stopped:
                        return

    async def _image(self, picture: np.ndarray) -> Image:
        """Decode a picture in a thread, once for all samples of a group."""
        key = digest([picture])
        if key not in self._images:
            self._images[key] = asyncio.ensure_future(asyncio.to_thread(decoded, picture))
            if len(self._images) > _DECODED_PICTURES:
                self._images.popitem(last=False)
        self._images.move_to_end(key)
        return await asyncio.shield(self._images[key])  # an aborted request leaves it to the others

    def _prompt(self, request: GenerateRequest, images: Sequence[Image]) -> TokensInput | TokensPrompt:
        """Return a request's prompt in vLLM's form. ``images``: its decoded pictures."""
        from vllm.inputs.engine import tokens_input

        # Cached prefixes are shared only between requests that began with the same weights.
        salt, pictures = f"weights {self._loads}", request.prompt_pictures
        if not pictures:
            return tokens_input(request.prompt_token_ids.tolist(), cache_salt=salt)
        # vLLM expands placeholders itself.
        token_ids = self._processor.collapsed(request.prompt_token_ids, pictures).tolist()
        return {
            "prompt_token_ids": token_ids,
            "multi_modal_data": {"image": list(images)},
            # The salt does not reach the cache of the vision tower's results, which outlives an update of weights.
            "multi_modal_uuids": {"image": [f"{digest([picture])}-{self._loads}" for picture in pictures]},
            "cache_salt": salt,
        }

    @cached_property
    def _images(self) -> OrderedDict[str, asyncio.Future[Image]]:
        return OrderedDict()

    @cached_property
    def _processor(self) -> PictureProcessor:
        return PictureProcessor(self._spec.model_path, self._spec.trust_remote_code)

    async def _sign_of_life(self) -> None:
        await self._answer(self._live_engine().get_weight_version())

    async def _withdraw(self, responses: Sequence[Response]) -> None:
        if responses:
            await self._answer(self._live_engine().abort([response.engine_id for response in responses]))

    async def _halt(self, mode: PauseMode) -> None:
        await self._answer(self._live_engine().pause_generation(mode="keep", clear_cache=mode != "keep"))

    async def _continue(self) -> None:
        await self._answer(self._live_engine().resume_generation())

    def _stage(self, buckets: list[WeightBucket]) -> tuple[list[dict[str, Any]], list[MemoryFile]] | MemoryFile:
        return located(buckets) if self._adapter_rank is None else safetensors_file(buckets)[0]

    async def _load_adapter(self, prepared: PreparedWeights) -> None:
        """Let vLLM load an adapter in place of its current one. Running requests continue with the new adapter."""
        from vllm.lora.request import LoRARequest

        engine, adapted = self._live_engine(), adapted_layers(prepared.layout, self._layers)
        config = adapter_config(adapted, cast(int, self._adapter_rank), self._spec.model_path)
        with adapter_folder(prepared.content, config) as path:
            if not await self._answer(engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))):
                raise EngineFailed(f"vLLM did not take the adapter of version {prepared.held.version}")
        self._policy = LoRARequest("policy", 1, path)
        await self._answer(engine.update_weight_version(str(prepared.held.version)))

    async def _load(self, prepared: PreparedWeights) -> None:
        if self._adapter_rank is not None:
            await self._load_adapter(prepared)
            return
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._live_engine()
        await self._answer(engine.start_weight_update())
        buckets, _ = prepared.content
        for bucket in buckets:
            await self._answer(engine.update_weights(WeightTransferUpdateRequest(bucket)))
        await self._answer(engine.finish_weight_update(str(prepared.held.version)))
        if self._without_weights:
            await self._answer(engine.wake_up(["kv_cache"]))
            await self._halt("keep")  # vLLM resumes decoding by itself when all memory is back

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Make one call of vLLM's weight transfer, on behalf of the trainer. The engine must be paused."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        engine = self._live_engine()
        if step == "init":
            await self._answer(engine.init_weight_transfer_engine(WeightTransferInitRequest(payload)))
        elif step == "start":
            await self._begin_again()
            await self._answer(engine.start_weight_update())
        elif step == "update":
            await self._answer(engine.update_weights(WeightTransferUpdateRequest(payload)))
        elif step == "finish":
            await self._answer(engine.finish_weight_update(payload))
        else:
            raise ValueError(f"step {step!r} of a weight transfer is unknown; one of init, start, update, finish")

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> HeldWeights:
        """See `InferStrategy.weights_pushed`. Checksums are None except for a sample of tensors that can be read back.
        Raises ``WeightMismatch`` naming a tensor that the model lacks, or that is missing."""
        entries = checked(((name, dtype, shape, None) for name, (dtype, shape) in layout.items()), self._shapes)
        pushed = {name: (dtype, tuple(shape)) for name, dtype, shape, _ in entries}
        await self._answer(self._live_engine().update_weight_version(str(version)))
        self._version = version
        self._loads += 1
        count = sum(math.prod(shape) for _, shape in pushed.values())
        return await self._inspected(HeldWeights(version, count, dict.fromkeys(pushed)), pushed)

    async def base_checksums(self) -> Mapping[str, int]:
        """See `InferStrategy.base_checksums`. Checksums are computed from vLLM's workers for tensors that these hold in
        the checkpoint's layout, and from the files for all others."""
        layout = {name: (self._spec.dtype, shape) for name, shape in self._shapes.items() if name not in self._buffers}
        checksums = dict(await super().base_checksums())
        for held in await self._answer(self._live_engine().collective_rpc("roll_held_checksums", args=(layout,))):
            checksums |= held
        return checksums

    async def _inspected_adapter(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        """Return the checksums of the adapter that vLLM's workers hold. Matrices that are split over workers cannot be
        read back, and get the checksums in ``sent``."""
        engine, found = self._live_engine(), dict[str, int | None]()
        for held in await self._answer(engine.collective_rpc("roll_held_adapter", args=(layout,))):
            found |= held
        lost = sorted(layout.keys() - found.keys())
        if lost:
            raise WeightMismatch(f"tensor {lost[0]!r} of version {sent.version} is in no layer of vLLM's model")
        checksums = {name: sent.checksums[name] if found[name] is None else found[name] for name in layout}
        version = int(await self._answer(engine.get_weight_version()))
        return HeldWeights(version, sent.parameter_count, checksums)

    async def _inspected(self, sent: HeldWeights, layout: Layout) -> HeldWeights:
        if self._adapter_rank is not None:
            return await self._inspected_adapter(sent, layout)
        engine = self._live_engine()
        for unloaded in await self._answer(engine.collective_rpc("roll_unloaded_parameters")):
            if unloaded:
                raise WeightMismatch(
                    f"parameter {unloaded[0]!r} of vLLM's model got no weights from version {sent.version} "
                    f"({len(unloaded)} such parameters)"
                )
        checksums = dict(sent.checksums)
        for held in await self._answer(engine.collective_rpc("roll_held_checksums", args=(layout, sent.version))):
            checksums |= held
        version = int(await self._answer(engine.get_weight_version()))
        return HeldWeights(version, sent.parameter_count, checksums)

    async def _score(self, tokens: np.ndarray) -> np.ndarray:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs.engine import tokens_input

        params = VLLMSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        values = np.zeros(len(tokens), dtype=np.float32)
        engine = self._live_engine()
        with _failures_reported():
            prompt, name = tokens_input(tokens.tolist()), self._requests.engine_id()
            async for output in engine.generate(prompt, params, name, lora_request=self._policy):
                if output.prompt_logprobs is not None:
                    pairs = zip(tokens[1:].tolist(), output.prompt_logprobs[1:], strict=True)
                    values[1:] = [position[token].logprob for token, position in pairs]
        return values

    async def _offload(self, discard: bool) -> bool:
        """See `ProcessEngine._offload`. vLLM's sleep level 1 moves the weights to host memory, level 2 drops all except
        buffers. Level 2 is not used if a weight update cannot restore everything: with a draft model, quantisation or
        adapter updates."""
        if not self._sleeps:
            await self._halt("resume")
            return False
        engine = self._live_engine()
        config = engine.vllm_config
        brings_all = config.speculative_config is None and config.model_config.quantization is None
        discard = discard and brings_all and self._adapter_rank is None
        await self._answer(engine.sleep(level=2 if discard else 1, mode="keep"))
        return discard

    async def _reload(self) -> None:
        if self._without_weights:
            await self._answer(
                self._live_engine().wake_up(["weights"])
            )  # the KV cache follows in `_load`: with it, vLLM would decode
        elif self._sleeps:
            await self._answer(self._live_engine().wake_up())
            if self._paused:  # waking resumes decoding
                await self._halt("keep")

    async def _stop(self, engine: AsyncLLM, running: Sequence[Response]) -> None:
        if not engine.errored:
            await engine.abort([response.engine_id for response in running])
            deadline = asyncio.get_running_loop().time() + _FAREWELL_SECONDS
            while self._requests.inside and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
        # Called on the event loop, where vLLM cancels its own tasks first; otherwise it would report dead processes.
        engine.shutdown()

    async def _answer(self, call: Awaitable[Result]) -> Result:
        """Await a call to vLLM. Raise ``EngineFailed`` if its engine is dead, or dies before it answers."""
        answer, engine = asyncio.ensure_future(call), self._engine
        try:
            # vLLM rejects calls to a dead engine, but leaves calls hanging that were pending when it died.
            with _failures_reported():
                while not (await asyncio.wait([answer], timeout=_LOOK_SECONDS))[0]:
                    if engine is not None and (engine.errored or self._engine is not engine):
                        raise engine.dead_error
                return answer.result()
        finally:
            answer.cancel()


def _load_logger(load: EngineLoad) -> type[PrometheusStatLogger]:
    """Return a logger that adds vLLM's statistics after each step to ``load``.

    It stands in the place of the one for Prometheus, so that none of its histograms are kept.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class LoadLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
            pass  # the base class would register its metrics

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is not None:
                load.preemptions += iteration_stats.num_preempted_reqs
            if scheduler_stats is None:
                return
            load.steps += 1
            load.running += scheduler_stats.num_running_reqs
            load.waiting += scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            load.cache_use += scheduler_stats.kv_cache_usage
            load.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            load.shared_tokens += scheduler_stats.prefix_cache_stats.hits

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

    return LoadLogger


def cache_bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Return the size of the KV cache per token in bytes, over all layers."""
    text = config.get_text_config(decoder=True)
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    head_size = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * getattr(torch, dtype).itemsize


def _require_adapters(arguments: AsyncEngineArgs, cause: Exception) -> None:
    """Raise ``ValueError`` if vLLM failed to start because it does not support LoRA for the model. Its own error says
    only that one of its processes ended."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models import supports_lora

    model = get_model_cls(arguments.create_model_config())
    if not supports_lora(model):
        message = f"vLLM has no adapters for {model.__name__}: write `weight_update.content: full`"
        raise ValueError(message) from cause


def _set_environment(arguments: dict[str, Any]) -> None:
    """Set environment variables for vLLM. The process is used by this engine only."""
    os.environ[VLLM_OWNER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments["weight_transfer_config"]["backend"] == "ipc":
        # CUDA IPC handles need pickle. They are sent only to the engine's own process.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if arguments.get("distributed_executor_backend") == "uni":
        # Otherwise vLLM starts another process on a CPU, which takes ten seconds more and binds to all cores.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


@contextmanager
def _failures_reported() -> Iterator[None]:
    """Convert the exceptions after which vLLM cannot serve requests any more to `EngineFailed`."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        cause = error.__cause__ or error
        raise EngineFailed(f"vLLM cannot go on: {type(cause).__name__}: {cause}") from error


def located(buckets: list[WeightBucket]) -> tuple[list[dict[str, Any]], list[MemoryFile]]:
    """Return each bucket's location and tensors for vLLM's processes, and the shared-memory copies to keep alive.

    Buckets that are not in a file yet are copied into shared memory."""
    entries, copies = [], []
    for bucket in buckets:
        location = bucket.location
        if location is None:
            copy = MemoryFile(len(bucket.data))
            copy.data[:] = bucket.data
            copies.append(copy)
            location = BucketLocation(copy.path, 0)
        entries.append(asdict(location) | {"size": len(bucket.data), "tensors": bucket.tensors})
    return entries, copies


_SMALLEST_TEMPERATURE = 0.01
"""vLLM replaces smaller positive temperatures by this one."""


def sampling_params(request: GenerateRequest, eos_token_ids: Sequence[int]) -> VLLMSamplingParams:
    """Return vLLM's sampling parameters for a request."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, seed = request.sampling, request.sampling.seed
    if request.first_token_index:
        # vLLM's random stream starts anew with each request, so a continued response needs another seed.
        seed = derive_seed(seed, "continued", request.first_token_index)
    return VLLMSamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop_token_ids=[] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval(sampling.watches_text),
    )


def take_output(response: Response, output: CompletionOutput, version: int) -> bool:
    """Add a message from vLLM to the response, and return the result of `Response.take`. Raises `EngineFailed` if vLLM
    ended the request with an error."""
    reason = output.finish_reason
    if reason is not None and reason not in get_args(FinishReason):
        raise EngineFailed(f"vLLM ended request {response.request.request_id!r} with {reason!r}")
    return response.take(
        output.token_ids,
        # With `logprobs=0`, vLLM returns one number per position.
        output.logprobs.logprobs if output.token_ids and output.logprobs is not None else [],
        version,
        [(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
        cast(FinishReason | None, reason),
    )
