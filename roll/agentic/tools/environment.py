"""Environment wrapper that adds tools: executes the calls in the policy's text, and passes on text without calls.

A text with a call never reaches the environment. So a call takes precedence over a final answer in the same text: that
answer was written without knowing the tool's result. Tools give no reward; `call_penalty` can make calls costly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import gymnasium
from pydantic import Field

from roll.agentic.base import Count
from roll.agentic.tools.base import (
    CALL_BEGIN,
    CALL_END,
    Answer,
    Deadline,
    Tool,
    ToolCall,
    Toolset,
    ToolSpec,
    ToolUnavailable,
    argument_problem,
    function_schema,
    make_tools,
    parse_calls,
)
from roll.configs.errors import nearest_name_hint
from roll.configs.plugins import checked_arguments, made, parameters_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolSettings:
    """Settings for offering and calling tools. Raises `ConfigError` for invalid values."""

    max_calls_per_turn: Count = 4
    call_timeout_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Time limit of one call."""
    turn_timeout_seconds: Annotated[float, Field(gt=0)] = 40.0
    """Time limit of all calls in a turn together. Must be less than the environment's step timeout."""
    max_answer_characters: Count = 8000
    """Longer answers are shortened in the middle."""
    call_penalty: Annotated[float, Field(le=0)] = 0.0
    """Added to the reward of a turn for each call in it; at most 0."""
    answer_role: Literal["tool", "user"] = "tool"
    """Role of the messages with tool results; `user` suits chat templates without tool support."""
    describe_in_prompt: bool = False
    """True to list the tools in the system message, for chat templates without tool support."""
    code_block_tool: str | None = None
    """Tool that receives fenced Python blocks as calls; None: such blocks are plain text."""

    def __post_init__(self) -> None:
        where = "tool_settings"
        checked_arguments("ToolSettings", parameters_of(ToolSettings, "ToolSettings", where), vars(self), where)


class ToolEnv(gymnasium.Wrapper[str, str, str, str]):
    """A text environment (see `roll.agentic.registry`) in which the policy can call tools."""

    def __init__(
        self, env: gymnasium.Env[str, str], tools: Sequence[Tool | Toolset], settings: ToolSettings | None = None
    ) -> None:
        """Wrap ``env``; the tools start at the first reset. Closing this environment closes them."""
        super().__init__(env)
        self._sources = list(tools)
        self._settings = settings or ToolSettings()
        self._tools: dict[str, Tool] = {}
        self._state = ""
        self._calls = 0
        self._errors = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        text, info = self.env.reset(seed=seed, options=options)
        self._tools = self._gathered()
        self._calls = self._errors = 0
        self._state = str(info.get("state", text))
        schemas = [function_schema(tool) for tool in self._tools.values()]
        offered: dict[str, Any] = {"tools": [*info.get("tools", ()), *schemas]}
        if self._settings.describe_in_prompt:
            system = [part for part in (info.get("system"), _described(schemas, self._settings)) if part]
            offered = {"system": "\n\n".join(system)}
        return text, self._counted(info | offered)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        calls = parse_calls(action, code_tool=self._settings.code_block_tool)
        if calls:
            return self._carried_out(calls)
        text, reward, terminated, truncated, info = self.env.step(action)
        self._state = str(info.get("state", text))
        return text, float(reward), terminated, truncated, self._counted(info)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(super().close)
            for each in self._sources:
                closing.callback(each.close)

    def _gathered(self) -> dict[str, Tool]:
        """Return the tools by name. Raises `ToolUnavailable`, also for duplicate names."""
        tools: dict[str, Tool] = {}
        for source in self._sources:
            for tool in source.tools() if isinstance(source, Toolset) else (source,):
                if tool.name in tools:
                    raise ToolUnavailable(f"two tools are called `{tool.name}`; give one of them another name")
                tools[tool.name] = tool
        for_blocks = self._settings.code_block_tool
        if for_blocks is not None and for_blocks not in tools:
            hint = nearest_name_hint(for_blocks, tools)
            raise ToolUnavailable(f"`code_block_tool` is `{for_blocks}`, which is no tool here; {hint}")
        return tools

    def _carried_out(self, calls: list[ToolCall]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        within = calls[: self._settings.max_calls_per_turn]
        answers: list[tuple[str, Answer]] = []
        valid = True
        turn = Deadline.after(self._settings.turn_timeout_seconds)
        for call in within:
            problem = call.problem or self._problem(call)
            valid = valid and problem is None
            answer = self._answer(call, turn) if problem is None else Answer(problem, is_error=True)
            answers.append((call.name, answer))
        if len(calls) > len(within):
            text = f"only the first {len(within)} of {len(calls)} calls were carried out; no more are allowed in a turn"
            answers.append(("", Answer(text, is_error=True)))
        self._calls += len(within)
        self._errors += sum(answer.is_error for _, answer in answers)
        messages = self._messages(answers)
        text = "\n\n".join(message["content"] for message in messages)
        # The state includes the calls: equal answers to different calls are different states.
        self._state = "\n".join([self._state, *map(str, within), text])
        info = {"messages": messages, "action_is_valid": valid, "state": self._state}
        reward = self._settings.call_penalty * len(within)
        return text, reward, False, False, self._counted(info)

    def _problem(self, call: ToolCall) -> str | None:
        if call.name not in self._tools:
            return f"there is no tool `{call.name[:60]}`; {nearest_name_hint(call.name[:60], self._tools)}"
        try:
            return argument_problem(self._tools[call.name], call.arguments)
        except Exception as error:  # the schema may come from a server and be invalid itself
            _logger.exception("the schema of the tool `%s` cannot be used", call.name)
            return f"the arguments of `{call.name}` cannot be checked: {type(error).__name__}"

    def _answer(self, call: ToolCall, turn: Deadline) -> Answer:
        seconds = min(self._settings.call_timeout_seconds, turn.seconds_left())
        if not seconds:
            return Answer("not carried out: the calls of this turn have taken too long", is_error=True)
        try:
            return self._tools[call.name].call(call.arguments, Deadline.after(seconds))
        except ToolUnavailable:
            raise
        except Exception as error:  # a bug in a tool must not end the episode, but must be logged
            _logger.exception("the tool `%s` failed", call.name)
            return Answer(f"the tool `{call.name}` failed: {type(error).__name__}", is_error=True)

    def _messages(self, answers: list[tuple[str, Answer]]) -> list[dict[str, Any]]:
        longest = self._settings.max_answer_characters
        texts = [("Error: " if answer.is_error else "") + _cut(answer.text, longest) for _, answer in answers]
        if self._settings.answer_role == "user":
            wrapped = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
            return [{"role": "user", "content": "\n".join(wrapped)}]
        return [
            {"role": "tool", "content": text} | ({"name": name} if name in self._tools else {})
            for (name, _), text in zip(answers, texts, strict=True)
        ]

    def _counted(self, info: dict[str, Any]) -> dict[str, Any]:
        counts = {"tool_calls": self._calls, "tool_errors": self._errors}
        return info | {"metrics": {**info.get("metrics", {}), **counts}}


def configured_tools(
    specs: Sequence[ToolSpec], settings: Mapping[str, Any], at: str = ""
) -> tuple[list[Tool | Toolset], ToolSettings]:
    """Return the tools and settings of `<at>tools` and `<at>tool_settings`, starting nothing. Raises `ConfigError`."""
    checked = made("ToolSettings", ToolSettings, settings, f"{at}tool_settings")
    return make_tools(specs, f"{at}tools"), checked


def with_tools(
    env: gymnasium.Env[str, str], specs: Sequence[ToolSpec], settings: Mapping[str, Any]
) -> gymnasium.Env[str, str]:
    """Return the environment with configured tools around it; without any, itself.

    Raises `ConfigError`, and has then closed the environment.
    """
    if not specs:
        return env
    try:
        return ToolEnv(env, *configured_tools(specs, settings))
    except BaseException:
        env.close()
        raise


def _described(schemas: Sequence[dict[str, Any]], settings: ToolSettings) -> str:
    example = json.dumps({"name": "<name>", "arguments": {"<argument>": "<value>"}})
    lines = [
        "You can call these tools:",
        "<tools>",
        *(json.dumps(schema, ensure_ascii=False) for schema in schemas),
        "</tools>",
        "A call looks like this, and its answer comes in the next message:",
        f"{CALL_BEGIN}\n{example}\n{CALL_END}",
    ]
    if settings.code_block_tool is not None:
        lines.append(f"A fenced block of Python (```python) is a call of `{settings.code_block_tool}`.")
    return "\n".join(lines)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head = longest * 2 // 3
    return f"{text[:head]}\n[... {len(text) - longest} characters left out ...]\n{text[head - longest :]}"
