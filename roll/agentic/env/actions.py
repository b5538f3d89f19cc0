"""Reading a named action from the policy's text.

A text without an action is data, not an error: reading it returns None. Reading takes time linear in the length of the
text, whatever it contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from roll.agentic.env.base import BadOption

ActionFormat = Literal["answer_tag", "plain"]
"""``answer_tag``: the text between the last ``<answer>`` and ``</answer>``; ``plain``: the whole text, stripped."""

OPENING, CLOSING = "<answer>", "</answer>"


def answer_in(text: str, action_format: ActionFormat) -> str | None:
    """Return the part of the text that is the answer; None if there is no pair of tags.

    The last pair counts, because models think aloud and correct themselves.
    """
    if action_format == "plain":
        return text.strip()
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, end) if end >= 0 else -1
    return text[start + len(OPENING) : end].strip() if start >= 0 else None


def as_answer(answer: str, action_format: ActionFormat) -> str:
    """Return the text with which a policy gives this answer."""
    return answer if action_format == "plain" else f"{OPENING}{answer}{CLOSING}"


def how_to_answer(what: str, action_format: ActionFormat) -> str:
    """Return one sentence of instructions for the policy. ``what`` names the answer, for example ``your guess``."""
    if action_format == "plain":
        return f"Answer with {what} and nothing else."
    return f"Give {what} as {OPENING}...{CLOSING}."


@dataclass(frozen=True)
class ActionReader:
    """Action names in the environment's order, compared without regard to case."""

    names: tuple[str, ...]
    action_format: ActionFormat

    def read(self, text: str) -> int | None:
        """Return the action's index among the names; None if the text names none."""
        answer = answer_in(text, self.action_format)
        folded = [name.casefold() for name in self.names]
        return folded.index(answer.casefold()) if answer is not None and answer.casefold() in folded else None

    def examples(self) -> tuple[str, ...]:
        """Return a text for each action."""
        return tuple(as_answer(name, self.action_format) for name in self.names)

    def instructions(self) -> str:
        """Return one or two sentences of instructions for the policy."""
        return f"Actions: {', '.join(self.names)}. {how_to_answer('one action', self.action_format)}"

    def complaint(self) -> str:
        """Return the message for a policy whose text named no action."""
        return f"That was no action. {self.instructions()}"


def action_reader(
    default_names: Sequence[str], action_names: Sequence[str] | None, action_format: ActionFormat
) -> ActionReader:
    """Return a reader of the default names, or of those a user chose. Raises `BadOption`."""
    if action_format not in ("answer_tag", "plain"):
        raise BadOption("action_format", f"{action_format!r} is no format of actions", "`answer_tag` or `plain`")
    names = tuple(str(name) for name in (default_names if action_names is None else action_names))
    if len(names) != len(default_names):
        message = f"{len(names)} names for {len(default_names)} actions"
        raise BadOption("action_names", message, f"name these, in this order: {', '.join(default_names)}")
    if len({name.casefold() for name in names}) < len(names):
        message = f"{', '.join(names)} are not all different (upper and lower case are the same)"
        raise BadOption("action_names", message, "a name of its own for each action")
    if any(not name or name != name.strip() or CLOSING in name for name in names):
        raise BadOption("action_names", "a name is empty or begins or ends with a space", "use words or letters")
    return ActionReader(names, action_format)
