"""wandb, swanlab and trackio themselves, offline: what was logged is read back out of their own files."""

import json
import math
import sqlite3
import struct
import time
from pathlib import Path
from pkgutil import resolve_name

import pytest

from roll.configs.run import TRACKERS
from roll.distribution import install_command
from roll.tracking.plugins.process import Ending, PlugIns, flat_summary, open_plug_ins
from roll.tracking.run_directory import RunDirectory

SECONDS = 120.0
CLASSES = {name: record.path for name, record in TRACKERS.built_in.items()}
CONFIG = {"seed": 42, "rewards": {"math": {"verifier": "math", "api_key": "***"}}, "stages": {}}
SUMMARY = {"status": "failed", "steps": 5, "val/last": {"math": 0.5}, "lag/max": None, "error": "EngineFailed: one"}
FAILED = Ending("failed", SUMMARY, "EngineFailed: one")

NETWORK_WATCH = """
import socket, sys
def _noted(connect):
    def noted(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(("127.", "::1")):
            with open({log!r}, "a") as file:
                print(address, sys.argv[:1], file=file)
        return connect(self, address)
    return noted
socket.socket.connect = _noted(socket.socket.connect)
socket.socket.connect_ex = _noted(socket.socket.connect_ex)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run, at home in an empty folder, with a key in the environment that must not turn up anywhere."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "sitecustomize.py").write_text(NETWORK_WATCH.format(log=str(tmp_path / "network.txt")))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(home), prepend=":")
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(variable, f"hush-{variable.lower()}-0123456789abcdef0123456789abcdef0123456789")
    return RunDirectory.create(str(tmp_path / "run"), "sums")


def track(run, name, options, records, ending):
    plug_ins = PlugIns(open_plug_ins({name: CLASSES[name]}, {name: options}, run, "sums", CONFIG), SECONDS)
    for metrics, step in records:
        plug_ins.log(metrics, step)
    plug_ins.end(ending)


FIRST = [({"reward/mean": 0.25, "val/math/accuracy": 0.125}, 0)] + [
    ({"reward/mean": step / 2, "actor/kl": math.nan if step == 2 else 0.5}, step) for step in (1, 2, 3)
]
AGAIN = [({"reward/mean": 10.0 + step, "actor/kl": math.inf}, step) for step in (3, 4)]


def said(run, name):
    return (run.logs / f"tracker_{name}.out").read_text()


def nobody_was_called(tmp_path):
    path = tmp_path / "network.txt"
    return not path.exists() or path.read_text() == ""


def no_key_was_written(folder):
    return [path for path in folder.rglob("*") if path.is_file() and b"hush-" in path.read_bytes()] == []


BLOCK, FILE_HEADER = 32768, 7


def wandb_records(path):
    """The file is a log as LevelDB has them, in blocks, with the library's own messages in it. The library reads it
    with a program that uploads it, and has no reader for us."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), FILE_HEADER, []
    assert data[:4] == b":W&B"
    while position < len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            record = Record()
            record.ParseFromString(b"".join(parts))
            yield record
            parts = []


def values(items):
    return {"/".join(item.nested_key) if item.nested_key else item.key: json.loads(item.value_json) for item in items}


@pytest.mark.tier("all")
@pytest.mark.needs("wandb")
def test_wandb_offline_has_what_was_logged_and_a_resumed_run_is_the_same_one(run, tmp_path):
    options = {"mode": "offline", "project": "adding", "tags": ["small"]}
    track(run, "wandb", options, FIRST, FAILED)
    time.sleep(1.1)  # wandb names its folders by the second
    track(run, "wandb", options, AGAIN, Ending("success", {"status": "success"}))
    files = sorted((run.trackers / "wandb").rglob("*.wandb"))
    assert len(files) == 2, said(run, "wandb")
    first, second = ([*wandb_records(path)] for path in files)
    (begun,) = [record.run for record in first if record.HasField("run")]
    identity = json.loads(run.tracker_ids.read_text())["wandb"]
    assert (begun.run_id, begun.project, begun.display_name, [*begun.tags]) == (identity, "adding", "sums", ["small"])
    assert [record.run.run_id for record in second if record.HasField("run")] == [identity]
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["seed"] == 42 and config["rewards"]["math"]["api_key"] == "***"
    history = [values(record.history.item) for record in first if record.HasField("history")]
    assert [row["step"] for row in history] == [0, 1, 2, 3]
    assert [row["reward/mean"] for row in history] == [0.25, 0.5, 1.0, 1.5]
    assert history[0]["val/math/accuracy"] == 0.125 and math.isnan(float(history[2]["actor/kl"]))
    again = [values(record.history.item) for record in second if record.HasField("history")]
    assert [(row["step"], row["reward/mean"]) for row in again] == [(3, 13.0), (4, 14.0)]
    assert [float(row["actor/kl"]) for row in again] == [math.inf, math.inf]
    axes = [record.metric for record in first if record.HasField("metric")]
    assert {metric.glob_name: metric.step_metric for metric in axes}["*"] == "step"
    summary = {}
    for record in first:
        if record.HasField("summary"):
            summary |= values(record.summary.update)
    assert summary["summary/status"] == "failed" and summary["summary/val/last/math"] == 0.5
    assert [record.exit.exit_code for record in first if record.HasField("exit")] == [1]
    assert [record.exit.exit_code for record in second if record.HasField("exit")] == [0]
    assert nobody_was_called(tmp_path) and no_key_was_written(run.root)


def swanlab_records(path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(path)
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        yield record


@pytest.mark.tier("all")
@pytest.mark.needs("swanlab")
@pytest.mark.parametrize("mode", ["offline", "local"])
def test_swanlab_without_its_cloud_has_what_was_logged(run, tmp_path, mode):
    track(run, "swanlab", {"mode": mode, "project": "adding"}, FIRST, FAILED)
    identity = json.loads(run.tracker_ids.read_text())["swanlab"]
    (path,) = (run.trackers / "swanlab").rglob(f"run-{identity}.swanlab")
    records = [*swanlab_records(path)]
    (start,) = [record.start for record in records if record.HasField("start")]
    assert (start.id, start.project, start.name) == (identity, "adding", "sums")
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    rewards = [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == "reward/mean"]
    assert rewards == [(0, 0.25), (1, 0.5), (2, 1.0), (3, 1.5)]
    (finish,) = [record.finish for record in records if record.HasField("finish")]
    assert finish.error == "EngineFailed: one"
    config = "\n".join(file.read_text() for file in path.parent.rglob("config.yaml"))
    assert "seed" in config and "42" in config and "summary/val/last/math" in config
    assert nobody_was_called(tmp_path) and no_key_was_written(run.root)


@pytest.mark.tier("all")
@pytest.mark.needs("trackio")
def test_trackio_has_what_was_logged_and_a_resumed_run_is_the_same_one(run, tmp_path):
    options = {"project": "adding", "dir": str(tmp_path / "database")}
    track(run, "trackio", options, FIRST, Ending("success", {"status": "success"}))
    track(run, "trackio", options, AGAIN, FAILED)
    with sqlite3.connect(tmp_path / "database" / "adding.db") as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = database.execute("SELECT config FROM configs").fetchone()
        alerts = database.execute("SELECT title, level FROM alerts ORDER BY id").fetchall()
    identity = json.loads(run.tracker_ids.read_text())["trackio"]
    assert {(run_id, name) for run_id, name, _, _ in rows} == {(rows[0][0], f"sums-{identity[:6]}")}
    metrics = [(step, json.loads(text)) for _, _, step, text in rows]
    assert [(step, row["reward/mean"]) for step, row in metrics] == [
        (0, 0.25), (1, 0.5), (2, 1.0), (3, 1.5), (3, 13.0), (4, 14.0),
    ]  # fmt: skip
    assert math.isnan(float(metrics[2][1]["actor/kl"])) and float(metrics[4][1]["actor/kl"]) == math.inf
    assert json.loads(config)["rewards"]["math"]["api_key"] == "***"
    assert alerts == [("the run ended: success", "info"), ("the run ended: failed", "error")]
    assert nobody_was_called(tmp_path) and no_key_was_written(tmp_path / "run")


def test_the_watch_on_the_network_sees_a_call(tmp_path):
    import subprocess
    import sys

    (tmp_path / "sitecustomize.py").write_text(NETWORK_WATCH.format(log=str(tmp_path / "network.txt")))
    code = "import socket; socket.socket().connect_ex(('192.0.2.1', 0))"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, check=True, timeout=60)
    assert not nobody_was_called(tmp_path)


def test_each_tracker_of_a_run_has_an_id_and_keeps_it(run, monkeypatch):
    opened = []
    monkeypatch.setattr("roll.tracking.plugins.process.TrackerProcess", lambda *facts: opened.append(facts))
    open_plug_ins({"wandb": CLASSES["wandb"]}, {"wandb": {"mode": "offline"}}, run, "sums", CONFIG)
    (run.trackers / "trackio").touch()  # in the way of a folder, which is the tracker's concern
    open_plug_ins({name: CLASSES[name] for name in ("wandb", "trackio")}, {}, run, "sums", CONFIG)
    names, runs = [facts[0] for facts in opened], [facts[2] for facts in opened]
    assert names == ["wandb", "wandb", "trackio"]
    assert runs[0].id == runs[1].id != runs[2].id and all(len(item.id) == 21 for item in runs)
    assert [item.resumed for item in runs] == [False, True, False]
    assert [facts[3]["mode"] for facts in opened[:2]] == ["offline", "online"]


def test_a_run_without_plug_ins_makes_no_folder_for_them(run):
    assert open_plug_ins({}, {}, run, "sums", CONFIG) == []
    assert not run.trackers.exists()


@pytest.mark.parametrize("name", CLASSES)
def test_each_option_says_what_it_is(name):
    from dataclasses import fields

    plug_in = resolve_name(CLASSES[name])
    assert all(item.metadata["help"].endswith(".") for item in fields(plug_in.Options))
    assert plug_in.install == install_command(name)


def test_a_summary_is_flattened():
    assert flat_summary(SUMMARY) == {
        "summary/status": "failed", "summary/steps": 5, "summary/val/last/math": 0.5,
        "summary/error": "EngineFailed: one",
    }  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_has_the_options(name):
    from dataclasses import MISSING, fields

    page = (Path(__file__).resolve().parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
    section = page.partition(f"#### `{name}`\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    options = fields(resolve_name(CLASSES[name]).Options)
    defaults = [[] if item.default is MISSING else item.default for item in options]
    assert rows == [
        f"| `{item.name}` | `{json.dumps(default)}` | {item.metadata['help']} |"
        for item, default in zip(options, defaults, strict=True)
    ]
