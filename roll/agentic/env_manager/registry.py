"""Environment managers by name, or a user's own class by its import path."""

from __future__ import annotations

from typing import Protocol

from roll.agentic.env_manager.play import Decoder
from roll.agentic.env_manager.settings import ManagerSettings
from roll.agentic.episode import EnvSession, Episode, Policy
from roll.configs.errors import ConfigError, ConfigProblem
from roll.data.chat_turns import TurnTemplate
from roll.data.imports import import_object
from roll.data.names import nearest_name_hint

BUILT_IN = {
    "trajectory": "roll.agentic.env_manager.trajectory:TrajectoryManager",
    "step": "roll.agentic.env_manager.step:StepManager",
}


class EnvManager(Protocol):
    """A manager that runs episodes; it may run many at once."""

    async def run_episode(self, session: EnvSession, policy: Policy, *, tag: str, seed: int) -> Episode:
        """Run one episode with the session, and close the session."""


class EnvManagerFactory(Protocol):
    """The class or function behind a name. It takes three arguments."""

    def __call__(self, settings: ManagerSettings, template: TurnTemplate, decoder: Decoder) -> EnvManager: ...


def manager_factory(name: str, path: str = "env_manager_cls") -> EnvManagerFactory:
    """Return the manager called ``name``: `trajectory`, `step`, or ``package.module:Class``.

    ``path`` is the configuration key that named it. Raises `ConfigError`.
    """
    import_path = BUILT_IN.get(name, name)
    if ":" not in import_path:
        remedy = f"{nearest_name_hint(name, BUILT_IN)}; or use an import path `package.module:Class`"
        raise ConfigError([ConfigProblem(path, f"`{name}` is no environment manager", remedy)])
    try:
        found = import_object(import_path)
    except ImportError as cause:
        remedy = "correct it, or make the module importable from the working folder or PYTHONPATH"
        raise ConfigError([ConfigProblem(path, str(cause), remedy)]) from cause
    if not callable(found):
        message = f"`{import_path}` is a {type(found).__name__}"
        raise ConfigError([ConfigProblem(path, message, "name a class that takes settings, template and decoder")])
    return found


def make_manager(
    name: str, settings: ManagerSettings, template: TurnTemplate, decoder: Decoder, path: str = "env_manager_cls"
) -> EnvManager:
    """Return a manager; see `manager_factory`. Raises `ConfigError`."""
    return manager_factory(name, path)(settings, template, decoder)
