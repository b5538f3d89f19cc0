"""Kills what a run is made of at random moments, resumes it, and checks its history. `make soak` runs it at length.

    python tests/pipeline/random_kills.py --seed 1 --count 50 [--pictures]

Victims are the driver, a trainer rank (whose peer may be in a collective with it), an engine, a reward worker, and
everything at once; moments are within training steps, in the middle of writing a checkpoint, and while the run starts.
Whether a checkpoint was really cut short is seen from what the kill left behind, and counted. At the end every prompt
of the data order was trained on or dropped exactly once, and the policy is as good as that of a run that nobody
disturbed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from runs import ROOT, TESTS, start_command
from tiny import make_task, tiny_config, write_config

from roll.configs.roles import DataArguments
from roll.data.prompts import PromptStream, load_prompts
from roll.data.records import derive_seed
from roll.data.tokenizer import load_tokenizer
from roll.tracking.files import read_json_lines
from roll.tracking.status import read_status
from roll.tracking.trackers import read_metrics
from tests.ray_cluster import environment
from tests.tiny_pictures import PROMPTS, make_picture_task, picture_config
from tests.warm_workers import search_path, warm_workers

BATCH = 8
STEPS_PER_KILL = 6
VICTIMS = ("driver", "trainer", "engine", "reward worker", "everything")
RUNNING_MOMENTS = ("in a step", "in a checkpoint")
MOMENTS = (*RUNNING_MOMENTS, *RUNNING_MOMENTS, "at the start")
ENDS_THE_RUN = ("driver", "trainer", "everything")
PATIENCE_SECONDS = 240
VALIDATION_PROMPTS = 100
RANKS = 2
"""Of the trainer, by default."""


def noise(prompts: int) -> float:
    """Largest difference that chance explains between two mean scores over so many prompts: three standard errors,
    where scores between 0 and 1 deviate by 1/2 at most."""
    return 3 * math.sqrt(2 * 0.5**2 / prompts)


@dataclass(frozen=True)
class Kill:
    """Who, and when."""

    victim: str
    moment: str


@dataclass
class Report:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    checkpoints_cut_short: int = 0
    """Kills in a checkpoint after which a part of one was there. (Not every kill in one ends the run, and some come
    when its last file has just been written.)"""
    starts: int = 0
    resumed_at: list[int] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    accuracy: float = 0.0
    undisturbed_accuracy: float = 0.0
    noise: float = 0.0
    """Largest difference of the two that chance explains."""
    first_accuracy: float = 0.0
    seconds: float = 0.0


class DisturbedRun:
    """One run in one folder, started again and again within its context: its processes are all found by a mark in their
    environment, which warm workers have from their server."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.out = folder / "run"
        self.path = write_config(
            folder, {**config, "output_dir": str(self.out), "resume_from_checkpoint": True}, "disturbed.yaml"
        )
        self.log = folder / "output.txt"
        self.mark = f"ROLL_SOAK_{uuid.uuid4().hex}"
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> DisturbedRun:
        with ExitStack() as stack:
            stack.enter_context(environment(**{self.mark: "1"}))
            self._server = stack.enter_context(warm_workers(ROOT, TESTS))
            stack.callback(self._kill_all)
            self._end = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.close()

    def _kill_all(self) -> None:
        for pid in self.processes():
            _kill(pid)

    def start(self) -> None:
        self.started_steps = self.steps()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(self.path)],
                stdout=log,
                stderr=log,
                cwd=TESTS,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": search_path(ROOT, TESTS)},
            )

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0

    def processes(self) -> dict[int, str]:
        """All that are the run's, by a mark in their environment; process id -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or int(entry.name) in (os.getpid(), self._server):
                    continue
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
        return found

    def kill(self, victim: str, dice: random.Random) -> bool:
        """SIGKILL; False if there is no such process at the moment."""
        if self.ended():
            return False
        if victim == "driver":
            targets = [self.process.pid]
        elif victim == "everything":
            targets = list(self.processes())
        elif victim == "reward worker":
            workers = [pid for pid, command in self.processes().items() if "RewardWorker" in command]
            targets = workers and [dice.choice(workers)]
        else:
            role = {"trainer": "actor_train", "engine": "actor_infer"}[victim]
            targets = self._workers(role)
            targets = targets and [dice.choice(targets)]
        killed = [pid for pid in targets if _kill(pid)]
        return bool(killed)

    def log_end(self) -> str:
        return self.log.read_text()[-3000:]

    def _workers(self, role: str) -> list[int]:
        try:
            status = read_status(self.out / "status.json")
        except ValueError:
            return []
        if status is None or status.driver.pid != self.process.pid:
            return []
        return [worker.pid for worker in status.workers if worker.name.startswith(role)]

    def has_partial_checkpoint(self) -> bool:
        """Whether a checkpoint is being written, or was when the run ended."""
        return any((self.out / "checkpoints").glob(".step-*"))

    def ended(self) -> bool:
        return self.process.poll() is not None

    def looks_well(self) -> bool:
        """Whether its summary says so."""
        path = self.out / "summary.json"
        return path.exists() and json.loads(path.read_text())["status"] == "success"

    def wait(self, reached: Callable[[], bool], what: str) -> bool:
        """Until something is reached, or the run ends: then False."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            if self.ended():
                return False
            assert time.monotonic() < give_up, f"{what} did not come: {self.log_end()}"
            time.sleep(0.01)
        return True

    def wait_for_the_end(self) -> int:
        """The exit code, when nothing is left of the run."""
        self.process.wait(PATIENCE_SECONDS)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while left := self.processes():
            assert time.monotonic() < give_up, f"processes outlive the run: {left}"
            time.sleep(0.1)
        return self.process.returncode


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_for_moment(run: DisturbedRun, moment: str, dice: random.Random) -> None:
    if moment == "at the start":
        pause = dice.random() * 12
        until = time.monotonic() + pause
        run.wait(lambda: time.monotonic() > until, "a moment")
        return
    wanted = run.started_steps + 1 + dice.randrange(3)
    run.wait(lambda: run.steps() >= wanted, f"step {wanted}")
    if moment == "in a checkpoint":
        run.wait(run.has_partial_checkpoint, "the writing of a checkpoint")
        time.sleep(dice.random() * 0.03)
    else:
        time.sleep(dice.random() * 0.3)


def disturb(run: DisturbedRun, kills: Sequence[Kill], dice: random.Random, report: Report) -> None:
    """Start, kill, resume, until all kills are done; then let it end."""
    run.start()
    report.starts += 1
    for kill in kills:
        wait_for_moment(run, kill.moment, dice)
        killed = run.wait(lambda kill=kill: run.kill(kill.victim, dice), f"a {kill.victim} to kill")
        assert killed, f"the run ended before a {kill.victim} of it was killed: {run.log_end()}"
        report.kills[kill.victim] += 1
        report.moments[kill.moment] += 1
        print(f"{kill.victim}, {kill.moment}: killed after step {run.steps()}", flush=True)
        if kill.moment == "at the start":
            # Nobody is replaced before everybody was there: a process that dies then may end the run.
            run.wait(lambda: run.steps() > run.started_steps, "a step")
        if kill.victim in ENDS_THE_RUN or run.ended():
            code = run.wait_for_the_end()
            assert code != 0 and not run.looks_well(), f"the run looks well after the death of {kill.victim}"
            report.checkpoints_cut_short += kill.moment == "in a checkpoint" and run.has_partial_checkpoint()
            run.start()
            report.starts += 1
        else:
            run.started_steps = run.steps()
    assert run.wait_for_the_end() == 0, run.log_end()
    assert report.kills.total() == len(kills)


def check_history(out: Path, config: dict[str, Any], report: Report) -> None:
    """Every prompt of the data order was trained on or dropped, exactly once."""
    max_steps = config["max_steps"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "success" and summary["steps"] == max_steps
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl")] == list(range(max_steps + 1))
    samples = [sample for sample in read_json_lines(out / "samples.jsonl") if sample["split"] == "train"]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, max_steps + 1), BATCH)
    trained_on = [sample["group_id"] for sample in samples]
    assert len(set(trained_on)) == len(trained_on), "a group was trained on twice"
    ledger = summary["ledger"]
    dropped = sum(count for name, count in ledger.items() if name.startswith("dropped/"))
    assert ledger["consumed"] == len(trained_on) == max_steps * BATCH
    assert ledger["issued"] == ledger["consumed"] + dropped and ledger["in_flight"] == ledger["buffered"] == 0
    assert len(set(range(ledger["issued"])) - set(trained_on)) == dropped, "a group is neither trained on nor dropped"
    order = data_order(config, ledger["issued"])
    wrong = [sample["group_id"] for sample in samples if sample["prompt"] != order[sample["group_id"]]]
    assert not wrong, f"groups {wrong} were made of other prompts than their numbers say"
    assert summary["lag/max"] <= 1
    report.ledger, report.resumed_at = ledger, summary["resumed_at"]
    report.first_accuracy, report.accuracy = summary["val/first"]["check"], summary["val/last"]["check"]


def data_order(config: dict[str, Any], count: int) -> list[str]:
    """The prompts of the first groups of a run, worked out from file and seed alone."""
    folder = Path(config["pretrain"])
    tokenizer = load_tokenizer(str(folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder))
    arguments = DataArguments(file_name=[config["actor_train"]["data_args"]["file_name"]])
    prompts = load_prompts(arguments, tokenizer, prompt_length=config["prompt_length"], path="", seed=config["seed"])
    return [prompt.text for prompt in itertools.islice(PromptStream(prompts, seed=config["seed"]), count)]


def soak(
    folder: Path,
    kills: Sequence[Kill],
    seed: int,
    ranks: int = RANKS,
    *,
    compare: bool = True,
    pictures: bool = False,
) -> Report:
    """A disturbed run and, to ``compare``, an undisturbed one; raises `AssertionError` for any broken promise."""
    started = time.monotonic()
    make_soak_config = soak_config_of_pictures if pictures else soak_config
    config = make_soak_config(folder, max_steps=STEPS_PER_KILL * len(kills) + 10, ranks=ranks)
    report, dice = Report(), random.Random(derive_seed(seed, "kills"))
    run = DisturbedRun(folder, config)
    with run:
        disturb(run, kills, dice, report)
    check_history(run.out, config, report)
    if compare:
        report.undisturbed_accuracy = undisturbed_accuracy(folder, config)
        report.noise = noise(VALIDATION_PROMPTS)
        assert abs(report.accuracy - report.undisturbed_accuracy) <= report.noise, report
    report.seconds = time.monotonic() - started
    return report


def soak_config(folder: Path, max_steps: int, ranks: int) -> dict[str, Any]:
    """The tiny task, validated on all its prompts."""
    make_task(folder)
    rows = [
        {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "domain": "check"} for a in range(10) for b in range(10)
    ]
    changes = disturbed(folder, rows, max_steps, ranks)
    return tiny_config(
        folder,
        rewards__addition__verifier="reward_functions:sometimes_failing_reward",
        rewards__addition__max_retries=0,
        rewards__check__verifier="reward_functions:share_of_digits_reward",
        **changes,
    )


def soak_config_of_pictures(folder: Path, max_steps: int, ranks: int) -> dict[str, Any]:
    """The tiny pictures, with forty prompts of a few words."""
    make_picture_task(folder)
    rows = [{"prompt": prompt, "domain": "colours"} for prompt, _ in zip(itertools.cycle(PROMPTS), range(40))]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checked = [row["prompt"] for row in rows] * 3
    changes = disturbed(
        folder,
        [{"prompt": prompt, "domain": "check"} for prompt in checked[:VALIDATION_PROMPTS]],
        max_steps,
        ranks,
    )
    return picture_config(
        folder,
        rewards__colours={"verifier": "picture_rewards:sometimes_failing_redness", "max_retries": 0},
        rewards__check__verifier="picture_rewards:redness",
        **changes,
    )


def disturbed(folder: Path, validation: Sequence[dict[str, str]], max_steps: int, ranks: int) -> dict[str, Any]:
    """Changes of a configuration: one step off, trained on as groups finish, validated at both ends."""
    assert len(validation) == VALIDATION_PROMPTS
    (folder / "check.jsonl").write_text("".join(json.dumps(row) + "\n" for row in validation))
    return {
        "max_steps": max_steps,
        "rollout_batch_size": BATCH,
        "save_steps": 2,
        "eval_steps": max_steps,
        "async_generation_ratio": 1,
        "num_logged_samples": BATCH,
        "max_group_retries": 0,
        "cluster__num_devices_per_node": ranks + 1,
        "actor_train__device_mapping": list(range(ranks)),
        "actor_train__stream_groups": True,
        "actor_infer__device_mapping": [ranks],
        "actor_infer__max_replica_restarts": 1000,
        "validation": {"data_args": {"file_name": str(folder / "check.jsonl")}},
    }


def undisturbed_accuracy(folder: Path, config: dict[str, Any]) -> float:
    """Of the same run when nobody kills anything."""
    process, out = start_command(folder, config)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS + 2 * config["max_steps"])
    assert process.returncode == 0, output
    return json.loads((out / "summary.json").read_text())["val/last"]["check"]


def random_plan(count: int, seed: int) -> list[Kill]:
    """Each victim as often as any other, moments by chance. A run starts after a kill that ended it, and only there."""
    dice = random.Random(derive_seed(seed, "plan"))
    victims = [VICTIMS[index % len(VICTIMS)] for index in range(count)]
    dice.shuffle(victims)
    starts = [True, *(victim in ENDS_THE_RUN for victim in victims)]
    return [
        Kill(victim, dice.choice(MOMENTS if is_start else RUNNING_MOMENTS))
        for victim, is_start in zip(victims, starts, strict=False)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50, help="kills (default 50)")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"ranks of the trainer (default {RANKS})")
    parser.add_argument("--pictures", action="store_true", help="of a run of `pipeline: image`")
    options = parser.parse_args()
    plan = random_plan(options.count, options.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = soak(Path(folder), plan, options.seed, options.ranks, pictures=options.pictures)
    for name, value in vars(report).items():
        print(f"{name}: {dict(value) if isinstance(value, Counter) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
