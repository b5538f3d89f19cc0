"""The page as a browser draws it: every part is there, nothing is complained of, and legends say what the files say.

Runs where a Chromium is installed (`chromium`, `chromium-browser` or `google-chrome`) and is skipped elsewhere.
"""

import re
import subprocess
from html.parser import HTMLParser

import pytest

from roll.report.files import read_run
from roll.report.page import render_comparison, render_page
from roll.tracking.summary import ReadableTokens
from roll.tracking.trackers import read_metrics
from tests.tiers import program

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("chromium")]


class Drawn(HTMLParser):
    """Titles of legend values by the name before them, and all text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.legend, self.shown, self.tags = {}, [], []
        self._title = self._name = None
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._hidden = tag in ("script", "style", "title", "noscript")
        if tag == "b" and self._name is not None:
            self.legend[self._name] = dict(attrs).get("title")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden and data.strip():
            self.shown.append(data)
            self._name = data


def drawn(run, tmp_path):
    """What a browser makes of the page of a run."""
    return looked_at(render_page(read_run(run.root)), tmp_path)


def looked_at(text, tmp_path):
    """What a browser makes of a page; fails for anything it says on its console."""
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8", errors="backslashreplace")
    command = [
        program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
        "--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    return Drawn(result.stdout)


def test_legends_say_the_last_values_of_the_file(make_run, tmp_path):
    run = make_run()
    page = drawn(run, tmp_path)
    folded = {"my/own/metric", "ledger/issued", "ledger/consumed", "ledger/dropped/filtered"}
    last = {name: (record["step"], value) for record in read_metrics(run.metrics) for name, value in record.items()}
    expected = {name: said for name, said in last.items() if name != "step" and name not in folded}
    titles = {name: re.fullmatch(r"step (\d+): (\S+)", title) for name, title in page.legend.items() if title}
    assert {name: (int(said[1]), float(said[2])) for name, said in titles.items()} == expected


def test_every_part_is_drawn(make_run, make_sample, tmp_path):
    tokens = ReadableTokens(["<b>x", "</script>", "\n"], [0, 1, None], [0.5, -0.5, None], [0, 1, None], 7, 2)
    run = make_run(samples=[make_sample(2, tokens=tokens), make_sample(3, tokens=None, response="<i>y</i>")])
    page = drawn(run, tmp_path)
    text = "\n".join(page.shown)
    for part in ("What slows this run down", "Learning", "Timeline", "Weight publication", "Waste", "Configuration"):
        assert part in page.shown
    assert "waits for the trainer" in text and "actor_train/0" in text and "dropped: filtered" in text
    assert "<i>y</i>" in text and page.tags.count("canvas") == 1
    assert "exp_name: additions" in text


def test_a_run_of_nothing_but_metrics_is_drawn(make_run, tmp_path):
    run = make_run()
    for path in (run.timeline, run.samples, run.summary, run.config):
        path.unlink()
    page = drawn(run, tmp_path)
    text = "\n".join(page.shown)
    assert "there is no timeline.json" in text and "there is no samples.jsonl" in text and "reward/mean" in text


def test_several_runs_are_drawn_over_each_other(make_run, tmp_path):
    folders = []
    for name, changes in (("a", {"steps": 3}), ("b", {"steps": 5, "metrics": lambda step: {"reward/mean": step / 9}})):
        run = make_run(**changes)
        folders.append(run.root.rename(tmp_path / name))
    page = looked_at(render_comparison([read_run(folder) for folder in folders]), tmp_path)
    assert {"Outcomes", "What differs in their settings", "Learning", "reward/mean"} <= set(page.shown)
    assert page.legend["b: reward/mean"] == f"step 5: {5 / 9}"
    assert page.legend["a: reward/mean"] == f"step 3: {0.1 + 3 / 7}"
