"""The role `actor_logp`: computes log-probabilities from before the first update on a batch, on devices of its own.

Training step s (from 0) needs the log-probabilities under version s, exactly. The role loads each version as soon as
the trainer has gathered it, independently of the engines, and computes only samples of that step with it. So the values
equal those that the trainer would compute, but for rounding. This saves time: the trainer updates on some rows of a
batch while the role computes the next ones, and groups that finish early are computed before the batch is complete.

The code is pure bookkeeping over two process groups. It waits for nothing but the trainer's weights, so it cannot be
part of a deadlock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.data.records import ROUTED, SampleBatch
from roll.tracking.waits import LOGP, TRAIN, waiting
from roll.trainers.step import PROMPT_PICTURES
from roll.weights.buffers import WeightBuffers
from roll.weights.publisher import Publication

if TYPE_CHECKING:
    from roll.pipeline.algorithm import TrainingBatch
    from roll.pipeline.recorder import RunRecorder

PIECES_PER_BATCH = 8
"""Minimum number of pieces into which a batch is split, if it has enough samples. The trainer starts once the first
piece is computed; smaller pieces fill micro-batches less well."""


class LogProbGroup(Protocol):
    """The methods of `TrainerGroup` that the role uses."""

    async def load_weights(self, publication: Publication) -> None:
        """Load a published version, and verify it."""

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token, float32 ``[total_tokens]``."""


@dataclass(eq=False)
class Request:
    """Samples whose log-probabilities have been requested."""

    step: int
    data: SampleBatch
    begun: bool = False
    values: asyncio.Future[np.ndarray] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Log-probabilities, float32 ``[total_tokens]``."""


class LogProbRole:
    """Interface of the role for the stages. `run` does the work."""

    def __init__(
        self,
        group: LogProbGroup,
        send: Callable[[int], Awaitable[Publication]],
        buffers: WeightBuffers,
        recorder: RunRecorder,
        temperature: float,
        least_rows: int = 1,
    ) -> None:
        """``send``: sends a gathered version and returns its publication. ``least_rows``: least samples per piece."""
        self.group = group
        self._send = send
        self._buffers = buffers
        self._recorder = recorder
        self._temperature = temperature
        self._least_rows = least_rows
        self._version = -1
        self._gathered: deque[int] = deque()
        self._publications: dict[int, asyncio.Future[Publication]] = {}
        self._requests: list[Request] = []
        """Requests not started yet, in order."""
        self._early: list[tuple[TrainingBatch, Request]] = []
        """Parts of incomplete batches, with their requests."""
        self._woken = asyncio.Event()

    def gathered(self, version: int) -> None:
        """Report that the trainer has gathered a version. Its weight buffer is held until the role has loaded it."""
        self._buffers.hold(version, LOGP)
        self._publications[version] = asyncio.get_running_loop().create_future()
        self._gathered.append(version)
        self._woken.set()

    async def publication(self, version: int) -> Publication:
        """Return the publication of a gathered version, to load into the engines. Call it once per version."""
        with waiting(LOGP, f"version {version} to be sent"):
            publication = await self._publications[version]
        del self._publications[version]
        return publication

    def begin(self, part: TrainingBatch) -> None:
        """Request the log-probabilities of a part of a batch, to be computed once its weights are loaded.

        If this has not started when the batch is complete, `in_turn` requests the rows again, in training order.
        """
        self._early.append((part, self._ask(part.step, wanted_of(part.data))))

    def pieces(self, rows: np.ndarray, updates: int) -> list[np.ndarray]:
        """Split the rows of one optimizer step into the pieces to train on. ``updates``: optimizer steps per batch."""
        most = max(1, len(rows) // self._least_rows)
        return np.array_split(rows, min(math.ceil(PIECES_PER_BATCH / updates), most))

    async def in_turn(self, batch: TrainingBatch, pieces: Sequence[np.ndarray]) -> AsyncIterator[np.ndarray]:
        """Yield each of the ``pieces`` (row indices) once the batch has the ``proximal_logprobs`` of these rows.

        Each row must be in exactly one piece. Later pieces are computed in the meantime and keep changing the batch, so
        read only rows that were already yielded.
        """
        data, wanted = batch.data, wanted_of(batch.data)
        values = data.tokens["proximal_logprobs"] = np.zeros(int(data.lengths.sum()), dtype=np.float32)
        sources = self._begun(batch)
        missing = np.ones(len(data), dtype=bool)
        for _, rows in sources:
            missing[rows] = False
        for piece in pieces:
            rows = piece[missing[piece]]
            if len(rows):
                sources.append((self._ask(batch.step, await asyncio.to_thread(wanted.select, rows)), rows))
        for piece in pieces:
            for source in [each for each in sources if np.isin(each[1], piece).any()]:
                request, rows = source
                with waiting(LOGP, f"log-probabilities for step {batch.step + 1}"):
                    found = await request.values
                values[token_places(data, rows)] = found
                sources.remove(source)
            yield piece

    async def run(self) -> None:
        """Load versions and process requests in order. Runs until cancelled; raises every error."""
        while True:
            request = next((each for each in self._requests if each.step == self._version), None)
            if self._gathered:
                await self._load(self._gathered.popleft())
            elif request is not None:
                await self._compute(request)
            else:
                self._woken.clear()
                awaited = [each.step for each in self._requests]
                if not awaited:
                    await self._woken.wait()
                    continue
                with waiting(TRAIN, f"the weights of version {awaited[0]}"):
                    await self._woken.wait()

    async def _load(self, version: int) -> None:
        publication = await self._send(version)
        self._publications[version].set_result(publication)
        with self._recorder.busy(LOGP):
            await self.group.load_weights(publication)
        self._version = version
        self._buffers.release(version, LOGP)

    async def _compute(self, request: Request) -> None:
        self._requests.remove(request)
        request.begun = True
        with self._recorder.busy(LOGP):
            values = await self.group.log_probs(request.data, self._temperature)
        self._recorder.count_tokens(LOGP, int(request.data.lengths.sum()))
        request.values.set_result(values)

    def _ask(self, step: int, data: SampleBatch) -> Request:
        request = Request(step, data)
        self._requests.append(request)
        self._woken.set()
        return request

    def _begun(self, batch: TrainingBatch) -> list[tuple[Request, np.ndarray]]:
        """Withdraw the early requests of a batch that have not started. Return the started ones, with their rows."""
        early = [each for each in self._early if each[0].step == batch.step]
        self._early = [each for each in self._early if each[0].step != batch.step]
        counts = np.array([len(group.samples) for group in batch.groups])
        ends = np.cumsum(counts)
        rows = {
            group.group_id: np.arange(end - count, end)
            for group, count, end in zip(batch.groups, counts, ends, strict=True)
        }
        begun = []
        for part, request in early:
            if request.begun:
                begun.append((request, np.concatenate([rows[group.group_id] for group in part.groups])))
            else:
                self._requests.remove(request)
        return begun


def wanted_of(data: SampleBatch) -> SampleBatch:
    """Return the fields that a forward pass needs, without copying them."""
    names = ("token_ids", "response_mask", ROUTED)
    seen = {PROMPT_PICTURES: data.per_sample[PROMPT_PICTURES]} if PROMPT_PICTURES in data.per_sample else {}
    return SampleBatch(data.lengths, {name: data.tokens[name] for name in names if name in data.tokens}, seen)


def token_places(data: SampleBatch, rows: np.ndarray) -> np.ndarray:
    """Return the indices of these rows' tokens in the token fields, int64 ``[tokens of the rows]``."""
    offsets = data.offsets
    return np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
