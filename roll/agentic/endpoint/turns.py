"""One turn: from a client's request to prompt tokens, and from sampled tokens to the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roll.agentic.endpoint.json_text import loaded
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused, ToolCall
from roll.agentic.endpoint.tool_calls import (
    HERMES_BEGIN,
    PARSERS,
    THOUGHT_BEGIN,
    THOUGHT_END,
    Parser,
    call_id,
    split_thoughts,
)
from roll.agentic.episode import Message, SampledTurn
from roll.data.chat import ChatTurns, ControlTokenSpelled, Conversation, TemplateRefused, TurnTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rendered = TypeVar("Rendered")
_UNFINISHED = "\ufffd"
"""What a decoder returns for an incomplete character."""


@dataclass(frozen=True)
class TurnReader:
    """Renders requests and parses answers, with a model's template, tokenizer and tool-call parser."""

    template: TurnTemplate
    decoder: PreTrainedTokenizerBase
    parser: Parser

    def begun(self, messages: Sequence[Message], request: ModelRequest) -> Conversation:
        """Start a conversation with these messages. Raises `RequestRefused`."""
        try:
            return with_system_folded(
                lambda messages: self.template.begin(messages, request.tools), messages, begins=True
            )
        except TemplateRefused as refused:
            code = "control_token" if isinstance(refused, ControlTokenSpelled) else "template_refused"
            raise RequestRefused(str(refused), field="messages", code=code) from refused

    def require_known(self, token_ids: Sequence[int]) -> None:
        """Raise `RequestRefused` for token ids outside the vocabulary."""
        if max(token_ids) >= len(self.decoder):
            beyond = f"the prompt holds token {max(token_ids)}, and the vocabulary ends before {len(self.decoder)}"
            raise RequestRefused(beyond, field="prompt")

    def encoded(self, prompt: str | tuple[int, ...]) -> np.ndarray:
        """Return the token ids (int32) of a plain prompt. Raises `RequestRefused`."""
        if not isinstance(prompt, str):
            self.require_known(prompt)
        return np.asarray(self.decoder(prompt)["input_ids"] if isinstance(prompt, str) else prompt, dtype=np.int32)

    def answer(
        self,
        request: ModelRequest,
        prompt: np.ndarray,
        sampled: SampledTurn,
        *,
        answer_id: str,
        created: int,
        calls_id: str,
    ) -> ModelAnswer:
        """Build the answer from the sampled tokens. ``calls_id``: seed for the ids of its tool calls."""
        special = self.template.special_ids
        ids = sampled.token_ids.tolist()
        if ids and sampled.finish_reason == "stop" and ids[-1] in special:
            ids.pop()
        text = self._decoded(ids)
        ends = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        if ends and sampled.finish_reason == "stop":
            text = text[: min(ends)]
        reasoning, text = self._split(request, text)
        calls: tuple[tuple[str, str], ...] = ()
        if request.prompt is None and request.may_call:
            text, calls = self.parser(text, request.tools)
        tool_calls = tuple(
            ToolCall(name, arguments, call_id(calls_id, index)) for index, (name, arguments) in enumerate(calls)
        )
        return ModelAnswer(
            id=answer_id,
            created=created,
            text=self._without_special(text),
            finish_reason="tool_calls" if tool_calls else "length" if sampled.finish_reason == "length" else "stop",
            prompt_token_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            reasoning=reasoning,
            tool_calls=tool_calls,
        )

    def begun_answer(
        self, request: ModelRequest, prompt: np.ndarray, token_ids: Sequence[int], *, answer_id: str, created: int
    ) -> ModelAnswer:
        """Return the part of an unfinished answer that cannot change any more: prefixes of its reasoning and its text.

        If tools may be called, any text may turn out to be a call; only for the Hermes format is its beginning
        recognisable.
        """
        marks = (*request.stop, THOUGHT_BEGIN, THOUGHT_END, HERMES_BEGIN, *self.template.special_tokens)
        reasoning, text = self._split(request, _certain(self._decoded(token_ids), request.stop, marks))
        if request.tools and request.may_call and self.parser is not PARSERS["none"]:
            text = text.partition(HERMES_BEGIN)[0] if self.parser is PARSERS["hermes"] else ""
        return ModelAnswer(
            id=answer_id,
            created=created,
            text=self._without_special(text) if text.strip() else "",  # whitespace may precede reasoning
            finish_reason="length",
            prompt_token_ids=prompt,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            reasoning=reasoning,
        )

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self.decoder.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _split(self, request: ModelRequest, text: str) -> tuple[str | None, str]:
        """Split a text into reasoning and the rest."""
        if request.prompt is not None:
            return None, text
        return split_thoughts(text, begun=isinstance(self.template, ChatTurns) and bool(self.template.opening))

    def _without_special(self, text: str) -> str:
        for token in self.template.special_tokens:
            text = text.replace(token, "")
        return text


def _certain(text: str, stops: Sequence[str], marks: Sequence[str]) -> str:
    """Return the prefix of a text that later tokens cannot change.

    Omits an end that may be part of a character, of a mark, or of the beginning of a mark.
    """
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    text = text.rstrip(_UNFINISHED)
    for size in range(min(max(map(len, marks)), len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text


def message_of(answer: ModelAnswer) -> Message:
    """Convert an answer to a message in the format of chat templates."""
    message: Message = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": loaded(call.arguments)}}
            for call in answer.tool_calls
        ]
    return message


def with_system_folded(
    render: Callable[[Sequence[Message]], Rendered], messages: Sequence[Message], *, begins: bool
) -> Rendered:
    """Render messages. If the template refuses them, turn later system messages into user messages and retry.

    ``begins``: True if the conversation starts with these messages.
    """
    try:
        return render(messages)
    except TemplateRefused:
        first = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
        head = first if begins else 0
        folded = [*messages[:head], *(_as_user(message) for message in messages[head:])]
        if folded == list(messages):
            raise
        return render(folded)


def _as_user(message: Message) -> dict[str, Any]:
    return {**message, "role": "user"} if message["role"] == "system" else message
