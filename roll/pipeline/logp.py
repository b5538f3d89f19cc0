"""Log-probabilities before the first update on a batch, by a role with devices of its own (`actor_logp`).

They are those of the weights with which the training step s (from 0) begins: version s, no older and no newer one. The
role gets each version as soon as the trainer has gathered it, whatever the engines still do, and computes with it only
what belongs to its step. So the numbers are those that the trainer itself would compute, but for rounding. What is
gained is time: the trainer takes its updates on some rows of a batch while the role computes the next rows, and what
had finished before the batch was full is computed before.

Pure bookkeeping over two process groups; it waits for nothing but the trainer's weights, so it cannot take part in a
deadlock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from roll.data.records import SampleBatch
from roll.tracking.waits import LOGP, TRAIN, waiting
from roll.weights.buffers import WeightBuffers
from roll.weights.publisher import Publication

if TYPE_CHECKING:
    from roll.pipeline.algorithm import TrainingBatch
    from roll.pipeline.recorder import RunRecorder

PIECES_PER_BATCH = 8
"""Number of pieces of a batch that are waited for one after the other, at least, if it has so many samples. The trainer
waits for the first one; smaller pieces fill micro-batches less well."""


class LogProbGroup(Protocol):
    """The calls that the ranks of the role receive (`TrainerGroup`)."""

    async def load_weights(self, publication: Publication) -> None:
        """Replace all weights by those of a version, verified."""

    async def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return float32 ``[total_tokens]``."""


@dataclass(eq=False)
class Request:
    """Samples whose log-probabilities are wanted."""

    step: int
    data: SampleBatch
    begun: bool = False
    values: asyncio.Future[np.ndarray] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """float32 ``[total_tokens]``."""


class LogProbRole:
    """The role, as the stages see it. `run` does the work."""

    def __init__(
        self,
        group: LogProbGroup,
        send: Callable[[int], Awaitable[Publication]],
        buffers: WeightBuffers,
        recorder: RunRecorder,
        temperature: float,
        least_rows: int = 1,
    ) -> None:
        """``send`` hands over a version that the trainer has gathered. ``least_rows``: fewest samples of a piece."""
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
        """Requests that are not begun, in order."""
        self._early: list[tuple[TrainingBatch, Request]] = []
        """Parts of a batch, with what was asked for before the batch was full."""
        self._woken = asyncio.Event()

    def gathered(self, version: int) -> None:
        """Note that the trainer has gathered a version. Its buffer is held until the role has loaded it."""
        self._buffers.hold(version, LOGP)
        self._publications[version] = asyncio.get_running_loop().create_future()
        self._gathered.append(version)
        self._woken.set()

    async def publication(self, version: int) -> Publication:
        """Return a gathered version as it was sent, for the engines; once."""
        with waiting(LOGP, f"version {version} to be sent"):
            publication = await self._publications[version]
        del self._publications[version]
        return publication

    def begin(self, part: TrainingBatch) -> None:
        """Ask for a part of a batch, as soon as its weights are there. What is not begun when the batch is full is
        asked for again, in the order in which it is trained on."""
        self._early.append((part, self._ask(part.step, wanted_of(part.data))))

    def pieces(self, rows: np.ndarray, updates: int) -> list[np.ndarray]:
        """Cut the rows of one of so many ``updates`` of a batch into the pieces that are trained on one by one."""
        most = max(1, len(rows) // self._least_rows)
        return np.array_split(rows, min(math.ceil(PIECES_PER_BATCH / updates), most))

    async def in_turn(self, batch: TrainingBatch, pieces: Sequence[np.ndarray]) -> AsyncIterator[np.ndarray]:
        """Yield piece after piece (rows of the batch) when the batch has the ``proximal_logprobs`` of its rows.

        The pieces have each row once. The rows of the next pieces are computed meanwhile. Fields of the batch get new
        values until the end, so only rows that were yielded are to be read.
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
        """Load the versions and compute what is asked for, in order. Never returns; raises what goes wrong."""
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
        """Withdraw the early requests of a batch that are not begun. Return the others, with their rows."""
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
    """Return what a forward pass needs of a batch; nothing is copied."""
    return SampleBatch(data.lengths, {name: data.tokens[name] for name in ("token_ids", "response_mask")})


def token_places(data: SampleBatch, rows: np.ndarray) -> np.ndarray:
    """Return int64 ``[tokens of the rows]``: the places of the tokens of these rows in the batch's token fields."""
    offsets = data.offsets
    return np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
