"""The interface of every generation engine, and what all of them share: checks of requests, facts of the model, stop
strings.

An engine knows nothing of groups, batches or training steps. Each request joins and leaves on its own. Its tokens carry
the log-probability of the distribution they were sampled from and the version of the weights that produced them. All
methods belong to one event loop; an engine that computes in a thread hides it.

Names and shapes of a checkpoint's tensors are what a trainer publishes. A model's end tokens come from where
transformers looks for them, so that every engine ends a response at the same ones. transformers is imported when a
model is read, because the run's own process imports this module too.
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
class PictureRequest:
    """A picture to draw."""

    prompt: str
    sampling: PictureSampling
    window: range | None
    """The steps that have noise, and are the tokens of the result. None: no step has any, and every step is a token of
    log-probability 0."""


@dataclass(frozen=True)
class Picture:
    """A picture that was drawn."""

    image: np.ndarray
    """uint8 ``[height, width, 3]``."""
    latents: np.ndarray
    """float32 ``[noisy steps + 1, channels, height, width]``: before the first step that has noise, and after each of
    them; without noise only the last one."""
    newest_version: int = -1
    """Newest version of the weights behind any of its steps, also those without noise."""


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
    with_text: bool = False
    """True if the engine's process also decodes the response, so that the run's own process need not."""
    picture: PictureRequest | None = None
    """What an engine of pictures draws. The seed is that of the sampling parameters, of which it reads nothing else."""


@dataclass
class Completion:
    """The result of a request: sampled tokens, their log-probabilities and the weight versions behind them."""

    request_id: str
    token_ids: np.ndarray
    """int32 ``[new]``."""
    logprobs: np.ndarray
    """float32 ``[new]``."""
    versions: np.ndarray
    """int32 ``[new]``."""
    finish_reason: FinishReason
    text: str | None = None
    """The response as text, without special tokens; None if it was not decoded."""
    picture: Picture | None = None
    """The picture, of which the tokens are the numbers of the steps that have noise; None if the response is text."""

    def after(self, known: int) -> TokenChunk:
        """Return the tokens beyond the first ``known``, as the last chunk of the request."""
        return TokenChunk(self.token_ids[known:], self.logprobs[known:], self.versions[known:], self.finish_reason)


@dataclass
class TokenChunk:
    """New tokens of a running request since its last chunk. The last chunk carries the finish reason."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None

    def completion(self, request_id: str, finish_reason: FinishReason) -> Completion:
        """Return these tokens as the whole response."""
        return Completion(request_id, self.token_ids, self.logprobs, self.versions, finish_reason)


def no_tokens() -> TokenChunk:
    """Return the only chunk of a request that was aborted before it began."""
    return TokenChunk(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")


Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""


@dataclass
class PreparedWeights:
    """A weight update that fits the engine's model, waiting to be loaded."""

    held: HeldWeights
    """Description of the weights as the engine would hold them."""
    content: Any
    """The tensors, in the form that the engine loads."""
    layout: Layout = field(default_factory=dict)
    """Filled in by an engine that compares it with what it holds after the load."""


@dataclass
class EngineLoad:
    """Totals over all steps of an engine. Divided by ``steps``, differences of them are means over a time."""

    steps: int = 0
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
    """One engine replica."""

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
        strategy_config: dict[str, Any],
    ) -> None:
        """``eos_token_ids`` defaults to the model's own. On GPUs the model is split over ``devices_per_engine``. An
        engine with ``shares_devices`` has to sleep at times. ``transport`` names the transport of weight updates. With
        an ``adapter_rank`` they bring adapters (`roll.weights.adapters`), and the engine keeps the model that it has
        loaded."""
        self._spec = ModelSpec(model_path, device, dtype, attn_implementation, max_length, trust_remote_code)
        self._eos_token_ids = eos_token_ids
        self._devices = devices_per_engine if device == "cuda" else 1
        self._shares_devices = shares_devices
        self._transport = transport
        self._adapter_rank = adapter_rank
        self._strategy_config = strategy_config
        self._tokenizer: Decoder | None = None

    @abstractmethod
    async def start(self) -> None:
        """Load the model (as version 0) and accept requests."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Run one request to its end. An aborted request returns normally, with `finish_reason='abort'` and its tokens.

        Raises ``ValueError`` for a request that cannot run, `EngineFailed` if the engine fails.
        """

    @abstractmethod
    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Run a request like `generate`, yielding its tokens as they come. Leaving the iteration early aborts it."""

    @abstractmethod
    async def progress(self, known: Mapping[str, int]) -> dict[str, TokenChunk]:
        """Return the new tokens of each running request beyond the first ``known[id]`` (absent: 0).

        A request without new tokens may be left out, and so may one that has not begun. A chunk that ends its request
        carries the finish reason.

        The answer also shows that the engine is alive, because it comes from the decoding loop between two steps. An
        engine that is stuck in a step does not answer. Paused and sleeping engines do. Raises `EngineFailed`.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now. Unknown ids are ignored: they may just have finished."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. Return when no step runs; new requests are queued.

        `drain` waits for the running requests and starts no queued one; it raises ``RuntimeError`` if another `pause`,
        `resume` or `shutdown` interrupts it. `keep` freezes running requests with their caches. `resume` drops the
        caches, which are rebuilt from prompts and partial tokens when the engine resumes.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Resume decoding after `pause`. Raises ``RuntimeError`` while the engine sleeps."""

    @abstractmethod
    async def prepare_weights(self, buckets: Iterable[WeightBucket], version: int) -> HeldWeights:
        """Receive a weight update while requests run, without changing the weights in use.

        Returns a description of the weights as `load_weights` will load them. An update that was prepared before is
        discarded. Raises `WeightMismatch`
        naming the tensor if a name is unknown or missing, or a shape differs.
        """

    @abstractmethod
    async def load_weights(self, version: int) -> HeldWeights:
        """Replace all weights by the prepared ones, or none; only while paused or idle.

        Raises ``RuntimeError`` if this version is not the one prepared, `EngineFailed` for a load that stopped halfway.
        """

    @abstractmethod
    async def sleep(self, discard: bool = False) -> bool:
        """Free the caches and move the weights off the device; only while paused or idle. Harmless to repeat.

        With ``discard`` an engine may drop its weights, and then returns True: between `wake` and `resume`,
        `load_weights` must bring others. The engine stays paused until then.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`. Requests continue from prompt plus partial tokens. A paused engine stays paused."""

    @abstractmethod
    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probability of each token given those before it, under the current weights, at temperature 1
        and without truncation.

        ``token_ids`` is int32 ``[length]`` for each sequence, with at least one token and fewer than the engine's
        longest sequence. Returns float32 ``[length]`` for each, 0 at the first token. May run beside requests; the
        engine must be awake and not paused. Raises ``ValueError`` for a sequence that does not fit the model.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return at least `running`, `waiting`, `version`, `generated_tokens` (total), `busy_seconds` (total) and
        `busy_spans` (the latest ones, in seconds since the epoch; see `BusySpans`); and `load`, the fields of
        `EngineLoad` that are known."""

    @abstractmethod
    async def shutdown(self) -> None:
        """End all requests as aborted and free everything. Harmless to repeat."""

    async def memory(self) -> Mapping[str, float]:
        """Return the memory of the process that computes (see `memory_in_use`); empty if it is not known."""
        return memory_in_use()

    async def base_checksums(self) -> Mapping[str, int]:
        """Return the checksums of the model that was loaded at the start, in the engine's precision, by the names of a
        checkpoint. To be called before the first adapters are loaded. Raises `WeightMismatch` for a model that cannot
        be compared."""
        raise RuntimeError(f"{type(self).__name__} cannot be given adapters alone")

    async def transfer_step(self, step: TransferStep, payload: Any) -> None:
        """Run one step of the engine library's own transfer, in which the trainer pushes by NCCL or CUDA IPC."""
        raise RuntimeError(f"weights cannot be pushed into {type(self).__name__}")

    async def weights_pushed(self, version: int, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> HeldWeights:
        """Record a completed push and return what the engine holds. ``layout``: name -> (dtype name, shape)."""
        raise RuntimeError(f"weights cannot be pushed into {type(self).__name__}")

    def _prepared_for(self, version: int) -> PreparedWeights:
        """Return the prepared weights. Raises ``RuntimeError`` if they are not of this version."""
        if self._prepared is None or self._prepared.held.version != version:
            held = "nothing" if self._prepared is None else f"version {self._prepared.held.version}"
            raise RuntimeError(f"version {version} is to be loaded, but {held} was prepared")
        return self._prepared

    def _read_facts(self, config: PretrainedConfig) -> None:
        """Take the vocabulary, and the end tokens unless they were given, from the model's configuration."""
        self._vocabulary = config.get_text_config(decoder=True).vocab_size
        given = self._eos_token_ids
        self._end_tokens = eos_token_ids(self._spec, config) if given is None else tuple(given)

    def _check_request(self, request: GenerateRequest) -> None:
        """Raise ``ValueError`` for a request that cannot run."""
        check_request(request, self._spec.max_length, self._vocabulary)

    def _matcher_for(self, request: GenerateRequest) -> StopStringMatcher | None:
        """Return the matcher of a request's stop strings, which has seen the tokens of earlier attempts; None if no
        stop string may end the response.

        The tokenizer is loaded for the first request that needs it. Raises ``ValueError`` if that fails.
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
    """The engine has failed for good. Every request fails with this error, which carries the cause."""


@dataclass
class BusyClock:
    """Total seconds of computing, and the latest spans of computing."""

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

    def stats(self) -> dict[str, Any]:
        """Return `busy_seconds` and `busy_spans` for the engine's stats, as of the last `set`."""
        return {"busy_seconds": self.total, "busy_spans": self.spans.recent()}


def check_request(request: GenerateRequest, max_length: int, vocabulary: int) -> None:
    """Raise ``ValueError`` naming the request and what is wrong with it."""
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
    """Yield the tensors of a weight update, each (name, dtype, shape, anything else).

    Raises ``WeightMismatch`` naming a tensor that does not fit the ``shapes`` of the model's checkpoint, comes twice,
    or is missing at the end.
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
    """Location of a model, and how to load and run it."""

    model_path: str
    device: str
    dtype: str
    attn_implementation: str
    max_length: int
    trust_remote_code: bool = False


def model_facts(spec: ModelSpec) -> tuple[PretrainedConfig, CheckpointNames, LayerShapes]:
    """Return the model's configuration, the tensors of its checkpoint, and its linear layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    return config, CheckpointNames(model), linear_layers(model)


def eos_token_ids(spec: ModelSpec, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the end tokens of the generation configuration, else of the model configuration, else of the tokenizer.
    Empty if none of them names an end token."""
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
    """Return the tokenizer stored with the model, which also reads the prompts.

    Raises ``OSError`` if there is none. For a folder without a tokenizer, transformers itself would invent an empty
    one.
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
    """The part of a tokenizer that matching needs."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""


class StopStringMatcher:
    """Matcher of one response's stop strings, token by token and without decoding the whole text again.

    A tokenizer decodes a token differently at the start of a text than inside it, and a character may be spread over
    several tokens, so a few earlier tokens are decoded along with the new ones.
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
        """Add tokens. Return True if the text now contains a stop string that it did not contain before."""
        self._token_ids.extend(token_ids)
        context = self._decoder.decode(self._token_ids[self._context_start : self._settled])
        text = self._decoder.decode(self._token_ids[self._context_start :])
        recent = self._tail + text[len(context) :]
        matched = any(stop in recent for stop in self._stop_strings)
        if not text.endswith(_UNFINISHED):
            self._context_start, self._settled = self._settled, len(self._token_ids)
            self._tail = recent[max(len(recent) - self._tail_length, 0) :]
        return matched
