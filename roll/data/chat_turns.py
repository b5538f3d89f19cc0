"""Turn templates: the exact tokens between what a policy wrote and where it writes next.

A context only ever grows: first prompt, sampled tokens as they were sampled, *glue* (what the template writes from the
end of the assistant's content to where the assistant writes next), sampled tokens, glue, and so on. Nothing that was
sampled is decoded and encoded again. A chat template that rewrites what it wrote before cannot be continued like that
and is refused. `docs/agentic_tokens.md` has a worked example.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from roll.data.templates import tokenise

Message = Mapping[str, Any]
"""One entry of a chat: ``role`` and ``content``, and what else a chat template understands."""

PLACEHOLDER = "AssistantWrites{number}Qz"
"""Stands for the assistant's content while a chat template is asked what it writes around it. One word of letters and
digits, so that no template trims, splits or escapes it."""


class TemplateRefused(ValueError):
    """A template cannot render these messages, or cannot be continued turn by turn. The message says what to do."""


class TurnTokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    all_special_ids: Sequence[int]
    added_tokens_decoder: Mapping[int, Any]
    """Id -> token, of which ``special`` is read."""

    def __call__(self, text: list[str], *, add_special_tokens: bool, return_attention_mask: bool) -> Mapping[str, Any]:
        """``input_ids`` of each text."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[Mapping[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> str:
        """The text of a conversation."""


class Conversation(Protocol):
    """One context as it grows."""

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """int32: what the policy reads in its first turn."""

    def glue(self, sampled: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """What stands between ``sampled`` (the policy's last tokens) and its next ones: the end of its turn unless it
        wrote that itself, the new messages, the opening of its next turn. int32; one call per turn, in order.

        Raises `TemplateRefused`.
        """


class TurnTemplate(Protocol):
    """How messages become tokens."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Token ids (int32) of a conversation, up to where the assistant writes. Raises `TemplateRefused`."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A conversation that will be continued. Raises `TemplateRefused`."""


class ChatTurns:
    """The chat template of a tokenizer, continued turn by turn."""

    def __init__(self, tokenizer: TurnTokenizer, options: Mapping[str, Any] | None = None) -> None:
        """``options`` are the template's own variables, such as ``enable_thinking``."""
        self._tokenizer = tokenizer
        self._options = dict(options or {})

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Token ids (int32) of a conversation, up to where the assistant writes. Raises `TemplateRefused`."""
        return self.encode(self.render(messages, tools))

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> ChatConversation:
        """A conversation that will be continued. Raises `TemplateRefused`."""
        return ChatConversation(self, messages, tools)

    def encode(self, text: str) -> np.ndarray:
        """Token ids (int32) of a text, nothing added."""
        return tokenise([text], self._tokenizer)[0]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out, see `special_token_ids`."""
        return special_token_ids(self._tokenizer)

    @cached_property
    def closing(self) -> np.ndarray:
        """Token ids of what the template writes after the content of an assistant that has the last word."""
        word = PLACEHOLDER.format(number=0)
        pair = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": word}]
        return self.encode(split_at(self.render(pair, (), generation_prompt=False), word)[1])

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True
    ) -> str:
        """The text of a conversation. Raises `TemplateRefused`."""
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
            )
        except Exception as cause:  # a template is a program of its own and raises what it likes
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefused(
                f"the chat template refuses messages of the roles [{roles}] ({type(cause).__name__}: {cause}); have "
                "the environment write roles that the template knows, or take `template: raw` for a model without one"
            ) from cause


class ChatConversation:
    """One growing context of a chat template. The assistant's contents are placeholders in what the template sees."""

    def __init__(self, template: ChatTurns, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        _require_messages(messages)
        self._template = template
        self._messages = list(messages)
        self._tools = tuple(tools)
        self._turns = 0
        self._text = template.render(self._messages, self._tools)
        self.prompt_token_ids = template.encode(self._text)

    def glue(self, sampled: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """What stands between ``sampled`` and the policy's next tokens. Raises `TemplateRefused`."""
        _require_messages(messages)
        word = self._unused_word(messages)
        longer = [*self._messages, {"role": "assistant", "content": word}, *messages]
        text = self._template.render(longer, self._tools)
        head, tail = split_at(text, word)
        self._require_continued_by(head)
        _require_written(tail, messages)
        self._messages, self._text = longer, text
        self._turns += 1
        tail_ids = self._template.encode(tail)
        return _without_written_stop(sampled, self._template.closing, tail_ids, self._template.special_ids)

    def _unused_word(self, messages: Sequence[Message]) -> str:
        """A placeholder that no message holds: what tools and environments say is not to be trusted."""
        said = [str(message.get("content")) for message in (*self._messages, *messages)]
        number = self._turns
        while any(PLACEHOLDER.format(number=number) in text for text in said):
            number += 1
        return PLACEHOLDER.format(number=number)

    def _require_continued_by(self, head: str) -> None:
        """The conversation as written now, up to the assistant's content, must go on from what the policy read.

        The messages must be written as they were. The opening of the assistant's turn may differ by what only one of
        the two has at its end: `<think>` in the generation prompt, or the space that some templates write before a
        content.
        """
        if head.startswith(self._text):
            return
        without_opening = self._template.render(self._messages, self._tools, generation_prompt=False)
        messages_end = len(os.path.commonprefix([self._text, without_opening]))
        if not (self._text.startswith(head) and len(head) >= messages_end):
            raise TemplateRefused(_rewriting(self._text, head))


@dataclass(frozen=True)
class RawTurns:
    """Plain text for models without a chat template: contents are joined, roles are not written.

    A prompt is the messages' contents joined by ``message_separator``, then ``prompt_end``; the policy's response is
    followed by ``response_end``, unless it ends with just that, and the next messages in the same form.
    """

    tokenizer: TurnTokenizer
    message_separator: str = "\n"
    prompt_end: str = "\n"
    response_end: str = "\n"

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Token ids (int32) of a conversation, up to where the policy writes. Raises `TemplateRefused`."""
        _require_no_tools(tools)
        text = ""
        block: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                text += self.block(block) + _plain(message) + self.response_end
                block = []
            else:
                block.append(message)
        return self.encode(text + self.block(block))

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> RawConversation:
        """A conversation that will be continued. Raises `TemplateRefused`."""
        return RawConversation(self, self.prompt(messages, tools))

    def block(self, messages: Sequence[Message]) -> str:
        """What is written for the messages between two responses; nothing for none."""
        return self.message_separator.join(map(_plain, messages)) + self.prompt_end if messages else ""

    def encode(self, text: str) -> np.ndarray:
        """Token ids (int32) of a text, nothing added."""
        return tokenise([text], self.tokenizer)[0]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out, see `special_token_ids`."""
        return special_token_ids(self.tokenizer)


@dataclass(frozen=True)
class RawConversation:
    """One growing context of plain text."""

    template: RawTurns
    prompt_token_ids: np.ndarray

    def glue(self, sampled: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        """What stands between ``sampled`` and the policy's next tokens. Raises `TemplateRefused`."""
        _require_messages(messages)
        closing = self.template.encode(self.template.response_end)
        tail = self.template.encode(self.template.response_end + self.template.block(messages))
        return _without_written_stop(sampled, closing, tail, self.template.special_ids)


def _require_written(tail: str, messages: Sequence[Message]) -> None:
    """Raise `TemplateRefused` if the template leaves a message out: the policy would act on what it never read."""
    for message in messages:
        words = str(message.get("content", "")).split()
        if words and words[0] not in tail:
            raise TemplateRefused(
                f"the chat template leaves out messages of the role {message.get('role')!r}; have the environment "
                "write them as `user` (of tools: `answer_role: user`, `describe_in_prompt: true`)"
            )


def require_append_only(
    template: TurnTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Try a conversation of three turns before a run depends on it; ``messages`` are those of a typical reset.

    Raises `TemplateRefused` if the template cannot render it or rewrites what it wrote.
    """
    conversation = template.begin(messages, tools)
    for _ in range(2):
        conversation.glue(np.zeros(0, dtype=np.int32), [{"role": "user", "content": "hello"}])


def special_token_ids(tokenizer: TurnTokenizer) -> frozenset[int]:
    """Ids that decoding with ``skip_special_tokens`` leaves out."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids) | frozenset(added)


def split_at(text: str, word: str) -> tuple[str, str]:
    """What a template wrote before and after the assistant's content. Raises `TemplateRefused`."""
    pieces = text.split(word)
    if len(pieces) != 2:
        raise TemplateRefused(
            f"the chat template writes the assistant's content {len(pieces) - 1} times instead of once, so what the "
            "policy sampled has no one place in it; take the step-wise manager (`env_manager_cls: step`), which "
            "renders each turn anew"
        )
    return pieces[0], pieces[1]


def _rewriting(before: str, head: str) -> str:
    place = len(os.path.commonprefix([before, head]))
    return (
        "the chat template is not append-only: when a conversation goes on it rewrites what the policy has read "
        f"(from character {place}: {before[place : place + 40]!r} became {head[place : place + 40]!r}). Take the "
        "step-wise manager (`env_manager_cls: step`), which renders each turn anew; some templates only do so because "
        "of a system message or of tools, and append without them"
    )


def _without_written_stop(
    sampled: np.ndarray, closing: np.ndarray, tail: np.ndarray, special_ids: frozenset[int]
) -> np.ndarray:
    """``tail`` without the end of the assistant's turn where the response has it already.

    The end is the closing up to its first special token (``<|im_end|>``), which alone identifies it; without a special
    token it is all of the closing.
    """
    stop = _common_beginning(closing, tail)
    special = [place for place, token_id in enumerate(stop) if int(token_id) in special_ids]
    if special:
        stop = stop[: special[0] + 1]
    mark = stop[-1:] if special else stop
    is_written = 0 < len(mark) <= len(sampled) and np.array_equal(sampled[-len(mark) :], mark)
    return tail[len(stop) :] if is_written else tail


def _common_beginning(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return first[: different[0] if len(different) else shorter]


def _require_messages(messages: Iterable[Message]) -> None:
    if not messages:
        raise TemplateRefused("an observation without messages gives the policy nothing to read; write at least one")


def _require_no_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    if tools:
        raise TemplateRefused(
            "`template: raw` has no place for tool schemas; describe the tools in the environment's text "
            "(`describe_in_prompt`), or take a chat template that knows tools"
        )


def _plain(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str):
        kind = type(content).__name__
        raise TemplateRefused(f"`template: raw` writes text, and the content of a message is a {kind}")
    return content
