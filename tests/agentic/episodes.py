"""A scripted environment and a scripted policy: both say what they are told to and remember what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.agentic.episode import Episode, ManagerSettings, Observation, SampledTurn
from roll.agentic.manager import ENVIRONMENT_MANAGERS, EnvManager
from roll.data.chat import RawTurns, TurnTemplate
from tests.data.chat_templates import make_tokenizer

DEADLINE_SECONDS = 60


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def observe(text: str, **said) -> Observation:
    return Observation(messages=(user(text),), **said)


class ScriptedSession:
    """Answers in order; an exception among the answers is raised."""

    def __init__(self, answers: Iterable[Observation | Exception]) -> None:
        self.answers = list(answers)
        self.texts: list[str] = []
        self.seeds: list[int] = []
        self.closed = 0

    async def reset(self, seed: int) -> Observation:
        self.seeds.append(seed)
        return self._next()

    async def step(self, text: str) -> Observation:
        self.texts.append(text)
        return self._next()

    async def close(self) -> None:
        self.closed += 1

    def _next(self) -> Observation:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class ScriptedPolicy:
    """Writes its responses in order, each cut to what may be sampled; a cut one ends as ``length``."""

    responses: Sequence[Sequence[int]]
    prompts: list[np.ndarray] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    sampled: list[SampledTurn] = field(default_factory=list)

    async def __call__(self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int) -> SampledTurn:
        assert turn == len(self.prompts)
        response = np.array(self.responses[turn], dtype=np.int32)
        count = min(len(response), max_new_tokens)
        self.prompts.append(prompt_token_ids.copy())
        self.asked.append(max_new_tokens)
        self.sampled.append(
            SampledTurn(
                response[:count],
                -(np.arange(count, dtype=np.float32) + 1 + 100 * turn) / 8,
                np.arange(count, dtype=np.int32) + 10 * turn,
                "stop" if count == len(response) else "length",
            )
        )
        return self.sampled[-1]


def encode(text: str, name: str = "chatml") -> list[int]:
    return make_tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def decode(token_ids: Iterable[int], name: str = "chatml") -> str:
    return make_tokenizer(name).decode(list(token_ids))


def limits(**changes) -> ManagerSettings:
    return ManagerSettings(**({"max_steps": 20, "prompt_length": 200, "sequence_length": 400} | changes))


def plain_turns() -> RawTurns:
    """Observations end with `>`, responses with `;`."""
    return RawTurns(make_tokenizer("chatml"), prompt_end=">", response_end=";")


def make_manager(
    name: str, settings: ManagerSettings, template: TurnTemplate, decoder, path: str = "env_manager_cls"
) -> EnvManager:
    return ENVIRONMENT_MANAGERS.load(name, path)(settings, template, decoder)


def run_episode(
    manager: str,
    session: ScriptedSession,
    policy: ScriptedPolicy,
    settings: ManagerSettings | None = None,
    template: TurnTemplate | None = None,
    name: str = "chatml",
) -> Episode:
    """One episode of the environment `lake` with seed 7."""
    made = make_manager(manager, settings or limits(), template or plain_turns(), make_tokenizer(name))
    episode = made.run_episode(session, policy, tag="lake", seed=7)
    return asyncio.run(asyncio.wait_for(episode, DEADLINE_SECONDS))


def play_texts(manager: str, answers, texts: Sequence[str], settings: ManagerSettings | None = None):
    """Run an episode of plain turns in which the policy writes these texts. Gives episode, session and policy."""
    session, policy = ScriptedSession(answers), ScriptedPolicy([encode(text) for text in texts])
    return run_episode(manager, session, policy, settings), session, policy
