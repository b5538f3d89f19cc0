"""`roll check-agent`: agents are played before a training, and what would go wrong in it is said in words."""

from __future__ import annotations

import pytest

from roll.cli.main import main
from tests.cli.served_models import make_model
from tests.pipeline.tiny import tiny_config, write_config

pytestmark = [pytest.mark.needs("aiohttp"), pytest.mark.tier("all")]

AGENTS = """
import json, sys, urllib.error, urllib.request


def ask(base_url, api_key, messages, **fields):
    body = json.dumps({"model": "any", "messages": messages, **fields}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def good(task, base_url, api_key):
    messages = [user("one")]
    for text in ("two", "three"):
        messages += [ask(base_url, api_key, messages), user(text)]
    return float(task["seed"] % 4 == 0)


def rewrites(task, base_url, api_key):
    ask(base_url, api_key, [user("one")])
    ask(base_url, api_key, [user("one"), {"role": "assistant", "content": "I never said so"}, user("two")])
    return 1.0


def forgets_its_tools(task, base_url, api_key):
    answer = ask(base_url, api_key, [user("one")], tools=[TOOL], tool_choice="required")
    answer["content"] = answer["content"] or ""
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"key": "word", "count": 1}
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
    ask(base_url, api_key, [user("one"), answer, result], tools=[TOOL], tool_choice="required", temperature=0.5)
    ask(base_url, api_key, [user("one"), answer, result])
    return 1.0


def asks_too_much(task, base_url, api_key):
    ask(base_url, api_key, [user("one")])
    for fields in ({"n": 2}, {"response_format": {"type": "json_object"}}):
        try:
            ask(base_url, api_key, [user("one")], **fields)
        except urllib.error.HTTPError:
            pass
    return 1.0


def breaks(task, base_url, api_key):
    raise RuntimeError("the agent is on fire")


def sleeps(task, base_url, api_key):
    import time
    time.sleep(3)


def says_too_much(task, base_url, api_key):
    ask(base_url, api_key, [user("one " * 1000)])


KEYS = {"key": {"type": "string"}, "count": {"type": "integer"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": KEYS}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("checked") / "model")


@pytest.fixture
def check(model, tmp_path, monkeypatch, capsys):
    """Return the exit code and the words of `roll check-agent` for a function of `AGENTS`, or other options."""
    (tmp_path / "agents_to_check.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)

    def checked(run, *arguments, **env):
        config = tiny_config(model.parent)
        for key in ("rewards", "num_return_sequences_in_group"):
            del config[key]
        del config["actor_train"]["data_args"]
        options = {"run": f"agents_to_check:{run}", **env.pop("env_config", {})}
        agent = {
            "env_type": "agent",
            "env_manager_cls": "agent",
            "env_config": options,
            "max_tokens_per_step": 120,
            **env,
        }
        lengths = {"prompt_length": 200, "response_length": 300, "eval_steps": 0}
        config |= {"pipeline": "agentic", "custom_envs": {"mine": agent}, **lengths}
        config["train_env_manager"] = {"group_size": 4}
        path = write_config(tmp_path, config, "run.yaml")
        code = main(["check-agent", str(path), *(arguments or ("--stand-in", "--episodes", "2"))])
        said = capsys.readouterr()
        return code, said.out + said.err

    return checked


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("good", ("mine: 2 episodes, none failed", "2.0 turns", "1.0 samples")),
        (
            "rewrites",
            ("message 2 was assistant 'I do not know.' and came back as assistant 'I never said so'", "2.0 samples"),
        ),
        ("forgets_its_tools", ("other tools (none)", "(look_up)", "2 of 4 answers called no tool", "`temperature`")),
        ("asks_too_much", ("refused 2 times: `n` is not served", "refused 2 times: `response_format`")),
    ],
)
def test_what_would_go_wrong_is_said(check, run, words):
    code, said = check(run)
    assert code == 0, said
    for each in words:
        assert each in said


@pytest.mark.parametrize(
    ("run", "env", "words"),
    [
        ("breaks", {}, ("RuntimeError: the agent is on fire", "2 failed")),
        ("sleeps", {"step_timeout_seconds": 0.2}, ("asked for nothing for 0.2 s",)),
        ("says_too_much", {}, ("first request was refused", "`prompt_length`")),
    ],
)
def test_an_episode_that_fails_is_exit_code_1(check, run, env, words):
    code, said = check(run, **env)
    assert code == 1
    for each in words:
        assert each in said


def test_the_output_of_a_command_that_fails_is_shown(check):
    command = ["sh", "-c", "echo no such luck >&2; exit 3"]
    code, said = check("good", env_config={"run": None, "command": command})
    assert code == 1 and "exit code 3" in said and "no such luck" in said


def test_the_configured_model_plays(check):
    """A random one, which writes nonsense up to its limit."""
    code, said = check("good", "--episodes", "2")
    assert code == 0 and "the policy is" in said and "cut by their length" in said


def test_what_is_no_agent_and_what_does_not_fit_is_exit_code_2(check, tmp_path, capsys):
    code, said = check("good", "--episodes", "0")
    assert code == 2 and "--episodes" in said
    code, said = check("good", env_config={"earlier_reasoning": "some"})
    assert code == 2 and "earlier_reasoning" in said
    code, said = check("good", env_type="roll.agentic.library.agent:AgentEnv", env_manager_cls="trajectory")
    assert code == 2 and "conducts no agents" in said
    code, said = check("good", env_type="copy_games:Copy", env_config={"run": None})
    assert code == 2
    code, said = check("good", env_type="frozen_lake", env_manager_cls="trajectory", env_config={"run": None})
    assert code == 2
    other = write_config(tmp_path, {"pipeline": "rlvr"}, "rlvr.yaml")
    assert main(["check-agent", str(other)]) == 2
