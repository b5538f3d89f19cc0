"""Run an engine in this process, without Ray, and serve it at an HTTP endpoint."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Literal
from uuid import uuid4

import numpy as np

from roll.agentic.agents import DIALECTS
from roll.agentic.endpoint.served import ServedModel, ServedSampling
from roll.agentic.endpoint.server import Endpoint
from roll.agentic.endpoint.turns import TurnReader
from roll.agentic.episode import SampledTurn
from roll.configs.plugins import problem
from roll.engines.base import EngineFailed, GenerateRequest, InferStrategy, SamplingParams, TokenChunk
from roll.engines.worker import EngineSpec

STOP_SECONDS = 60.0
"""Longest wait for an engine to end."""
LARGEST_SEED = 2**63
"""Engines take no larger ones, and none below 0."""
LEAST_TEMPERATURE = 0.01
"""Temperature below which sampling is greedy, because engines reject smaller positive ones."""


@asynccontextmanager
async def running_engine(spec: EngineSpec, device: Literal["cpu", "cuda"], path: str) -> AsyncIterator[InferStrategy]:
    """Run an engine in this process within the block. Raises `ConfigError` for the key ``path`` if it cannot start."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    engine = spec.build(device)
    try:
        try:
            await engine.start()
        except (OSError, ValueError, RuntimeError) as cause:
            message = f"{spec.model_path} cannot be loaded: {cause}"
            raise problem(path, message, "name a model in Hugging Face format, with safetensors") from cause
        yield engine
    finally:
        await engine.shutdown()


async def sampled_turn(
    engine: InferStrategy,
    prompt_token_ids: np.ndarray,
    sampling: SamplingParams,
    on_tokens: Callable[[np.ndarray], None] = lambda token_ids: None,
) -> SampledTurn:
    """Sample a continuation of ``prompt_token_ids`` (int32 ``[prompt]``).

    ``on_tokens`` is called with new token ids as they are sampled. Cancelling the call aborts the request."""
    request = GenerateRequest(uuid4().hex, prompt_token_ids, sampling)
    chunks: list[TokenChunk] = []
    async for chunk in engine.stream(request):
        chunks.append(chunk)
        on_tokens(chunk.token_ids)
    return SampledTurn(
        np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32),
        np.concatenate([chunk.logprobs for chunk in chunks]).astype(np.float32),
        np.concatenate([chunk.versions for chunk in chunks]).astype(np.int32),
        chunks[-1].finish_reason or "stop",
    )


@dataclass(frozen=True)
class ServedHere:
    """Settings of a model to serve: engine, sampling, address."""

    engine: EngineSpec
    device: Literal["cpu", "cuda"]
    reader: TurnReader
    sampling: ServedSampling
    name: str = "policy"
    """Model name in the endpoint's list of models."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen at; 0: any free port."""
    key: str = ""
    """API key; empty: requests need none."""


@dataclass(frozen=True)
class Serving:
    """A model that is being served."""

    address: str
    """Base URL, which ends with `/v1`."""
    failed: Future[EngineFailed]
    """Gets a result when the engine fails permanently."""


@contextmanager
def serving(what: ServedHere) -> Iterator[Serving]:
    """Serve a model from a background thread within the block.

    Raises `ConfigError` if the engine cannot start, ``RuntimeError`` if the address is not available.
    """
    started: Future[Serving] = Future()
    failed: Future[EngineFailed] = Future()
    over = threading.Event()

    async def serve() -> None:
        async with running_engine(what.engine, what.device, "MODEL") as engine:
            dialects = [dialect(what.reader.decoder.decode, client_samples=True) for dialect in DIALECTS]
            endpoint = Endpoint(dialects, model=what.name, host=what.host, port=what.port)
            await asyncio.to_thread(endpoint.start)
            try:
                model = ServedModel(what.reader, _Policy(engine, failed), what.sampling, what.engine.max_length)
                started.set_result(Serving(endpoint.serve(model, what.key), failed))
                await asyncio.to_thread(over.wait)
            finally:
                await asyncio.to_thread(endpoint.stop)

    def run() -> None:
        # Ctrl-C reaches each process of a terminal; those that an engine starts inherit this, and it alone ends them.
        resource_tracker.ensure_running()  # whose start lets the signal through again
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            asyncio.run(serve())
            gc.collect()  # what is left of an engine complains when the interpreter takes its modules away first
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="serving", daemon=True)
    thread.start()
    try:
        yield started.result()
    finally:
        over.set()
        thread.join(STOP_SECONDS if started.done() else 0)


@dataclass(frozen=True)
class _Policy:
    """Sampling function of a served model."""

    engine: InferStrategy
    failed: Future[EngineFailed]

    async def __call__(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: ServedSampling,
        on_tokens: Callable[[np.ndarray], None],
    ) -> SampledTurn:
        params = SamplingParams(
            max_new_tokens,
            temperature=sampling.temperature if sampling.temperature >= LEAST_TEMPERATURE else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=random.getrandbits(31) if sampling.seed is None else sampling.seed % LARGEST_SEED,
            stop_strings=stop_strings,
        )
        try:
            return await sampled_turn(self.engine, prompt_token_ids, params, on_tokens)
        except EngineFailed as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise
