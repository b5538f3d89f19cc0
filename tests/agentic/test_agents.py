"""The manager of agents, with the real endpoint: what becomes of an episode when agent, policy or caller give up."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from roll.agentic.agents import AgentManager, agent_endpoint
from roll.agentic.endpoint.records import ModelRequest
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.episode import EnvironmentFailed, EpisodeRefused, Observation, SampledTurn
from roll.agentic.worker import SessionFailed
from roll.data.chat import ChatTurns
from roll.rollout.clock import run_virtual
from tests.agentic.episodes import DEADLINE_SECONDS, encode, limits, observe
from tests.data.chat_templates import make_tokenizer

pytestmark = pytest.mark.needs("aiohttp")

Agent = Callable[[str, str], Awaitable[Observation]]
TOKENIZER = make_tokenizer("chatml")


async def ask(base_url: str, key: str, *texts: str, model: str = "any") -> str:
    """Ask as an agent does, in a thread: user and assistant take turns. Raises `SessionFailed` for a refusal."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]

    def answer() -> str:
        body = json.dumps({"model": model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    try:
        return await asyncio.to_thread(answer)
    except urllib.error.HTTPError as refused:
        raise SessionFailed("mine", 7, 0, "raised", f"its step raised {refused.read().decode()}") from refused


class AgentSession:
    """An environment whose step is an agent in this loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.closed = 0

    async def reset(self, seed: int) -> Observation:
        return observe("the task")

    async def step(self, text: str) -> Observation:
        where = json.loads(text)
        self.acting = asyncio.ensure_future(self._agent(where["base_url"], where["api_key"]))
        try:
            return await self.acting
        except asyncio.CancelledError as given_up:
            if not given_up.args:
                raise
            raise SessionFailed("mine", 7, 0, "hung", given_up.args[0]) from None

    def give_up(self, cause: str) -> None:
        self.acting.cancel(cause)

    async def close(self) -> None:
        self.closed += 1


class Replies:
    """A policy that writes its texts in order; with an exception it fails, with None it never answers. What it says in
    its last breath has been sampled when it is cancelled."""

    last_breath: str | None = None

    def __init__(self, *texts: str | Exception | None) -> None:
        self._texts = list(texts)
        self.running = 0
        self.prompts: list[list[int]] = []

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        assert turn == len(self.prompts)
        self.prompts.append(prompt_token_ids.tolist())
        text = self._texts[turn]
        self.running += 1
        try:
            if text is None:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if self.last_breath is None:
                        raise
                    text = self.last_breath
            if isinstance(text, Exception):
                raise text
            ids = np.array(encode(f"{text}<|im_end|>"), dtype=np.int32)[:max_new_tokens]
            return SampledTurn(ids, np.zeros(len(ids), dtype=np.float32) - 1, np.full(len(ids), turn, np.int32), "stop")
        finally:
            self.running -= 1


def manager_at(endpoint: Any, **changes: Any) -> AgentManager:
    settings = SessionSettings(limits(**changes), PARSERS["hermes"], untrained_models=frozenset({"small"}))
    return AgentManager(settings, ChatTurns(TOKENIZER), TOKENIZER, endpoint, 60.0)


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    """Runs an agent's episode with a policy; the endpoint's thread is gone afterwards."""
    before = set(threading.enumerate())

    def episode_of(agent: Agent, policy: Replies, cancel: asyncio.Event | None = None, **changes: Any) -> Any:
        async def main() -> Any:
            endpoint = agent_endpoint(TOKENIZER, "127.0.0.1")
            await asyncio.to_thread(endpoint.start)
            manager = manager_at(endpoint, **changes)
            session = AgentSession(agent)
            playing = asyncio.ensure_future(manager.run_episode(session, policy, tag="mine", seed=7))
            try:
                if cancel is not None:
                    await cancel.wait()
                    playing.cancel()
                return await asyncio.wait_for(playing, DEADLINE_SECONDS)
            finally:
                assert session.closed and not policy.running, "nothing of an episode outlives it"
                await asyncio.to_thread(endpoint.stop)

        return asyncio.run(main())

    yield episode_of
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "agent-endpoint"]


def test_an_episode_is_what_was_sampled_with_the_agents_reward(run):
    async def agent(base_url: str, key: str) -> Observation:
        first = await ask(base_url, key, "one")
        second = await ask(base_url, key, "one", first, "two")
        assert (first, second) == ("eins", "zwei")
        return observe("", reward=0.5, terminated=True, success=True, metrics={"words": 2.0})

    policy = Replies("eins", "zwei")
    episode = run(agent, policy)
    (sample,) = episode.samples
    assert sample.token_ids.tolist() == policy.prompts[1] + encode("zwei<|im_end|>")
    assert sample.token_ids[sample.response_mask].tolist() == encode("eins<|im_end|>") + encode("zwei<|im_end|>")
    assert (sample.score, sample.reward, episode.score, episode.end) == (0.5, 0.5, 0.5, "terminated")
    assert episode.success is True and episode.metrics["words"] == episode.metrics["turns"] == 2
    assert [turn.response for turn in episode.turns] == ["eins", "zwei"]


def test_a_failure_of_the_policy_is_raised_at_once_whatever_the_agent_does(run):
    async def stubborn(base_url: str, key: str) -> Observation:
        with pytest.raises(SessionFailed, match="policy"):
            await ask(base_url, key, "one")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(LookupError, match="the engine is gone"):
        run(stubborn, Replies(LookupError("the engine is gone")))


def test_a_cancelled_episode_leaves_no_call_of_the_policy(run):
    asked = asyncio.Event()

    async def agent(base_url: str, key: str) -> Observation:
        first = await ask(base_url, key, "one")
        waiting = asyncio.ensure_future(ask(base_url, key, "one", first, "two"))
        while not policy.running:
            await asyncio.sleep(0.01)
        asked.set()
        return await asyncio.shield(waiting)  # its thread gets an answer when the episode is over

    policy = Replies("eins", None)
    with pytest.raises(asyncio.CancelledError):
        run(agent, policy, cancel=asked)


def test_a_call_that_the_agent_did_not_wait_for_is_ended_with_it(run):
    async def agent(base_url: str, key: str) -> Observation:
        await ask(base_url, key, "one")
        left = asyncio.ensure_future(ask(base_url, key, "another"))
        left.add_done_callback(lambda done: done.exception())
        while not policy.running:
            await asyncio.sleep(0.01)
        return observe("", reward=1.0, terminated=True)

    policy = Replies("eins", None)
    episode = run(agent, policy)
    assert len(episode.samples) == 1 and episode.metrics["turns"] == 1


def test_all_that_was_sampled_is_trained_on_or_has_a_cause(run):
    """Also what had been sampled when the end of the episode came before the answer was made."""

    async def agent(base_url: str, key: str) -> Observation:
        await ask(base_url, key, "a title", model="small")
        await ask(base_url, key, "one")
        left = asyncio.ensure_future(ask(base_url, key, "another"))
        left.add_done_callback(lambda done: done.exception())
        while not policy.running:
            await asyncio.sleep(0.01)
        return observe("", reward=1.0, terminated=True)

    policy = Replies("my title", "eins", None)
    policy.last_breath = "too late"
    episode = run(agent, policy)
    causes = {name: value for name, value in episode.metrics.items() if name.startswith("untrained/") and value}
    assert causes == {
        "untrained/other_model": len(encode("my title<|im_end|>")),
        "untrained/too_late": len(encode("too late<|im_end|>")),
    }
    (sample,) = episode.samples
    assert sample.token_ids[sample.response_mask].tolist() == encode("eins<|im_end|>")


@pytest.mark.parametrize("gives_up", [True, False])
def test_an_agent_that_has_had_its_turns_has_an_end(run, gives_up):
    async def agent(base_url: str, key: str) -> Observation:
        await ask(base_url, key, "one")
        try:
            await ask(base_url, key, "two")
        except SessionFailed:
            if gives_up:
                raise
        return observe("", reward=0.25, terminated=True)

    episode = run(agent, Replies("eins"), max_steps=1)
    assert (episode.end, episode.score) == ("max_steps", 0.0 if gives_up else 0.25)


def test_a_first_prompt_without_room_is_refused_with_the_key_to_raise(run):
    async def agent(base_url: str, key: str) -> Observation:
        await ask(base_url, key, "one " * 100)
        raise AssertionError

    with pytest.raises(EpisodeRefused, match="prompt_length"):
        run(agent, Replies("eins"), prompt_length=20)


def test_an_agent_that_says_nothing_has_no_episode(run):
    async def agent(base_url: str, key: str) -> Observation:
        return observe("", reward=1.0, terminated=True)

    with pytest.raises(EnvironmentFailed, match="'mine', seed 7.*without a token"):
        run(agent, Replies())


def test_an_agents_own_failure_is_one_of_its_environment(run):
    async def agent(base_url: str, key: str) -> Observation:
        await ask(base_url, key, "one")
        raise SessionFailed("mine", 7, 0, "raised", "its step raised KeyError: 'x'")

    with pytest.raises(EnvironmentFailed, match="KeyError"):
        run(agent, Replies("eins"))


class InThisLoop:
    """An endpoint whose agents need no network."""

    session: EpisodeSession

    def open(self, session: EpisodeSession) -> tuple[str, str]:
        self.session = session
        return "here", "key"

    async def close(self, session: EpisodeSession) -> None:
        session.close()


class SlowToClose(InThisLoop):
    """An endpoint that is still ending calls when the episode is cancelled."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    async def close(self, session: EpisodeSession) -> None:
        await super().close(session)
        self.closing.set()
        await asyncio.Event().wait()


def test_an_episode_that_is_cancelled_while_it_ends_leaves_no_call_of_the_policy():
    async def main() -> None:
        endpoint: Any = SlowToClose()
        policy = Replies("eins", None)

        async def agent(base_url: str, key: str) -> Observation:
            await endpoint.session.respond(ModelRequest(({"role": "user", "content": "one"},)))
            unread = endpoint.session.respond(ModelRequest(({"role": "user", "content": "two"},)))
            left.append(asyncio.ensure_future(unread))
            while not policy.running:
                await asyncio.sleep(0)
            return observe("", reward=1.0, terminated=True)

        left: list[asyncio.Future[Any]] = []
        session = AgentSession(agent)
        playing = asyncio.ensure_future(manager_at(endpoint).run_episode(session, policy, tag="mine", seed=7))
        await asyncio.wait_for(endpoint.closing.wait(), DEADLINE_SECONDS)
        playing.cancel()
        await asyncio.wait([playing], timeout=DEADLINE_SECONDS)
        assert playing.cancelled() and session.closed
        assert not policy.running, "an episode that is begun again has requests of the same names"
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(("thinks", "ends_at"), [(50.0, 3150.0), (70.0, 1060.0)])
def test_an_agent_is_given_up_for_its_silence_and_not_for_the_time_that_the_policy_takes(thinks, ends_at):
    """In virtual time: each answer takes 1000 s, and 60 s of silence are allowed."""

    async def main() -> float:
        endpoint: Any = InThisLoop()

        async def agent(base_url: str, key: str) -> Observation:
            for word in ("one", "two", "three"):
                await endpoint.session.respond(ModelRequest(({"role": "user", "content": word},)))
                await asyncio.sleep(thinks)
            return observe("", reward=1.0, terminated=True)

        async def policy(prompt_token_ids: np.ndarray, *, turn: int, **limits: Any) -> SampledTurn:
            await asyncio.sleep(1000.0)
            return await replies(prompt_token_ids, turn=turn, **limits)

        replies = Replies("eins", "zwei", "drei")
        manager = manager_at(endpoint)
        session = SlowToReset(agent)
        began = asyncio.get_running_loop().time() + session.seconds
        try:
            episode = await manager.run_episode(session, policy, tag="mine", seed=7)
            assert len(episode.turns) == 3 and thinks < 60
        except EnvironmentFailed as failed:
            assert "asked for nothing for 60 s (step_timeout_seconds)" in str(failed) and thinks > 60
        assert session.closed and all(task.cancelling() for task in asyncio.all_tasks() - {asyncio.current_task()})
        return asyncio.get_running_loop().time() - began

    assert run_virtual(main()) == pytest.approx(ends_at)


class SlowToReset(AgentSession):
    """An environment that waits for a place first."""

    seconds = 500.0

    async def reset(self, seed: int) -> Observation:
        await asyncio.sleep(self.seconds)
        return await super().reset(seed)
