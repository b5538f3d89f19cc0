"""Environments by name, import path, entry point or gymnasium id, and the adapter for games that do not speak text.

The signature is checked before an environment is made. Importing this module registers the built-in ones with gymnasium
(`gymnasium.make("roll/FrozenLake-v0")`).

`TextAdapter` turns an environment with actions and observations that `roll.agentic.spaces` can write into a text
environment. Some of gymnasium's own small games need more than that, namely names of actions, a better text, and a
criterion of success. Each of them has one entry in `KNOWN_GAMES`. A text without an action does not reach the game: the
policy is told so, and the reward is 0.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import parse_env_id
from gymnasium.spaces import Discrete, Space, Text

from roll.agentic import spaces
from roll.agentic.base import ActionFormat, AnyText, BadOption, action_reader
from roll.configs.errors import ConfigError, ConfigProblem, nearest, nearest_name_hint, problems_of
from roll.configs.plugins import (
    IMPORT_REMEDY,
    Kind,
    PlugIn,
    by_name,
    checked_arguments,
    look_in_working_folder,
    parameters_of,
    problem,
    takes_anything,
)

COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOTHING = object()
"""Marks that the game has not been reset; its real observation may be None."""


@dataclass(frozen=True)
class Game:
    """Facts about a game that the adapter needs."""

    action_names: tuple[str, ...]
    rules: str
    describe: Callable[[Any, Any], str]
    """Function from the unwrapped environment and its observation to text. Equal states must give equal texts."""
    any_end_is_success: bool = False
    """True if every terminal state is a success; otherwise only one with a positive reward."""


class TextAdapter(gymnasium.Wrapper[str, str, Any, Any]):
    """A text environment around a game that does not speak text. Rewards are the game's own."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        action_format: ActionFormat = "answer_tag",
        action_names: Sequence[str] | None = None,
        instructions: bool = True,
    ) -> None:
        """Wrap ``env``: a known game, or one whose actions can be written, and which renders as text (`ansi`) or whose
        observations can be written.

        ``action_names`` are in the order of discrete actions; by default a known game's names, else numbers. Raises
        `BadOption`, and `TypeError` for an environment that cannot be written as text.
        """
        super().__init__(env)
        self._game_env = env
        self._game = _known_game(env)
        self._is_rendered = self._game is not None or env.render_mode == "ansi"
        self._actions = _actions(env, self._game, action_names, action_format)
        observed = getattr(env, "observation_space", None)
        if not self._is_rendered and (why := spaces.can_be_written(observed)):
            raise TypeError(
                f"{env} cannot be written as text: its render mode is {env.render_mode}, not `ansi`, and of its "
                f"observations, {why}"
            )
        self._observed = None if self._is_rendered or isinstance(observed, Text) else observed
        self._instructions = instructions
        self._seen: Any = NOTHING
        """The game's last observation."""
        self._is_over = True
        self.observation_space = AnyText()
        self.action_space = AnyText()

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]  # a property in gymnasium's own wrapper, too
        """`ansi`, whatever the game's own mode."""
        return "ansi"

    @property
    def example_actions(self) -> tuple[str, ...]:
        """An answer for each action, in the requested format."""
        return self._actions.examples()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._seen, info = self.env.reset(seed=seed, options=options)
        self._is_over = False
        text = self.render()
        said = {"state": text}
        if self._instructions:
            rules = "You play a game." if self._game is None else self._game.rules
            seen = "" if self._observed is None else f" You read {spaces.described(self._observed)}, as JSON."
            said["system"] = f"{rules}{seen} {self._actions.instructions()}"
        return text, dict(info) | said

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        try:
            chosen = self._actions.read(action)
        except spaces.NoAction as why:
            text = self.render()
            note = f"{why}\n" if self._instructions else ""
            return note + text, 0.0, False, False, {"action_is_valid": False, "state": text}
        self._seen, reward, terminated, truncated, info = self._game_env.step(chosen)
        self._is_over = bool(terminated or truncated)
        text = self.render()
        said: dict[str, Any] = {"action_is_valid": True, "state": text}
        if self._game is not None:
            said["success"] = bool(terminated) and (self._game.any_end_is_success or float(reward) > 0)
        return text, float(reward), terminated, truncated, dict(info) | said

    def render(self) -> str:
        """Return the state as text. Coloured parts become bracketed, because colour often marks the player."""
        if self._seen is NOTHING:
            raise gymnasium.error.ResetNeeded("reset the environment before its first frame")
        if self._game is not None:
            return self._game.describe(self.env.unwrapped, self._seen)
        return without_colours(str(self.env.render())) if self._is_rendered else spaces.written(self._seen)


def without_colours(text: str) -> str:
    """Strip terminal escapes and trailing spaces, and put coloured parts in brackets."""
    plain = ESCAPE.sub("", COLOURED.sub(r"[\1]", text))
    return "\n".join(line.rstrip() for line in plain.split("\n")).strip("\n")


def _actions(
    env: gymnasium.Env[Any, Any], game: Game | None, names: Sequence[str] | None, action_format: ActionFormat
) -> spaces.Actions:
    """Return the texts of an environment's actions. Raises `BadOption`, and `TypeError` if there are none."""
    space = env.action_space
    if isinstance(space, Discrete):
        numbers = tuple(str(int(space.start) + index) for index in range(int(space.n)))
        reader = action_reader(numbers if game is None else game.action_names, names, action_format)
        return spaces.NamedActions(reader, int(space.start))
    if why := spaces.can_be_written(space):
        raise TypeError(f"{env} takes actions that cannot be written as text: {why}")
    if names is not None:
        raise BadOption("action_names", "its actions are not discrete, and have no names", "leave it out")
    action_reader((), None, action_format)  # which knows the formats
    return spaces.JsonActions(space, action_format)


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


_LAKE = Game(
    ("left", "down", "right", "up"),
    "You (P) walk over a frozen lake of safe cells (S, F) to the goal (G). A hole (H) ends the game.",
    _frozen_lake,
)
_CLIFF = Game(
    ("up", "right", "down", "left"),
    "You (x) walk from the bottom left to the target (T). The cliff (C) costs 100 and takes you back to the start.",
    _cliff_walking,
    any_end_is_success=True,
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
    ),
    "Blackjack": Game(
        ("stick", "hit"),
        "You play blackjack against the dealer: come nearer to 21 than the dealer, but not above it.",
        _blackjack,
    ),
}
"""Known games by their gymnasium name without version."""

GYMNASIUM_ID = re.compile(r"(?:[\w-]+/)?[\w.-]+-v\d+")
STEP_LIMIT = "max_episode_steps"
"""Option of `gymnasium.make` that every environment accepts."""

ENVIRONMENTS = Kind(
    "environment",
    "roll.environments",
    {
        "agent": PlugIn("roll.agentic.library.agent:AgentEnv"),
        "dialogue": PlugIn("roll.agentic.library.dialogue:DialogueEnv"),
        "frozen_lake": PlugIn("roll.agentic.library.grid_games:FrozenLakeEnv"),
        "math_tools": PlugIn("roll.agentic.library.math_tools:MathToolsEnv"),
        "number_guessing": PlugIn("roll.agentic.library.question_games:NumberGuessingEnv"),
        "openenv": PlugIn("roll.agentic.library.openenv:OpenEnvEnv", ("websockets",)),
        "reasoning_gym": PlugIn("roll.agentic.library.question_games:ReasoningGymEnv", ("reasoning_gym",)),
        "sokoban": PlugIn("roll.agentic.library.grid_games:SokobanEnv"),
        "textarena": PlugIn("roll.agentic.library.question_games:TextArenaEnv", ("textarena",)),
        "verifiers": PlugIn("roll.agentic.library.verifiers_env:VerifiersEnv"),
    },
    PlugIn,
    "package.module:Class",
    members=("reset", "step", "close"),
)


def make_env(env_type: str, env_config: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    """Make a text environment; wrap an environment that does not speak text in a `TextAdapter`.

    Raises `ConfigError` with the paths `env_type` and `env_config.<key>`. Name and signature are checked before any
    code of the environment runs, except the import of its module. The environment may still reject a value, or turn out
    not to be a text environment.
    """
    source = _find(env_type, "")
    return source.made(*source.checked(env_config))


def check_env_type(tag: str, env_type: str, env_config: Mapping[str, Any]) -> list[ConfigProblem]:
    """Return the problems of ``custom_envs.<tag>``.

    Built-in environments and gymnasium's own are created for this check, because they are small. For others, only name
    and signature are checked.
    """

    def check() -> None:
        source = _find(env_type, f"custom_envs.{tag}.")
        options = source.checked(env_config)
        if source.is_small:
            source.made(*options).close()

    return problems_of(check)


def class_of(env_type: str) -> type | None:
    """Return the class of an environment; None if it is not found or is created by a function."""
    try:
        found = _find(env_type, "").create
    except ConfigError:
        return None
    return found if isinstance(found, type) else None


@dataclass(frozen=True)
class _Source:
    """Origin of an environment."""

    env_type: str
    at: str
    """Prefix of the paths of `env_type` and `env_config` in messages."""
    create: Callable[..., Any]
    """Class or factory whose signature is checked."""
    spec: registration.EnvSpec | None = None
    """Registration with gymnasium, for environments that gymnasium creates."""

    @property
    def is_small(self) -> bool:
        """True if creating the environment is fast and uses nothing but memory."""
        is_gymnasiums_own = self.spec is not None and self.create.__module__.startswith("gymnasium.")
        return is_gymnasiums_own or self.env_type in ENVIRONMENTS.built_in

    def checked(self, env_config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the validated options of the environment, and those of its adapter. Raises `ConfigError`."""
        parameters = parameters_of(self.create, self.env_type, f"{self.at}env_type")
        named = by_name(parameters)
        of_adapter: dict[str, inspect.Parameter] = {}
        if not takes_anything(parameters) and self.env_type not in ENVIRONMENTS.built_in:
            of_adapter = by_name(parameters_of(TextAdapter, "TextAdapter", self.at), filled={"env", *named})
        settable = {**parameters, **of_adapter}
        if self.spec is not None:
            given = self.spec.kwargs
            settable |= {key: each.replace(default=given[key]) for key, each in named.items() if key in given}
            settable[STEP_LIMIT] = inspect.Parameter(STEP_LIMIT, inspect.Parameter.KEYWORD_ONLY, default=None)
        values = checked_arguments(self.env_type, settable, env_config, f"{self.at}env_config")
        options = {key: value for key, value in values.items() if key not in of_adapter}
        metadata = getattr(self.create, "metadata", None)
        render_modes = metadata.get("render_modes", ()) if isinstance(metadata, Mapping) else ()
        if "render_mode" in named and "ansi" in render_modes:
            options.setdefault("render_mode", "ansi")
        return options, {key: value for key, value in values.items() if key in of_adapter}

    def made(self, options: dict[str, Any], adapter_options: dict[str, Any]) -> gymnasium.Env[str, str]:
        """Make the environment, in a `TextAdapter` if it does not speak text. Raises `ConfigError`."""
        try:
            env = self._bare(options)
            try:
                return self._as_text(env, adapter_options)
            except BaseException:
                if isinstance(env, gymnasium.Env):
                    with suppress(Exception):  # why it is refused says more
                        env.close()
                raise
        except BadOption as bad:
            raise problem(f"{self.at}env_config.{bad.option}", bad.message, bad.remedy) from bad

    def _bare(self, options: dict[str, Any]) -> Any:
        try:
            if self.spec is not None:
                return gymnasium.make(self.spec, disable_env_checker=True, **options)
            return self.create(**options)
        except ConfigError as error:  # from a component with its own options, such as tools
            inside = [replace(each, path=f"{self.at}env_config.{each.path}") for each in error.problems]
            raise ConfigError(inside) from error

    def _as_text(self, env: Any, adapter_options: dict[str, Any]) -> gymnasium.Env[str, str]:
        path = f"{self.at}env_type"
        if not isinstance(env, gymnasium.Env):
            made = f"`{self.env_type}` made a {type(env).__name__}"
            raise problem(path, made, "name a class of, or a function that returns, a `gymnasium.Env`")
        if not _speaks_text(env):
            try:
                return TextAdapter(env, **adapter_options)
            except TypeError as cause:
                remedy = "give it the render mode `ansi`, or wrap it into an environment that takes and gives text"
                raise problem(path, str(cause), remedy) from cause
        if adapter_options:
            key = next(iter(adapter_options))
            hint = nearest_name_hint(key, by_name(parameters_of(self.create, self.env_type, path)))
            message = f"`{self.env_type}` has no option `{key}`, and it takes text already"
            raise problem(f"{self.at}env_config.{key}", message, hint)
        return env


def _speaks_text(env: gymnasium.Env[Any, Any]) -> bool:
    """Return True unless the spaces of an environment say that its actions or its observations are no texts."""
    acts, sees = (getattr(env, name, None) for name in ("action_space", "observation_space"))
    if isinstance(acts, Discrete):
        return False
    if not _is_gymnasiums(acts):
        return True
    return isinstance(acts, Text) and (isinstance(sees, Text) or not _is_gymnasiums(sees))


def _is_gymnasiums(space: Any) -> bool:
    """Return True for a kind of space that gymnasium has; its plain `Space` says nothing."""
    return type(space).__module__.startswith("gymnasium.") and type(space) is not Space


def _find(env_type: str, at: str) -> _Source:
    path = f"{at}env_type"
    module, _, name = env_type.partition(":")
    if name and GYMNASIUM_ID.fullmatch(name):
        look_in_working_folder()
        try:
            importlib.import_module(module)
        except Exception as cause:
            message = f"module {module!r} cannot be imported: {type(cause).__name__}: {cause}"
            raise problem(path, message, IMPORT_REMEDY) from cause
        return _registered(env_type, name, at)
    if name or env_type in ENVIRONMENTS.names():
        return _Source(env_type, at, ENVIRONMENTS.load(env_type, path))
    return _registered(env_type, env_type, at)


def _registered(env_type: str, env_id: str, at: str) -> _Source:
    """Return an environment from gymnasium's registry. Without a version, the newest one is used."""
    path = f"{at}env_type"
    try:
        spec = gymnasium.spec(env_id)
    except gymnasium.error.Error as cause:
        ours = ENVIRONMENTS.names()
        near = nearest(env_type, {*ours, *registration.registry})
        hint = f"did you mean `{near}`?" if near else f"{nearest_name_hint(env_type, ours)}."
        remedy = f"{hint} Or use a gymnasium id, or an import path `package.module:Class`"
        raise problem(path, f"there is no environment `{env_type}`", remedy) from cause
    try:
        if spec.entry_point is None:
            raise ImportError("it has no entry point")
        create = spec.entry_point if callable(spec.entry_point) else registration.load_env_creator(spec.entry_point)
    except Exception as cause:  # any error of its module, such as gymnasium's own error for a missing package
        message = f"`{env_type}` is registered, but cannot be imported ({type(cause).__name__}: {cause})"
        raise problem(path, message, "install what it needs, or correct its entry point") from cause
    return _Source(env_type, at, create, spec)


for _built_in in ENVIRONMENTS.built_in.values():  # `FrozenLakeEnv` becomes `roll/FrozenLake-v0`
    _id = f"roll/{_built_in.path.partition(':')[2].removesuffix('Env')}-v0"
    if _id not in registration.registry:
        gymnasium.register(_id, entry_point=_built_in.path, disable_env_checker=True)
