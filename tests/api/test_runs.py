"""`roll.open_run` and `roll.compare`: what a folder tells, while the run lives and afterwards."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import roll
from roll.cli.main import main
from roll.report.files import read_run
from roll.report.page import comparison_data, differences, labels_of
from tests.report.conftest import CONFIG, make_run, make_sample, metrics_of  # noqa: F401


def test_a_run_tells_what_its_files_say(make_run):  # noqa: F811
    run = roll.open_run(make_run().root)
    assert run.status == "success" and run.summary["steps"] == 3 and run.checkpoint is None
    rows = run.metrics if isinstance(run.metrics, list) else run.metrics.reset_index().to_dict("records")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[2]["reward/mean"] == metrics_of(2)["reward/mean"]
    assert len(run.samples) == 3 and "success after 3 steps" in repr(run)
    page = run.report()
    assert page.path == run.path / "report.html" and "<title>additions" in page.path.read_text()
    assert page._repr_html_().startswith("<iframe srcdoc=") and "<title>" not in page._repr_html_()


def test_a_living_run_is_read_anew(make_run):  # noqa: F811
    files = make_run(status="running")
    run = roll.open_run(files.root)
    assert run.status == "died"
    with files.held():
        assert run.status == "running"
        files.metrics.write_text(files.metrics.read_text() + '{"step": 4}\n')
        assert len(run.metrics) == 5


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        roll.open_run(tmp_path)


def test_metrics_are_a_frame_where_pandas_is(make_run, monkeypatch):  # noqa: F811
    """A stand-in notes what it is asked for, as the real one need not be installed."""
    run = roll.open_run(make_run().root)

    class Frame(list):
        def set_index(self, name):
            return ("indexed by", name, len(self))

        def __contains__(self, name):
            return name in self[0]

    pandas = ModuleType("pandas")
    pandas.DataFrame = Frame
    pandas.__spec__ = object()
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert run.metrics == ("indexed by", "step", 4) and isinstance(run.samples, Frame)


@pytest.fixture
def two_runs(make_run, tmp_path):  # noqa: F811
    folders = []
    for name, ratio, steps in (("a", 1.0, 3), ("b", 0.0, 5)):
        metrics = metrics_of if name == "a" else lambda step: {"reward/mean": step / 9, "only/here": 1.0}
        run = make_run(steps=steps, metrics=metrics, config=CONFIG.replace("ratio: 1.0", f"ratio: {ratio}"))
        run.root.rename(tmp_path / name)
        folders.append(tmp_path / name)
    return folders


def test_curves_of_several_runs_share_a_panel(two_runs):
    runs = [read_run(folder) for folder in two_runs]
    data = comparison_data(runs, now=0.0)
    assert data["labels"] == ["a", "b"] and [state["steps"] for state in data["states"]] == [3, 5]
    panels = {panel["title"]: panel["metrics"] for section in data["sections"] for panel in section["panels"]}
    assert panels["reward/mean"] == ["a: reward/mean", "b: reward/mean"] and panels["only/here"] == ["b: only/here"]
    series = data["metrics"]["series"]
    assert series["b: only/here"]["place"] == 1
    for run, label in zip(runs, data["labels"], strict=True):
        points = dict(zip(*(series[f"{label}: reward/mean"][key] for key in ("steps", "values")), strict=True))
        assert points == {record["step"]: record["reward/mean"] for record in run.metrics if "reward/mean" in record}
    assert data["differences"] == [{"key": "async_generation_ratio", "values": ["1.0", "0.0"]}]


def test_every_difference_is_listed_and_nothing_else():
    configs = [{"a": {"b": 1, "c": [1]}, "d": None, "exp_name": "x"}, {"a": {"b": 2, "c": [1]}, "exp_name": "y"}]
    assert differences(configs) == [
        {"key": "a.b", "values": ["1", "2"]},
        {"key": "d", "values": ["None", "–"]},
    ]


def test_labels_differ(two_runs):
    same = [read_run(two_runs[0])] * 2
    assert labels_of(same) == ["additions a (1)", "additions a (2)"]


def test_one_page_compares_runs_for_python_and_for_the_command_line(two_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = roll.compare([roll.open_run(two_runs[0]), two_runs[1]], "both.html")
    assert page.path == tmp_path / "both.html" and "a: reward/mean" in page.path.read_text()
    assert main(["report", *map(str, two_runs)]) == 0
    assert "comparison of 2 runs" in capsys.readouterr().out
    assert "a: reward/mean" in (tmp_path / "comparison.html").read_text()
    assert main(["report", *map(str, two_runs), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert main(["report", str(two_runs[0]), str(tmp_path / "nothing")]) == 2
    with pytest.raises(ValueError, match="at least two"):
        roll.compare([two_runs[0]])
