"""Trial episodes of agents before training (`roll check-agent`), in this process, to find and explain problems.

Episodes run with the same manager, endpoint and environment as in a run. Their requests are kept, so that the report
can name the message whose change prevented a request from continuing an earlier one. A stand-in replaces the policy and
needs no model: every other turn it calls a tool, if there is one.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.agentic.agents import AgentManager, RecordedSession, agent_endpoint
from roll.agentic.base import observation_from
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, Pause, RequestRefused, Tell, no_pause
from roll.agentic.endpoint.session import SessionSettings, normal_forms
from roll.agentic.endpoint.turns import TurnReader, message_of
from roll.agentic.episode import (
    EnvironmentFailed,
    EnvSession,
    Episode,
    EpisodeRefused,
    Message,
    Observation,
    Policy,
    SampledTurn,
)
from roll.agentic.registry import make_env
from roll.agentic.worker import EnvHost, HostSession, PoolSettings, SessionFailed
from roll.configs.errors import count
from roll.configs.run import CustomEnvConfig
from roll.data.chat import ASKED, ChatTurns, TemplateRefused

_SHORT = 60
"""Maximum characters of a message quoted in an explanation."""
_LOGGED = 2000
"""Maximum characters of an agent's output quoted in the report of a failure."""


@dataclass(frozen=True)
class Asked:
    """An answered request."""

    request: ModelRequest
    answer: ModelAnswer
    begun_for: str | None
    """Why the request continued no earlier one, though its messages contain answers; None otherwise."""


class WatchedSession(RecordedSession):
    """A session that keeps its requests."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked: list[Asked] = []
        self.refusals: list[RequestRefused] = []
        self.asking: ModelRequest | None = None
        """The last request."""

    async def respond(self, request: ModelRequest, *, tell: Tell | None = None, pause: Pause = no_pause) -> ModelAnswer:
        self.asking = request
        try:
            answer = await super().respond(request, tell=tell, pause=pause)
        except RequestRefused as refused:
            self.refusals.append(refused)
            raise
        self.asked.append(Asked(request, answer, self._turns[-1].begun_for))
        return answer

    def explained(self) -> list[str]:
        """Return a sentence for each request that contains earlier answers but could not continue any of them."""
        return [
            f"request {place + 1}: {_explanation(each, self.asked[:place])}"
            for place, each in enumerate(self.asked)
            if each.begun_for is not None
        ]


@dataclass
class Rehearsed:
    """A trial episode."""

    tag: str
    seed: int
    episode: Episode | None = None
    failure: str | None = None
    session: WatchedSession | None = None
    """None if the agent never started."""
    refused: list[RequestRefused] = field(default_factory=list)
    """All refused requests."""
    output: list[str] = field(default_factory=list)
    """Log output during the episode."""


@dataclass
class Rehearsal:
    """Runs trial episodes of one environment, one after the other."""

    tag: str
    env: CustomEnvConfig
    reader: TurnReader
    settings: SessionSettings

    async def play(self, seeds: Sequence[int], policy: Policy | None) -> list[Rehearsed]:
        """Run an episode for each seed, with a stand-in if ``policy`` is None. Raises the errors of the policy."""
        host = EnvHost({self.tag: self.env}, PoolSettings(), make_env, observation_from)
        refused: list[RequestRefused] = []
        endpoint = agent_endpoint(self.reader.decoder, "127.0.0.1", on_refusal=refused.append)
        endpoint.start()
        played = []
        try:
            for seed in seeds:
                refused.clear()
                each = Rehearsed(self.tag, seed)

                def watched(*parts: Any, each: Rehearsed = each) -> RecordedSession:
                    each.session = WatchedSession(*parts)
                    return each.session

                silence = self.env.step_timeout_seconds
                reader = self.reader
                manager = AgentManager(self.settings, reader.template, reader.decoder, endpoint, silence, watched)
                chosen = policy or StandIn(self.reader, each)
                with _Logged(each.output):
                    try:
                        local = LocalSession(host, self.tag)
                        each.episode = await manager.run_episode(local, chosen, tag=self.tag, seed=seed)
                    except (EnvironmentFailed, EpisodeRefused, TemplateRefused) as failure:
                        each.failure = str(failure)
                each.refused = [*refused, *(each.session.refusals if each.session else ())]
                played.append(each)
        finally:
            endpoint.stop()
            await host.close()
        return played


class LocalSession(EnvSession):
    """A session with an environment in this process."""

    def __init__(self, host: EnvHost, tag: str) -> None:
        self._session: HostSession = host.open(tag, frames=False)
        self._given_up: str | None = None

    async def reset(self, seed: int) -> Observation:
        return self._raised(await self._session.reset(seed))

    async def step(self, text: str) -> Observation:
        return self._raised(await self._session.step(text))

    def give_up(self, cause: str) -> None:
        self._given_up = cause
        self._session.release()

    async def close(self) -> None:
        self._session.release()

    def _raised(self, outcome: Observation | SessionFailed) -> Observation:
        if not isinstance(outcome, SessionFailed):
            return outcome
        if self._given_up is None:
            raise outcome
        cause = f"{self._given_up}; {outcome.cause}"
        raise SessionFailed(outcome.tag, outcome.seed, outcome.turn, "hung", cause)


class StandIn:
    """Stand-in for a policy; needs no model."""

    def __init__(self, reader: TurnReader, rehearsed: Rehearsed) -> None:
        self._reader = reader
        self._rehearsed = rehearsed

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        """Write a tool call or a sentence."""
        session = self._rehearsed.session
        request = None if session is None else session.asking
        text = None
        if request is not None and request.tools and request.may_call and turn % 2 == 0:
            text = self._call(request.tools[turn // 2 % len(request.tools)])
        closing = self._reader.template.closing.tolist()
        ends = [place for place, each in enumerate(closing) if each in self._reader.template.special_ids]
        ids = self._reader.decoder(text or "I do not know.", add_special_tokens=False)["input_ids"]
        whole = np.array([*ids, *closing[: ends[0] + 1 if ends else 0]], dtype=np.int32)
        cut = whole[:max_new_tokens]
        nothing = np.zeros(len(cut), dtype=np.float32)
        return SampledTurn(cut, nothing, cut * 0, "stop" if len(cut) == len(whole) else "length")

    def _call(self, tool: Mapping[str, Any]) -> str | None:
        """Return a call of the tool in the format of the chat template; None if that is unknown."""
        template = self._reader.template
        if not isinstance(template, ChatTurns):
            return None
        function = tool["function"]
        made = {"name": function["name"], "arguments": _example(function.get("parameters") or {"type": "object"})}
        call = {"id": "123456789", "type": "function", "function": made}
        try:
            before = template.render([ASKED], [tool])
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            after = template.render([ASKED, message], [tool], generation_prompt=False)
            text = after.removesuffix(template.end_of(after))
        except TemplateRefused:
            return None
        return text.removeprefix(before) if text.startswith(before) else None


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value that conforms to a simple JSON schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object":
        return {name: _example(each) for name, each in (schema.get("properties") or {}).items()}
    return {"integer": 1, "number": 1.0, "boolean": True, "array": []}.get(str(kind), "word")


def report(tag: str, played: Sequence[Rehearsed], settings: SessionSettings) -> str:
    """Return a report for people: one line per observation, with a remedy."""
    episodes = [each.episode for each in played if each.episode is not None]
    failed = len(played) - len(episodes)
    lines = [f"{tag}: {count(len(played), 'episode')}, {failed or 'none'} failed"]
    if episodes:
        lines += _averages(episodes, settings)
    for each in played:
        if each.failure is not None:
            lines.append(f"  ! seed {each.seed}: {each.failure}")
            lines += [f"      {line}" for line in "\n".join(each.output)[-_LOGGED:].splitlines()]
    notes = [*_branches(played), *_left_out(episodes), *_refusals(played), *_fields(played)]
    return "\n".join([*lines, *(f"  {note}" for note in notes)])


def _averages(episodes: Sequence[Episode], settings: SessionSettings) -> list[str]:
    def mean(name: str) -> float:
        return float(np.mean([episode.metrics[name] for episode in episodes]))

    samples = [sample for episode in episodes for sample in episode.samples]
    longest, room = max(len(sample.token_ids) for sample in samples), settings.limits.sequence_length
    rewards = [episode.score for episode in episodes]
    lines = [
        f"  reward {np.mean(rewards):g} in the mean, from {min(rewards):g} to {max(rewards):g}",
        f"  {mean('turns'):.1f} turns and {mean('tokens'):.1f} sampled tokens an episode, "
        f"{len(samples) / len(episodes):.1f} samples; the longest has {longest} of {room} tokens",
    ]
    if len(set(rewards)) == 1 and len(episodes) > 1:
        lines.append("  - all rewards are equal: if that stays so, nothing is learned")
    if cut := mean("capped_turns"):
        lines.append(
            f"  - {cut:.0%} of the answers were cut by their length (`max_tokens_per_step`, `response_length`)"
        )
    ends = Counter[str](episode.end for episode in episodes)
    for end, key in (("max_steps", "max_steps"), ("sequence_length", "response_length")):
        if ends[end]:
            lines.append(f"  - {count(ends[end], 'episode')} came to the limit `{key}`; raise it, or expect reward 0")
    return lines


def _branches(played: Sequence[Rehearsed]) -> list[str]:
    found = [(each.seed, text) for each in played if each.session for text in each.session.explained()]
    if not found:
        return []
    several = f"- {count(len(found), 'request')} continued no earlier answer, and began a sample of its own:"
    shown = [f"    seed {seed}, {text}" for seed, text in found[:8]]
    return [several, *shown, *([f"    and {len(found) - 8} more"] if len(found) > 8 else [])]


def _left_out(episodes: Sequence[Episode]) -> list[str]:
    tokens = Counter[str]()
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name.startswith("untrained/") and value:
                tokens[name.removeprefix("untrained/")] += int(value)
    return [f"- {count(number, 'sampled token')} would not be trained on: `{name}`" for name, number in tokens.items()]


def _refusals(played: Sequence[Rehearsed]) -> list[str]:
    found = Counter(str(refused) for each in played for refused in each.refused)
    return [f"- refused {count(number, 'time')}: {text}" for text, number in found.most_common(8)]


def _fields(played: Sequence[Rehearsed]) -> list[str]:
    asked = [each for one in played if one.session for each in one.session.asked]
    names = dict.fromkeys(name for each in asked for name in each.request.without_effect if name != "tool_choice")
    forced = [each for each in asked if "tool_choice" in each.request.without_effect and each.request.may_call]
    unmet = sum(not each.answer.tool_calls for each in forced)
    notes = [f"- fields without effect: {', '.join(f'`{name}`' for name in names)}"] if names else []
    if unmet:
        wish = f"- {unmet} of {count(len(forced), 'answer')} called no tool though `tool_choice` asked for it"
        notes.append(f"{wish}: nothing is forced on the policy, so the agent must bear that")
    return notes


def _explanation(each: Asked, earlier: Sequence[Asked]) -> str:
    """Explain why a request continued no earlier one: name the closest one, and where they differ."""
    forms = normal_forms(each.request.messages)

    def shared(other: Asked) -> int:
        theirs = normal_forms(_history(other))
        return next(
            (n for n, (a, b) in enumerate(zip(forms, theirs, strict=False)) if a != b), min(len(forms), len(theirs))
        )

    nearest = max(earlier, key=shared)
    place, history = shared(nearest), _history(nearest)
    if each.begun_for == "tools":
        return f"other tools ({_named(each.request)}) than those of the conversation ({_named(nearest.request)})"
    if each.begun_for == "template":
        return "the chat template rewrites earlier turns, so each turn is a sample"
    if place >= len(each.request.messages):
        return f"its {count(place, 'message')} begin an earlier history, and end before its answer"
    if place >= len(history):
        return "it goes on from an answer that is not recorded"
    now, before = each.request.messages[place], history[place]
    return f"message {place + 1} was {_shown(before)} and came back as {_shown(now)}"


def _history(asked: Asked) -> list[Message]:
    return [*asked.request.messages, message_of(asked.answer)]


def _named(request: ModelRequest) -> str:
    return ", ".join(str(tool["function"]["name"]) for tool in request.tools) or "none"


def _shown(message: Message) -> str:
    said = message["content"] or json.dumps([call["function"] for call in message.get("tool_calls") or ()])
    short = said if len(said) <= _SHORT else f"{said[: _SHORT - 3]}..."
    return f"{message['role']} {short!r}"


class _Logged(logging.Handler):
    """Inside this context, collects the log output of environments, which is not shown otherwise."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines
        self._logger = logging.getLogger("roll.agentic")

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("roll.agentic.endpoint"):  # the report says that itself
            self._lines.append(record.getMessage())

    def __enter__(self) -> None:
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before[0])
        self._logger.propagate = self._before[1]
