"""An agent as an environment: what it is told, what its result may be, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from roll.agentic.base import BadOption, observation_from
from roll.agentic.library.agent import AgentEnv, AgentStopped, agent_environment, read_result
from roll.agentic.registry import check_env_type
from roll.configs.given import holding_given, with_tokens

ADDRESS = json.dumps({"base_url": "http://127.0.0.1:9/e/7/v1", "api_key": "secret"})
NOT_LONG = 20.0


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """A module of agents, importable as `some_agents`."""
    (tmp_path / "some_agents.py").write_text(
        "import asyncio\n"
        "def echo(task, base_url, api_key):\n"
        "    task['mine'] = 1\n"
        "    return {'reward': 1, 'success': True, 'metrics': {'length': len(base_url)}}\n"
        "async def right(task, base_url, api_key):\n"
        "    await asyncio.sleep(0)\n"
        "    return task['answer'] == 42\n"
        "async def waits(task, base_url, api_key):\n"
        "    await asyncio.sleep(3600)\n"
        "def breaks(task, base_url, api_key):\n"
        "    raise KeyError('no such thing')\n"
        "def longest(task, output):\n"
        "    return {'reward': len(output), 'success': False}\n"
        "def notes(task, output):\n"
        "    task['seen'].append(output)\n"
        "    return len(task['seen'])\n"
        "def modest(task):\n"
        "    return 1.0\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("some_agents", None)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def played(env: AgentEnv, seed: int = 1):
    env.reset(seed=seed)
    text, reward, terminated, truncated, info = env.step(ADDRESS)
    return observation_from(text, info, reward=reward, terminated=terminated, truncated=truncated)


def test_a_function_is_called_with_the_task_and_where_its_model_is(agents):
    env = AgentEnv(run="some_agents:echo")
    text, _ = env.reset(seed=3)
    assert json.loads(text) == {"seed": 3}
    last = played(env, 3)
    assert (last.reward, last.success, last.terminated) == (1.0, True, True)
    assert last.metrics == {"length": len("http://127.0.0.1:9/e/7/v1")}
    assert json.loads(env.reset(seed=3)[0]) == {"seed": 3}, "the agent has changed its own copy of the task only"


def test_the_seed_chooses_the_task_and_all_tasks_are_chosen(agents):
    lines = [json.dumps({"answer": number}) for number in (41, 42, 43)]
    (agents / "tasks.jsonl").write_text("\n".join([*lines, ""]))
    env = AgentEnv(run="some_agents:right", tasks=str(agents / "tasks.jsonl"))
    told = [env.reset(seed=seed)[0] for seed in range(0, 60, 2)]
    assert told == [env.reset(seed=seed)[0] for seed in range(0, 60, 2)]
    assert {json.loads(text)["answer"] for text in told} == {41, 42, 43}
    for seed, text in zip(range(0, 60, 2), told, strict=True):
        last = played(env, seed)
        assert last.success is ("42" in text) and last.reward == float(last.success)


def test_tasks_that_were_corrected_in_the_file_are_read_again(agents):
    """As in a notebook, where one process begins several runs."""
    path = agents / "tasks.jsonl"
    for answer in (41, 421):
        path.write_text(json.dumps({"answer": answer}))
        assert json.loads(AgentEnv(run="some_agents:right", tasks=str(path)).reset(seed=1)[0]) == {"answer": answer}


def test_what_a_verifier_writes_into_its_task_is_in_no_later_episode(agents):
    (agents / "tasks.jsonl").write_text(json.dumps({"seen": []}))
    env = AgentEnv(command=python("print('four')"), tasks=str(agents / "tasks.jsonl"), verifier="some_agents:notes")
    assert [played(env).reward for _ in range(2)] == [1.0, 1.0]


def test_a_command_finds_its_task_and_its_model_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "localhost")
    program = (
        "import json, os\n"
        "print('hello')\n"
        "keys = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'ANTHROPIC_API_KEY']\n"
        "keys += ['NO_PROXY', 'ROLL_TASK']\n"
        "open('seen.json', 'w').write(json.dumps({key: os.environ[key] for key in keys}))\n"
        "print(json.dumps({'reward': 0.5}))\n"
    )
    assert played(AgentEnv(command=python(program), folder=str(tmp_path)), 5).reward == 0.5
    assert json.loads((tmp_path / "seen.json").read_text()) == {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/e/7/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/e/7",
        "ANTHROPIC_API_KEY": "secret",
        "NO_PROXY": "localhost,127.0.0.1",
        "ROLL_TASK": '{"seed": 5}',
    }
    assert "OPENAI_API_KEY" not in os.environ, "the episodes of a process do not share its environment"


def test_a_verifier_judges_what_an_agent_says(agents):
    env = AgentEnv(command=python("print('four')"), verifier="some_agents:longest")
    last = played(env)
    assert (last.reward, last.success) == (len("four\n"), False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('half done'); print('no key', file=sys.stderr); sys.exit(3)", "exit code 3.*no key"),
        ("print('done')", "no JSON.*done"),
        ("pass", "no JSON"),
        ("print('{\"rewrad\": 1}')", "no `reward`"),
        ('print(\'{"reward": 1, "sucess": true}\')', "did you mean `success`"),
        ("print('\"much\"')", "has to be a number"),
        ("print('NaN')", "finite"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "exit code 143"),
    ],
)
def test_a_command_that_fails_or_says_nonsense_is_an_error_with_the_cause_in_its_first_line(program, words):
    with pytest.raises(Exception, match=words) as caught:
        played(AgentEnv(command=python(program)))
    assert "\n" not in str(caught.value)


def test_a_program_that_is_not_there_is_said():
    with pytest.raises(RuntimeError, match="no-such-program"):
        played(AgentEnv(command=["./no-such-program"]))


@pytest.mark.parametrize("result", [None, "1", {"success": True}, {"reward": "1"}, [1.0], {"reward": 1, "success": 1}])
def test_what_is_no_result_is_refused(result):
    with pytest.raises(ValueError, match="reward|success"):
        reward, info = read_result(result)
        observation_from("", info, reward=reward)


def test_a_function_of_a_notebook_is_an_agent():
    def half(task, base_url, api_key):
        return 0.5

    tree, pickles = with_tokens({"run": half})
    with holding_given(pickles):
        assert check_env_type("mine", "agent", tree) == []
        assert played(AgentEnv(**tree)).reward == 0.5


def test_an_error_of_a_function_is_its_own(agents):
    with pytest.raises(KeyError, match="no such thing"):
        played(AgentEnv(run="some_agents:breaks"))


def is_alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + NOT_LONG
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def pids_in(path) -> list[int]:
    deadline = time.monotonic() + NOT_LONG
    while not (path.exists() and path.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [int(word) for word in path.read_text().split()]


FAMILY = "sleep 3600 & echo $$ $! > pids; {}"
"""A program with a child, that writes down who they are."""


def test_a_closed_environment_leaves_no_process_of_its_command(tmp_path):
    env = AgentEnv(command=["sh", "-c", FAMILY.format("wait")], folder=str(tmp_path))
    env.reset(seed=1)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            env.step(ADDRESS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    pids = pids_in(tmp_path / "pids")
    assert all(map(is_alive, pids))
    env.close()
    thread.join(NOT_LONG)
    assert isinstance(errors[0], AgentStopped) and until_gone(pids)


def test_what_a_command_leaves_running_is_ended_with_it(tmp_path):
    assert played(AgentEnv(command=["sh", "-c", FAMILY.format("echo 1")], folder=str(tmp_path))).reward == 1
    assert until_gone(pids_in(tmp_path / "pids"))


def test_a_killed_worker_takes_its_commands_along(tmp_path):
    program = (
        "from roll.agentic.library.agent import AgentEnv\n"
        f"env = AgentEnv(command=['sh', '-c', {FAMILY.format('wait')!r}], folder={str(tmp_path)!r})\n"
        f"env.reset(seed=1); env.step({ADDRESS!r})\n"
    )
    worker = subprocess.Popen(python(program))
    pids = pids_in(tmp_path / "pids")
    assert all(map(is_alive, pids))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert until_gone(pids)


def test_closing_ends_a_coroutine_also_if_it_begins_later(agents):
    for is_first in (True, False):
        env = AgentEnv(run="some_agents:waits")
        env.reset(seed=1)
        if is_first:
            env.close()
        else:
            threading.Timer(0.2, env.close).start()
        with pytest.raises(AgentStopped):
            env.step(ADDRESS)


def test_the_environment_of_a_command_names_the_host_that_no_proxy_may_stand_before(monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "inner.net")
    made = agent_environment({}, "http://[::1]:8000/v1", "k")
    assert (made["NO_PROXY"], made["no_proxy"]) == ("::1", "inner.net,::1")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({}, "run"),
        ({"run": "some_agents:echo", "command": ["true"]}, "run"),
        ({"run": "some_agents:eco"}, "run"),
        ({"run": "some_agents:number"}, "run"),
        ({"run": "some_agents:modest"}, "run"),
        ({"command": ["no-such-program"]}, "command"),
        ({"command": []}, "command"),
        ({"command": ["true"], "folder": "no/such/folder"}, "folder"),
        ({"run": "some_agents:echo", "folder": "."}, "folder"),
        ({"run": "some_agents:echo", "tasks": "no/such/file"}, "tasks"),
        ({"run": "some_agents:echo", "tasks": "{agents}/broken.jsonl"}, "tasks"),
        ({"run": "some_agents:echo", "tasks": "{agents}/list.jsonl"}, "tasks"),
        ({"run": "some_agents:echo", "tasks": "{agents}/empty.jsonl"}, "tasks"),
        ({"command": ["true"], "verifier": "no.such:verifier"}, "verifier"),
        ({"command": ["true"], "verifier": "some_agents:modest"}, "verifier"),
        ({"command": ["true"], "tool_parser": "hermse"}, "tool_parser"),
        ({"comand": ["true"], "run": "some_agents:echo"}, "comand"),
    ],
)
def test_wrong_options_are_found_before_a_run_and_by_their_path(agents, options, option):
    for name, text in (("broken", '{"a": 1}\n{"a": '), ("list", "[1]\n"), ("empty", "\n")):
        (agents / f"{name}.jsonl").write_text(text)
    options = {key: value.format(agents=agents) if key == "tasks" else value for key, value in options.items()}
    (found,) = check_env_type("mine", "agent", options)
    assert found.path == f"custom_envs.mine.env_config.{option}" and found.remedy


def test_options_that_fit_have_no_problem(agents):
    assert check_env_type("mine", "agent", {"run": "some_agents:echo", "tool_parser": "hermes"}) == []
    with pytest.raises(BadOption):
        AgentEnv()


def test_a_coroutine_of_one_environment_does_not_block_another(agents):
    async def both() -> None:
        waiting, quick = AgentEnv(run="some_agents:waits"), AgentEnv(run="some_agents:echo")
        waiting.reset(seed=1)
        stopped = asyncio.create_task(asyncio.to_thread(waiting.step, ADDRESS))
        assert (await asyncio.to_thread(played, quick)).reward == 1
        waiting.close()
        with pytest.raises(AgentStopped):
            await stopped

    asyncio.run(both())
