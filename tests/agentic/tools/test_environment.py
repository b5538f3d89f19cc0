"""Calls are carried out, answered and counted; everything else reaches the environment unchanged."""

from __future__ import annotations

import json

import gymnasium
import pytest

from roll.agentic.registry import make_env
from roll.agentic.tools.base import Answer, Deadline, ToolUnavailable
from roll.agentic.tools.calculator import Calculator
from roll.agentic.tools.environment import ToolEnv, ToolSettings
from roll.configs.errors import ConfigError, problems_of


class Echo(gymnasium.Env):
    """Repeats what it is told and ends at `end`."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "begin", {"system": "Be good.", "metrics": {"inner": 1}, "tools": [{"type": "inner"}]}

    def step(self, action):
        self.heard.append(action)
        return f"heard {action}", 1.0, action == "end", False, {"success": True, "metrics": {"heard": len(self.heard)}}

    def close(self):
        self.closed = True


class Recorder:
    """A tool that remembers its calls."""

    name = "record"
    description = "Records."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, answer: Answer | Exception | None = None) -> None:
        self.answer = answer or Answer("ok")
        self.calls: list[str] = []
        self.seconds: list[float] = []
        self.closed = 0

    def call(self, arguments: dict, deadline: Deadline) -> Answer:
        self.calls.append(arguments["text"])
        self.seconds.append(deadline.seconds_left())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed += 1


class Set:
    """Tools that are known late."""

    def __init__(self, *tools) -> None:
        self._tools = tools
        self.closed = False

    def tools(self):
        return self._tools

    def close(self):
        self.closed = True


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def begun(*tools, **settings) -> ToolEnv:
    env = ToolEnv(Echo(), tools, ToolSettings(**settings))
    env.reset(seed=1)
    return env


@pytest.mark.parametrize(
    "setting",
    [
        {"max_calls_per_turn": 0},
        {"call_timeout_seconds": 0.0},
        {"turn_timeout_seconds": -1.0},
        {"max_answer_characters": 0},
        {"call_penalty": 0.1},
        {"answer_role": "system"},
    ],
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match=f"tool_settings.{next(iter(setting))}"):
        ToolSettings(**setting)


def test_tools_are_offered_at_reset_beside_the_environments_own():
    text, info = ToolEnv(Echo(), [Calculator(), Set(Recorder())]).reset(seed=1)
    assert text == "begin" and info["system"] == "Be good."
    assert [each.get("function", {}).get("name") for each in info["tools"]] == [None, "calculator", "record"]
    assert info["metrics"] == {"inner": 1, "tool_calls": 0, "tool_errors": 0}


def test_a_call_is_answered_and_the_environment_is_not_stepped():
    env = begun(Calculator())
    text, reward, terminated, truncated, info = env.step("I need help. " + call("calculator", expression="6*7"))
    assert (text, reward, terminated, truncated) == ("42", 0.0, False, False)
    assert info["messages"] == [{"role": "tool", "name": "calculator", "content": "42"}]
    assert info["action_is_valid"] is True
    assert info["metrics"] == {"tool_calls": 1, "tool_errors": 0}
    assert env.unwrapped.heard == []


def test_a_text_without_a_call_is_a_step():
    env = begun(Calculator())
    text, reward, terminated, _, info = env.step("end")
    assert (text, reward, terminated) == ("heard end", 1.0, True)
    assert info == {"success": True, "metrics": {"heard": 1, "tool_calls": 0, "tool_errors": 0}}


def test_several_calls_are_carried_out_in_order_and_counted_over_the_episode():
    tool = Recorder()
    env = begun(tool)
    env.step(call("record", text="a") + call("record", text="b"))
    info = env.step(call("record", text="c"))[-1]
    assert tool.calls == ["a", "b", "c"]
    assert info["metrics"]["tool_calls"] == 3
    assert env.reset(seed=2)[1]["metrics"]["tool_calls"] == 0


def test_calls_beyond_the_limit_are_not_carried_out():
    tool = Recorder()
    env = begun(tool, max_calls_per_turn=2)
    info = env.step("".join(call("record", text=text) for text in "abc"))[-1]
    assert tool.calls == ["a", "b"]
    assert len(info["messages"]) == 3 and "only the first 2 of 3" in info["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{oops</tool_call>", "no JSON"),
        (call("recrod", text="a"), "did you mean `record`?"),
        (call("record"), "'text' is a required property"),
        (call("record", text=3), "text: 3 is not of type 'string'"),
    ],
)
def test_calls_that_cannot_be_carried_out_are_invalid_actions_with_an_answer(text, words):
    tool = Recorder()
    env = begun(tool)
    said, reward, terminated, _, info = env.step(text)
    assert words in said and said.startswith("Error: ")
    assert info["action_is_valid"] is False and (reward, terminated) == (0.0, False)
    assert info["metrics"]["tool_errors"] == 1 and tool.calls == []


def test_an_error_answer_of_a_tool_is_a_valid_action():
    info = begun(Recorder(Answer("no such city", is_error=True))).step(call("record", text="x"))[-1]
    assert info["action_is_valid"] is True
    assert info["metrics"] == {"tool_calls": 1, "tool_errors": 1}


def test_a_tool_that_raises_does_not_end_the_episode_but_is_logged(caplog):
    text = begun(Recorder(RuntimeError("private details"))).step(call("record", text="x"))[0]
    assert text == "Error: the tool `record` failed: RuntimeError"
    assert "private details" in caplog.text


def test_a_tool_that_cannot_work_ends_the_episode():
    with pytest.raises(ToolUnavailable, match="not here"):
        begun(Recorder(ToolUnavailable("not here"))).step(call("record", text="x"))


def test_each_call_has_its_own_time():
    tool = Recorder()
    begun(tool, call_timeout_seconds=30.0).step(call("record", text="x") + call("record", text="y"))
    assert all(25 < seconds <= 30 for seconds in tool.seconds)


def test_the_calls_of_a_turn_end_before_the_environments_deadline():
    tool = Recorder()
    begun(tool, call_timeout_seconds=30.0, turn_timeout_seconds=20.0).step(call("record", text="x"))
    assert 15 < tool.seconds[0] <= 20
    late = begun(tool, turn_timeout_seconds=1e-9)
    info = late.step(call("record", text="y"))[-1]
    assert tool.calls == ["x"] and "have taken too long" in info["messages"][0]["content"]


def test_calls_may_cost():
    assert begun(Recorder(), call_penalty=-0.1).step(2 * call("record", text="x"))[1] == pytest.approx(-0.2)


def test_a_user_may_speak_the_answers():
    info = begun(Calculator(), answer_role="user").step(2 * call("calculator", expression="1+1"))[-1]
    block = "<tool_response>\n2\n</tool_response>"
    assert info["messages"] == [{"role": "user", "content": f"{block}\n{block}"}]


def test_tools_may_be_described_in_the_system_message():
    _, info = ToolEnv(Echo(), [Calculator()], ToolSettings(describe_in_prompt=True)).reset(seed=1)
    assert info["system"].startswith("Be good.\n\n") and '"name": "calculator"' in info["system"]
    assert info["tools"] == [{"type": "inner"}]


def test_long_answers_are_cut():
    text = begun(Recorder(Answer("a" * 500 + "z" * 500)), max_answer_characters=300).step(call("record", text="x"))[0]
    assert text.startswith("a" * 200) and text.endswith("z" * 100) and "700 characters left out" in text


def test_states_differ_by_what_was_asked_and_answered():
    env = begun(Calculator())
    states = [env.step(call("calculator", expression=each))[-1]["state"] for each in ("1+1", "2+0", "1+1")]
    assert len(set(states)) == 3
    env.reset(seed=1)
    assert env.step(call("calculator", expression="1+1"))[-1]["state"] == states[0]


def test_blocks_of_python_may_be_calls():
    class Python(Recorder):
        name = "python"
        parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}

        def call(self, arguments, deadline):
            return Answer(arguments["code"].strip())

    assert begun(Python(), code_block_tool="python").step("```python\nx\n```")[0] == "x"
    assert begun(Python()).step("```python\nx\n```")[0].startswith("heard")


def test_all_is_closed_with_the_environment():
    tool, tools = Recorder(), Set()
    env = begun(tool, tools)
    env.close()
    assert tool.closed == 1 and tools.closed and env.unwrapped.closed


def test_all_is_closed_even_if_closing_a_tool_fails():
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("no")

    tools = Set()
    env = begun(Broken(), tools)
    with pytest.raises(OSError, match="no"):
        env.close()
    assert tools.closed and env.unwrapped.closed


def test_names_must_be_one_of_a_kind():
    with pytest.raises(ToolUnavailable, match="two tools are called `record`"):
        begun(Recorder(), Set(Recorder()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_calls_per_turn": 0}, ">= 1"),
        ({"call_penalty": 1}, "<= 0"),
        ({"answer_role": "assistant"}, "`tool`, `user`"),
        ({"max_cals_per_turn": 1}, "did you mean `max_calls_per_turn`?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    (problem,) = problems_of(lambda: make_env("math_tools", {"tool_settings": settings}))
    assert problem.path == f"env_config.tool_settings.{next(iter(settings))}" and words in str(problem)
