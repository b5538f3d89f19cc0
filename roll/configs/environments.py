"""Environments of the agentic pipeline: kinds, managers, processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.fields import COUNT, NOT_NEGATIVE, POSITIVE, Range, option


@dataclass
class EnvManagerConfig:
    """A set of environments: number, kinds and grouping of their episodes."""

    num_env_groups: int | None = option(
        None,
        help="Training: groups of episodes that run at once; default: all that may have started. Validation: groups in "
        "all, one seed each.",
        range=COUNT,
    )
    group_size: int = option(1, help="Episodes of one group; they share tag and seed.", range=COUNT)
    group_size_redundancy: int = option(
        0,
        help="Episodes of a group that may fail (environment raised, hung, died): each is replaced by a new one. "
        "Unlike in ROLL they do not start with the others, so slow episodes are not left out for being slow.",
        range=NOT_NEGATIVE,
    )
    tags: list[str] = option(factory=list, help="Tags of `custom_envs` used. Default: all, in their order.")
    num_groups_partition: list[int] = option(
        factory=list,
        help="Share of each tag: of as many successive groups as these numbers add up to, each tag gets its number. "
        "Default: 1 each.",
    )
    max_traj_per_env: int | None = option(
        None,
        help="Groups that one of the `num_env_groups` plays in a training step at most, in the mean; a configuration "
        "that needs more is refused.",
        range=COUNT,
    )
    format_penalty: float = option(
        0.0, help="Added to the reward of a turn whose action is not valid: 0 or less.", range=Range(at_most=0)
    )


@dataclass
class CustomEnvConfig:
    """One kind of environment; the key under `custom_envs` is its tag."""

    env_type: str = option(
        "",
        help="A built-in environment, a gymnasium id, the name of an entry point of the group `roll.environments`, or "
        "an import path `package.module:Class`. See `docs/environments.md`.",
    )
    env_config: dict[str, Any] = option(factory=dict, help="Keyword arguments of the environment.")
    max_steps: int = option(10, help="Longest episode in turns.", range=COUNT)
    max_tokens_per_step: int | None = option(
        None,
        help="Longest response of one turn in tokens; `generating_args.max_new_tokens` may be less. Default: what the "
        "sequence leaves.",
        range=COUNT,
    )
    env_manager_cls: str = option(
        "trajectory",
        help="`trajectory`: an episode is one sample; `step`: each turn is one, with a window of what came before; or "
        "the import path of an environment manager of one's own.",
    )
    history_length: int = option(
        10, help="Turns before the present one that the prompt of a turn shows (`step` only).", range=NOT_NEGATIVE
    )
    keep_first_observation: bool = option(
        True, help="Begin each prompt with the episode's first observation, however long ago it was (`step` only)."
    )
    reset_timeout_seconds: float = option(60.0, help="Longest time of a reset.", range=POSITIVE)
    step_timeout_seconds: float = option(60.0, help="Longest time of a step.", range=POSITIVE)


@dataclass
class RawTurnsConfig:
    """The text between the turns of a model without a chat template."""

    message_separator: str = option("\n", help="Text between messages that follow each other.")
    prompt_end: str = option("\n", help="Text between an observation and the response.")
    response_end: str = option("\n", help="Text between a response and the next observation.")


@dataclass
class EnvWorkersConfig:
    """The processes that hold the environments of training and validation."""

    num_workers: int = option(1, help="Worker processes.", range=COUNT)
    max_sessions: int = option(4096, help="Episodes in progress at most, over all workers.", range=COUNT)
    max_failed_starts: int = option(
        3, help="Worker processes in a row that do not start before the run fails.", range=COUNT
    )
    silence_timeout_seconds: float = option(
        60.0, help="A worker process that does not answer for this long is replaced.", range=POSITIVE
    )
    place_timeout_seconds: float = option(
        3600.0, help="Longest time that an episode waits for one of the `max_sessions` places.", range=POSITIVE
    )
    max_memory_growth_gib: float = option(
        4.0, help="A worker process whose memory grew by more is replaced when its episodes have ended.", range=POSITIVE
    )
