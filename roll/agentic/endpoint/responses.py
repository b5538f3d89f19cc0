"""OpenAI's responses API: a conversation is a list of items; tool calls and reasoning are separate items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from roll.agentic.endpoint.body import Body
from roll.agentic.endpoint.dialects import Dialect, Json, event, model_name
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused
from roll.agentic.episode import Message

_WHOLE = "send the whole conversation as `input`: nothing is stored here"
_TEXTS = ("input_text", "output_text", "text", "refusal")


class Responses(Dialect):
    """OpenAI's responses API, without stored conversations and hosted tools."""

    path = "responses"

    def _read(self, body: Body) -> dict[str, Any]:
        for name in ("previous_response_id", "conversation", "prompt"):
            body.forbid(name, _WHOLE)
        body.forbid("background", "wait for the answer", False)
        body.forbid("top_logprobs", "use chat completions, which tell those of the sampled tokens", 0)
        form = None
        if (text := body.part("text")) is not None:
            form = self._form(text, "format")
            text.done()
        if not body.flag("parallel_tool_calls", default=True):
            body.has_no_effect("parallel_tool_calls")
        messages: list[Message] = []
        if instructions := body.text("instructions"):
            messages.append({"role": "system", "content": instructions})
        given = body.take("input", str, list)
        if not given:
            body.refuse("input", "is missing")
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
        else:
            for item in body.parts("input"):
                _add_item(messages, item)
                item.done()
        return {
            "messages": tuple(messages),
            "form": form,
            "tools": tuple(map(_tool, body.parts("tools"))),
            "may_call": body.may_call(),
            "max_tokens": body.count("max_output_tokens"),
        }

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        cut = answer.finish_reason == "length"
        prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
        return {
            **self._begun(request, answer),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(answer),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def events(
        self, request: ModelRequest, answer: ModelAnswer, told: ModelAnswer | None = None, *, ended: bool = True
    ) -> Iterator[str]:
        """Yield all events once the answer is complete, and none before, because they are numbered."""
        if not ended:
            return
        numbers = count()

        def wrote(kind: str, **fields: Any) -> str:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        yield wrote("response.created", response=self._begun(request, answer))
        yield wrote("response.in_progress", response=self._begun(request, answer))
        whole = self.answer(request, answer)
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "function_call":
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield wrote("response.output_item.added", output_index=index, item=begun)
                yield wrote("response.function_call_arguments.delta", **at, delta=item["arguments"])
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield wrote("response.function_call_arguments.done", **at, **done)
            else:
                (part,) = item["content"]
                at["content_index"] = 0
                kind = f"response.{part['type']}"
                more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
                begun = {**item, "content": [], "status": "in_progress"}
                yield wrote("response.output_item.added", output_index=index, item=begun)
                yield wrote("response.content_part.added", **at, part={**part, "text": ""})
                yield wrote(f"{kind}.delta", **at, delta=part["text"], **more)
                yield wrote(f"{kind}.done", **at, text=part["text"], **more)
                yield wrote("response.content_part.done", **at, part=part)
            yield wrote("response.output_item.done", output_index=index, item=item)
        yield wrote(f"response.{whole['status']}", response=whole)

    def error_event(self, refused: RequestRefused) -> str:
        inside = self.error(refused)["error"]
        fields = {name: inside[name] for name in ("code", "message", "param")}
        return event({"type": "error", "sequence_number": 0, **fields}, "error")

    def _begun(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": model_name(request),
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto" if request.may_call else "none",
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
            "top_p": None,
            "usage": None,
        }


def _items(answer: ModelAnswer) -> list[Json]:
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[Json] = []
    if answer.reasoning is not None:
        content = [{"type": "reasoning_text", "text": answer.reasoning}]
        thought = {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content}
        items.append({**thought, "status": status})
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        said = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [part]}
        items.append({**said, "status": status})
    for call in answer.tool_calls:
        item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        items.append({**item, "arguments": call.arguments, "status": "completed"})
    return items


def _add_item(messages: list[Message], item: Body) -> None:
    """Append an item to the messages. Consecutive reasoning, text and calls form one assistant message."""
    kind = item.text("type") or "message"
    for name in ("id", "status"):
        item.take(name, str)
    if kind == "message":
        _add_message(messages, item)
    elif kind == "function_call":
        made = item.call(item.text("call_id", required=True))
        _assistant(messages, ()).setdefault("tool_calls", []).append(made)
    elif kind == "function_call_output":
        identifier = item.text("call_id", required=True)
        messages.append({"role": "tool", "content": item.content("output", _TEXTS), "tool_call_id": identifier})
    elif kind == "reasoning":
        thought = item.content("content", ("reasoning_text",)) or item.content("summary", ("summary_text",))
        if thought:
            _assistant(messages, ("content", "reasoning_content", "tool_calls"))["reasoning_content"] = thought
    elif kind == "item_reference":
        item.refuse("type", f"is `item_reference`: {_WHOLE}")
    else:
        item.refuse("type", f"is `{kind[:40]}`, and only messages, function calls and thoughts are taken")


def _add_message(messages: list[Message], item: Body) -> None:
    role = item.text("role", required=True)
    text = item.content("content", _TEXTS)
    if role == "assistant":
        _assistant(messages, ("content",))["content"] = text
    elif role in ("system", "developer", "user"):
        messages.append({"role": "user" if role == "user" else "system", "content": text})
    else:
        item.refuse("role", "must be one of system, developer, user, assistant")


def _assistant(messages: list[Message], free: tuple[str, ...]) -> Message:
    """Return the last message if it is the assistant's and its fields ``free`` are empty; else append a new one."""
    if messages and messages[-1]["role"] == "assistant" and not any(messages[-1].get(name) for name in free):
        return messages[-1]
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(item: Body) -> Mapping[str, Any]:
    if item.text("type", required=True) != "function":
        item.refuse("type", "is not served: only functions are, which the client calls itself")
    described = item.function()
    item.done()
    return described
