"""Engine processes with something wrong, named in the configurations of tests as `odd_engines:Name`."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from roll.engines.base import Completion
from roll.engines.worker import InferWorker

SECONDS_PER_TOKEN = 0.1
SHIFT = 0.5
"""Nats by which the odd engines' log-probabilities are too small."""


class KilledTwice(InferWorker):
    """Generates slowly. The first replica is killed while it generates, once some of its tokens are known to the pool;
    the second one while it takes its third version. Each only once in a run."""

    async def start(self, spec):
        await super().start(spec)
        self._looks = self._loads = 0
        engine = self._strategy._thread.engine
        step = engine.step

        def slow_step(admit=True):
            time.sleep(SECONDS_PER_TOKEN)
            step(admit)

        engine.step = slow_step

    async def progress(self, known=None):
        if known and any(known.values()):
            # The tokens of an earlier look are with the pool.
            self._die_once(rank=0)
        return await super().progress(known)

    async def load_weights(self, *args):
        self._loads += 1
        if self._loads == 3:
            self._die_once(rank=1)
        return await super().load_weights(*args)

    def _die_once(self, rank):
        if first_time(self.identity, rank):
            os.kill(os.getpid(), signal.SIGKILL)


class KilledTwiceWithVLLM(InferWorker):
    """Of the first replica vLLM's process is killed with requests that it has just been given, after its third version;
    the second one is killed itself while it takes its third version. Each only once in a run."""

    async def start(self, spec):
        await super().start(spec)
        self._loads = 0

    async def submit(self, requests):
        await super().submit(requests)
        # On a busy machine a look at the processes once found none; there is another one with the next requests.
        engines = [child for child in psutil.Process().children() if child.name().startswith("VLLM::EngineCor")]
        if self._loads >= 3 and engines and first_time(self.identity, rank=0):
            engines[0].kill()

    async def load_weights(self, *args):
        self._loads += 1
        if self._loads == 3 and first_time(self.identity, rank=1):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().load_weights(*args)


def first_time(identity, rank):
    """Whether this is the replica ``rank`` and was not asked this before; remembered over deaths."""
    marker = Path(identity.log_dir) / f"killed-{rank}"
    if identity.rank != rank or marker.exists():
        return False
    marker.touch()
    return True


class ShiftedRecord(InferWorker):
    """Says of its tokens that they were less probable than they were."""

    async def collect(self, wait_seconds):
        ended = await super().collect(wait_seconds)
        return [
            replace(item, logprobs=item.logprobs - np.float32(SHIFT)) if isinstance(item, Completion) else item
            for item in ended
        ]


class ShiftedScores(InferWorker):
    """Computes something else than the trainer from its second version on."""

    async def score(self, token_ids):
        shift = SHIFT if self._strategy.stats()["version"] else 0.0
        return [scores - np.float32(shift) for scores in await super().score(token_ids)]


class OppositeExperts(InferWorker):
    """Its routers choose those experts that the same weights would choose last elsewhere."""

    async def start(self, spec):
        await super().start(spec)
        for name, module in self._strategy._thread.engine._model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_pre_hook(lambda module, args: (-args[0],))
