"""Adapter that turns any gymnasium environment with discrete actions and a text rendering into a text environment.

The rendering is the observation. Gymnasium's own small games need more than that: names of actions, a text where there
is no rendering, a criterion of success. Each has one entry in `KNOWN_GAMES`. A text without an action does not reach
the game: the policy is told so, and the reward is 0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import parse_env_id

from roll.agentic.env.actions import ActionFormat, action_reader
from roll.agentic.env.base import AnyText

COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Game:
    """Everything the adapter knows about one game."""

    action_names: tuple[str, ...]
    rules: str
    describe: Callable[[Any, Any], str]
    """Function from the bare environment and its observation to text. Equal states give equal texts."""
    is_success: Callable[[float, bool], bool]
    """Function from a step's reward, and whether the step terminated the episode, to success."""


class TextAdapter(gymnasium.Wrapper[str, str, Any, Any]):
    """A text environment around one with discrete actions. Rewards are the game's own."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        action_format: ActionFormat = "answer_tag",
        action_names: Sequence[str] | None = None,
        instructions: bool = True,
    ) -> None:
        """Wrap ``env``, which must have a `Discrete` action space and be a known game or render as text (`ansi`).

        ``action_names`` are in the order of the game's actions; by default a known game's names, else numbers. Raises
        `BadOption`, and `TypeError` for an environment that cannot be written as text.
        """
        super().__init__(env)
        self._game_env = env
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"{env} has the action space {space}, which is not discrete")
        self._game = _known_game(env)
        if self._game is None and env.render_mode != "ansi":
            raise TypeError(f"{env} cannot be written as text: its render mode is {env.render_mode}, not `ansi`")
        numbers = tuple(str(int(space.start) + index) for index in range(int(space.n)))
        names = numbers if self._game is None else self._game.action_names
        self._reader = action_reader(names, action_names, action_format)
        self._first_action = int(space.start)
        self._instructions = instructions
        self._seen: Any = None
        self._has_begun = False
        self._is_over = True
        self.observation_space = AnyText()
        self.action_space = AnyText()

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]  # a property in gymnasium's own wrapper, too
        """`ansi`, whatever the game's own mode is."""
        return "ansi"

    @property
    def example_actions(self) -> tuple[str, ...]:
        """An answer for each action, in the requested format."""
        return self._reader.examples()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._seen, info = self.env.reset(seed=seed, options=options)
        self._has_begun, self._is_over = True, False
        text = self.render()
        told = {"state": text}
        if self._instructions:
            rules = "You play a game." if self._game is None else self._game.rules
            told["system"] = f"{rules} {self._reader.instructions()}"
        return text, dict(info) | told

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        chosen = self._reader.read(action)
        if chosen is None:
            text = self.render()
            note = f"{self._reader.complaint()}\n" if self._instructions else ""
            return note + text, 0.0, False, False, {"action_is_valid": False, "state": text}
        self._seen, reward, terminated, truncated, info = self._game_env.step(self._first_action + chosen)
        self._is_over = bool(terminated or truncated)
        text = self.render()
        told: dict[str, Any] = {"action_is_valid": True, "state": text}
        if self._game is not None:
            told["success"] = self._game.is_success(float(reward), bool(terminated))
        return text, float(reward), terminated, truncated, dict(info) | told

    def render(self) -> str:
        """Return the state as text. Coloured parts are put in brackets, since colours often mark the player."""
        if not self._has_begun:
            raise gymnasium.error.ResetNeeded("reset the environment before its first frame")
        if self._game is not None:
            return self._game.describe(self.env.unwrapped, self._seen)
        return without_colours(str(self.env.render()))


def without_colours(text: str) -> str:
    """Return the text without terminal escapes and trailing spaces, with coloured parts in brackets."""
    plain = ESCAPE.sub("", COLOURED.sub(r"[\1]", text))
    return "\n".join(line.rstrip() for line in plain.split("\n")).strip("\n")


def accepted_options() -> dict[str, inspect.Parameter]:
    """Return the adapter's own options by name."""
    parameters = dict(inspect.signature(TextAdapter.__init__, eval_str=True).parameters)
    return {name: each for name, each in parameters.items() if name not in ("self", "env")}


def _known_game(env: gymnasium.Env[Any, Any]) -> Game | None:
    if env.spec is None:
        return None
    namespace, name, _ = parse_env_id(env.spec.id)
    return KNOWN_GAMES.get(name) if namespace is None else None


def _frozen_lake(game: Any, observation: Any) -> str:
    rows = [[letter.decode() for letter in row] for row in game.desc]
    row, column = divmod(int(observation), len(rows[0]))
    rows[row][column] = "X" if rows[row][column] == "H" else "P"
    return "\n".join("".join(each) for each in rows)


def _taxi(game: Any, observation: Any) -> str:
    places = [f"{letter} ({row}, {column})" for letter, (row, column) in zip("RGYB", game.locs, strict=True)]
    row, column, passenger, destination = (int(each) for each in game.decode(int(observation)))
    waiting = "in the taxi" if passenger == len(places) else f"at {places[passenger]}"
    board = "\n".join(b"".join(line).decode() for line in game.desc)
    return f"{board}\nTaxi: ({row}, {column}). Passenger: {waiting}. Destination: {places[destination]}."


def _cliff_walking(game: Any, observation: Any) -> str:
    rows, columns = game.shape
    cells = [["o"] * columns for _ in range(rows)]
    cells[-1][1:] = ["C"] * (columns - 2) + ["T"]
    row, column = divmod(int(observation), columns)
    cells[row][column] = "x"
    return "\n".join("".join(each) for each in cells)


def _blackjack(game: Any, observation: Any) -> str:
    total, dealer, has_usable_ace = (int(each) for each in observation)
    ace = "with" if has_usable_ace else "without"
    return f"Your cards sum to {total}, {ace} a usable ace. The dealer shows {'an ace' if dealer == 1 else dealer}."


def _won(reward: float, terminated: bool) -> bool:
    return terminated and reward > 0


def _ended(reward: float, terminated: bool) -> bool:
    return terminated


_LAKE = Game(
    ("left", "down", "right", "up"),
    "You (P) walk over a frozen lake of safe cells (S, F) to the goal (G). A hole (H) ends the game.",
    _frozen_lake,
    _won,
)
_CLIFF = Game(
    ("up", "right", "down", "left"),
    "You (x) walk from the bottom left to the target (T). The cliff (C) costs 100 and takes you back to the start.",
    _cliff_walking,
    _ended,
)
KNOWN_GAMES = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Game(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "You drive a taxi: pick up the passenger and drop them at their destination. Places are (row, column) from "
        "(0, 0), top left; | is a wall, : is none.",
        _taxi,
        _won,
    ),
    "Blackjack": Game(
        ("stick", "hit"),
        "You play blackjack against the dealer: come nearer to 21 than the dealer, but not above it.",
        _blackjack,
        _won,
    ),
}
"""Known games by gymnasium's name, without the version."""
