"""The page says what the files say, to the last bit, and nothing that a model wrote can break out of it."""

import base64
import fcntl
import hashlib
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from PIL import Image

from roll.cli.main import main
from roll.report.files import read_run
from roll.report.findings import findings
from roll.report.page import render_page
from roll.tracking.trackers import read_metrics


class Page(HTMLParser):
    """What a browser finds in a page: its elements, and the text inside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.texts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1][0] == tag:
            self.inside.pop()

    def handle_data(self, data):
        key = self.inside[-1] if self.inside else ("", None)
        self.texts[key] = self.texts.get(key, "") + data

    @property
    def data(self):
        return json.loads(self.texts["script", "run-data"])


def page_of(run):
    text = render_page(read_run(run.root), now=0.0)
    return Page(text)


def test_every_number_of_the_metrics_is_on_the_page_to_the_last_bit(make_run):
    run = make_run()
    metrics = page_of(run).data["metrics"]
    found = {step: {} for step in metrics["steps"]}
    for name, series in metrics["series"].items():
        for step, value in zip(series.get("steps", metrics["steps"]), series["values"], strict=True):
            found[step][name] = value
    assert [{"step": step, **values} for step, values in found.items()] == read_metrics(run.metrics)
    assert metrics["thinned"] is None


def test_each_metric_is_in_exactly_one_panel(make_run):
    data = page_of(make_run()).data
    drawn = [name for section in data["sections"] for panel in section["panels"] for name in panel["metrics"]]
    assert sorted(drawn) == sorted(data["metrics"]["series"])


def test_what_is_told_of_the_run_is_that_of_its_summary(make_run):
    data = page_of(make_run(status="failed", error="WorkerDied: actor_train/0")).data
    state = data["state"]
    assert (state["status"], state["steps"], state["max_steps"], state["seconds"]) == ("failed", 3, 3, 75.5)
    assert (state["validation_first"], state["validation_last"]) == ({"sums": 0.25}, {"sums": 0.875})
    assert state["error"] == "WorkerDied: actor_train/0"
    assert data["ledger"] == {"issued": 10, "consumed": 8, "dropped/filtered": 2}
    assert data["lags"] == [{"lag": "0", "share": 0.25}, {"lag": "1", "share": 0.75}]
    assert data["tokens"] == {"generated": 120.0, "trained": 90.0}
    assert "last words" in data["log"]


def test_a_lag_without_tokens_in_a_step_has_no_share_of_it(make_run):
    def metrics(step):
        return {"actor/lag_1/share": 1.0} if step < 3 else {"actor/lag_0/share": 1.0, "actor/lag_2+/share": 0.0}

    lags = page_of(make_run(metrics=metrics)).data["lags"]
    assert lags == [{"lag": "0", "share": 1 / 3}, {"lag": "1", "share": 2 / 3}, {"lag": "2+", "share": 0.0}]


BREAKOUTS = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "</SCRIPT ><img src=x onerror=alert(1)>",
    "]]>&lt;/script&gt;\u2028\u2029\x00",
    "half a character \ud83d",
]


@pytest.mark.parametrize("text", BREAKOUTS)
def test_no_text_breaks_out_of_the_page(make_run, make_sample, text):
    samples = [make_sample(1, prompt=text, response=text, domain=text, tokens=None)]
    config = f"exp_name: {json.dumps(text)}\n" if "\x00" not in text and "\ud83d" not in text else "exp_name: x\n"
    run = make_run(samples=samples, config=config, status="failed", error=text)
    (run.logs / "driver.log").write_text(text, errors="backslashreplace")
    assert main(["report", str(run.root)]) == 0
    page = Page((run.root / "report.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script", "script"]
    assert not set("<>&\u2028\u2029") & set(page.texts["script", "run-data"])
    (sample,) = page.data["samples"]
    assert (sample["prompt"], sample["response"], sample["domain"]) == (text, text, text)
    assert page.data["state"]["error"] == text


def test_the_page_loads_nothing_and_runs_nothing_but_its_own_script(make_run):
    page = page_of(make_run())
    assert page.data["pictures"] is None, "its samples are texts"
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "data"} & set(attrs)]
    (policy,) = [attrs["content"] for _, attrs in page.tags if "Content-Security-Policy" in attrs.get("http-equiv", "")]
    assert "default-src 'none'" in policy
    for kind, key in (("script", ("script", None)), ("style", ("style", None))):
        digest = base64.b64encode(hashlib.sha256(page.texts[key].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    writers_of_markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
    assert not re.search(rf"{writers_of_markup}|fetch\(|XMLHttpRequest|import\(", page.texts["script", None])
    assert not re.search(r"url\(|@import", page.texts["style", None])


def decoded(source):
    head, _, data = source.partition(",")
    return head, Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


def test_validation_pictures_are_a_grid_of_prompts_and_versions(make_run, make_sample):
    samples = [
        make_sample(
            step, split="val", group_id=group, prompt=f"prompt {group}", response=f"{step}-{group}.png", score=step / 8
        )
        for step in (0, 2, 4)
        for group in (0, 1)
    ]
    training = make_sample(4, response="4-train.png")
    outside = make_sample(0, split="val", group_id=9, response="../../secret.png")
    run = make_run(samples=[*samples, training, outside])
    run.pictures.mkdir()
    (run.root.parent / "secret.png").write_bytes(b"not a picture of this run")
    for number, sample in enumerate([*samples, training]):
        Image.new("RGB", (400, 200) if number == 5 else (8, 8), (number, 0, 0)).save(run.pictures / sample.response)
    (run.pictures / "2-0.png").write_bytes(b"cut off")
    (run.pictures / "2-1.png").unlink()
    grid = page_of(run).data["pictures"]
    assert grid["versions"] == [0, 2, 4] and (grid["versions_recorded"], grid["prompts_recorded"]) == (3, 2)
    assert [row["prompt"] for row in grid["rows"]] == ["prompt 0", "prompt 1"]
    first, second = (row["pictures"] for row in grid["rows"])
    assert first[1] is None and second[1] is None
    assert [first[0]["score"], first[2]["score"]] == [0, 0.5]
    head, image = decoded(first[2]["source"])
    assert head == "data:image/png;base64" and image.getpixel((0, 0)) == (4, 0, 0)
    head, image = decoded(second[2]["source"])
    assert head == "data:image/jpeg;base64" and image.size == (128, 64)


def test_samples_have_the_pictures_of_their_prompts(make_run, make_sample):
    samples = [make_sample(step, pictures=[f"prompt-{step}.png", "prompt-all.jpeg"]) for step in range(1, 101)]
    run = make_run(samples=[make_sample(1, pictures=["../../secret.png", "prompt-lost.png"]), *samples])
    run.pictures.mkdir()
    (run.root.parent / "secret.png").write_bytes(b"not a picture of this run")
    for step in range(1, 101):
        Image.new("RGB", (8, 8), (step, 0, 0)).save(run.pictures / f"prompt-{step}.png")
    Image.new("RGB", (400, 200)).save(run.pictures / "prompt-all.jpeg")
    data = page_of(run).data
    assert data["samples"][1]["pictures"] == ["prompt-1.png", "prompt-all.jpeg"]
    shown = data["prompt_pictures"]
    assert "prompt-100.png" in shown and 50 < len(shown) <= 64
    assert not {"../../secret.png", "prompt-lost.png"} & shown.keys()
    head, image = decoded(shown["prompt-100.png"])
    assert head == "data:image/png;base64" and image.getpixel((0, 0)) == (100, 0, 0)


def test_a_damaged_picture_leaves_its_place_empty(make_run, make_sample):
    run = make_run(samples=[make_sample(0, split="val", response="0.png")])
    run.pictures.mkdir()
    whole = io.BytesIO()
    Image.new("RGB", (8, 8)).save(whole, "PNG")
    data = whole.getvalue()
    size, pixels = data.index(b"IHDR"), data.index(b"IDAT")
    for damaged in (
        data[: size - 4] + b"\0\0\0\5" + data[size:],  # its header is too short: ValueError
        data[:pixels] + b"\xd9L\xbc\x93" + data[pixels + 4 :],  # a chunk without a name: SyntaxError
        data[: pixels + 8],  # cut off: OSError
    ):
        (run.pictures / "0.png").write_bytes(damaged)
        (row,) = page_of(run).data["pictures"]["rows"]
        assert row["pictures"] == [None]


def test_a_grid_of_many_validations_has_the_first_the_last_and_some_between(make_run, make_sample):
    samples = [make_sample(step, split="val", response=f"{step}.png") for step in range(40)]
    run = make_run(samples=samples)
    run.pictures.mkdir()
    for sample in samples:
        Image.new("RGB", (8, 8)).save(run.pictures / sample.response)
    grid = page_of(run).data["pictures"]
    assert len(set(grid["versions"])) == 12 and (grid["versions"][0], grid["versions"][-1]) == (0, 39)
    assert grid["versions_recorded"] == 40 and len(grid["rows"][0]["pictures"]) == 12


def test_a_page_of_a_long_run_stays_small_and_says_what_it_left_out(make_run, make_sample):
    names = [f"part/{index}/value" for index in range(80)]
    samples = [make_sample(step, response="<é" * 3000, tokens=None) for step in range(1, 3001)]
    run = make_run(3000, lambda step: {name: (step * 7919 % 3001) / 7 for name in names}, samples)
    text = render_page(read_run(run.root))
    data = Page(text).data
    assert len(text.encode()) < 2_500_000
    assert (data["metrics"]["recorded"], data["samples_recorded"]) == (3001, 3000)
    assert data["metrics"]["thinned"] is not None and 2 <= len(data["samples"]) < 3000
    recorded = {record["step"]: record for record in read_metrics(run.metrics)}
    series = data["metrics"]["series"][names[0]]
    assert all(recorded[step][names[0]] == value for step, value in zip(series["steps"], series["values"], strict=True))


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.json", "samples.jsonl", "summary.json", "config.yaml"])
def test_a_missing_file_is_a_reason_and_the_rest_is_there(make_run, name):
    run = make_run()
    (run.root / name).unlink()
    data = page_of(run).data
    assert list(data["absent"]) == [name] and name in data["absent"][name]
    assert bool(data["samples"]) == (name != "samples.jsonl")
    assert (data["timeline"] is None) == (name == "timeline.json")
    assert bool(data["metrics"]["series"]) == (name != "metrics.jsonl")
    assert data["ledger"]


def test_unreadable_files_are_reasons(make_run):
    run = make_run()
    run.metrics.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    run.summary.write_text("{")
    run.timeline.write_text("[\n]")
    run.config.write_text("a: [")
    absent = page_of(run).data["absent"]
    assert "line 2" in absent["metrics.jsonl"]
    assert set(absent) == {"metrics.jsonl", "summary.json", "timeline.json", "config.yaml"}


def test_a_run_that_has_just_begun_has_a_page(make_run):
    run = make_run(steps=0, status="running")
    run.metrics.write_text("")
    run.samples.write_text("")
    data = page_of(run).data
    assert data["absent"]["metrics.jsonl"].endswith("no step has ended yet")
    assert data["findings"] == [] and data["samples"] == []


def test_a_run_that_nobody_works_on_any_more_does_not_look_alive(make_run):
    run = make_run(status="running")
    assert page_of(run).data["state"]["status"] == "died"
    with run.held():
        assert page_of(run).data["state"]["status"] == "running"
    assert page_of(run).data["state"]["status"] == "died"
    with open(run.root / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a report has given the lock back


def test_the_command_writes_where_it_is_told(make_run, tmp_path, capsys):
    run = make_run()
    (run.root / "timeline.json").unlink()
    assert main(["report", str(run.root), "--output", str(tmp_path / "page.html")]) == 0
    assert "there is no timeline.json" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert not (run.root / "report.html").exists()


def test_the_command_says_what_the_verdict_of_the_page_says(make_run, capsys):
    run = make_run()
    assert main(["report", str(run.root)]) == 0
    said = capsys.readouterr().out.splitlines()
    found = findings(read_run(run.root))
    expected = [f"{place}. {each.text} {each.remedy}".rstrip() for place, each in enumerate(found, 1)]
    assert expected and [line for line in said if line[0].isdigit()] == expected


def test_the_command_loads_no_heavy_library(make_run):
    code = (
        "import sys; from roll.cli.main import main; code = main(['report', sys.argv[1]]);"
        "sys.exit(code or ' '.join({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", code, str(make_run().root)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_folder_without_a_run_and_a_place_that_cannot_be_written_have_their_exit_codes(make_run, tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["report", str(make_run().root), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"ledger": [1]}, {"resumed_at": "abc"}, {"seconds": "long"}, {"val/last": 0.5}])
def test_a_summary_of_another_shape_is_called_unreadable(make_run, wrong):
    run = make_run()
    summary = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**summary, **wrong}))
    read = read_run(run.root)
    assert read.absent["summary.json"].startswith(f"summary.json cannot be read: its {next(iter(wrong))} is no")
    assert render_page(read)
