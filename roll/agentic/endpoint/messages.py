"""Anthropic's messages API: contents are blocks, and tool results come back inside a user message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from roll.agentic.endpoint.body import Body, call
from roll.agentic.endpoint.dialects import Dialect, Json, event, model_name, rest
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused
from roll.agentic.episode import Message

BILLING = "x-anthropic-billing-header:"
"""Prefix of a line that Claude Code puts first. Some versions change it with each request, so it is removed."""
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class Messages(Dialect):
    """Anthropic's messages API, including the requests of `count_tokens`."""

    path = "messages"
    too_long = "prompt is too long"

    def _read(self, body: Body) -> dict[str, Any]:
        body.forbid("mcp_servers", "connect to the servers in the agent", [])
        form = self._form(body, "output_format")
        if (output := body.part("output_config")) is not None:
            form = self._form(output, "format") or form
            output.done()
        thoughts = False
        if (thinking := body.part("thinking")) is not None:
            thoughts = thinking.text("type") not in ("", "disabled")
            thinking.done()
        messages: list[Message] = []
        if system := "".join(_system_texts(body, "system")):
            messages.append({"role": "system", "content": system})
        for item in body.parts("messages"):
            _add_message(messages, item)
            item.done()
        if all(message["role"] == "system" for message in messages):
            body.refuse("messages", "is missing")
        if messages[-1]["role"] == "assistant":
            body.refuse("messages", "ends with the assistant, whose text cannot be given: end with the user")
        return {
            "messages": tuple(messages),
            "form": form,
            "tools": tuple(map(_tool, body.parts("tools"))),
            "may_call": body.may_call(("auto",), ("any", "tool")),
            "max_tokens": body.count("max_tokens"),
            "stop": body.texts("stop_sequences"),
            "thoughts": thoughts,
        }

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        reason, stop = self._stop(request, answer)
        return {**self._begun(request, answer), "content": _blocks(request, answer), **reason, **stop, **_usage(answer)}

    def events(
        self, request: ModelRequest, answer: ModelAnswer, told: ModelAnswer | None = None, *, ended: bool = True
    ) -> Iterator[str]:
        def wrote(kind: str, **fields: Any) -> str:
            return event({"type": kind, **fields}, kind)

        if told is None:
            yield wrote("message_start", message=self._begun(request, answer))
        before = [] if told is None else _blocks(request, told, ended=False)
        blocks = _blocks(request, answer, ended=ended)
        for index, block in enumerate(blocks):
            known = before[index] if index < len(before) else None
            if known is None:
                yield wrote("content_block_start", index=index, content_block=_empty(block))
            for delta in _deltas(block, known):
                yield wrote("content_block_delta", index=index, delta=delta)
            if index >= len(before) - 1 and (ended or index < len(blocks) - 1):  # earlier blocks are already stopped
                if block["type"] == "thinking":
                    signature = {"type": "signature_delta", "signature": block["signature"]}
                    yield wrote("content_block_delta", index=index, delta=signature)
                yield wrote("content_block_stop", index=index)
        if not ended:
            return
        reason, stop = self._stop(request, answer)
        yield wrote("message_delta", delta={**reason, **stop}, **_usage(answer))
        yield wrote("message_stop")

    def error(self, refused: RequestRefused) -> Json:
        kind = _ERRORS.get(refused.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self._message(refused)}}

    def error_event(self, refused: RequestRefused) -> str:
        return event(self.error(refused), "error")

    def token_count(self, prompt_tokens: int) -> Json:
        """Return the body of the answer to `count_tokens`."""
        return {"input_tokens": prompt_tokens}

    def _begun(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": model_name(request),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(answer.prompt_token_ids), "output_tokens": 0},
        }

    def _stop(self, request: ModelRequest, answer: ModelAnswer) -> tuple[Json, Json]:
        reason, stop = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish_reason, "end_turn"), None
        if answer.finish_reason == "stop" and request.stop:
            sampled = self.decode(answer.token_ids.tolist())
            stop = min((each for each in request.stop if each in sampled), key=sampled.find, default=None)
            reason = "stop_sequence" if stop else reason
        return {"stop_reason": reason}, {"stop_sequence": stop}


def _usage(answer: ModelAnswer) -> Json:
    return {"usage": {"input_tokens": len(answer.prompt_token_ids), "output_tokens": len(answer.token_ids)}}


def _blocks(request: ModelRequest, answer: ModelAnswer, *, ended: bool = True) -> list[Json]:
    blocks: list[Json] = []
    if answer.reasoning is not None and request.thoughts:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or ended and not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.text})
    for each in answer.tool_calls:
        blocks.append({"type": "tool_use", "id": each.id, "name": each.name, "input": json.loads(each.arguments)})
    return blocks


def _empty(block: Json) -> Json:
    """Return a content block as it is at the start of its stream."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}
    return {**block, "thinking": "", "signature": ""} if block["type"] == "thinking" else {**block, "text": ""}


def _deltas(block: Json, told: Json | None) -> Iterator[Json]:
    """Yield the deltas that are still to be sent for a content block; at least one for a new block."""
    kind = block["type"]
    if kind == "tool_use":
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    elif (more := rest(block[kind], None if told is None else told.get(kind))) or told is None:
        yield {"type": f"{kind}_delta", kind: more}


def _system_texts(holder: Body, name: str) -> list[str]:
    """Return the texts of a system prompt, without the billing line."""
    value = holder.take(name, str, list)
    texts = [value] if isinstance(value, str) else [block.piece() for block in holder.parts(name)] if value else []
    return [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]


def _add_message(messages: list[Message], item: Body) -> None:
    role = item.text("role", required=True)
    if role == "system":
        if text := "".join(_system_texts(item, "content")):
            messages.append({"role": "system", "content": text})
        return
    if role not in ("user", "assistant"):
        item.refuse("role", "must be user, assistant or system")
    content = item.take("content", str, list)
    if not content:
        item.refuse("content", "is missing")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
    elif role == "user":
        _add_user_blocks(messages, item.parts("content"))
    else:
        messages.append(_assistant(item.parts("content")))


def _add_user_blocks(messages: list[Message], blocks: list[Body]) -> None:
    texts = []
    for block in blocks:
        if block.text("type") == "tool_result":
            identifier = block.text("tool_use_id", required=True)
            messages.append({"role": "tool", "content": block.content("content"), "tool_call_id": identifier})
            block.done()
        else:
            texts.append(block.piece())
    if text := "\n".join(filter(None, texts)):
        messages.append({"role": "user", "content": text})


def _assistant(blocks: list[Body]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.text("type")
        if kind == "tool_use":
            name = block.text("name", required=True)
            calls.append(call(block.text("id"), name, block.take("input", dict)))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
            block.take("signature", str)
        elif kind != "redacted_thinking":
            texts.append(block.piece())
        block.done()
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, texts))}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _tool(item: Body) -> Mapping[str, Any]:
    if item.text("type") not in ("", "custom"):
        item.refuse("type", "is not served: only tools are that the client runs itself")
    described = item.function("input_schema")
    item.done()
    return described
