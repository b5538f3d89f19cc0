"""Logs: one file per role, warnings only on the terminal, no secret in either."""

import logging
import time
import warnings

import pytest

from roll.tracking.logs import configure_logging, last_lines, redact


@pytest.fixture(autouse=True)
def untouched_logging():
    root, project = logging.getLogger(), logging.getLogger("roll")
    before, levels = list(root.handlers), (root.level, project.level)
    yield
    logging.captureWarnings(False)
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    project.setLevel(levels[1])


def test_a_role_logs_to_its_own_file_and_the_terminal_sees_warnings_only(tmp_path, capsys):
    path = configure_logging(tmp_path / "logs", "driver", console=True)
    logging.getLogger("roll.pipeline").info("started")
    logging.getLogger("roll.pipeline").warning("replica 1 restarts")
    logging.getLogger("somelibrary").info("chatter")
    assert path == tmp_path / "logs" / "driver.log"
    text, terminal = path.read_text(), capsys.readouterr()
    assert "started" in text and "replica 1 restarts" in text and "chatter" not in text
    assert "replica 1 restarts" in terminal.err and "started" not in terminal.err
    assert terminal.out == ""


def test_a_worker_says_nothing_on_the_terminal(tmp_path, capsys):
    configure_logging(tmp_path, "actor_infer-0")
    logging.getLogger("roll").error("engine died")
    assert capsys.readouterr().err == ""
    assert "engine died" in (tmp_path / "actor_infer-0.log").read_text()


def test_configuring_again_moves_the_log_and_doubles_nothing(tmp_path):
    first = configure_logging(tmp_path, "driver")
    second = configure_logging(tmp_path, "trainer")
    logging.getLogger("roll").warning("once")
    assert first.read_text() == ""
    assert second.read_text().count("once") == 1


def test_python_warnings_go_to_the_file_only(tmp_path, capsys):
    path = configure_logging(tmp_path, "driver", console=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old function", DeprecationWarning, stacklevel=1)
    assert "old function" in path.read_text()
    assert "old function" not in capsys.readouterr().err


def test_secrets_are_masked_in_messages_and_in_tracebacks(tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hub_s3cr3t")
    path = configure_logging(tmp_path, "driver")
    try:
        raise ConnectionError("401 for hub_s3cr3t")
    except ConnectionError:
        logging.getLogger("roll").exception("login with api_key=%s failed", "k-123")
    text = path.read_text()
    assert "hub_s3cr3t" not in text and "k-123" not in text
    assert "ConnectionError: 401 for ***" in text


def test_a_role_cannot_leave_the_folder(tmp_path):
    path = configure_logging(tmp_path / "logs", "../rewards.math/0")
    assert path.parent == tmp_path / "logs" and path.exists()


def test_a_message_that_utf8_cannot_hold_is_logged(tmp_path, monkeypatch):
    # pytest would send what its own handlers capture to another process, as UTF-8.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    path = configure_logging(tmp_path, "driver")
    logging.getLogger("roll").warning("half \ud83d")
    assert "half \\ud83d" in path.read_text()


def test_the_last_lines_of_a_log_are_read_from_its_end_only(tmp_path):
    path = tmp_path / "driver.log"
    path.write_bytes(b"one\n" + "é".encode() * 50 + b"\r\nthree \xff\nfour")
    assert last_lines(path, 2, max_bytes=1000) == ["three \ufffd", "four"]
    assert last_lines(path, 9, max_bytes=1000)[0] == "one"
    assert last_lines(path, 9, max_bytes=17) == ["\ufffdé", "three \ufffd", "four"]
    path.write_bytes(b"")
    assert last_lines(path, 2, max_bytes=1000) == []


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("api_key: abc", "api_key: ***"),
        ("  wandb_api_key: 'a b c'", "  wandb_api_key: ***"),
        ('{"password": "x y", "seed": 1}', '{"password": ***, "seed": 1}'),
        ("HF_TOKEN=hf_abc next", "HF_TOKEN=*** next"),
        ("tracker.client-secret=zz, seed=1", "tracker.client-secret=***, seed=1"),
        ("authToken: q", "authToken: ***"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("https://me:pass@host/x", "https://me:***@host/x"),
        ("error: api_key=abc", "error: api_key=***"),
        ('password="torn off', "password=*** off"),
        ("Authorization: token=abc", "Authorization: token=***"),
        ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=***"),
    ],
)
def test_secrets_are_masked_by_name(text, masked):
    assert redact(text, environ={}) == masked


@pytest.mark.parametrize(
    "text",
    [
        "max_new_tokens: 64",
        "max_tokens_per_microbatch_in_train: 8192",
        "eos_token: '</s>'",
        "tokens_per_second/actor_infer: 5000",
        "tokenizer: gpt2",
        "a secret is a word",
        "http://host:8000/path",
        "step 3, loss=0.1",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert redact(text, environ={}) == text


def test_values_of_secret_variables_are_masked_wherever_they_turn_up():
    environ = {"MY_PASSWORD": "hunter2hunter2", "MY_SECRET": "hunter2", "PIN_TOKEN": "1", "PATH": "/usr/bin"}
    assert redact("said hunter2hunter2 and hunter2 1 /usr/bin", environ) == "said *** and *** 1 /usr/bin"


@pytest.mark.parametrize("text", ["a_secret" * 20_000, "x-y_" * 40_000, "token" + " " * 160_000, "u://" * 40_000])
def test_masking_a_long_text_takes_linear_time(text):
    started = time.process_time()
    redact(text, environ={})
    assert time.process_time() - started < 10
