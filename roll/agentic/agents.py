"""The environment manager for unmodified agents, which call the policy over HTTP.

The environment (`roll.agentic.library.agent`) runs the agent in its worker process. Meanwhile the endpoint answers the
agent's requests with turns of the policy. The agent decides what the policy reads and when the episode ends; the
sampled tokens become training samples.

If a limit stops an agent (`max_steps`, or no room in the context), the episode counts, with reward 0 unless the agent
returns one; otherwise long episodes would be left out. For the same reason an agent's time limit applies to its
silence, the time during which no turn is being sampled for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.agentic.endpoint.dialects import Chat, Completions, Dialect
from roll.agentic.endpoint.messages import Messages
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, Pause, RequestRefused, Tell, no_pause
from roll.agentic.endpoint.responses import Responses
from roll.agentic.endpoint.server import Endpoint
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.episode import (
    EnvironmentFailed,
    EnvSession,
    Episode,
    EpisodeEnd,
    EpisodeRefused,
    Observation,
    Policy,
    SampledTurn,
)
from roll.agentic.worker import SessionFailed
from roll.data.chat import TurnTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG_EPISODE = 20_000
"""Number of tokens above which samples are built in a thread, so that the event loop is not blocked."""
LIMITS: dict[str | None, EpisodeEnd] = {
    "max_steps_exceeded": "max_steps",
    "context_length_exceeded": "sequence_length",
    "control_token": "control_token",
}
"""Error code of a refused request -> the end of the episode."""


DIALECTS: tuple[type[Dialect], ...] = (Chat, Completions, Responses, Messages)


def agent_endpoint(tokenizer: PreTrainedTokenizerBase, host: str, **settings: Any) -> Endpoint:
    """Build an endpoint for all supported APIs, not yet started. ``settings``: further arguments of `Endpoint`."""
    return Endpoint([dialect(tokenizer.decode) for dialect in DIALECTS], host=host, **settings)


@dataclass(frozen=True)
class AgentManager:
    """Runs episodes in which an agent calls the policy."""

    settings: SessionSettings
    template: TurnTemplate
    decoder: PreTrainedTokenizerBase
    endpoint: Endpoint
    silence_seconds: float
    """Longest time that an agent may spend without a running request to the policy."""
    make_session: Callable[..., RecordedSession] = lambda *parts: RecordedSession(*parts)
    """Factory of an episode's session, called with template, tokenizer, policy and settings."""

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run an agent to its end. Always closes the session.

        Raises `EpisodeRefused`, the errors of the policy, and `EnvironmentFailed`, also if the agent sampled nothing.
        """
        calls = _PolicyCalls(policy)
        recorded = self.make_session(self.template, self.decoder, calls, self.settings)
        try:
            task = await session.reset(seed)
            base_url, api_key = self.endpoint.open(recorded)
            watch = asyncio.create_task(self._watch(session, calls))
            try:
                address = json.dumps({"base_url": base_url, "api_key": api_key})
                end = await calls.until_failure(_played(session, address, recorded))
            finally:
                watch.cancel()
                try:
                    await self.endpoint.close(recorded)
                finally:
                    await calls.end()
        finally:
            await session.close()
        made = recorded, calls.sampled_tokens, task, end, tag, seed
        return await asyncio.to_thread(_episode_of, *made) if recorded.tokens > LONG_EPISODE else _episode_of(*made)

    async def _watch(self, session: EnvSession, calls: _PolicyCalls) -> None:
        await calls.silence(self.silence_seconds)
        session.give_up(f"its agent asked for nothing for {self.silence_seconds:g} s (step_timeout_seconds)")


class RecordedSession(EpisodeSession):
    """A session that records why the endpoint refused requests."""

    refused: RequestRefused | None = None
    """The last refused request's error."""
    limit: EpisodeEnd | None = None
    """The limit for which a request was first refused; None: no limit was reached."""

    async def respond(self, request: ModelRequest, *, tell: Tell | None = None, pause: Pause = no_pause) -> ModelAnswer:
        try:
            return await super().respond(request, tell=tell, pause=pause)
        except RequestRefused as refused:
            self.refused = refused
            self.limit = self.limit or LIMITS.get(refused.code)
            raise


class _PolicyCalls:
    """Wraps the policy for one episode: counts tokens, reports failures, and cancels the calls left at the end."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running: set[asyncio.Task[SampledTurn]] = set()
        self._failure: asyncio.Future[Observation] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._quiet_since = 0.0
        self.sampled_tokens = 0
        """Number of tokens sampled by completed calls."""

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        if self._ended.is_set():
            return _aborted()
        call = asyncio.create_task(self._sampled(prompt_token_ids, turn, max_new_tokens, stop_strings))
        self._running.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self._ended.is_set():
                return _aborted()
            raise
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            raise
        finally:
            self._running.discard(call)
            self._quiet_since = asyncio.get_running_loop().time()

    async def _sampled(
        self, prompt: np.ndarray, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...]
    ) -> SampledTurn:
        sampled = await self._policy(prompt, turn=turn, max_new_tokens=max_new_tokens, stop_strings=stop_strings)
        self.sampled_tokens += len(sampled.token_ids)
        return sampled

    async def silence(self, seconds: float) -> None:
        """Return once no call has been running for ``seconds``, counted from now at the earliest."""
        now = asyncio.get_running_loop().time
        self._quiet_since = now()
        while (left := seconds if self._running else self._quiet_since + seconds - now()) > 0:
            await asyncio.sleep(left)

    async def until_failure(self, playing: Coroutine[Any, Any, Observation]) -> Observation:
        """Return the result of ``playing``; if the policy fails first, cancel it and raise the policy's error."""
        played = asyncio.create_task(playing)
        try:
            await asyncio.wait([played, self._failure], return_when=asyncio.FIRST_COMPLETED)
            return self._failure.result() if self._failure.done() else played.result()
        finally:
            if not played.done():
                played.cancel()
                await asyncio.wait([played])
            for outcome in (played, self._failure):  # marks exceptions that are not raised here as retrieved
                if outcome.done() and not outcome.cancelled():
                    outcome.exception()

    async def end(self) -> None:
        """Cancel the running calls and wait for their end, because a repeated episode reuses their request ids."""
        self._ended.set()
        self._failure.cancel()
        running = list(self._running)
        for call in running:
            call.cancel()
        if running:
            await asyncio.wait(running)


def _aborted() -> SampledTurn:
    nothing = np.zeros(0, dtype=np.int32)
    return SampledTurn(nothing, np.zeros(0, dtype=np.float32), nothing, "abort")


async def _played(session: EnvSession, address: str, recorded: RecordedSession) -> Observation:
    """Run the agent and return the final observation, truncated if a limit that refused a turn made the agent fail."""
    try:
        return await session.step(address)
    except SessionFailed as failed:
        if recorded.failure is not None:
            raise recorded.failure from failed
        if recorded.limit is None or failed.kind not in ("raised", "nonsense"):
            raise
        return Observation((), truncated=True)


def _episode_of(
    recorded: RecordedSession, sampled: int, task: Observation, last: Observation, tag: str, seed: int
) -> Episode:
    samples, metrics = recorded.samples(last.reward, last.reward), recorded.metrics()
    # Tokens sampled just before the end of the episode, from which no turn was made.
    known = metrics["tokens"] + metrics["untrained/aborted"] + metrics["untrained/too_late"]
    metrics["untrained/too_late"] += sampled - known
    if not samples:
        where = f"environment {tag!r}, seed {seed}"
        if recorded.limit == "sequence_length":
            raise EpisodeRefused(f"{where}: the agent's first request was refused: {recorded.refused}")
        why = "" if recorded.refused is None else f"; its last request was refused: {recorded.refused}"
        raise EnvironmentFailed(f"{where}: the agent ended without a token of the policy to train on{why}")
    return Episode(
        tag=tag,
        seed=seed,
        samples=samples,
        end=recorded.limit or ("truncated" if last.truncated else "terminated"),
        success=last.success,
        score=last.reward,
        turns=recorded.turns(last.reward),
        last_frame=last.frame,
        metrics=task.metrics | last.metrics | metrics | {"invalid_actions": 0.0},
    )
