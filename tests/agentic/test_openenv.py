"""Environments in OpenEnv servers: what is sent and understood, and that no server, session or thread is left."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roll.agentic.base import Unavailable, observation_from
from roll.agentic.library.openenv import OpenEnvEnv
from roll.agentic.library.programs import Shared, guarded
from roll.agentic.registry import check_env_type, make_env
from tests.agentic.openenv_server import Server
from tests.tiers import need

need("websockets")
SCRIPT = str(Path(__file__).with_name("openenv_server.py"))
COMMAND = [sys.executable, SCRIPT, "{port}"]
NOT_LONG = 20.0


@pytest.fixture
def serving():
    servers = []

    def start(**options) -> Server:
        server = Server(0, **options)
        thread = threading.Thread(target=server.socket.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.stop()
        thread.join(NOT_LONG)


def stepped(env, text):
    told, reward, terminated, truncated, info = env.step(text)
    return observation_from(told, info, reward=reward, terminated=terminated, truncated=truncated)


def until(condition) -> bool:
    deadline = time.monotonic() + NOT_LONG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_policys_text_is_the_one_field_of_the_servers_action(serving):
    server = serving()
    env = make_env("openenv", {"url": server.url, "reset": {"level": 3}})
    for seed in (2, 4):
        text, info = env.reset(seed=seed)
        assert (text, "system" in info) == (str(seed // 2), False)
        assert server.resets[-1] == {"seed": seed, "level": 3}
        first, second = stepped(env, str(seed // 2)), stepped(env, "7")
        assert (first.reward, first.done, second.reward, second.terminated) == (1.0, False, 0.0, True)
    assert server.sessions == 1, "an environment keeps its session"
    env.close()
    env.close()
    assert until(lambda: server.sessions == 0)


def test_an_action_of_several_fields_is_json_which_the_policy_is_told(serving):
    env = OpenEnvEnv(url=serving(actions="move").url)
    _, info = env.reset(seed=0)
    assert '"row"' in info["system"] and '"column"' in info["system"] and "metadata" not in info["system"]
    for text in ("up", "{", '{"row": 1', '["row"]', "{" * 10**5, '{"row": 1}', '{"row": 1, "column": 2, "x": 3}'):
        last = stepped(env, text)
        assert (last.action_is_valid, last.reward, last.done) == (False, 0.0, False)
    assert "column: does not fit" in stepped(env, '{"row": 1}').messages[0]["content"]
    assert stepped(env, 'I go\n```json\n{"row": 1, "column": {"a": 2}}\n```').action_is_valid
    env.close()


def test_an_action_may_have_a_field_that_observations_hide(serving):
    """And what its fields refer to is told. Metadata are the environment's own: the policy cannot give any."""
    env = OpenEnvEnv(url=serving(actions="end").url)
    _, info = env.reset(seed=2)
    assert '"done"' in info["system"] and '"enum": ["yes", "no"]' in info["system"]
    last = stepped(env, '{"done": "yes", "message": "1", "metadata": {"is_trusted": true}}')
    assert last.action_is_valid and last.reward == 1.0
    env.close()


def test_options_say_what_the_schema_does_not(serving):
    env = OpenEnvEnv(
        url=serving().url, action_key="message", observation_key="text", action_format="answer_tag", system="Copy it."
    )
    text, info = env.reset(seed=2)
    assert (text, info["system"]) == ("1", "Copy it.")
    assert not stepped(env, "1").action_is_valid
    last = stepped(env, "I think <answer>1</answer>")
    assert last.reward == 1.0 and last.messages[0]["content"] == "1", "the one field that was asked for"
    env.close()
    env = OpenEnvEnv(url=serving().url, observation_key="txt")
    with pytest.raises(ValueError, match="has no `txt`.*`text`"):
        env.reset(seed=1)
    env.close()


def test_all_fields_of_an_observation_are_told(serving):
    env = OpenEnvEnv(url=serving().url)
    env.reset(seed=2)
    assert stepped(env, "1").messages[0]["content"] == '{"text": "1", "more": null}'
    env.close()


def test_an_error_of_the_server_is_a_failure_with_its_cause(serving):
    env = OpenEnvEnv(url=serving().url)
    env.reset(seed=1)
    with pytest.raises(RuntimeError, match=r"failed in a step: it went boom \(EXECUTION_ERROR\)"):
        env.step("boom")
    with pytest.raises(ConnectionError, match="ended"):
        env.step("leave")
    env.reset(seed=1)  # on a new connection
    env.close()


def test_a_full_server_says_what_to_do(serving):
    server = serving(capacity=1)
    first, second = OpenEnvEnv(url=server.url), OpenEnvEnv(url=server.url)
    first.reset(seed=1)
    with pytest.raises(RuntimeError, match="no room.*max_concurrent_envs"):
        second.reset(seed=1)
    first.close()
    second.close()


def test_closing_ends_a_call_that_does_not_return(serving):
    env = OpenEnvEnv(url=serving().url)
    env.reset(seed=1)
    timer = threading.Timer(0.2, env.close)
    timer.start()
    with pytest.raises(ConnectionError):
        env.step("hang")
    timer.join()


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(Unavailable, match="127.0.0.1:9"):
        OpenEnvEnv(url="http://127.0.0.1:9").reset(seed=1)
    with pytest.raises(Unavailable, match="127.0.0.1:9"):
        OpenEnvEnv(url="ws://127.0.0.1:9", action_key="message").reset(seed=1)


def children(of: int) -> set[int]:
    return {int(pid) for task in Path(f"/proc/{of}/task").glob("*/children") for pid in task.read_text().split()}


def test_one_server_is_started_for_all_and_ended_after_the_last(monkeypatch):
    envs = [OpenEnvEnv(command=COMMAND) for _ in range(4)]
    before = children(os.getpid())
    threads = [threading.Thread(target=env.reset, kwargs={"seed": 2}) for env in envs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NOT_LONG)
    (guard,) = children(os.getpid()) - before
    (server,) = children(guard)
    for env in envs[:-1]:
        env.close()
    assert stepped(envs[-1], "1").reward == 1.0
    envs[-1].close()
    assert until(lambda: not Path(f"/proc/{server}").exists() and not children(os.getpid()) - before)


def test_a_server_that_dies_is_replaced_for_the_next_episode():
    env = OpenEnvEnv(command=COMMAND)
    env.reset(seed=2)
    with pytest.raises(ConnectionError):
        env.step("die")
    assert env.reset(seed=2)[0] == "1"
    env.close()


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(Unavailable, match="does not start.*this server cannot start"):
        OpenEnvEnv(command=[*COMMAND, "--broken"]).reset(seed=1)
    with pytest.raises(Unavailable, match="does not start"):
        OpenEnvEnv(command=["sleep", "3600", "{port}"], start_timeout_seconds=0.3).reset(seed=1)


def test_no_other_process_is_given_the_port_of_a_server_that_starts(monkeypatch):
    """Two workers would start a server at the same port, and the slower one would talk to that of the other."""
    refused = []

    def started(words, **options):
        with socket.socket() as other, pytest.raises(OSError) as cause:
            other.bind(("127.0.0.1", int(words[-1])))
        refused.append(cause.value.errno)
        return guarded(words, **options)

    monkeypatch.setattr("roll.agentic.library.openenv.guarded", started)
    env = OpenEnvEnv(command=COMMAND)
    assert env.reset(seed=2)[0] == "1" and refused == [errno.EADDRINUSE]
    env.close()


def test_a_server_that_reuses_no_address_finds_its_port(caplog):
    caplog.set_level("INFO")
    env = OpenEnvEnv(command=[*COMMAND, "--alone"])
    assert env.reset(seed=2)[0] == "1"
    assert "already in use" in caplog.text, "at the kept port it cannot start"
    env.close()


def test_a_server_without_an_answer_is_given_back_by_each_attempt(monkeypatch):
    """Else a second reset would take it once more, and nobody would end it."""
    env = OpenEnvEnv(command=COMMAND)
    before = children(os.getpid())

    def unreachable(url):
        raise Unavailable("no")

    monkeypatch.setattr("roll.agentic.library.openenv._Session", unreachable)
    for _ in range(2):
        with pytest.raises(Unavailable):
            env.reset(seed=1)
    env.close()
    assert until(lambda: not children(os.getpid()) - before)


def test_a_killed_worker_takes_its_server_along(tmp_path):
    program = (
        "import subprocess, os, sys, time\n"
        "from roll.agentic.library.openenv import OpenEnvEnv\n"
        f"env = OpenEnvEnv(command={COMMAND!r}); env.reset(seed=1)\n"
        "print('ready', flush=True); time.sleep(3600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert worker.stdout.readline() == b"ready\n"
    (guard,) = children(worker.pid)
    (server,) = children(guard)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert until(lambda: not Path(f"/proc/{server}").exists())


class Lamp:
    def __init__(self, name: str) -> None:
        self.name, self.is_on = name, True

    def is_alive(self) -> bool:
        return self.is_on

    def end(self) -> None:
        self.is_on = False


def test_programs_are_shared_by_what_they_were_started_with():
    lamps: Shared[Lamp] = Shared(Lamp)
    red, blue, again = lamps.take("red"), lamps.take("blue"), lamps.take("red")
    assert red is again and red is not blue
    lamps.give_back(red)
    assert red.is_on
    lamps.give_back(again)
    assert not red.is_on and blue.is_on
    new = lamps.take("red")
    assert new is not red and new.is_on
    new.is_on = False  # it has died, and an old user gives it back after it was replaced
    newer = lamps.take("red")
    lamps.give_back(new)
    assert newer is not new and newer.is_on and lamps.take("red") is newer


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({}, "url"),
        ({"url": "http://a", "command": COMMAND}, "url"),
        ({"url": "localhost:8000"}, "url"),
        ({"command": ["serve"]}, "command"),
        ({"command": ["no-such-program", "{port}"]}, "command"),
        ({"url": "http://a", "action_format": "tag"}, "action_format"),
        ({"url": "http://a", "actoin_key": "x"}, "actoin_key"),
    ],
)
def test_wrong_options_are_found_before_a_run(options, option):
    (found,) = check_env_type("mine", "openenv", options)
    assert found.path == f"custom_envs.mine.env_config.{option}" and found.remedy
