"""`roll serve` and `roll chat`: a run's last model answers at an address and in a terminal; what cannot be, is said."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager

import pytest

from roll.cli.main import main
from roll.cli.serve import model_at
from roll.configs.errors import ConfigError
from tests.agentic.endpoint.test_served import Sampler, served
from tests.cli.served_models import make_model
from tests.tiers import need

pytestmark = [pytest.mark.needs("aiohttp"), pytest.mark.tier("all")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(autouse=True)
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def a_run(folder, model, *steps):
    for step in steps:
        shutil.copytree(model, folder / "checkpoints" / f"step-{step}")
    return folder


def test_a_run_means_its_last_whole_model(model, tmp_path, capsys):
    run = a_run(tmp_path / "run", model, 2, 10)
    newest = run / "checkpoints" / "step-10"
    assert model_at(str(run)) == model_at(str(run / "checkpoints")) == model_at(str(newest)) == str(newest)
    (newest / "model.safetensors").write_bytes(b"half")
    assert model_at(str(run)) == str(run / "checkpoints" / "step-2")
    assert "passed over" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not written to its end"):
        model_at(str(newest))
    assert model_at("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(model, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ([str(tmp_path / "absent")], "there is no folder"),
            ([str(tmp_path)], "neither a model nor a run"),
            ([str(run)], "without a checkpoint"),
            ([str(bare)], "no chat template"),
            ([str(model), "--port", port], "cannot listen"),
            ([str(model), "--engine", "hff"], "hf_infer"),
            ([str(model), "max_running_request=2"], "max_running_requests"),
            ([str(model), "fast"], "key=value"),
            ([str(model), "--tool-parser", "herms"], "hermes"),
            ([str(model), "--top-p", "0"], "out of range"),
            ([str(model), "--max-tokens", "0"], "out of range"),
            ([str(model), "--sequence-length", "0"], "out of range"),
            ([str(model), "--num-gpus", "2"], "splits no model"),
        ):
            where = [] if "--port" in arguments else ["--port", "0"]
            assert main(["serve", *arguments, *where]) == 2, arguments
            assert words in capsys.readouterr().err, arguments
    assert main(["chat"]) == 2 and "--url" in capsys.readouterr().err
    assert main(["chat", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "no model answers" in capsys.readouterr().err


MODELS = b'{"data": [{"id": "m"}]}'
HI = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextmanager
def speaking(*answers):
    """The address of a server that says these bytes, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak():
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(60)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([b"SSH-2.0-OpenSSH\r\n"], "no model answers"),
        ([HEAD + b"<html>"], "no model answers"),
        ([HEAD + b"{}"], "no server of chat completions"),
        ([HEAD + b"[]"], "no server of chat completions"),
        ([HEAD + MODELS, HEAD + b'data: {"object": "x"}\n\n'], "no server of chat completions"),
        ([HEAD + MODELS, HEAD + HI], "broke off"),
    ],
)
def test_a_server_that_is_none_or_dies_is_said(answers, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    with speaking(*answers) as address:
        assert main(["chat", "--url", address]) == 1
    assert words in capsys.readouterr().err


def test_an_address_that_is_none_and_options_without_effect_are_refused(capsys):
    for address in ("http://127.0.0.1:abc", "http://[::1", "http://127.0.0.1:1/a b", "localhost:1"):
        assert main(["chat", "--url", address]) == 1
        assert "no model answers" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "--top-p", "0.5", "--engine", "vllm"]) == 2
    said = capsys.readouterr().err
    assert "`--top-p`" in said and "`--engine`" in said and "`--top-k`" not in said


def test_a_conversation_has_a_memory_and_can_begin_again(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\n/reset\none\n/quit\nnever\n"))
    sampler = Sampler("<think>hm</think>You go left.")
    with served(sampler) as address:
        assert main(["chat", "--url", address.removesuffix("/v1"), "--system", "be short"]) == 0
    first, second, third = (each["prompt"] for each in sampler.asked)
    assert first == third and second[: len(first)] == first and len(second) > len(first)
    assert capsys.readouterr().out.count("hm\n---\nYou go left.\n") == 3


def test_a_model_is_talked_to_from_its_folder_and_what_it_refuses_is_said(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["chat", str(model), "--temperature", "0", "--max-tokens", "12"]) == 0
    assert f"talking to {model}" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("one " * 1000))
    assert main(["chat", str(model)]) == 1
    assert "context length" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.tier("soak"))])
def test_a_served_run_answers_until_it_is_interrupted(engine, model, tmp_path, monkeypatch, capsys):
    options = []
    if engine == "vllm":
        need("vllm")
        options = ["gpu_memory_utilization=0.1", "--sequence-length", "256"]
    run = a_run(tmp_path / "run", model, 1)
    command = [sys.executable, "-m", "roll.cli.main", "serve", str(run), "--port", "0", "--max-tokens", "5"]
    command += ["--engine", engine, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            line = next(line for line in process.stdout if "is served at" in line)
            address = line.split()[-1]

            def answer(seed: int) -> str:
                body = {"model": "m", "messages": [{"role": "user", "content": "one"}], "seed": seed}
                headers = {"Content-Type": "application/json"}
                asked = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(asked, timeout=60) as response:
                    told = json.load(response)
                assert told["usage"]["completion_tokens"] <= 5
                return told["choices"][0]["message"]["content"]

            answers = [answer(seed) for seed in (1, -2, 3, 2**63, 1, -2, 3, 2**63)]
            assert answers[:4] == answers[4:] and len(set(answers)) > 1, "a seed is a choice of tokens"
            monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
            assert main(["chat", "--url", address]) == 0
            assert str(run) in capsys.readouterr().out
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: it reaches the engine's processes, too
            out, err = process.communicate(timeout=90)
            assert process.returncode == 0 and "ended" in out
            for noise in ("Traceback", "KeyboardInterrupt", "SystemExit", "ERROR", "Exception"):
                assert noise not in out + err, out + err
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
