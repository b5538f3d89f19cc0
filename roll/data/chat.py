"""Turn templates: compute the exact tokens between one response of the policy and the next.

A context only ever grows: first prompt, sampled tokens as they were sampled, *glue*, sampled tokens, glue, and so on.
The glue is the template's text from the end of one assistant content to the start of the next. Sampled tokens are never
decoded and encoded again. Contents are shielded before they are rendered, so that they never become control tokens. A
chat template that rewrites earlier text cannot be continued in this way and is rejected. `docs/agentic_tokens.md` has a
worked example.
"""

from __future__ import annotations

import json
import os.path
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.encoding import ContentEncoder, ControlTokensRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""One entry of a chat: ``role``, ``content``, and any other key that the chat template understands."""

PLACEHOLDER = "AssistantWrites{number}Qz"
"""A stand-in for the assistant's content while a chat template renders the text around it. It is one word of letters
and digits, so that no template trims, splits or escapes it."""
ASKED: Message = {"role": "user", "content": "hello"}
"""A user message with which templates are tried."""
_OPENED = re.compile(r"<(think|thinking|thought|reasoning)>\s*\Z")


class TemplateRefused(ValueError):
    """A template cannot render these messages, or cannot be continued turn by turn. The message says what to do."""


class ControlTokenSpelled(TemplateRefused):
    """A content spells a control token, and the run refuses such contents. The message names the token."""


@dataclass(eq=False)
class TurnTemplate(ABC):
    """A conversion of messages into tokens."""

    tokenizer: PreTrainedTokenizerBase
    refuse_control_tokens: bool = field(default=False, kw_only=True)
    """True if contents that spell control tokens are refused, except those of the assistant itself."""

    @abstractmethod
    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Return token ids (int32) of a conversation, up to the assistant's next content. Raises `TemplateRefused`."""

    @abstractmethod
    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """Begin a conversation that is continued turn by turn. Raises `TemplateRefused`."""

    @property
    @abstractmethod
    def closing(self) -> np.ndarray:
        """Token ids that end a response, unless the policy wrote them itself."""

    @cached_property
    def contents(self) -> ContentEncoder:
        """Encoder that shields message contents and encodes the text rendered from them."""
        return ContentEncoder(self.tokenizer)

    def shielded(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages, or descriptions of tools, with stand-ins for the control tokens that they spell.

        Raises `ControlTokenSpelled` if such texts are refused.
        """
        for message in messages if self.refuse_control_tokens else ():
            spelled = None if message.get("role") == "assistant" else self.contents.spelled_in(message)
            if spelled is not None:
                by = f"a message of the role {message['role']!r}" if "role" in message else "the description of a tool"
                raise ControlTokenSpelled(f"{by} spells the control token {spelled!r} (`on_control_tokens: refuse`)")
        return self.contents.shielded(list(messages))

    def encode(self, text: str) -> np.ndarray:
        """Return token ids (int32) of a text rendered from shielded contents, without added tokens."""
        try:
            return self.contents.encode(text)
        except ControlTokensRefused as cause:
            raise TemplateRefused(str(cause)) from cause

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of `special_ids`, longest first."""
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self.special_ids))
        return tuple(sorted(texts, key=len, reverse=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding with ``skip_special_tokens`` skips."""
        added = (token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset(self.tokenizer.all_special_ids) | frozenset(added)


@dataclass(frozen=True)
class Tail:
    """The text between two turns of the policy."""

    text: str
    """Text from the end of the policy's response to the start of its next one, rendered from shielded messages."""
    end: str | None
    """Text that ends the policy's turn if nothing follows it; None: the template's ``closing``."""
    following: TailOf
    """Function that returns the next tail."""


TailOf = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], Tail]
"""A function of the next messages, and of the tool calls in the policy's turn before them, without side effects."""


class Conversation:
    """A context that grows turn by turn."""

    def __init__(self, template: TurnTemplate, prompt_token_ids: np.ndarray, tail: TailOf) -> None:
        """Begin with the token ids, int32, that the policy reads in its first turn."""
        self._template = template
        self._tail = tail
        self.prompt_token_ids = prompt_token_ids

    def branch(self) -> Conversation:
        """Return an independent conversation that continues from here."""
        return Conversation(self._template, self.prompt_token_ids, self._tail)

    def glue(
        self, sampled: np.ndarray, messages: Sequence[Message], tool_calls: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Return the tokens (int32) between ``sampled``, the policy's last tokens, and its next ones.

        They are the end of the policy's turn unless it wrote that itself, the new messages, and the opening of its next
        turn. ``tool_calls``: the calls parsed from the policy's turn, for templates that render them. Call this once
        per turn, in order. Raises `TemplateRefused`, which leaves the conversation unchanged.
        """
        _require_messages(messages)
        template = self._template
        tail = self._tail(template.shielded(messages), template.contents.shielded(list(tool_calls)))
        closing = self._template.closing if tail.end is None else self._template.encode(tail.end)
        found = _without_written_stop(sampled, closing, self._template.encode(tail.text), self._template.special_ids)
        self._tail = tail.following
        return found


@dataclass(eq=False)
class ChatTurns(TurnTemplate):
    """The chat template of a tokenizer, continued turn by turn."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's own variables, such as ``enable_thinking``."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        return self.begin(messages, tools).prompt_token_ids

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        text = _ChatText(self, self.shielded(messages), self.shielded(tools))
        _require_written(text.messages, _to_be_read(messages), lambda tried: self.render(tried, text.tools))
        return Conversation(self, self.encode(text.read), text.tail)

    def end_of(self, text: str) -> str:
        """Return the text that ends the assistant's turn at the end of a conversation, ``text``.

        It is the usual end of a turn, or else a special token. It is empty if this template ends no turn. Raises
        `TemplateRefused` if the template ends turns, but not this one.
        """
        usual = self._around[1]
        if usual and text.endswith(usual):
            return usual
        bare = text.rstrip()
        end = next((token for token in self.special_tokens if bare.endswith(token)), None)
        if end is not None:
            return text[len(bare) - len(end) :]
        if usual:
            raise TemplateRefused("the chat template does not say where an assistant's tool calls end")
        return ""  # the next turn's opening ends this one

    @cached_property
    def leading(self) -> str:
        """Whitespace before an assistant's content that is not in the generation prompt, so the policy writes it."""
        more = self._around[0].removeprefix(self.render([ASKED], ()))
        return more if more.isspace() else ""

    @cached_property
    def opening(self) -> str:
        """Thought tag that ends the generation prompt (such as ``<think>``, with whitespace after it), or empty."""
        found = _OPENED.search(self.render([ASKED], ()))
        return "" if found is None else found[0]

    @cached_property
    def closing(self) -> np.ndarray:
        """Token ids that the template writes after the content of an assistant's last message."""
        return self.encode(self._around[1])

    @cached_property
    def _around(self) -> tuple[str, str]:
        """Text before and after the content of an assistant's answer to `ASKED`."""
        word = PLACEHOLDER.format(number=0)
        answered = [ASKED, {"role": "assistant", "content": word}]
        return _split_at(self.render(answered, (), generation_prompt=False), word)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, stand-ins included. Raises `TemplateRefused`."""
        try:
            return self._rendered(messages, tools, generation_prompt)
        except Exception as cause:  # a template is a program and may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefused(
                f"the chat template refuses messages of the roles [{roles}] ({type(cause).__name__}: {cause}); have "
                "the environment write roles that the template knows, or take `template: raw` for a model without one"
            ) from cause

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        if any(message.get("tool_calls") for message in messages) and self._takes_arguments_as_text:
            messages = [_with_text_arguments(each) if each.get("tool_calls") else each for each in messages]
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=open_turn,
            **self.options,
        )

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """True if the template fails on the arguments of a tool call as an object, and not on their JSON text."""
        function = {"name": "word", "arguments": {"word": 1}}
        called = {
            "role": "assistant",
            "content": "word",
            "tool_calls": [{"id": "123456789", "type": "function", "function": function}],
        }
        return not self._takes(called) and self._takes(_with_text_arguments(called))

    def _takes(self, message: Message) -> bool:
        """Return True if the template renders a message after `ASKED`."""
        try:
            self.tokenizer.apply_chat_template([ASKED, message], tokenize=False, **self.options)
        except Exception:  # a template is a program and may raise anything
            return False
        return True


def _with_text_arguments(message: Message) -> Message:
    """Return an assistant's message with the arguments of its calls as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


class _ChatText:
    """The text of one conversation, rendered from shielded messages, with placeholders for the policy's responses."""

    def __init__(
        self, chat: ChatTurns, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], turns: int = 0
    ) -> None:
        _require_messages(messages)
        self._chat = chat
        self.messages = list(messages)
        self.tools = tuple(tools)
        self._turns = turns

    @cached_property
    def read(self) -> str:
        """Text that the policy has read."""
        return self._chat.render(self.messages, self.tools)

    def tail(self, messages: Sequence[Message], tool_calls: Sequence[Mapping[str, Any]] = ()) -> Tail:
        word = _unused_word([*self.messages, *messages, *tool_calls], self._turns)
        answered: dict[str, Any] = {"role": "assistant", "content": word}
        if tool_calls:
            answered["tool_calls"] = list(tool_calls)
        longer = [*self.messages, answered, *messages]
        new = range(len(longer) - len(messages), len(longer))
        beside = not tool_calls or self._writes_beside_calls(longer, new, word)
        written, end = self._behind(longer, new, word, beside)
        if not _surely_writes(written, messages):
            _require_written(longer, new, lambda tried: self._behind(tried, new, word, beside)[0])
        self.__dict__.pop("read", None)  # long; a conversation that branches here renders it again
        return Tail(written, end, _ChatText(self._chat, longer, self.tools, self._turns + 1).tail)

    def _writes_beside_calls(self, longer: list[Message], new: range, word: str) -> bool:
        """Return True if the template writes a content, ``word``, beside tool calls, and before what tools answer."""
        told, sought = _with_stand_ins(longer, new)
        alone = self._chat.render(longer[: new.start], self.tools, generation_prompt=False)
        text = self._chat.render(told, self.tools)
        behind = text.partition(word)[2]
        return text.count(word) == alone.count(word) == 1 and all(name in behind for name in sought.values())

    def _behind(self, longer: list[Message], new: range, word: str, beside: bool) -> tuple[str, str | None]:
        """Return the text after the assistant's content or calls, and what ends its turn there; see `Tail`.

        ``longer``: all messages, of which those at ``new`` follow the assistant's turn. ``word``: the content of that
        turn; it is left out unless it is ``beside`` the calls.
        """
        present = longer[: new.start]
        if not beside:
            present[-1] = {**present[-1], "content": ""}
        text = self._chat.render([*present, *longer[new.start :]], self.tools)
        if not present[-1].get("tool_calls"):
            head, written = _split_at(text, word)
            self._require_continued_by(head)
            return written, None
        alone = self._chat.render(present, self.tools, generation_prompt=False)
        own = alone.partition(word)[2] if beside else alone
        head, _, behind = text.partition(word) if beside else (alone, "", text)
        self._require_continued_by(head)
        end = self._chat.end_of(own)
        calls = own.removesuffix(end)
        if not behind.startswith(calls):
            raise TemplateRefused("the chat template rewrites an assistant's tool calls when a conversation goes on")
        return behind[len(calls) :], end

    def _require_continued_by(self, head: str) -> None:
        """Raise `TemplateRefused` unless ``head`` continues the text read so far.

        ``head`` is the new text, at least up to the assistant's content. The messages must be rendered as before. The
        opening of the assistant's turn may differ: `<think>` in the generation prompt and `<think></think>` in the
        history, or the space that some templates write before a content.
        """
        before = self.read
        if head.startswith(before):
            return
        without_opening = self._chat.render(self.messages, self.tools, generation_prompt=False)
        messages_end = len(os.path.commonprefix([before, without_opening]))
        place = len(os.path.commonprefix([before, head]))
        if place >= messages_end:
            return
        raise TemplateRefused(
            "the chat template is not append-only: when a conversation goes on it rewrites what the policy has read "
            f"(from character {place}: {before[place : place + 40]!r} became {head[place : place + 40]!r}). Take the "
            "step-wise manager (`env_manager_cls: step`), which renders each turn anew; some templates only do so "
            "because of a system message or of tools, and append without them"
        )


@dataclass(eq=False)
class RawTurns(TurnTemplate):
    """Plain text for models without a chat template: contents are joined, roles are not written.

    A prompt is the messages' contents joined by ``message_separator``, then ``prompt_end``. After the policy's response
    come ``response_end``, unless the response ends with it, and the next messages in the same form.
    """

    message_separator: str = "\n"
    prompt_end: str = "\n"
    response_end: str = "\n"

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        if tools:
            raise TemplateRefused(
                "`template: raw` has no place for tool schemas; describe the tools in the environment's text "
                "(`describe_in_prompt`), or take a chat template that knows tools"
            )
        text = ""
        block: list[Message] = []
        for message in self.shielded(messages):
            if message["role"] == "assistant":
                text += self.block(block) + _plain(message) + self.response_end
                block = []
            else:
                block.append(message)
        return self.encode(text + self.block(block))

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        return Conversation(self, self.prompt(messages, tools), self._tail)

    def _tail(self, messages: Sequence[Message], tool_calls: Sequence[Mapping[str, Any]]) -> Tail:
        return Tail(self.response_end + self.block(messages), None, self._tail)

    @cached_property
    def closing(self) -> np.ndarray:
        """Token ids of ``response_end``."""
        return self.encode(self.response_end)

    def block(self, messages: Sequence[Message]) -> str:
        """Return the text of the messages between two responses; empty without messages."""
        return self.message_separator.join(map(_plain, messages)) + self.prompt_end if messages else ""


def _unused_word(messages: Sequence[Message], number: int = 0) -> str:
    """Return a placeholder that no message contains: the texts of tools and environments are untrusted."""
    said = [str(message) for message in messages]
    while any(PLACEHOLDER.format(number=number) in text for text in said):
        number += 1
    return PLACEHOLDER.format(number=number)


def _to_be_read(messages: Sequence[Message]) -> list[int]:
    """Return the places of the messages that every template has to write at the beginning of a conversation.

    Of the assistant's messages, it may leave out the thoughts; and in a conversation that goes on, some templates
    (Mistral's) write the system messages only before a user message at the end.
    """
    goes_on = any(message.get("role") == "assistant" for message in messages)
    first = next((place for place, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    begin = first if goes_on else 0
    return [place for place in range(begin, len(messages)) if messages[place].get("role") != "assistant"]


def _require_written(
    messages: Sequence[Message], places: Iterable[int], rendered: Callable[[list[Message]], str]
) -> None:
    """Raise `TemplateRefused` if the template leaves out a message, so that the policy would never read it.

    ``places``: those of ``messages`` to look for. ``rendered``: function from messages that differ from ``messages`` in
    their contents only to the text in which they have to stand.
    """
    tried, sought = _with_stand_ins(messages, places)
    if not sought:
        return
    try:
        text = rendered(tried)
    except TemplateRefused:  # a template that objects to another content reads it
        return
    for place, name in sought.items():
        if name not in text:
            raise TemplateRefused(
                f"the chat template leaves out messages of the role {messages[place].get('role')!r}; have the "
                "environment write them as `user` (of tools: `answer_role: user`, `describe_in_prompt: true`)"
            )


def _surely_writes(text: str, messages: Sequence[Message]) -> bool:
    """Return True if the text has the content of the only message, which is too long to stand there by chance."""
    content = messages[0].get("content") if len(messages) == 1 else None
    return isinstance(content, str) and len(content.strip()) >= 16 and content.strip() in text


def _with_stand_ins(messages: Sequence[Message], places: Iterable[int]) -> tuple[list[Message], dict[int, str]]:
    """Return the messages, of which those at ``places`` say another word each, and these words by place.

    A template may write a content in another form, such as JSON, and a short content stands in any text.
    """
    word, told, words = _unused_word(messages), list(messages), {}
    for place in places:
        content = _replaced(messages[place].get("content"), f"{word}{place}Qz")
        if content != messages[place].get("content"):
            told[place], words[place] = {**messages[place], "content": content}, f"{word}{place}Qz"
    return told, words


def _replaced(content: Any, word: str) -> Any:
    """Return a content that says ``word`` in place of its texts; the same content if it says nothing."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return [{**part, "text": word} if part.get("text") else part for part in content]
    return word if content and not str(content).isspace() else content


def require_append_only(
    template: TurnTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Try a conversation of three turns before a run depends on it; ``messages`` are those of a typical reset.

    Raises `TemplateRefused` if the template cannot render it or rewrites earlier text.
    """
    conversation = template.begin(messages, tools)
    for _ in range(2):
        conversation.glue(np.zeros(0, dtype=np.int32), [{"role": "user", "content": "hello"}])


def _split_at(text: str, word: str) -> tuple[str, str]:
    """Split a template's text at the assistant's content, ``word``. Raises `TemplateRefused` unless it occurs once."""
    pieces = text.split(word)
    if len(pieces) != 2:
        raise TemplateRefused(
            f"the chat template writes the assistant's content {len(pieces) - 1} times instead of once, so there is no "
            "single place for what the policy sampled; take the step-wise manager (`env_manager_cls: step`), which "
            "renders each turn anew"
        )
    return pieces[0], pieces[1]


def _without_written_stop(
    sampled: np.ndarray, closing: np.ndarray, tail: np.ndarray, special_ids: frozenset[int]
) -> np.ndarray:
    """Return ``tail``, without the end of the assistant's turn if the response already has it.

    The end is the closing up to its first special token (``<|im_end|>``), which alone identifies it; without a special
    token it is all of the closing. If the template ends no turn, the special token that opens the next one is the end.
    """
    shorter = min(len(closing), len(tail))
    different = np.flatnonzero(closing[:shorter] != tail[:shorter])
    stop = closing[: different[0] if len(different) else shorter]  # both begin with it
    if not len(stop):
        stop = tail[:1] if len(tail) and int(tail[0]) in special_ids else stop
    special = [place for place, token_id in enumerate(stop) if int(token_id) in special_ids]
    if special:
        stop = stop[: special[0] + 1]
    mark = stop[-1:] if special else stop
    is_written = 0 < len(mark) <= len(sampled) and np.array_equal(sampled[-len(mark) :], mark)
    return tail[len(stop) :] if is_written else tail


def _require_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise TemplateRefused("an observation without messages gives the policy nothing to read; write at least one")


def _plain(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, str):
        kind = type(content).__name__
        raise TemplateRefused(f"`template: raw` writes text, and the content of a message is a {kind}")
    return content
