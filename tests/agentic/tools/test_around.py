"""Tools of `custom_envs.<tag>.tools` around environments that do not know of them: whole episodes, and the checks."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest

from roll.agentic.base import observation_from
from roll.agentic.library.question_games import NumberGuessingEnv
from roll.agentic.registry import make_env
from roll.agentic.rehearsal import LocalSession
from roll.agentic.tools.environment import with_tools
from roll.agentic.worker import EnvHost, PoolSettings
from roll.configs.errors import ConfigError, problems_of
from roll.configs.run import CustomEnvConfig
from roll.data.chat import ChatTurns, RawTurns
from roll.pipeline.agentic_plan import _template_problems, _tools_fit
from tests.agentic.episodes import ScriptedPolicy, decode, encode, limits, make_manager
from tests.data.chat_templates import FORMATS, make_tokenizer
from tests.tiers import need

SERVER = str(Path(__file__).with_name("tiny_mcp_server.py"))
PYTHON = {"tool": "python", "accept_weak_sandbox": True}


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(env: CustomEnvConfig, *texts: str, manager: str = "trajectory", template: str = "chatml"):
    """Play an episode as a worker and a manager do; the policy writes these texts."""
    end = FORMATS[template].stop
    policy = ScriptedPolicy([encode(text + end, template) for text in texts])

    async def play():
        host = EnvHost({"it": env}, PoolSettings(), make_env, observation_from)
        try:
            tokenizer = make_tokenizer(template)
            settings = limits(prompt_length=4000, sequence_length=8000, max_steps=len(texts))
            made = make_manager(manager, settings, ChatTurns(tokenizer), tokenizer)
            return await made.run_episode(LocalSession(host, "it"), policy, tag="it", seed=4)
        finally:
            await host.close()

    episode = asyncio.run(asyncio.wait_for(play(), 60))
    return episode, [decode(prompt, template) for prompt in policy.prompts]


def dialogue(tmp_path: Path, **options) -> CustomEnvConfig:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"turns": ["How much is 3 + 4?", {"if": "7", "say": "Thanks. And twice that?"}]}))
    return CustomEnvConfig("dialogue", {"tasks": str(path), "verifier": f"{__name__}:is_14"}, **options)


def is_14(task, messages):
    return {"reward": float("14" in messages[-1]["content"]), "metrics": {"messages": len(messages)}}


@pytest.mark.tier("all")
@pytest.mark.parametrize("manager", ["trajectory", "step"])
def test_a_game_is_played_with_python_and_hears_nothing_of_it(manager):
    env = CustomEnvConfig("number_guessing", {"low": 1, "high": 4, "action_format": "plain"}, tools=[PYTHON])
    episode, prompts = played(env, call("python", code="print(2 ** 5)"), "4", "3", "2", "1", manager=manager)
    assert '"name": "python"' in prompts[0] and "from 1 to 4" in prompts[0], "tools and rules"
    assert "<tool_response>\n32\n</tool_response>" in prompts[1]
    assert episode.success is True and episode.score == 1.0
    assert episode.metrics["tool_calls"] == 1 and episode.metrics["tool_errors"] == 0
    assert episode.metrics["invalid_actions"] == 0
    assert episode.turns[0].reward == 0.0, "a call is no step of the game"


@pytest.mark.tier("all")
def test_a_dialogue_goes_on_after_calls_of_a_server(tmp_path):
    need("mcp")
    server = {"tool": "mcp", "command": sys.executable, "args": [SERVER], "only": ["add"], "prefix": "my_"}
    env = dialogue(tmp_path, tools=["calculator", server], tool_settings={"call_penalty": -0.25})
    texts = (call("my_add", a=3, b=4), "It is 7.", call("calculator", expression="7 * 2"), "It is 14.")
    episode, prompts = played(env, *texts)
    assert '"name": "my_add"' in prompts[0] and '"name": "calculator"' in prompts[0]
    assert "<tool_response>\n7\n</tool_response>" in prompts[1] and "And twice that?" in prompts[2]
    assert episode.end == "terminated" and episode.score == pytest.approx(1.0 - 0.5)
    assert episode.metrics["messages"] == 4, "the user and the verifier hear no calls"
    assert episode.metrics["tool_calls"] == 2


def test_an_environment_without_tools_is_left_alone():
    episode, prompts = played(CustomEnvConfig("number_guessing", {"action_format": "plain"}), call("x"))
    assert "tools" not in prompts[0] and "tool_calls" not in episode.metrics


class Held(NumberGuessingEnv):
    closed = 0

    def close(self) -> None:
        Held.closed += 1


def test_an_environment_is_closed_if_its_tools_cannot_be_made():
    with pytest.raises(ConfigError, match="calculator"):
        with_tools(Held(), ["calculater"], {})
    assert Held.closed == 1


def fits(env: CustomEnvConfig):
    return problems_of(lambda: _tools_fit(env, "custom_envs.it."))


@pytest.mark.parametrize(
    ("env", "path", "words"),
    [
        (CustomEnvConfig("frozen_lake", tools=["calculater"]), "tools[0]", "did you mean `calculator`?"),
        (CustomEnvConfig("frozen_lake", tools=[{"tool": "python", "wall": 1}]), "tools[0].wall", "no argument `wall`"),
        (CustomEnvConfig("frozen_lake", tools=["no.such:Tool"]), "tools[0]", "cannot be imported"),
        (
            CustomEnvConfig("frozen_lake", tools=["calculator"], tool_settings={"max_cals_per_turn": 1}),
            "tool_settings.max_cals_per_turn",
            "did you mean `max_calls_per_turn`?",
        ),
        (CustomEnvConfig("frozen_lake", tool_settings={"call_penalty": -1}), "tool_settings", "no tools to set"),
        (CustomEnvConfig("agent", tools=["calculator"]), "tools", "an agent calls its tools itself"),
        (CustomEnvConfig("verifiers", tools=["calculator"]), "tools", "an agent calls its tools itself"),
        (CustomEnvConfig("math_tools", tools=["calculator"]), "tools", "set `custom_envs.it.env_config.tools`"),
        (
            CustomEnvConfig("frozen_lake", tools=["calculator"], step_timeout_seconds=40.0),
            "tool_settings.turn_timeout_seconds",
            "may take 40 s, and a step 40 s",
        ),
    ],
)
def test_tools_that_cannot_work_are_named_before_a_run(env, path, words):
    (found,) = fits(env)
    assert found.path == f"custom_envs.it.{path}" and words in str(found)


def test_tools_that_fit_are_no_problem():
    assert fits(CustomEnvConfig("frozen_lake", tools=["calculator"], tool_settings={"call_penalty": -0.1})) == []
    assert fits(CustomEnvConfig("frozen_lake")) == []


class Quiet(gymnasium.Env):
    """An environment of a user's own, which is not made before a run."""

    def __init__(self):
        raise AssertionError("made")


def template_problems(env: CustomEnvConfig, template) -> list:
    return list(_template_problems(SimpleNamespace(custom_envs={"it": env}), template))


@pytest.mark.parametrize("env_type", ["number_guessing", f"{__name__}:Quiet"])
@pytest.mark.parametrize("manager", ["trajectory", "step"])
def test_a_template_that_writes_no_tools_is_a_problem_unless_they_are_described(env_type, manager):
    env = CustomEnvConfig(env_type, tools=["calculator"], env_manager_cls=manager)
    assert template_problems(env, ChatTurns(make_tokenizer("chatml"))) == []
    plain = ChatTurns(make_tokenizer("phi3"))
    (found,) = template_problems(env, plain)
    assert found.path == "custom_envs.it" and "describe_in_prompt" in found.message
    described = {"describe_in_prompt": True, "answer_role": "user"}
    assert template_problems(CustomEnvConfig(env_type, tools=["calculator"], tool_settings=described), plain) == []
    assert template_problems(env, RawTurns(make_tokenizer("chatml")))[0].message.count("describe_in_prompt") == 1
    described = {"describe_in_prompt": True}
    env = CustomEnvConfig(env_type, tools=["calculator"], tool_settings=described, env_manager_cls=manager)
    (found,) = template_problems(env, ChatTurns(make_tokenizer("deepseek")))
    assert "leaves out messages of the role 'tool'" in found.message


@pytest.mark.tier("all")
def test_a_server_that_does_not_start_is_a_problem_of_the_tools():
    need("mcp")
    tools = [{"tool": "mcp", "command": sys.executable, "args": ["-c", "raise SystemExit('not today')"]}]
    env = CustomEnvConfig(f"{__name__}:Quiet", tools=tools)
    (found,) = template_problems(env, ChatTurns(make_tokenizer("chatml")))
    assert found.path == "custom_envs.it.tools" and "not today" in found.message


def test_a_dialogue_that_may_outlast_its_episode_is_a_problem(tmp_path):
    template = ChatTurns(make_tokenizer("chatml"))
    assert template_problems(dialogue(tmp_path, max_steps=2), template) == [], "the script has two turns"
    (found,) = template_problems(dialogue(tmp_path, max_steps=1), template)
    assert found.path == "custom_envs.it.max_steps" and "2 answers" in found.message
    short = dialogue(tmp_path, max_steps=1)
    short.env_config["max_turns"] = 1
    assert template_problems(short, template) == []
