"""The HTTP APIs of the endpoint: one `Dialect` for each path, with OpenAI's chat completions and completions here.

`read` parses a request into a `ModelRequest`; what is not supported is refused, with the field and a remedy. `answer`
and `events` write the policy's answer as the original service would, as one body or as a stream. In training, the run
decides how to sample: a client's temperature is accepted and has no effect.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from roll.agentic.endpoint.body import Body
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused
from roll.agentic.episode import Message

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, including special tokens."""
Json = dict[str, Any]

_USE_TOOLS = "describe functions under `tools`"
_USE_PROMPT = "no form is forced on the policy, so ask for it in the prompt"
_NOT_TRAINED = "leave it out, for the trainer would not know of it"
_NOT_KNOWN = "leave it out, for sampling has a temperature, top_p, top_k and a seed only"
_ONLY_SAMPLED = "leave it out, for only the sampled tokens have log-probabilities"
_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class Dialect(ABC):
    """One API: a path of the endpoint, with its request and answer formats."""

    path: ClassVar[str]
    """Path below `/v1/`."""
    too_long: ClassVar[str] = "This model's maximum context length is exceeded"
    """The service's error message for prompts that are too long; agents then shorten their conversation."""

    def __init__(self, decode: Decode, *, client_samples: bool = False) -> None:
        """``client_samples``: True for a served model, for which the client chooses the sampling parameters."""
        self.decode = decode
        self.client_samples = client_samples

    def read(self, value: Any) -> ModelRequest:
        """Parse the decoded JSON body of a request. Raises only `RequestRefused`."""
        body = Body(value)
        sampling = _sampling(body) if self.client_samples else {}
        fields = {"model": body.text("model"), "stream": body.flag("stream"), **sampling, **self._read(body)}
        body.done()
        return ModelRequest(**fields, without_effect=body.without_effect)

    @abstractmethod
    def _read(self, body: Body) -> dict[str, Any]:
        """Return the fields of the request except ``model``, ``stream``, ``without_effect`` and sampling."""

    @abstractmethod
    def answer(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        """Return the body of the answer."""

    @abstractmethod
    def events(
        self, request: ModelRequest, answer: ModelAnswer, told: ModelAnswer | None = None, *, ended: bool = True
    ) -> Iterator[str]:
        """Yield the server-sent events that carry the answer. Assembled by a client, they equal `answer`.

        ``told``: the part of the answer that earlier events carried. ``ended``: False if more reasoning or text will
        follow.
        """

    def error(self, refused: RequestRefused) -> Json:
        """Return the body of an error response."""
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        kind = "authentication_error" if refused.status == 401 else kind
        message = self._message(refused)
        return {"error": {"message": message, "type": kind, "param": refused.field, "code": refused.code}}

    def error_event(self, refused: RequestRefused) -> str:
        """Return the event that ends a stream with an error."""
        return event(self.error(refused))

    def _message(self, refused: RequestRefused) -> str:
        begin = f"{self.too_long}: " if refused.code == "context_length_exceeded" else ""
        return f"{begin}{refused}"

    def _form(self, body: Body, name: str) -> str | None:
        """Return the path of a field that demands structured output, or None. Structured output is not supported,
        because it would need constrained decoding."""
        form = body.part(name)
        if form is None or form.take("type", str) == "text":
            return None
        body.has_no_effect(name)
        return body.where(name)

    def _refuse_other_sampling(self, body: Body) -> None:
        """Refuse sampling options that the trainer does not know, and those that need several answers."""
        body.forbid("n", "ask once for each answer", 1)
        remedy = _NOT_KNOWN if self.client_samples else _NOT_TRAINED
        body.forbid("logit_bias", remedy, {})
        for name in ("frequency_penalty", "presence_penalty"):
            body.forbid(name, remedy, 0)
        body.forbid("repetition_penalty", remedy, 1)
        body.forbid("allowed_token_ids", remedy, [])
        for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            body.forbid(name, _USE_PROMPT)

    def _token_texts(self, answer: ModelAnswer) -> list[tuple[str, float]]:
        texts = [self.decode([int(token)]) for token in answer.token_ids]
        logprobs = [max(float(logprob), _LEAST_LOGPROB) for logprob in answer.logprobs]
        return list(zip(texts, logprobs, strict=True))


class Chat(Dialect):
    """OpenAI's chat completions API."""

    path = "chat/completions"

    def _read(self, body: Body) -> dict[str, Any]:
        self._refuse_other_sampling(body)
        body.forbid("top_logprobs", _ONLY_SAMPLED, 0)
        body.forbid("functions", _USE_TOOLS, [])
        body.forbid("function_call", _USE_TOOLS, "none")
        body.forbid("audio", "leave it out, for only text is answered")
        body.forbid("modalities", "leave it out, for only text is answered", ["text"], [])
        body.forbid("web_search_options", _USE_TOOLS)
        body.forbid("continue_final_message", "end with a message of the user or of a tool", False)
        if not body.flag("parallel_tool_calls", default=True):
            body.has_no_effect("parallel_tool_calls")
        messages = tuple(map(_chat_message, body.parts("messages")))
        if not messages:
            body.refuse("messages", "is missing")
        longest = [body.count(name) for name in ("max_completion_tokens", "max_tokens")]
        return {
            "messages": messages,
            "form": self._form(body, "response_format"),
            "tools": tuple(map(_chat_tool, body.parts("tools"))),
            "may_call": body.may_call(),
            "max_tokens": longest[0] or longest[1],
            "stop": body.texts("stop"),
            "include_usage": _include_usage(body),
            "logprobs": body.flag("logprobs"),
            "return_token_ids": body.flag("return_token_ids"),
        }

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        message: Json = {"role": "assistant", "content": _content(answer), "refusal": None}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_chat_call(call.id, call.name, call.arguments) for call in answer.tool_calls]
        choice = {"message": message, **self._end(request, answer)}
        whole = {**_head("chatcmpl", "chat.completion", request, answer), "choices": [choice], "usage": _usage(answer)}
        return {**whole, **_prompt_ids(request, answer)}

    def events(
        self, request: ModelRequest, answer: ModelAnswer, told: ModelAnswer | None = None, *, ended: bool = True
    ) -> Iterator[str]:
        head = _head("chatcmpl", "chat.completion.chunk", request, answer)
        if request.include_usage:
            head["usage"] = None

        def chunk(delta: Json, end: Json | None = None, **more: Any) -> str:
            choice = {"delta": delta, **(end or {"index": 0, "logprobs": None, "finish_reason": None})}
            return event({**head, "choices": [choice], **more})

        if told is None:
            first = {"role": "assistant", "content": None if ended and _content(answer) is None else ""}
            yield chunk(first, **_prompt_ids(request, answer))
        thoughts, text = _news(answer, told)
        if thoughts:
            yield chunk({"reasoning_content": thoughts})
        if text:
            yield chunk({"content": text})
        if not ended:
            return
        for index, call in enumerate(answer.tool_calls):
            yield chunk({"tool_calls": [{"index": index, **_chat_call(call.id, call.name, "")}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        yield chunk({}, self._end(request, answer))
        if request.include_usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield event("[DONE]")

    def _end(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        logprobs = None
        if request.logprobs:
            entries = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in self._token_texts(answer)
            ]
            logprobs = {"content": entries, "refusal": None}
        end = {"index": 0, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        return {**end, "token_ids": answer.token_ids.tolist()} if request.return_token_ids else end


class Completions(Dialect):
    """OpenAI's completions API: continues a text or token ids, without a chat template."""

    path = "completions"

    def _read(self, body: Body) -> dict[str, Any]:
        self._refuse_other_sampling(body)
        body.forbid("best_of", "ask once for each answer", 1)
        body.forbid("echo", "leave it out, and put the prompt before the answer", False)
        body.forbid("suffix", "leave it out, for the policy only continues a text", "")
        body.forbid("logprobs", "only the sampled tokens have log-probabilities, which 0 asks for", 0)
        return {
            "messages": (),
            "form": self._form(body, "response_format"),
            "prompt": _prompt(body),
            "max_tokens": body.count("max_tokens") or 16,  # OpenAI's default
            "stop": body.texts("stop"),
            "include_usage": _include_usage(body),
            "logprobs": body.take("logprobs", int) == 0,
            "return_token_ids": body.flag("return_token_ids"),
        }

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        head = _head("cmpl", "text_completion", request, answer)
        return {**head, "choices": [self._choice(request, answer)], "usage": _usage(answer)}

    def events(
        self, request: ModelRequest, answer: ModelAnswer, told: ModelAnswer | None = None, *, ended: bool = True
    ) -> Iterator[str]:
        head = _head("cmpl", "text_completion", request, answer)
        usage = {"usage": None} if request.include_usage else {}
        _, text = _news(answer, told)
        if not ended:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
            yield event({**head, "choices": [choice], **usage})
            return
        yield event({**head, "choices": [{**self._choice(request, answer), "text": text}], **usage})
        if request.include_usage:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield event("[DONE]")

    def _choice(self, request: ModelRequest, answer: ModelAnswer) -> Json:
        logprobs: Json | None = None
        if request.logprobs:
            tokens = self._token_texts(answer)
            starts = list(accumulate((len(text) for text, _ in tokens), initial=0))[:-1]
            logprobs = {
                "tokens": [text for text, _ in tokens],
                "token_logprobs": [logprob for _, logprob in tokens],
                "top_logprobs": None,
                "text_offset": starts,
            }
        choice = {"index": 0, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        ids = {"token_ids": answer.token_ids.tolist()} if request.return_token_ids else {}
        return {**choice, **_prompt_ids(request, answer), **ids}


def model_list(name: str, *, created: int, max_model_len: int) -> Json:
    """Return the body of `GET models`, for clients of OpenAI and Anthropic. ``created``: seconds since the epoch;
    ``max_model_len``: maximum tokens of prompt and answer together."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "roll", "max_model_len": max_model_len}
    other = {"type": "model", "display_name": name, "created_at": created}
    page = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [{**model, **other}], **page}


def event(data: Json | str, name: str | None = None) -> str:
    """Format a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def rest(text: str | None, told: str | None) -> str:
    """Return the remainder of ``text`` after the part that was already sent."""
    return (text or "").removeprefix(told or "")


def _news(answer: ModelAnswer, told: ModelAnswer | None) -> tuple[str, str]:
    """Return the reasoning and the text of an answer that were not sent yet."""
    if told is None:
        return answer.reasoning or "", answer.text
    return rest(answer.reasoning, told.reasoning), rest(answer.text, told.text)


def model_name(request: ModelRequest) -> str:
    """Return the model name that the client used."""
    return request.model or "policy"


def _sampling(body: Body) -> dict[str, Any]:
    """Parse the client's sampling parameters."""
    top_k = body.number("top_k", -1, 2**31)  # -1 and 0: all
    return {
        "temperature": body.number("temperature", 0.0, 100.0),
        "top_p": body.number("top_p", 1e-6, 1.0),
        "top_k": None if top_k is None else max(0, int(top_k)),
        "seed": body.take("seed", int),
    }


def _chat_message(item: Body) -> Message:
    role = item.text("role", required=True)
    message: Message
    if role in ("system", "developer"):
        message = {"role": "system", "content": item.content("content")}
    elif role == "user":
        message = {"role": "user", "content": item.content("content")}
    elif role == "tool":
        message = {"role": "tool", "content": item.content("content"), "tool_call_id": item.text("tool_call_id")}
        if name := item.text("name"):
            message["name"] = name
    elif role == "assistant":
        message = {"role": "assistant", "content": item.content("content", ("text", "refusal"))}
        if reasoning := item.text("reasoning_content") or item.text("reasoning"):
            message["reasoning_content"] = reasoning
        item.forbid("function_call", "say it as one of `tool_calls`")
        if calls := [_chat_tool_call(each) for each in item.parts("tool_calls")]:
            message["tool_calls"] = calls
    else:
        item.refuse("role", "must be one of system, developer, user, assistant, tool")
    item.done()
    return message


def _chat_tool_call(item: Body) -> Message:
    item.forbid("type", _USE_TOOLS, "function")
    function, identifier = item.part("function"), item.text("id")
    if function is None:
        item.refuse("function", "is missing")
    item.done()
    made = function.call(identifier)
    function.done()
    return made


def _chat_tool(item: Body) -> Mapping[str, Any]:
    if item.text("type", required=True) != "function":
        item.refuse("type", f"is not served: {_USE_TOOLS}")
    function = item.part("function")
    if function is None:
        item.refuse("function", "is missing")
    described = function.function()
    function.done()
    item.done()
    return described


def _prompt(body: Body) -> str | tuple[int, ...]:
    prompt = body.take("prompt", str, list)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if not prompt:
        body.refuse("prompt", "is missing")
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(each, str | list) for each in prompt):
        body.refuse("prompt", "holds several prompts: ask once for each")
    if not all(type(each) is int and 0 <= each < 2**31 for each in prompt):
        body.refuse("prompt", "must be text or token ids")
    return tuple(prompt)


def _include_usage(body: Body) -> bool:
    options = body.part("stream_options")
    if options is None:
        return False
    include = options.flag("include_usage")
    options.done()
    return include


def _content(answer: ModelAnswer) -> str | None:
    return None if answer.tool_calls and not answer.text else answer.text


def _chat_call(identifier: str, name: str, arguments: str) -> Json:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _head(prefix: str, kind: str, request: ModelRequest, answer: ModelAnswer) -> Json:
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": model_name(request),
    }


def _usage(answer: ModelAnswer) -> Json:
    prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _prompt_ids(request: ModelRequest, answer: ModelAnswer) -> Json:
    return {"prompt_token_ids": answer.prompt_token_ids.tolist()} if request.return_token_ids else {}
