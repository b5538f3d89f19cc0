from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.base import (
    INFO_KEYS,
    ActionReader,
    AnyText,
    BadAnswer,
    BadOption,
    action_reader,
    answer_in,
    as_answer,
    observation_from,
)
from roll.agentic.episode import Observation

STEP = {"reward": 0.0, "terminated": False, "truncated": False}


def test_a_reset_becomes_a_system_and_a_user_message():
    tools = [{"type": "function"}]
    observation = observation_from("Hello", {"system": "Rules", "tools": tools}, frame="H")
    assert observation == Observation(
        messages=({"role": "system", "content": "Rules"}, {"role": "user", "content": "Hello"}),
        state="Hello",
        tools=({"type": "function"},),
        frame="H",
    )


def test_a_step_carries_everything_that_info_says():
    messages = [{"role": "tool", "content": "4", "name": "calculator"}]
    info = {
        "action_is_valid": np.False_,
        "success": True,
        "state": "key",
        "metrics": {"calls": 2, "share": np.float32(0.5), "flag": True},
        "messages": messages,
        "unknown": object(),
    }
    observation = observation_from("text", info, reward=np.float32(1.5), terminated=np.True_, truncated=False)
    assert observation == Observation(
        messages=(messages[0],),
        reward=1.5,
        terminated=True,
        action_is_valid=False,
        success=True,
        state="key",
        metrics={"calls": 2.0, "share": 0.5, "flag": 1.0},
    )
    assert type(observation.terminated) is bool and type(observation.reward) is float
    assert all(type(value) is float for value in observation.metrics.values())


def test_what_info_leaves_out_has_defaults():
    observation = observation_from("text", {}, reward=1, terminated=False, truncated=True)
    assert observation.done and observation.action_is_valid and observation.success is None
    assert observation.state == "text" and observation.metrics == {} and observation.frame is None


def test_messages_are_copies():
    message = {"role": "user", "content": "a"}
    observation = observation_from("text", {"messages": [message]}, **STEP)
    message["content"] = "b"
    assert observation.messages[0]["content"] == "a"


@pytest.mark.parametrize(
    ("text", "info", "parts", "words"),
    [
        (None, {}, {}, "the observation is None (NoneType); it has to be a str"),
        (np.zeros(2), {}, {}, "(ndarray); it has to be a str"),
        (b"x", {}, {}, "the observation is b'x' (bytes)"),
        ("\ud800", {}, {}, "no text that can be written"),
        ("x", None, {}, "info is None"),
        ("x", ["a"], {}, "info is ['a'] (list); it has to be a dict"),
        ("x", {}, {"reward": None}, "the reward is None"),
        ("x", {}, {"reward": "1"}, "the reward is '1' (str); it has to be a number"),
        ("x", {}, {"reward": True}, "the reward is True (bool)"),
        ("x", {}, {"reward": np.True_}, "the reward is"),
        ("x", {}, {"reward": math.nan}, "the reward is nan; it has to be finite"),
        ("x", {}, {"reward": -np.inf}, "the reward is -inf"),
        ("x", {}, {"reward": 10**400}, "the reward is inf"),
        ("x", {}, {"reward": -1e300}, "the reward is -1e+300; it has to be between -1e+30 and 1e+30"),
        ("x", {}, {"reward": 1j}, "(complex)"),
        ("x", {}, {"terminated": 1}, "terminated is 1 (int); it has to be a bool"),
        ("x", {}, {"truncated": None}, "truncated is None"),
        ("x", {"action_is_valid": 1}, {}, "info['action_is_valid'] is 1"),
        ("x", {"success": None}, {}, "info['success'] is None"),
        ("x", {"state": 3}, {}, "info['state'] is 3 (int); it has to be a str"),
        ("x", {"metrics": [1]}, {}, "info['metrics'] is [1]"),
        ("x", {"metrics": {"a": "1"}}, {}, "info['metrics']['a'] is '1'"),
        ("x", {"metrics": {3: 1}}, {}, "a key of info['metrics'] is 3"),
        ("x", {"metrics": {"a": math.inf}}, {}, "info['metrics']['a'] is inf"),
        ("x", {"messages": "hello"}, {}, "info['messages'] is 'hello'"),
        ("x", {"messages": []}, {}, "info['messages'] is empty"),
        ("x", {"messages": ["hello"]}, {}, "info['messages'][0] is 'hello'"),
        ("x", {"messages": [{"role": "user"}]}, {}, "info['messages'][0] has no 'content'"),
        ("x", {"messages": [{"role": "user", "content": None}]}, {}, "info['messages'][0]['content'] is None"),
        ("x", {"system": "late"}, {}, "info['system'] came with a step"),
        ("x", {"tools": []}, {}, "info['tools'] came with a step"),
        ("x", {}, {"frame": np.zeros(2)}, "the rendered frame is array"),
    ],
)
def test_what_is_of_a_wrong_type_is_named(text, info, parts, words):
    with pytest.raises(BadAnswer) as caught:
        observation_from(text, info, **STEP | parts)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("info", "words"),
    [({"system": 3}, "info['system'] is 3"), ({"tools": {}}, "info['tools'] is {}"), ({"tools": [3]}, "['tools'][0]")],
)
def test_wrong_answers_to_a_reset_are_named(info, words):
    with pytest.raises(BadAnswer) as caught:
        observation_from("x", info)
    assert words in str(caught.value)


def test_a_long_wrong_value_is_shortened():
    with pytest.raises(BadAnswer) as caught:
        observation_from(["x" * 10_000], {})
    assert len(str(caught.value)) < 200


def test_a_wrong_value_of_many_lines_is_told_in_one():
    with pytest.raises(BadAnswer, match=r"^the rendered frame is array.*\(ndarray\); it has to be a str$"):
        observation_from("a wall", {}, frame=np.zeros((4, 4, 3), np.uint8))


def test_the_page_explains_every_key():
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    for key in INFO_KEYS:
        assert f"`{key}`" in page


def test_all_texts_are_in_the_space_of_texts():
    space = AnyText()
    space.seed(3)
    assert space.contains("") and "\x00√" in space and 3 not in space
    assert all(isinstance(space.sample(), str) for _ in range(20))
    assert AnyText() == space


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>up</answer>", "up"),
        ("no <answer>left</answer>, rather <answer> right\n</answer>.", "right"),
        ("<answer>a</answer> <answer>b", "a"),
        ("<answer><answer>a</answer>", "a"),
        ("<answer>a</answer></answer>", "a"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<answer>a", None),
        ("a</answer>", None),
        ("up", None),
        ("", None),
    ],
)
def test_the_last_pair_of_tags_holds_the_answer(text, answer):
    assert answer_in(text, "answer_tag") == answer


def test_a_plain_answer_is_the_whole_text():
    assert answer_in(" up\n", "plain") == "up"


@given(st.text(), st.sampled_from(["answer_tag", "plain"]))
def test_reading_any_text_gives_an_action_or_none(text, action_format):
    reader = ActionReader(("left", "right"), action_format)
    assert reader.read(text) in (0, 1, None)
    assert action_format == "plain" or reader.read(text + as_answer("RIGHT", action_format)) == 1


def test_examples_are_read_as_their_actions():
    for action_format in ("answer_tag", "plain"):
        reader = action_reader(("left", "İ", "ß"), None, action_format)
        assert [reader.read(example) for example in reader.examples()] == [0, 1, 2]


def test_names_must_fit_the_actions():
    assert action_reader(("a", "b"), ["x", "y"], "plain").names == ("x", "y")
    with pytest.raises(BadOption):
        action_reader(("a", "b"), ["x"], "plain")


def test_environments_load_no_heavy_library():
    code = (
        "import sys; import roll.agentic.registry, roll.agentic.conformance, roll.agentic.frames\n"
        "import roll.agentic.library.question_games\n"
        "from roll.agentic.registry import make_env\n"
        "for name in ('frozen_lake', 'sokoban', 'number_guessing', 'Taxi-v4'): make_env(name, {}).reset(seed=1)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray', 'reasoning_gym', 'textarena', 'pygame'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
