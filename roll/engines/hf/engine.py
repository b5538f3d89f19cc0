"""The engine of `hf_infer`: continuous batching over a transformers model, one synchronous `step` at a time.

Each step generates one token for every running request; requests join and leave between steps. Guarantee: on a CPU with
SDPA, the tokens and log-probabilities of a request are bitwise independent of the other requests in the batch and of
its arrival time. For this, a prompt is prefilled only with prompts of the same padded length, and decoding steps pad
rows and lengths to multiples for which the kernels' results do not depend on the shape. All methods must be called from
one thread.

Running requests are rows of a table, and have the same row in the KV cache. The first n rows are in use; when a request
ends, the last row moves into its place. A decoding step can therefore use plain views ``[:rows, :, :kv_length]`` of the
cache, without gathering and without a loop over requests. The cache grows geometrically in rows and length, and shrinks
only in `release`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from roll.algorithms.logprobs import token_logprobs
from roll.algorithms.routing import RoutingRecorder, RoutingShape
from roll.data.pictures import PictureProcessor, digest, picture_tokens
from roll.engines.base import EngineLoad, FinishReason, GenerateRequest, StopStringMatcher, TokenChunk, no_tokens
from roll.engines.hf.model import LENGTH_MULTIPLE, ROW_MULTIPLE, SlotCache, counter_uniforms, round_up, sample
from roll.engines.hf.weights import ModelEngine
from roll.engines.options import HFInferConfig

_ADMISSION_INTERVAL = 4
"""While requests run, new ones are admitted only at every fourth step, so that their prompts share a prefill pass."""


@dataclass(eq=False)
class ActiveRequest:
    """A request in the engine, with the state that is not in the `RequestTable`."""

    request: GenerateRequest
    matcher: StopStringMatcher | None = None
    streaming: bool = False
    """True to report a chunk after each step."""
    row: int = -1
    """Row in the table; -1 while the request is queued."""
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    """Results for the caller, in the caller's event loop: chunks, then the completion or an error."""


class HFEngine(ModelEngine):
    """Continuous-batching engine over one transformers model."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_length: int,
        options: HFInferConfig,
        end_tokens: tuple[int, ...],
        adapter_rank: int | None = None,
    ) -> None:
        """``max_length``: maximum length of prompt plus response. ``end_tokens``: end-of-sequence tokens.
        ``adapter_rank``: rank of the LoRA adapters in weight updates; None: updates contain all weights."""
        super().__init__(model, adapter_rank)
        self.load = EngineLoad()
        self.prefill_tokens = 0
        """Total number of prefilled tokens. A prompt shared by several requests counts once."""
        self._max_length = max_length
        self._options = options
        self._end_tokens = end_tokens
        config = model.config.get_text_config(decoder=True)
        self._vocabulary = config.vocab_size
        self._processor = PictureProcessor(model.name_or_path)
        self._placeholders = picture_tokens(model.config)
        threads = torch.get_num_threads() if self._device.type == "cpu" else 1
        self._min_rows = ROW_MULTIPLE * threads
        max_rows = max(round_up(options.max_running_requests, ROW_MULTIPLE), self._min_rows)
        self._cache = SlotCache(max_rows, max_length)
        self._table = RequestTable(max_length)
        self._recorder: RoutingRecorder | None = None
        self._watched: set[ActiveRequest] = set()
        self._streaming: set[ActiveRequest] = set()
        self._caches_dropped = False
        self._steps_since_admission = 0

    def record_routing(self) -> None:
        """Record the experts of all tokens. Call before the first request. Raises `UnroutableModel`."""
        self._recorder = RoutingRecorder(self._model)
        self._table.record_routing(self._recorder.shape)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._table)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for the KV cache."""
        return self._cache.num_bytes

    def figures(self) -> dict[str, Any]:
        """Return ``kv_bytes``, the total ``prefill_tokens``, and the ``load``; see `EngineLoad`."""
        load = {name: total for name, total in vars(self.load).items() if name != "preemptions"}
        return {"prefill_tokens": self.prefill_tokens, "kv_bytes": self.kv_bytes, "load": load}

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort these requests (None: all); their results are the tokens so far. Unknown ids are ignored."""
        names = None if request_ids is None else set(request_ids)
        everyone = (*self._table.requests, *self._waiting)
        chosen = [active for active in everyone if names is None or active.request.request_id in names]
        rows = [active.row for active in chosen if active.row >= 0]
        waiting = [active for active in chosen if active.row < 0]
        self._finish(np.array(rows, dtype=np.int64), ["abort"] * len(rows))
        for active in waiting:
            self._waiting.remove(active)
            self._events.append((active, no_tokens().completion(active.request.request_id, "abort")))

    def progress(self, known: Mapping[str, int]) -> list[tuple[ActiveRequest, TokenChunk]]:
        """Return, for running requests, the tokens after the first ``known[id]`` ones (default 0), if there are any."""
        chunks = [
            (active, self._table.chunk(active.row, known.get(active.request.request_id, 0)))
            for active in self._table.requests
        ]
        return [(active, chunk) for active, chunk in chunks if len(chunk.token_ids)]

    @torch.inference_mode()
    def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `InferStrategy.score`. Runs one forward pass per sequence, to limit the memory for logits.

        Raises ``ValueError`` for a sequence that does not fit the model, ``RuntimeError`` while asleep.
        """
        if self.asleep:
            raise RuntimeError("the engine sleeps; wake it before score")
        return [self._score(tokens) for tokens in token_ids]

    @torch.inference_mode()
    def step(self, admit: bool = True) -> None:
        """Admit queued requests (if ``admit``), and generate one token for every running request."""
        self.clock.set(True)
        if self._caches_dropped:
            self._prefill(range(self.running))
            self._caches_dropped = False
        if admit:
            self._admit()
        self._count_step()
        if self.running:
            self._decode()
        self.clock.set(False)

    def _count_step(self) -> None:
        room = self._options.max_running_requests * self._max_length
        self.load.steps += 1
        self.load.running += self.running
        self.load.waiting += self.waiting
        self.load.cache_use += float(self._table.column("length").sum()) / room

    def drop_caches(self) -> None:
        """Free the KV cache. The next step recomputes it from the tokens, with the then current weights."""
        self._cache.release()
        self._caches_dropped = True

    def _score(self, token_ids: np.ndarray) -> np.ndarray:
        longest = self._max_length
        if not 0 < len(token_ids) <= longest:
            raise ValueError(f"a sequence of {len(token_ids)} tokens cannot be scored; 1 to {longest} can")
        if token_ids.min() < 0 or token_ids.max() >= self._vocabulary:
            raise ValueError(f"a sequence to score has token ids outside the vocabulary of {self._vocabulary}")
        tokens = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        logprobs = np.zeros(len(token_ids), dtype=np.float32)
        logprobs[1:] = token_logprobs(logits, tokens[1:]).cpu().numpy()
        return logprobs

    def _admit(self) -> None:
        """Give free rows to queued requests, first come, first served, and prefill their prompts together."""
        self._steps_since_admission += 1
        free = self._options.max_running_requests - self.running
        if not self._waiting or not free:
            return
        if self.running and self._steps_since_admission < _ADMISSION_INTERVAL:
            return
        self._steps_since_admission = 0
        first = self.running
        for _ in range(min(free, len(self._waiting))):
            active = self._waiting.popleft()
            sampling = active.request.sampling
            end_tokens = () if sampling.ignore_eos else (*self._end_tokens, *sampling.stop_token_ids)
            self._table.add(active, end_tokens + self._placeholders)
            if active.matcher is not None:
                self._watched.add(active)
            if active.streaming:
                self._streaming.add(active)
        self._prefill(range(first, self.running))

    def _prefill(self, rows: Iterable[int]) -> None:
        """Compute the KV cache of all tokens of these rows except the last. Equal prompts are computed once."""
        buckets: dict[int, dict[tuple[str, bytes], list[int]]] = {}
        for row in rows:
            tokens = self._table.cached_tokens(row)
            if len(tokens):
                same_length = buckets.setdefault(prefill_length(len(tokens), self._max_length), {})
                pictures = digest(self._table.requests[row].request.prompt_pictures)
                same_length.setdefault((pictures, tokens.tobytes()), []).append(row)
                self.load.prompt_tokens += len(tokens)
        for length, rows_of_prompt in sorted(buckets.items()):
            # The vision tower's results depend on the pictures beside a picture, so these prompts have their own pass.
            for (pictures, _), group in rows_of_prompt.items():
                if pictures:
                    self._prefill_pass([group], length)
            groups = [group for (pictures, _), group in rows_of_prompt.items() if not pictures]
            per_pass = max(1, self._options.max_prefill_tokens // length)
            for start in range(0, len(groups), per_pass):
                self._prefill_pass(groups[start : start + per_pass], length)

    def _prefill_pass(self, groups: list[list[int]], length: int) -> None:
        """Run one forward pass over one prompt per group of rows, and copy the result to all rows of the group."""
        prompts = max(len(groups), -(-self._min_rows // length))
        input_ids = np.zeros((prompts, length), dtype=np.int64)
        for index, rows in enumerate(groups):
            tokens = self._table.cached_tokens(rows[0])
            input_ids[index, : len(tokens)] = tokens
            self.prefill_tokens += len(tokens)
            self.load.shared_tokens += len(tokens) * (len(rows) - 1)
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        arguments = {"input_ids": torch.from_numpy(input_ids).to(self._device)}
        pictures = self._table.requests[groups[0][0]].request.prompt_pictures
        if pictures:
            arguments = self._processor.model_arguments(arguments["input_ids"], [pictures, *[()] * (prompts - 1)])
        self._model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if pictures:
            shifts: Any = self._model.base_model.rope_deltas
            self._table.column("position_shift")[groups[0]] = int(shifts[0])
        sources = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])).to(self._device)
        targets = torch.tensor([row for rows in groups for row in rows], device=self._device)
        self._cache.reserve(self._padded_rows(), length)
        for layer, states in enumerate(cache.layers):
            self._cache.store(layer, states.keys, states.values, sources, targets)
        if self._recorder is not None:
            routed = self._recorder.take().reshape(prompts, length, *self._recorder.shape.of_token)
            for experts, rows in zip(routed, groups, strict=False):
                self._table.add_routing(rows, experts)

    def _padded_rows(self) -> int:
        return round_up(max(self.running, self._min_rows), ROW_MULTIPLE)

    def _decode(self) -> None:
        """Run one forward pass over the last token of every row, sample, and update the table."""
        count = self.running
        logits = self._next_logits()[:count]
        if self._recorder is not None:
            self._table.append_routing(self._recorder.take()[:count])
        temperature, top_k, top_p = (self._table.column(name) for name in ("temperature", "top_k", "top_p"))
        uniforms = counter_uniforms(self._table.column("seed"), self._table.token_indices())
        chosen, logprobs = sample(logits, temperature, top_k, top_p, uniforms)
        tokens = chosen.cpu().numpy()
        self._table.append(tokens, logprobs.cpu().numpy(), self.version)
        self.generated_tokens += count
        self._finish_ended(tokens)
        for active in self._streaming:
            self._events.append((active, self._table.last_token(active.row)))

    def _next_logits(self) -> torch.Tensor:
        """Return the logits after the last token of every row, ``[padded rows, vocabulary]``. Padding rows have token 0
        at position 0."""
        count, rows = self.running, self._padded_rows()
        input_ids = np.zeros(rows, dtype=np.int64)
        positions = np.zeros(rows, dtype=np.int64)
        shifts = np.zeros(rows, dtype=np.int64)
        input_ids[:count] = self._table.last_tokens()
        positions[:count] = self._table.column("length") - 1
        shifts[:count] = self._table.column("position_shift")
        kv_length = round_up(int(positions.max()) + 1, LENGTH_MULTIPLE)
        self._cache.reserve(rows, kv_length)
        position_ids = torch.from_numpy(positions).to(self._device)
        self._cache.begin_step(torch.arange(rows, device=self._device), position_ids, kv_length)
        future = torch.arange(kv_length, device=self._device) > position_ids[:, None]
        mask = torch.zeros(future.shape, dtype=self._model.dtype, device=self._device)
        mask.masked_fill_(future, -torch.inf)
        output = self._model(
            input_ids=torch.from_numpy(input_ids).to(self._device)[:, None],
            attention_mask=mask[:, None, None, :],
            position_ids=(position_ids + torch.from_numpy(shifts).to(self._device))[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _finish_ended(self, tokens: np.ndarray) -> None:
        stopped, at_limit = self._table.ended(tokens)
        for active in self._watched:
            if active.matcher is not None and active.matcher.push([int(tokens[active.row])]):
                stopped[active.row] = True
        rows = np.flatnonzero(stopped | at_limit)
        self._finish(rows, ["stop" if stopped[row] else "length" for row in rows])

    def _finish(self, rows: np.ndarray, reasons: list[FinishReason]) -> None:
        """Report the requests of these rows as ended, and remove the rows."""
        if not len(rows):
            return
        for row, reason in zip(rows, reasons, strict=True):
            active = self._table.requests[row]
            whole = self._table.chunk(row, 0).completion(active.request.request_id, reason)
            if active.request.with_routing and reason != "abort":
                whole.routed_experts = self._table.routing(row)
            self._events.append((active, whole))
            self._watched.discard(active)
            self._streaming.discard(active)
        length = int(self._table.column("length").max())
        sources, targets = self._table.remove(rows)
        if len(sources) and not self._caches_dropped:
            with torch.inference_mode():
                self._cache.move(sources, targets, length)


def prefill_length(tokens: int, max_length: int) -> int:
    """Return the padded length of a prefill pass. There are about eight different lengths per power of two."""
    step = max(LENGTH_MULTIPLE, 1 << max(tokens.bit_length() - 3, 0))
    return min(round_up(tokens, step), round_up(max_length, LENGTH_MULTIPLE))


_PARAMETERS = np.dtype(
    [
        ("length", np.int64),
        ("prompt_length", np.int64),
        ("routed", np.int64),
        ("limit", np.int64),
        ("first_token_index", np.int64),
        ("position_shift", np.int64),  # what pictures in the prompt add to the positions behind them
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
    ]
)
_NO_TOKEN = -1
_SEED_MASK = (1 << 64) - 1


class RequestTable:
    """Tokens, log-probabilities, versions and sampling parameters of the running requests, one row each."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self.requests: list[ActiveRequest] = []
        self._parameters = np.zeros(0, dtype=_PARAMETERS)
        self._tokens = np.zeros((0, max_length), dtype=np.int64)
        self._logprobs = np.zeros((0, max_length), dtype=np.float32)
        self._versions = np.zeros((0, max_length), dtype=np.int32)
        self._experts: np.ndarray | None = None
        self._stop_ids = np.zeros((0, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def record_routing(self, shape: RoutingShape) -> None:
        """Make room for the experts of each token. Call while the table is empty."""
        self._experts = np.zeros((0, self._max_length, *shape.of_token), dtype=shape.dtype)

    def add_routing(self, rows: Sequence[int], experts: np.ndarray) -> None:
        """Record the experts of the first tokens of these rows, ``[tokens, layers, top_k]``, which are the same.

        Those that a token had when the next one was sampled stay, also if its cache is computed again.
        """
        assert self._experts is not None
        for row in rows:
            known, end = self._parameters["routed"][row], self._parameters["length"][row] - 1
            self._experts[row, known:end] = experts[known:end]
            self._parameters["routed"][row] = end

    def append_routing(self, experts: np.ndarray) -> None:
        """Record the experts of the last token of every row, ``[rows, layers, top_k]``."""
        assert self._experts is not None
        lengths = self.column("length")
        self._experts[np.arange(len(self)), lengths - 1] = experts
        self.column("routed")[:] = lengths

    def routing(self, row: int) -> np.ndarray | None:
        """Return the experts of the row's tokens except the last, ``[tokens - 1, layers, top_k]``; None if they are not
        recorded."""
        return None if self._experts is None else self._experts[row, : self._parameters["length"][row] - 1].copy()

    def column(self, name: str) -> np.ndarray:
        """Return one parameter of all rows, ``[rows]``, as a view."""
        return self._parameters[name][: len(self)]

    def add(self, active: ActiveRequest, stop_token_ids: tuple[int, ...]) -> None:
        """Append a row for a request. ``stop_token_ids``: all token ids that end it."""
        prompt, sampling = active.request.prompt_token_ids, active.request.sampling
        row = len(self)
        if row == len(self._parameters):
            self._add_rows()
        self._parameters[row] = (
            len(prompt),
            len(prompt),
            0,
            min(len(prompt) + sampling.max_new_tokens, self._max_length),
            active.request.first_token_index,
            0,
            sampling.seed & _SEED_MASK,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        self._tokens[row, : len(prompt)] = prompt
        if len(stop_token_ids) > self._stop_ids.shape[1]:
            wider = ((0, 0), (0, len(stop_token_ids) - self._stop_ids.shape[1]))
            self._stop_ids = np.pad(self._stop_ids, wider, constant_values=_NO_TOKEN)
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(stop_token_ids)] = stop_token_ids
        active.row = row
        self.requests.append(active)

    def cached_tokens(self, row: int) -> np.ndarray:
        """Return the tokens that must be in the KV cache before the next step: all except the last."""
        return self._tokens[row, : self._parameters["length"][row] - 1]

    def last_tokens(self) -> np.ndarray:
        """Return the last token of every row, the input of the next step, int64 ``[rows]``."""
        return self._tokens[np.arange(len(self)), self.column("length") - 1]

    def token_indices(self) -> np.ndarray:
        """Return each row's position in its random stream for the next token, int64 ``[rows]``."""
        return self.column("length") - self.column("prompt_length") + self.column("first_token_index")

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one token to every row."""
        lengths = self.column("length")
        rows = np.arange(len(self))
        self._tokens[rows, lengths] = tokens
        self._logprobs[rows, lengths] = logprobs
        self._versions[rows, lengths] = version
        lengths += 1

    def ended(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows have ended with the last ``tokens``: by a stop token, and by the length limit. Both are
        bool ``[rows]``."""
        stopped = (self._stop_ids[: len(self)] == tokens[:, None]).any(axis=1)
        return stopped, self.column("length") >= self.column("limit")

    def chunk(self, row: int, start: int) -> TokenChunk:
        """Return the row's response tokens from number ``start`` on."""
        return self._from(row, int(self._parameters["prompt_length"][row]) + start)

    def last_token(self, row: int) -> TokenChunk:
        """Return the row's last token, as a chunk."""
        return self._from(row, int(self._parameters["length"][row]) - 1)

    def _from(self, row: int, position: int) -> TokenChunk:
        new = slice(position, int(self._parameters["length"][row]))
        return TokenChunk(
            self._tokens[row, new].astype(np.int32), self._logprobs[row, new].copy(), self._versions[row, new].copy()
        )

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Remove rows, and fill the gaps with rows from the end. Return (sources, targets) of the moved rows."""
        remaining = len(self) - len(rows)
        leaving = np.zeros(len(self), dtype=bool)
        leaving[rows] = True
        targets = np.flatnonzero(leaving[:remaining])
        sources = remaining + np.flatnonzero(~leaving[remaining:])
        if len(sources):
            longest = int(self.column("length").max())
            for array in (self._tokens, self._logprobs, self._versions, self._experts):
                if array is not None:
                    array[targets, :longest] = array[sources, :longest]
            self._parameters[targets] = self._parameters[sources]
            self._stop_ids[targets] = self._stop_ids[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
            self.requests[target].row = int(target)
        del self.requests[remaining:]
        return sources, targets

    def _add_rows(self) -> None:
        """Double the number of rows, for amortised constant cost."""
        rows = max(2 * len(self._parameters), ROW_MULTIPLE)
        longest = int(self._parameters["length"].max(initial=0))
        self._parameters = _enlarged(self._parameters, rows)
        self._stop_ids = _enlarged(self._stop_ids, rows)
        self._tokens, self._logprobs, self._versions = (
            _enlarged(array, rows, longest) for array in (self._tokens, self._logprobs, self._versions)
        )
        if self._experts is not None:
            self._experts = _enlarged(self._experts, rows, longest)


def _enlarged(array: np.ndarray, rows: int, columns: int | None = None) -> np.ndarray:
    """Return the array enlarged with rows of zeros. Only the first ``columns`` (None: all) are copied."""
    grown = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    kept = (slice(len(array)), slice(columns))[: array.ndim]
    grown[kept] = array[kept]
    return grown
