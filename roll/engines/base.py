"""The interface of all generation engines, and what they share: request validation, model metadata, stop strings.

An engine knows nothing of groups, batches or training steps; requests are independent. Each token carries its
log-probability under the distribution it was sampled from, and the version of the weights that produced it. All methods
must be called from one event loop; engines that compute in a thread hide it.

Weight updates use the names and shapes of checkpoint tensors. End-of-sequence tokens are looked up where transformers
does, so that all engines end a response at the same ones. transformers is imported only when a model is read, because
the driver process imports this module too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch

from roll.configs.errors import ConfigError
from roll.configs.roles import PictureSampling
from roll.data import tokenizer
from roll.data.pictures import picture_tokens, policy_class
from roll.data.records import PictureStep
from roll.runtime.usage import memory_in_use
from roll.tracking.timeline import BusySpans
from roll.weights.adapters import LayerShapes, linear_layers
from roll.weights.buckets import HeldWeights, TransferStep, WeightBucket, WeightMismatch
from roll.weights.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

PauseMode = Literal["keep", "resume", "drain"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The same parameters, seed, prompt and weights give the same tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy decoding. All recorded log-probabilities are then 0, because the token is certain."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request when sampled. The token is part of the response."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    """True to continue to `max_new_tokens`, ignoring all end tokens and stop strings."""

    @property
    def watches_text(self) -> bool:
        """True if a stop string may end the response."""
        return bool(self.stop_strings) and not self.ignore_eos


@dataclass(frozen=True)
class PictureRequest:
    """Request to generate an image."""

    prompt: str
    sampling: PictureSampling
    window: range | None
    """Numbers of the stochastic (SDE) denoising steps, which are the tokens of the result. None: all steps are
    deterministic (ODE), and each is a token of log-probability 0."""


@dataclass(frozen=True)
class Picture:
    """A generated image, with the latents to train on."""

    image: np.ndarray
    """uint8 ``[height, width, 3]``: RGB image."""
    latents: np.ndarray
    """float32 ``[stochastic steps + 1, ...]``: latents before the first stochastic step and after each of them, in the
    shape that the transformer takes. Without stochastic steps: only the final latents."""
    newest_version: int = -1
    """Newest weight version used in any denoising step, deterministic ones included."""
    means: np.ndarray | None = None
    """float32 ``[stochastic steps, ...]``: mean of each stochastic step, if ``sampling.log_prob`` is ``guard``."""


@dataclass(frozen=True)
class GenerateRequest:
    """A generation request: a prompt and its sampling parameters."""

    request_id: str
    prompt_token_ids: np.ndarray
    """int32 ``[prompt]``. For a request that is reissued after its engine died: the prompt plus the partial response.
    """
    sampling: SamplingParams
    first_token_index: int = 0
    """Number of response tokens at the end of the prompt, from earlier attempts. They do not count towards
    `max_new_tokens`. The random stream resumes at this index, so a continued response is sampled like an uninterrupted
    one."""
    with_text: bool = False
    """True to also decode the response to text in the engine's process, which relieves the driver process."""
    with_routing: bool = False
    """True to return the experts of each token, from an engine that records them."""
    picture: PictureRequest | None = None
    """The image to generate, for an image engine, which uses only the seed of `sampling`."""
    prompt_pictures: tuple[np.ndarray, ...] = ()
    """Files of the pictures whose placeholders are in the prompt; see `roll.data.records.Prompt`."""


@dataclass
class Completion:
    """The result of a request: sampled tokens, their log-probabilities and the weight versions that produced them."""

    request_id: str
    token_ids: np.ndarray
    """int32 ``[new]``: sampled token ids."""
    logprobs: np.ndarray
    """float32 ``[new]``: log-probability of each token."""
    versions: np.ndarray
    """int32 ``[new]``: weight version of each token."""
    finish_reason: FinishReason
    text: str | None = None
    """The response as text, without special tokens; None if it was not decoded."""
    picture: Picture | None = None
    """The image, whose tokens are the numbers of its stochastic steps; None for a text response."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 ``[prompt + new - 1, layers, experts per token]``: the experts of each token but the last one;
    None if they were not requested, or the request was aborted."""

    def after(self, known: int) -> TokenChunk:
        """Return the tokens after the first ``known`` ones, as the last chunk of the request."""
        return TokenChunk(self.token_ids[known:], self.logprobs[known:], self.versions[known:], self.finish_reason)


@dataclass
class TokenChunk:
    """New tokens of a request since its previous chunk. The last chunk has the finish reason."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None

    def before_last(self) -> TokenChunk:
        """Return all tokens except the last one, of a request that has not finished."""
        return TokenChunk(self.token_ids[:-1], self.logprobs[:-1], self.versions[:-1])

    def completion(self, request_id: str, finish_reason: FinishReason) -> Completion:
        """Return these tokens as a complete response."""
        return Completion(request_id, self.token_ids, self.logprobs, self.versions, finish_reason)


def no_tokens() -> TokenChunk:
    """Return the empty chunk of a request that was aborted before it began."""
    return TokenChunk(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""


@dataclass
class PreparedWeights:
    """A received weight update, checked against the engine's model and ready to load."""

    held: HeldWeights
    """Version and checksums of the weights as the engine will hold them."""
    content: Any
    """The tensors, in the engine's own form."""
    layout: Layout = field(default_factory=dict)
    """Layout of the tensors; set by engines that read weights back after the load."""


@dataclass
class EngineLoad:
    """Cumulative counters of an engine.

    `running`, `waiting` and `cache_use` add one value per step: their increase over a period divided by the increase of
    `steps` is their mean.
    """

    steps: int = 0
    """Steps of the engine, or readings, if it tells its load on request only."""
    running: int = 0
    """Requests that were computed."""
    waiting: int = 0
    """Requests that waited for a place inside the engine."""
    cache_use: float = 0.0
    """Share of the room for keys and values that was in use."""
    prompt_tokens: int = 0
    """Tokens of prompts that joined, not summed over steps."""
    shared_tokens: int = 0
    """Those of them whose keys and values were there already."""
    preemptions: int = 0
    """Running requests that lost their place, and are computed again."""


class InferStrategy(ABC):
    """Interface of a generation engine: one replica."""

    _prepared: PreparedWeights | None = None

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
        adapter_rank: int | None = None,
        records_routing: bool = False,
        strategy_config: dict[str, Any],
    ) -> None:
        """Set the engine's arguments; `start` loads the model.

        ``eos_token_ids`` default to the model's own. On GPUs the model is split over ``devices_per_engine``.
        ``shares_devices``: other roles use the devices too, so the engine must support `sleep`. ``transport``: name of
        the transport of weight updates. ``adapter_rank``: updates contain LoRA adapters of this rank
        (`roll.weights.adapters`) for the loaded base model; None: all weights. ``records_routing``: the experts of
        tokens can be requested (`GenerateRequest.with_routing`)."""
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._eos_token_ids = eos_token_ids
        self._devices = devices_per_engine if device == "cuda" else 1
        self._shares_devices = shares_devices
        self._transport = transport
        self._adapter_rank = adapter_rank
        self._records_routing = records_routing
        self._strategy_config = strategy_config
        self._tokenizer: Decoder | None = None

    @abstractmethod
    async def start(self) -> None:
        """Load the model (as version 0) and accept requests."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Run a request to its end. If it is aborted, return its tokens so far, with ``finish_reason="abort"``.

        Raises ``ValueError`` for an invalid request, `EngineFailed` if the engine fails.
        """

    @abstractmethod
    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run a request like `generate`, yielding tokens as they are sampled. Leaving the iterator early aborts it."""

    @abstractmethod
    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return request id -> tokens after the first ``known[id]`` ones (default 0), for running requests.

        Requests without new tokens may be left out. The last chunk of a request has the finish reason.

        Also serves as a liveness check: the decoding loop answers between two steps, also while paused or asleep. An
        engine that hangs in a step does not answer. Raises `EngineFailed`.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests. Unknown ids are ignored, because a request may just have finished."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding, and return when no step is running. New requests are queued.

        Mode `drain` waits for running requests to finish and starts no queued ones; it raises ``RuntimeError`` if
        another `pause`, `resume` or `shutdown` interrupts it. `keep` freezes running requests with their KV caches.
        `resume` drops the caches; they are recomputed from prompts and partial responses when the engine resumes.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resume decoding after `pause`. Raises ``RuntimeError`` while the engine sleeps."""

    @abstractmethod
    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Receive a weight update without changing the weights in use. Requests keep running.

        Returns version and checksums of the weights as `load_weights` will load them. Replaces an update that was
        prepared before. Raises `WeightMismatch` naming the tensor if a name is unknown or missing, or a shape differs.
        """

    @abstractmethod
    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones. Only while paused or idle.

        Returns version and checksums of the loaded weights. Raises ``RuntimeError`` if another version was prepared (no
        weight is changed then), `EngineFailed` if loading fails halfway.
        """

    @abstractmethod
    async def sleep(self, discard: bool = False) -> bool:
        """Free the KV cache and move the weights off the device. Only while paused or idle; idempotent.

        With ``discard``, an engine may drop its weights instead, and then returns True: it stays paused, and
        `load_weights` must be called between `wake` and `resume`.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`. Requests continue from prompt plus partial response. A paused engine stays paused."""

    @abstractmethod
    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of given sequences under the current weights, at temperature 1 and without
        truncation.

        Each sequence of ``token_ids`` is int32 ``[length]``, with at least one token and fewer than the engine's
        maximum length. Returns float32 ``[length]`` for each: the log-probability of each token given the preceding
        ones, 0 for the first. May run alongside requests; the engine must be awake and not paused. Raises
        ``ValueError`` for a sequence that does not fit the model.
        """

    async def score_steps(self, steps: Sequence[PictureStep]) -> list[np.ndarray]:
        """Return the log-probabilities of denoising steps under the current weights, as `score` does for text.

        Returns float32 ``[2]`` for each: 0 for the prompt, and the step's. Engines of text raise ``RuntimeError``.
        """
        raise RuntimeError("an engine of text scores no denoising steps")

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return at least `running`, `waiting`, `version`, `generated_tokens` (total), `busy_seconds` (total) and
        `busy_spans` (the latest ones, in seconds since the epoch; see `BusySpans`); and `load`, the fields of
        `EngineLoad` that are known."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Abort all requests and free all resources. Idempotent."""

    async def memory(self) -> Mapping[str, float]:
        """Return the memory of the process that computes (see `memory_in_use`); empty if it is not known."""
        return memory_in_use()

    async def base_checksums(self) -> Mapping[str, int]:
        """Return checkpoint name -> checksum of the model loaded by `start`, in the engine's precision.

        Call before the first adapter is loaded. Raises `WeightMismatch` if the model cannot be compared,
        ``RuntimeError`` if the engine does not support adapter updates."""
        raise RuntimeError(f"{type(self).__name__} cannot be given adapters alone")

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Run one step of the engine library's own weight transfer, by which the trainer pushes weights (NCCL or CUDA
        IPC). Raises ``RuntimeError`` if the engine does not support it."""
        raise RuntimeError(f"weights cannot be pushed into {type(self).__name__}")

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> HeldWeights:
        """Complete a push of weights. Return version and checksums of the weights that the engine now holds.

        ``layout``: name -> (dtype name, shape). Raises ``RuntimeError`` if the engine does not support pushes."""
        raise RuntimeError(f"weights cannot be pushed into {type(self).__name__}")

    def _prepared_for(self, version: int) -> PreparedWeights:
        """Return the prepared weights. Raises ``RuntimeError`` if they have another version."""
        if self._prepared is None or self._prepared.held.version != version:
            held = "nothing" if self._prepared is None else f"version {self._prepared.held.version}"
            raise RuntimeError(f"version {version} is to be loaded, but {held} was prepared")
        return self._prepared

    def _read_facts(self, config: PretrainedConfig) -> None:
        """Read the vocabulary size and, unless they were given, the end tokens from the model's configuration."""
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        given = self._eos_token_ids
        ends = eos_token_ids(self._spec, config) if given is None else tuple(given)
        self._end_tokens = (*ends, *picture_tokens(config))

    def _check_request(self, request: GenerateRequest) -> None:
        check_request(request, self._spec.max_length, self._vocabulary)

    def _matcher_for(self, request: GenerateRequest) -> StopStringMatcher | None:
        """Return the matcher for a request's stop strings, already fed with the tokens of earlier attempts. None if it
        has none.

        Loads the tokenizer at the first request that needs it. Raises ``ValueError`` if that fails.
        """
        if not request.sampling.watches_text:
            return None
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._spec)
            except OSError as error:
                raise ValueError(
                    f"request {request.request_id!r} has stop strings, but the model's tokenizer cannot be loaded: "
                    f"{error}"
                ) from error
        matcher = StopStringMatcher(self._tokenizer, request.sampling.stop_strings)
        if request.first_token_index:
            matcher.push(request.prompt_token_ids[-request.first_token_index :].tolist())
        return matcher


class EngineFailed(RuntimeError):
    """The engine has failed permanently. Every request fails with this error, which names the cause."""


@dataclass
class BusyClock:
    """Total busy time of an engine, and its recent busy spans."""

    total: float = 0.0
    since: float | None = None
    spans: BusySpans = field(default_factory=BusySpans)

    def set(self, busy: bool) -> None:
        """Record that the engine is busy (or idle) from now on."""
        now = time.perf_counter()
        if self.since is not None:
            self.total += now - self.since
            ended = time.time()
            self.spans.add(ended - (now - self.since), ended)
        self.since = now if busy else None

    def stats(self) -> dict[str, Any]:
        """Return `busy_seconds` and `busy_spans` for `InferStrategy.stats`, up to the last `set`."""
        return {"busy_seconds": self.total, "busy_spans": self.spans.recent()}


def check_request(request: GenerateRequest, max_length: int, vocabulary: int) -> None:
    """Raise ``ValueError`` naming the problem if a request is invalid."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    problem = None
    if prompt.ndim != 1 or len(prompt) == 0:
        problem = "its prompt is empty"
    elif len(prompt) >= max_length:
        problem = f"its prompt of {len(prompt)} tokens leaves no room for a response within {max_length} tokens"
    elif prompt.min() < 0 or prompt.max() >= vocabulary:
        problem = f"its prompt has token ids outside the vocabulary of {vocabulary}"
    elif not 0 <= request.first_token_index <= len(prompt):
        problem = f"first_token_index {request.first_token_index} is not within its prompt of {len(prompt)} tokens"
    elif sampling.max_new_tokens < 1:
        problem = f"max_new_tokens is {sampling.max_new_tokens}; at least 1 is needed"
    elif not 0 <= sampling.temperature < np.inf:
        problem = f"temperature is {sampling.temperature}; 0 or a positive number is needed"
    elif not 0 < sampling.top_p <= 1:
        problem = f"top_p is {sampling.top_p}; a number above 0 and at most 1 is needed"
    elif sampling.top_k < 0:
        problem = f"top_k is {sampling.top_k}; 0 (all) or a positive number is needed"
    elif not all(sampling.stop_strings):
        problem = "one of its stop strings is empty"
    if problem is not None:
        raise ValueError(f"request {request.request_id!r} cannot run: {problem}")


Content = TypeVar("Content")


def checked(
    tensors: Iterable[tuple[str, str, Sequence[int], Content]], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, Sequence[int], Content]]:
    """Yield the tensors of a weight update, (name, dtype, shape, content), and validate them on the way.

    ``shapes`` are those of the model's checkpoint. Raises `WeightMismatch` naming a tensor that is unknown, has another
    shape, is no floating-point tensor, occurs twice, or is missing at the end.
    """
    missing = dict.fromkeys(shapes)
    for tensor in tensors:
        name, dtype, shape, _ = tensor
        if name not in shapes:
            raise WeightMismatch(f"tensor {name!r} is not in the engine's model")
        if name not in missing:
            raise WeightMismatch(f"tensor {name!r} came twice")
        if not dtype.startswith(("float", "bfloat")):
            raise WeightMismatch(f"tensor {name!r} has dtype {dtype}, the engine's is a floating-point one")
        if tuple(shape) != tuple(shapes[name]):
            raise WeightMismatch(f"tensor {name!r} has shape {tuple(shape)}, the engine's has {tuple(shapes[name])}")
        del missing[name]
        yield tensor
    if missing:
        first = next(iter(missing))
        raise WeightMismatch(f"tensor {first!r} is missing from the publication ({len(missing)} missing in all)")


@dataclass(frozen=True)
class ModelSpec:
    """Location of a model, and settings for loading it."""

    model_path: str
    device: str
    dtype: str
    attn_implementation: str
    max_length: int
    trust_remote_code: bool = False


def model_facts(spec: ModelSpec) -> tuple[PretrainedConfig, CheckpointNames, LayerShapes]:
    """Return a model's configuration, its checkpoint's tensor names, and the shapes of its linear layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code)
    with torch.device("meta"):
        model = policy_class(config).from_config(config, trust_remote_code=spec.trust_remote_code)
    return config, CheckpointNames(model), linear_layers(model)


def eos_token_ids(spec: ModelSpec, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation configuration, else the model configuration, else the
    tokenizer; empty if none of them has any."""
    from transformers import GenerationConfig

    try:
        generation_eos = GenerationConfig.from_pretrained(spec.model_path).eos_token_id
    except OSError:
        generation_eos = None  # A model without generation_config.json is complete.
    for eos in (generation_eos, config.get_text_config(decoder=True).eos_token_id):
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    try:
        eos = load_tokenizer(spec).eos_token_id
    except OSError:
        return ()
    return () if eos is None else (int(eos),)


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored with the model, the same as for prompts.

    Raises ``OSError`` if there is none; transformers itself would create an empty one.
    """
    folder = Path(spec.model_path)
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        raise OSError(f"{folder} holds no tokenizer_config.json")
    try:
        return tokenizer.load_tokenizer(spec.model_path, trust_remote_code=spec.trust_remote_code)
    except ConfigError as error:
        raise OSError(str(error)) from error


_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """The tokenizer method that stop-string matching needs."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""


class StopStringMatcher:
    """Incremental matcher for the stop strings of one response. Does not decode the whole text at every token.

    Tokenizers decode a token differently at the start of a text, and a character may be split over several tokens, so a
    few earlier tokens are decoded again together with the new ones.
    """

    def __init__(self, decoder: Decoder, stop_strings: Iterable[str]) -> None:
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._tail_length = max(len(text) for text in self._stop_strings) - 1
        self._token_ids: list[int] = []
        self._context_start = 0
        self._settled = 0
        self._tail = ""

    def push(self, token_ids: Iterable[int]) -> bool:
        """Append tokens. Return True if they complete a stop string."""
        self._token_ids.extend(token_ids)
        context = self._decoder.decode(self._token_ids[self._context_start : self._settled])
        text = self._decoder.decode(self._token_ids[self._context_start :])
        recent = self._tail + text[len(context) :]
        matched = any(stop in recent for stop in self._stop_strings)
        if not text.endswith(_UNFINISHED):
            self._context_start, self._settled = self._settled, len(self._token_ids)
            self._tail = recent[max(len(recent) - self._tail_length, 0) :]
        return matched
