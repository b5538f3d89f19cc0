"""`roll simulate --replay`: the recorded groups of a run as it was meet it, and under another schedule its truth; and
`roll advise --after`, which compares a prediction with its outcome."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

from roll.cli.main import main
from roll.configs.loader import dump_config
from roll.simulation.aftermath import inputs_after
from roll.simulation.calibration import calibrated
from roll.simulation.inputs import Inputs, read_inputs
from roll.simulation.replay import Recorded, recorded_groups
from roll.simulation.run import simulate
from roll.simulation.workload import groups
from tests.simulation.test_simulate import gpus

TRUTH = (
    "engine.scale=1.7", "trainer.scale=0.6", "trainer.step_seconds=0", "trainer.optimizer_seconds=0",
    "lengths.median=300", "lengths.prompt=200", "lengths.correlation=0.7", "weight_update.gather_seconds=1",
    "weight_update.send_seconds=2", "weight_update.load_seconds=1", "rewards.seconds=0.5", "rewards.sigma=0",
    "filtered_share=0.2", "host.cores=4",
)  # fmt: skip
STEPS, BATCH = 12, 8


def line(number, work, batch):
    """Return what a run records of a group."""
    times = {"issued": 1.0, "generated": 1.0 + work.seconds - work.latencies[0][0], "judged": 1.0 + work.seconds}
    return {"step": batch + 1, "group": number, "prompt": work.prompt, "responses": work.responses, **times,
            "consumed": 9.0 if work.kept else None}  # fmt: skip


def line_with(**changes):
    usual = {
        "step": 1,
        "group": 0,
        "prompt": 3.0,
        "responses": [4, 5],
        "generated": 1.0,
        "judged": 2.0,
        "consumed": 3.0,
    }
    return json.dumps(usual | changes) + "\n"


def recorded_run(folder, name="run", slower=1.0, **changes):
    """Write the files of a run that took what a simulation of its groups says (or longer). Returns its configuration,
    its inputs and its groups."""
    truth = read_inputs(None, list(TRUTH))
    usual = {"async_generation_ratio": 0, "group_filter": "zero_variance", "max_steps": STEPS, "eval_steps": 0}
    config = gpus(folder, **{**usual, **changes})
    works, kept = [], 0
    for work in islice(groups(config, truth, 0), 1000):
        works.append(work)
        kept += work.kept
        if kept == STEPS * BATCH:
            break
    outcome = simulate(config, truth, replayed=works)
    works = [replace(work, seconds=round(outcome.group_seconds)) for work in works]  # whole: sums are exact
    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    step, tokens = outcome.step_seconds, outcome.tokens * outcome.step_seconds
    record = {
        **{f"idle/{role}": share for role, share in outcome.idle.items()},
        "time/step": slower * step, "response/tokens": tokens,
        "lag/mean": sum(lag * share for lag, share in outcome.lags.items()),
        "tokens_per_second/actor_train": (tokens + outcome.samples * 200) / step,
        "weights/gather_seconds": 1, "weights/send_seconds": 2, "weights/load_seconds": 2,
    }  # fmt: skip
    lines = [json.dumps({"step": number, **record}) for number in range(1, STEPS + 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    seen, lines = 0, []
    for number, work in enumerate(works):
        lines.append(json.dumps(line(number, work, min(seen // BATCH, STEPS - 1))))
        seen += work.kept
    (run / "groups.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    return config, truth, works


def test_a_replay_meets_the_run_and_its_truth_under_another_schedule(tmp_path, capsys):
    _, truth, works = recorded_run(tmp_path)
    assert main(["simulate", "--replay", str(tmp_path / "run"), "ratio=1", "--draws", "0"]) == 0
    first, _, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("replayed ") and f"steps 3 to {STEPS}" in first
    assert abs(float(first.rpartition("(")[2].rstrip("%)"))) <= 5
    ahead = gpus(tmp_path, async_generation_ratio=1, group_filter="zero_variance", eval_steps=0)
    taken = simulate(ahead, truth, replayed=works)
    assert second.startswith("a step ")
    assert float(second.split()[2]) == pytest.approx(taken.step_seconds, rel=0.1)
    assert len(taken.step_ends) == STEPS and taken.ledger["dropped/filtered"] == sum(not work.kept for work in works)
    assert any(told.startswith("measured ") and "lengths.correlation=0.6" in told for told in rest), rest


def test_a_replay_that_does_not_meet_the_run_says_so(tmp_path):
    config, truth, works = recorded_run(tmp_path)
    outcome = simulate(config, truth, replayed=works)
    told = Recorded(works, step_seconds=outcome.step_seconds / 1.5).compared(outcome)
    assert told.endswith(f"of its replay as it was {outcome.step_seconds:.3g} s (+50%)")


def test_all_lengths_of_a_run_and_their_correlation_calibrate_it(tmp_path):
    config, _, works = recorded_run(tmp_path)
    assert recorded_groups(tmp_path / "run") == [*works]
    found, _ = calibrated(config, Inputs(), [tmp_path / "run"], rounds=0)
    assert found.lengths.quantiles[-1] == max(max(work.responses) for work in works)
    assert found.lengths.correlation == pytest.approx(0.7, abs=0.1)
    assert found.filtered_share == pytest.approx(sum(not work.kept for work in works) / len(works))


def test_turns_share_the_wait_of_an_episode_and_a_shorter_limit_cuts(tmp_path):
    record = {"step": 1, "group": 3, "prompt": 7.5, "responses": [40, 10], "turns": [4, 1], "waits": [2.0, 3.0],
              "issued": 1.0, "generated": None, "judged": 9.0, "consumed": 9.5}  # fmt: skip
    (tmp_path / "groups.jsonl").write_text(json.dumps(record) + "\n")
    (work,) = recorded_groups(tmp_path)
    assert work.latencies == [[0.5] * 4, [3.0]] and work.responses == [40, 10] and work.kept
    config, truth, works = recorded_run(tmp_path)
    whole = simulate(config, truth, replayed=works)
    cut = simulate(gpus(tmp_path, response_length=100, async_generation_ratio=0), truth, replayed=works)
    assert cut.tokens * cut.step_seconds <= 100 * cut.samples < whole.tokens * whole.step_seconds


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["simulation.lengths.median=3"], "simulation.lengths.median: a replay takes it from the run"),
        (["--sweep", "simulation.rewards.seconds=1"], "simulation.rewards.seconds: a replay takes it from the run"),
        (["num_return_sequences_in_group=2"], "groups of 4 samples, not 2"),
        (["rollout_batch_size=32"], "96 recorded groups are 3 steps of 32"),
        (["max_steps=3"], "max_steps: a replay has as many steps as the run recorded"),
        (["--sweep", "max_steps=3"], "max_steps: a replay has as many steps as the run recorded"),
        (["other.yaml"], "other.yaml"),
        (["async_generation_rati=2"], "did you mean `async_generation_ratio`?"),
    ],
)
def test_what_cannot_be_replayed_is_said(tmp_path, capsys, words, told):
    recorded_run(tmp_path)
    assert main(["simulate", "--replay", str(tmp_path / "run"), "--draws", "0", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no groups.jsonl"),
        ("{}\n", "it is damaged"),
        ("nonsense\n{}\n", "not a JSON object"),
        (line_with(responses=[]), "it is damaged"),
        (line_with(responses=[float("nan"), 1]), "it is damaged"),
        (line_with(turns=[0, 1], waits=[1.0, 1.0]), "it is damaged"),
    ],
)
def test_a_run_without_its_groups_is_refused(tmp_path, capsys, content, told):
    recorded_run(tmp_path)
    path = tmp_path / "run" / "groups.jsonl"
    path.unlink() if content is None else path.write_text(content)
    assert main(["simulate", "--replay", str(tmp_path / "run")]) == 2
    assert told in capsys.readouterr().err
    assert main(["simulate", "--replay", str(tmp_path)]) == 2
    assert "there is no run in this folder" in capsys.readouterr().err


def test_a_run_without_steps_is_refused_by_a_replay_and_as_one_that_followed(tmp_path, capsys):
    recorded_run(tmp_path)
    recorded_run(tmp_path, "other")
    metrics = tmp_path / "other" / "metrics.jsonl"
    lines = metrics.read_text()
    metrics.write_text("{}\n" + lines)
    replay = ["simulate", "--replay", str(tmp_path / "other"), "--draws", "0"]
    after = ["advise", str(tmp_path / "run"), "--after", str(tmp_path / "other"), "--draws", "0"]
    assert main(replay) == main(after) == 0, "a line without a step is none of a step"
    metrics.unlink()
    for words, key in ((replay, "--replay"), (after, "--after")):
        capsys.readouterr()
        assert main(words) == 2
        assert f"{key}: the run has 0 steps after the first 2" in capsys.readouterr().err


def test_groups_of_another_size_calibrate_lengths_and_no_speed(tmp_path, capsys):
    config, _, _ = recorded_run(tmp_path)
    path = tmp_path / "run" / "groups.jsonl"
    first, *others = path.read_text().splitlines()
    longer = json.dumps(json.loads(first) | {"responses": [5000.0, 1.0]})
    path.write_text("\n".join([longer, *others]) + "\n")
    found, _ = calibrated(config, Inputs(), [tmp_path / "run"], rounds=0)
    assert found.lengths.quantiles[-1] == 5000 and found.origin("lengths.correlation") != "measured"
    assert main(["simulate", "--replay", str(tmp_path / "run")]) == 2
    assert "the run recorded groups of 2, 4 samples, not 4" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--target", "gpu_hours"], ["--max-lag", "1"], ["--price", "2"]])
def test_a_comparison_with_what_followed_refuses_what_it_does_not_use(tmp_path, capsys, words):
    assert main(["advise", str(tmp_path), "--after", str(tmp_path), *words]) == 2
    assert f"{words[0]}: a comparison with `--after` has no use for it" in capsys.readouterr().err


def test_a_run_that_followed_is_compared_with_what_was_predicted_of_its_changes(tmp_path, capsys):
    recorded_run(tmp_path)
    recorded_run(tmp_path, "ahead", async_generation_ratio=1)
    recorded_run(tmp_path, "slow", slower=3.0, async_generation_ratio=1)

    def told(other, *words):
        code = main(["advise", str(tmp_path / "run"), "--after", str(tmp_path / other), "--draws", "6", *words])
        output = capsys.readouterr()
        return code, output.out + output.err

    code, text = told("ahead")
    assert code == 0 and "changed    async_generation_ratio 0.0 -> 1.0" in text and "measured " in text
    assert "the step is inside the interval" in text, text
    step = next(line.split() for line in text.splitlines() if line.strip().startswith("step s"))
    assert float(step[2]) == pytest.approx(float(step[4]), rel=0.15)  # of other groups with such lengths
    for name in ("lag mean", "idle actor_infer", "idle actor_train", "tokens of a response", "gain"):
        assert any(line.strip().startswith(name) for line in text.splitlines()), text
    code, text = told("slow")
    assert code == 0 and "the step LEFT the interval" in text and "slower than its end" in text
    code, text = told("ahead", "async_generation_ratio=2")
    assert code == 2 and "would change a run that is over" in text
    code, text = told("nowhere")
    assert code == 2 and "there is no run in this folder" in text


def test_reward_workers_follow_the_configuration(tmp_path):
    inputs = read_inputs(None, ["rewards.workers=3"])
    before, after = (gpus(tmp_path, rewards__addition__num_workers=number) for number in (2, 6))
    assert inputs_after(inputs, before, after).rewards.workers == 7
    assert inputs_after(Inputs(), before, after).rewards.workers is None
