"""The recorder of a run: writes metrics, timeline, samples, episodes, summary and console output.

Stages report their results to it; it does not depend on them. Idle shares and token rates refer to the wall-clock time
between the ends of two consecutive steps. `samples.jsonl` gets readable records of groups: texts, and the version and
advantage of each token. Decoding token by token takes milliseconds per sample, so it happens in a thread. From each
validation, the best, the worst and a random episode of each tag are saved as text, PNG (first and last frame) and
animated GIF.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from roll.agentic.episode import Episode
from roll.agentic.frames import frames_to_gif, text_to_png
from roll.configs.derived import present_roles, tracker_classes, tracker_list
from roll.configs.loader import redacted_config
from roll.configs.roles import COMPARED_ROLES, ROLES
from roll.configs.run import PipelineConfig, RunConfig
from roll.data.pictures import digest, picture_format
from roll.data.records import Group, Sample, SampleBatch, derive_seed
from roll.engines.pool import InferencePool
from roll.pipeline.algorithm import TrainingBatch
from roll.pipeline.groups import GroupLog, drop_lines
from roll.pipeline.rollouts import ValidationResult, WorkerProcesses
from roll.pipeline.usage import CpuSeconds, EngineLoads, engine_memory, rates_per_device, trainer_usage
from roll.rollout.journal import Recovered
from roll.rollout.scheduler import RolloutScheduler
from roll.runtime.usage import Usage
from roll.tracking.console import Console, say_beside
from roll.tracking.logs import LogWatch
from roll.tracking.plugins.process import Ending, PlugIns, open_plug_ins
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import ReadableSample, ReadableTokens, SampleLog, Summary
from roll.tracking.timeline import Timeline
from roll.tracking.trackers import MetricsLog, TensorBoardTracker, read_metrics
from roll.tracking.waits import LOGP, WaitBoard
from roll.trainers.worker import TrainerGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FinalStatus = Literal["success", "failed", "interrupted"]
SAID = {True: "success", False: "no success", None: "success not told"}


def write_episodes(episodes: Sequence[Episode], folder: Path, version: int) -> dict[str, Path]:
    """Write the chosen episodes to a subfolder of ``folder``.

    Returns the animated GIFs, by tracker name, of the episodes that have rendered frames.
    """
    below = folder / f"version-{version:06d}"
    pictures = {}
    for (tag, which), episode in chosen(episodes, version).items():
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{tag}-{which}.txt").write_text(as_text(episode), encoding="utf-8")
        if frames := frames_of(episode):
            gif = below / f"{tag}-{which}.gif"
            frames_to_gif(frames, gif)
            text_to_png("\n\n".join([frames[0], *frames[1:][-1:]]), gif.with_suffix(".png"))
            pictures[f"val/{tag}/{which}_episode"] = gif
    return pictures


def chosen(episodes: Sequence[Episode], version: int) -> dict[tuple[str, str], Episode]:
    """Return episodes by (tag, ``best``, ``worst`` or ``random``). Among equal scores, shorter episodes rank higher."""
    by_tag: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_tag[episode.tag].append(episode)
    found: dict[tuple[str, str], Episode] = {}
    for tag, members in sorted(by_tag.items()):
        ranked = sorted(members, key=lambda each: (bool(each.success), each.score, -len(each.turns)))
        lucky = np.random.default_rng(derive_seed(version, "gallery", tag)).integers(len(members))
        found |= {(tag, "best"): ranked[-1], (tag, "worst"): ranked[0], (tag, "random"): members[lucky]}
    return found


def frames_of(episode: Episode) -> list[str]:
    """Return the captioned frames before each turn and at the end. Empty if the environment renders none."""
    frames = [
        f"turn {number}: {turn.response!r}\n{turn.frame}"
        for number, turn in enumerate(episode.turns)
        if turn.frame is not None
    ]
    if frames and episode.last_frame is not None:
        frames.append(f"{episode.end}, score {episode.score:g}\n{episode.last_frame}")
    return frames


def as_text(episode: Episode) -> str:
    """Format an episode as text, turn by turn."""
    head = (
        f"{episode.tag}, seed {episode.seed}: {SAID[episode.success]}, score "
        f"{episode.score:g}, {len(episode.turns)} turns, ended by {episode.end}\n"
    )
    turns = [
        f"--- turn {number}\n{turn.observation}\n>>> {turn.response!r}"
        f"{'' if turn.action_is_valid else ' (not valid)'}, reward {turn.reward:g}\n"
        for number, turn in enumerate(episode.turns)
    ]
    end = [] if episode.last_frame is None else [f"--- at the end\n{episode.last_frame}\n"]
    return "\n".join([head, *turns, *end])


FIRST_TOKENS, LAST_TOKENS = 384, 128
"""Number of tokens kept at the beginning and at the end of a response that is longer than both."""
LONGEST_CHARACTER = 8
"""Maximum number of tokens per character. Byte-level tokenizers may split one character into several tokens."""
UNFINISHED = "\ufffd"


def readable(
    groups: Sequence[Group], data: SampleBatch, step: int, count: int, decoder: PreTrainedTokenizerBase
) -> list[ReadableSample]:
    """Return the first sample (or episode) of each of the first ``count`` groups, with token advantages."""
    by_row = np.split(data.tokens["advantages"], data.offsets[1:-1])
    samples, row = [], 0
    for group in groups[:count]:
        parts = group.episodes[0]
        advantages = by_row[row : row + len(parts)]
        oldest = min((part.oldest_version for part in parts if part.response_tokens), default=-1)
        samples.append(_readable(group, step, "train", oldest, advantages, decoder))
        row += len(group.samples)
    return samples


def readable_validation(result: ValidationResult, count: int, decoder: PreTrainedTokenizerBase) -> list[ReadableSample]:
    """Return the first sample (or episode) of each of the first ``count`` groups of a validation."""
    version = result.version
    return [_readable(group, version, "val", version, None, decoder) for group in result.groups[:count]]


def _readable(
    group: Group,
    step: int,
    split: Literal["train", "val"],
    oldest: int,
    advantages: Sequence[np.ndarray] | None,
    decoder: PreTrainedTokenizerBase,
) -> ReadableSample:
    parts = group.episodes[0]
    sample = parts[0]
    sampled = np.concatenate([part.response_mask for part in parts])
    is_picture = sample.image is not None or sample.latents is not None
    mean = None
    if advantages is not None:
        mean = float(np.concatenate(advantages)[sampled].mean()) if sampled.any() else 0.0
    return ReadableSample(
        step=step,
        group_id=group.group_id,
        prompt=group.prompt.text,
        response="\n".join(part.response_text for part in parts)
        if sample.image is None
        else picture_file(step, split, group),
        score=sample.score,
        advantage=mean,
        versions=(oldest, int(np.concatenate([part.versions for part in parts])[sampled].max(initial=oldest))),
        finish_reason="length" if any(part.finish_reason == "length" for part in parts) else sample.finish_reason,
        domain=group.prompt.domain,
        split=split,
        tokens=None if is_picture else readable_tokens(parts, advantages, decoder),
        pictures=[prompt_picture_file(picture) for picture in group.prompt.pictures],
    )


def picture_file(step: int, split: Literal["train", "val"], group: Group) -> str:
    """Return the file name of a group's first image."""
    return f"step-{step}-{split}-{group.group_id}.png"


def write_pictures(
    groups: Sequence[Group], step: int, split: Literal["train", "val"], folder: Path
) -> list[tuple[Group, Path]]:
    """Write each group's first image to ``folder`` as PNG. Returns the groups that have images, with their files."""
    files = []
    for group in groups:
        image = group.samples[0].image
        if image is not None:
            folder.mkdir(exist_ok=True)
            path = folder / picture_file(step, split, group)
            Image.fromarray(image).save(path)
            files.append((group, path))
    return files


def prompt_picture_file(picture: np.ndarray) -> str:
    """Return the file name of a picture in a prompt, uint8 ``[bytes]``; equal pictures share it."""
    return f"prompt-{digest([picture])}.{picture_format(picture)}"


def write_prompt_pictures(groups: Sequence[Group], folder: Path) -> None:
    """Write the pictures in the groups' prompts to ``folder``, as the data has them, each picture once."""
    for picture in (picture for group in groups for picture in group.prompt.pictures):
        folder.mkdir(exist_ok=True)
        path = folder / prompt_picture_file(picture)
        if not path.exists() or path.stat().st_size != picture.nbytes:  # a crash may have cut it off
            path.write_bytes(picture.tobytes())


def readable_tokens(
    parts: Sequence[Sample], advantages: Sequence[np.ndarray] | None, decoder: PreTrainedTokenizerBase
) -> ReadableTokens:
    """Return the tokens of an episode, starting at its first sampled token. ``parts``: the episode's samples.

    The prompt tokens of later samples are included. ``advantages``: float ``[length]`` per sample.
    """
    first = parts[0].response_mask
    start = int(np.argmax(first)) if first.any() else len(first)
    token_ids = np.concatenate([part.token_ids for part in parts])[start:]
    sampled = np.concatenate([part.response_mask for part in parts])[start:]
    left_out = max(0, len(token_ids) - FIRST_TOKENS - LAST_TOKENS)
    gap = FIRST_TOKENS if left_out else len(token_ids)

    def kept(values: np.ndarray) -> list[list[Any]]:
        return [values[:gap].tolist(), values[gap + left_out :].tolist()]

    def of_sampled(values: Sequence[np.ndarray] | None) -> list[Any]:
        known = np.full(len(sampled), None)
        if values:
            known[sampled] = np.concatenate(values)[start:][sampled]
        return sum(kept(known), [])

    return ReadableTokens(
        texts=[text for stretch in kept(token_ids) for text in token_texts(stretch, decoder)],
        versions=of_sampled([part.versions for part in parts]),
        advantages=of_sampled(advantages),
        turns=of_sampled([part.turns for part in parts if part.turns is not None]),
        left_out=left_out,
        left_out_after=FIRST_TOKENS if left_out else 0,
    )


def token_texts(token_ids: Sequence[int], decoder: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds. If a character takes several tokens, the last of them gets its text.

    Each token is decoded after its predecessor, because some tokenizers emit a leading space only then.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        known = decoder.decode(before, skip_special_tokens=False)
        text = decoder.decode(before + pending, skip_special_tokens=False)[len(known) :]
        if text.endswith(UNFINISHED) and len(pending) < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before, pending = pending, []
    if pending:
        texts[-1] = decoder.decode(pending, skip_special_tokens=False)
    return texts


class RunRecorder:
    """Writes the files of the run directory during a run."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        *,
        started: float,
        decoder: PreTrainedTokenizerBase,
        after_step: int | None = None,
    ) -> None:
        """Open the files of the run.

        ``after_step``: the step after which a resumed run continues; the folder must not contain records of later
        steps. ``decoder``: tokenizer that makes single tokens readable.
        """
        earlier = None if after_step is None else read_metrics(run.metrics)
        self.run = run
        self.waits = WaitBoard()
        self.summary = Summary(run.summary, started=started, earlier=earlier)
        self.console = Console(config.exp_name, config.max_steps, config.logging_steps)
        self.console.resume(earlier or [])
        self.ledger: dict[str, int] = {}
        self._has_events = bool(tracker_list(config))
        self._open_files(after_step)
        plug_ins = open_plug_ins(
            tracker_classes(config), config.tracker_kwargs, run, config.exp_name, redacted_config(config)
        )
        self._plug_ins = PlugIns(plug_ins, config.tracker_timeout_seconds)
        self._log_watch = LogWatch(run.logs, config.console_output, say_beside)
        self._steps_done, self._max_steps = max(0, after_step or 0), config.max_steps
        self._samples_per_step = config.num_logged_samples if isinstance(config, PipelineConfig) else 0
        self._decoder = decoder
        self._step_ended = time.monotonic()
        self._beside = [LOGP] if LOGP in present_roles(config) else []
        self._tokens = dict.fromkeys(ROLES, 0)
        self._busy_since: dict[str, float] = {}
        self._drawn_until: dict[str, float] = {}
        self._engine_totals: dict[str, float] = {"generated_tokens": 0.0, "busy_seconds": 0.0}
        self._loads, self._cpu_seconds = EngineLoads(), CpuSeconds()
        self._tflops, self._roles = config.cluster.device_tflops, present_roles(config)
        self._replica_totals: dict[str, tuple[float, float]] = {}

    def _open_files(self, after_step: int | None) -> None:
        """Open the files that contain records of steps."""
        run = self.run
        self.timeline = Timeline(run.timeline)
        self._metrics, self._samples = MetricsLog(run.metrics), SampleLog(run.samples)
        self._groups = GroupLog(run.groups)
        self._events = TensorBoardTracker(run.tensorboard, after_step=after_step) if self._has_events else None

    def _close_files(self) -> None:
        with ExitStack() as files:
            for file in (self.timeline, self._samples, self._groups, self._metrics, self._events):
                if file is not None:
                    files.callback(file.close)

    def go_back(self, after_step: int, take_out: Callable[[], None]) -> None:
        """Continue after an earlier step (-1: before the record of step 0).

        ``take_out`` removes all later records from the run directory. Tracker plug-ins receive these steps a second
        time.
        """
        self._close_files()
        take_out()
        earlier = read_metrics(self.run.metrics)
        self._open_files(after_step)
        self._tokens, self.ledger = dict.fromkeys(self._tokens, 0), {}
        self._steps_done = max(0, after_step)
        self.summary.go_back(earlier)
        self.console.resume(earlier)

    def event(self, text: str) -> None:
        """Print a line on the console."""
        self.console.event(text)

    @contextmanager
    def busy(self, role: str) -> Iterator[None]:
        """Record the role as busy inside this context."""
        self._busy_since[role] = time.time()
        try:
            yield
        finally:
            self.timeline.busy(role, self._busy_since.pop(role), time.time())

    @contextmanager
    def validating(self, version: int) -> Iterator[None]:
        """Show a validation as a row of the timeline inside this context."""
        self.timeline.transition("validation", "running", version=version)
        try:
            yield
        finally:
            self.timeline.transition("validation", "idle")

    def filtered(self, group: Group) -> None:
        """Write the line of a group that the filter drops, with the step that ends next."""
        self._groups.write([group], min(self._steps_done + 1, self._max_steps))

    def made_again(self, recovered: Recovered) -> None:
        """Remove the lines of filtered groups that a resumed run generates again."""
        self._groups.close()
        drop_lines(self.run.groups, recovered)
        self._groups = GroupLog(self.run.groups)

    def count_tokens(self, role: str, tokens: int) -> None:
        """Add to the number of tokens that a role on the training side has processed."""
        self._tokens[role] += tokens

    def start_clock(self) -> None:
        """Start the time of the first step now."""
        self._step_ended = time.monotonic()

    def _end_step(self) -> tuple[float, float]:
        """Begin the next step. Return begin and end of the one before, in seconds since the epoch.

        Their difference is right even if the clock was set in between.
        """
        before, self._step_ended = self._step_ended, time.monotonic()
        now = time.time()
        return now - (self._step_ended - before), now

    async def step(
        self,
        batch: TrainingBatch,
        scheduler: RolloutScheduler[Any, Group],
        pool: InferencePool,
        workers: WorkerProcesses,
        trainers: Mapping[str, TrainerGroup],
    ) -> None:
        """Finish a training step: add rates, idle shares and counters to its metrics, show them, and record samples."""
        step = batch.step + 1
        window = self._end_step()
        self.ledger = scheduler.ledger.counts()
        fields = {**{role: f"{role}_logprobs" for role in COMPARED_ROLES}, "critic": "values"}
        others = [role for role, name in fields.items() if name in batch.data.tokens]
        others += self._beside
        engines, *used = await asyncio.gather(pool.stats(), *(trainer.usage() for trainer in trainers.values()))
        spans = workers.busy_spans()
        self._draw({**spans, **{engine["name"]: engine["busy_spans"] for engine in engines}})
        batch.metrics |= {
            **{f"ledger/{name}": float(count) for name, count in self.ledger.items()},
            **self._rates(engines, window, others),
            **self._loads.metrics(engines),
            **engine_memory("actor_infer", engines),
            **self._cpu_seconds.metrics(
                {
                    "driver": {0: time.process_time()},
                    "actor_infer": {(each["name"], each["process_id"]): each["cpu_seconds"] for each in engines},
                    **{
                        role: {(rank, each.process_id): each.cpu_seconds for rank, each in enumerate(ranks)}
                        for role, ranks in zip(trainers, used, strict=True)
                    },
                    **workers.cpu_seconds(),
                }
            ),
            **{
                name: value
                for role, ranks in zip(trainers, used, strict=True)
                for name, value in trainer_usage(role, ranks, self._tflops).items()
            },
            **{f"idle/{role}": self.timeline.idle_share(role, window) for role in spans},
            "time/step": window[1] - window[0],
            "engine/restarts": float(pool.restarts),
            "engine/reissued": float(pool.reissued),
            "engine/resumed_tokens": float(pool.resumed_tokens),
            "engine/abandoned_tokens": float(pool.abandoned_tokens),
        }
        self.show(batch.metrics, step)
        count, decoder = self._samples_per_step, self._decoder
        self._samples.write(await asyncio.to_thread(readable, batch.groups, batch.data, step, count, decoder))
        await asyncio.to_thread(write_pictures, batch.groups[:count], step, "train", self.run.pictures)
        await asyncio.to_thread(write_prompt_pictures, batch.groups[:count], self.run.pictures)
        await asyncio.to_thread(self._groups.write, batch.groups, step)
        self._steps_done = step

    def show(self, metrics: dict[str, float], step: int) -> None:
        """Show the metrics of a step on the console, and put them into the summary. Step 0 is the initial model."""
        self.summary.update(metrics, step, self.ledger)
        self.console.step(metrics, step)

    def show_validation(self, result: ValidationResult) -> None:
        """Show the metrics of a validation that finished after the metrics of its step were shown."""
        self.summary.update(result.metrics, result.version)
        self.console.validation(result.metrics, result.version)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write the metrics of a step to `metrics.jsonl` and the trackers. Call it once per step, in order."""
        self._metrics.log(metrics, step)
        if self._events is not None:
            self._events.log(metrics, step)
        self._plug_ins.log(metrics, step)

    async def sync(self) -> None:
        """Wait until all metrics logged so far are on disk."""
        await asyncio.to_thread(self._metrics.sync)

    async def validation(self, result: ValidationResult) -> None:
        """Record the samples and episodes of a validation. Its metrics are logged with those of its step."""
        count, decoder = self._samples_per_step, self._decoder
        self._samples.write(await asyncio.to_thread(readable_validation, result, count, decoder))
        chosen, version = result.groups[:count], result.version
        drawn = await asyncio.to_thread(write_pictures, chosen, version, "val", self.run.pictures)
        await asyncio.to_thread(write_prompt_pictures, chosen, self.run.pictures)
        pictures = {f"val/{group.prompt.domain}/{group.group_id}": path for group, path in drawn}
        pictures |= await asyncio.to_thread(write_episodes, result.episodes, self.run.episodes, version)
        if self._events is not None:
            for name, path in pictures.items():
                self._events.picture(name, path, version)

    def ended(self, status: FinalStatus, error: BaseException | str | None) -> bool:
        """Write the outcome of the run to the summary. Call it before `close`, which may fail or hang.

        Returns True if the outcome is on disk. Otherwise the console still shows the cause.
        """
        try:
            self.summary.finish(status, error, ledger=self.ledger)
        except OSError as unwritten:
            logger.error("how the run ended is not on the disk: %s", unwritten)
            if status == "success":
                with suppress(OSError):
                    self.summary.finish("failed", unwritten, ledger=self.ledger)
            return False
        return True

    def close(self, status: FinalStatus, error: BaseException | str | None = None) -> FinalStatus:
        """Write the end of the run, release the terminal, and return the final status.

        The status becomes a failure if files cannot be completed (for example on a full disk).
        """
        self._log_watch.close()
        try:
            self._close_files()
        except OSError as unwritten:
            status, error = "failed", error or unwritten
        if not self.ended(status, error) and status == "success":
            status = "failed"
        summary = self.summary.as_dict()
        self._plug_ins.end(Ending(status, summary, summary["error"]))
        self.console.close(summary)
        return status

    def _draw(self, spans: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        """Add the busy spans of other processes to the timeline, each span once.

        A name without a worker index gets a single row.
        """
        for name, busy in spans.items():
            role, _, worker = name.rpartition("/")
            if not worker.isdecimal():  # a reward may be called `openai/gsm8k`
                role, worker = name, "all"
            known_until = self._drawn_until.get(name, 0.0)
            for start, end in busy:
                if end > known_until:
                    self.timeline.busy(role, start, end, worker)
                    self._drawn_until[name] = end

    def supervised_step(self, metrics: dict[str, float], step: int, used: Sequence[Usage]) -> None:
        """Measure a finished step of a run without rollouts, add its rates to its metrics, and show and log them."""
        window = self._end_step()
        seconds = max(window[1] - window[0], 1e-9)
        counted, self._tokens = self._tokens, dict.fromkeys(self._tokens, 0)
        rates = {"tokens_per_second/actor_train": counted["actor_train"] / seconds}
        metrics |= {
            **rates,
            **rates_per_device(rates, self._roles),
            **trainer_usage("actor_train", used, self._tflops),
            "idle/actor_train": self.timeline.idle_share("actor_train", window),
            "time/step": seconds,
        }
        self.show(metrics, step)
        self.log(metrics, step)

    def _rates(
        self, engines: Sequence[dict[str, Any]], window: tuple[float, float], others: Sequence[str]
    ) -> dict[str, float]:
        """Return the token rates and idle shares of a step. ``others``: roles other than trainer and engine."""
        seconds = max(window[1] - window[0], 1e-9)
        totals = {name: float(sum(engine[name] for engine in engines)) for name in self._engine_totals}
        gained = {name: max(0.0, totals[name] - before) for name, before in self._engine_totals.items()}
        self._engine_totals = totals
        counted, self._tokens = self._tokens, dict.fromkeys(self._tokens, 0)
        for role, since in self._busy_since.items():
            # The next batch is often being processed already; the work so far belongs to this window.
            self.timeline.busy(role, since, window[1])
        rates = {
            "tokens_per_second/actor_infer": gained["generated_tokens"] / seconds,
            "idle/actor_infer": max(0.0, 1.0 - gained["busy_seconds"] / (seconds * max(1, len(engines)))),
        }
        for role in ("actor_train", *others):
            rates[f"tokens_per_second/{role}"] = counted[role] / seconds
            rates[f"idle/{role}"] = self.timeline.idle_share(role, window)
        return rates | rates_per_device(rates, self._roles) | self._slowest(engines)

    def _slowest(self, engines: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the number of the replica that sampled least while it was busy, and its speed over the others'."""
        totals = {each["name"]: (float(each["generated_tokens"]), float(each["busy_seconds"])) for each in engines}
        before, self._replica_totals = self._replica_totals, totals
        speeds = {}
        for name, (tokens, seconds) in totals.items():
            tokens_before, seconds_before = before.get(name, (0.0, 0.0))
            if seconds > seconds_before and tokens > tokens_before:
                speeds[name.rpartition("/")[2]] = (tokens - tokens_before) / (seconds - seconds_before)
        if len(speeds) < 2:
            return {}
        slowest = min(speeds, key=speeds.__getitem__)
        speed = speeds.pop(slowest) / float(np.median(list(speeds.values())))
        return {"engine/slowest": float(slowest), "engine/slowest_speed": speed}
