"""The recorder of a run: metrics, timeline, samples, summary and console in one place.

Stages report their results to it; it knows nothing of how they work. Shares and rates are over the wall-clock time
between the ends of two consecutive steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from roll.configs.derived import tracker_list
from roll.configs.loader import told_config
from roll.configs.schema import PipelineConfig
from roll.data.records import Group
from roll.distributed.inference import InferencePool
from roll.pipeline.batch import TrainingBatch
from roll.pipeline.gallery import hang_up
from roll.pipeline.readable import TokenDecoder, readable, readable_validation
from roll.pipeline.rollout_side import WorkerProcesses
from roll.pipeline.validation import ValidationResult
from roll.rollout.scheduler import RolloutScheduler
from roll.tracking.console import Console, say_beside
from roll.tracking.log_watch import LogWatch
from roll.tracking.metrics import MetricsLog, read_metrics
from roll.tracking.plugins.contract import Ending
from roll.tracking.plugins.opening import open_plug_ins
from roll.tracking.plugins.process import PlugIns
from roll.tracking.run_directory import RunDirectory
from roll.tracking.samples import SampleLog
from roll.tracking.summary import Summary
from roll.tracking.timeline import Timeline
from roll.tracking.trackers import TensorBoardTracker, Trackers
from roll.tracking.waits import WaitBoard

logger = logging.getLogger(__name__)

FinalStatus = Literal["success", "failed", "interrupted"]


class RunRecorder:
    """Writer of the run directory during a run."""

    def __init__(
        self,
        config: PipelineConfig,
        run: RunDirectory,
        *,
        started: float,
        decoder: TokenDecoder,
        after_step: int | None = None,
    ) -> None:
        """Open the files of the run.

        ``after_step``: step after which a resumed run continues; its folder must hold nothing later. ``decoder`` makes
        single tokens readable.
        """
        earlier = None if after_step is None else read_metrics(run.metrics)
        self.run = run
        self.timeline = Timeline(run.timeline)
        self.waits = WaitBoard()
        self.summary = Summary(run.summary, started=started, earlier=earlier)
        self.console = Console(config.exp_name, config.max_steps, config.logging_steps)
        for record in earlier or []:
            self.console.recall(
                {name: value for name, value in record.items() if value is not None}, record["step"]
            )
        self.ledger: dict[str, int] = {}
        self._metrics = MetricsLog(run.metrics)
        events = [TensorBoardTracker(run.tensorboard, after_step=after_step)] if tracker_list(config) else []
        self._trackers = Trackers([self._metrics, *events])
        plug_ins = open_plug_ins(
            tracker_list(config), config.tracker_kwargs, run, config.exp_name, told_config(config)
        )
        self._plug_ins = PlugIns(plug_ins, config.tracker_timeout_seconds)
        self._log_watch = LogWatch(run.logs, config.console_output, say_beside)
        self._samples = SampleLog(run.samples)
        self._samples_per_step = config.num_logged_samples
        self._decoder = decoder
        self._step_ended = time.time()
        self._tokens = {"actor_train": 0, "reference": 0, "critic": 0}
        self._busy_since: dict[str, float] = {}
        self._drawn_until: dict[str, float] = {}
        self._engine_totals: dict[str, float] = {"generated_tokens": 0.0, "busy_seconds": 0.0}

    def event(self, text: str) -> None:
        """Print a line on the console."""
        self.console.event(text)

    @contextmanager
    def busy(self, role: str) -> Iterator[None]:
        """Count the role as computing while this is open."""
        self._busy_since[role] = time.time()
        try:
            yield
        finally:
            self.timeline.busy(role, self._busy_since.pop(role), time.time())

    @contextmanager
    def validating(self, version: int) -> Iterator[None]:
        """Mark a validation in its own row of the timeline while this is open."""
        self.timeline.transition("validation", "running", version=version)
        try:
            yield
        finally:
            self.timeline.transition("validation", "idle")

    def count_tokens(self, role: str, tokens: int) -> None:
        """Add to the tokens that a trainer or a reference has processed."""
        self._tokens[role] += tokens

    def start_clock(self) -> None:
        """Let the first step begin now."""
        self._step_ended = time.time()

    async def step(
        self,
        batch: TrainingBatch,
        scheduler: RolloutScheduler[Any, Group],
        pool: InferencePool,
        workers: WorkerProcesses,
    ) -> None:
        """Record a finished training step."""
        step = batch.step + 1
        window = (self._step_ended, time.time())
        self._step_ended = window[1]
        self.ledger = scheduler.ledger.counts()
        batch.metrics.update({f"ledger/{name}": float(count) for name, count in self.ledger.items()})
        fields = {"reference": "reference_logprobs", "critic": "values"}
        others = [role for role, name in fields.items() if name in batch.data.tokens]
        engines = await pool.stats()
        spans = workers.busy_spans()
        self._draw({**spans, **{engine["name"]: engine["busy_spans"] for engine in engines}})
        batch.metrics.update(self._rates(engines, window, others))
        batch.metrics.update({f"idle/{role}": self.timeline.idle_share(role, window) for role in spans})
        batch.metrics["time/step"] = window[1] - window[0]
        batch.metrics["engine/restarts"] = float(pool.restarts)
        batch.metrics["engine/reissued"] = float(pool.reissued)
        batch.metrics["engine/resumed_tokens"] = float(pool.resumed_tokens)
        self._log(batch.metrics, step)
        count, decoder = self._samples_per_step, self._decoder
        self._samples.write(await asyncio.to_thread(readable, batch.groups, batch.data, step, count, decoder))

    async def sync(self) -> None:
        """Wait until the metrics of all steps so far are on the disk."""
        await asyncio.to_thread(self._metrics.sync)

    def before_training(self, metrics: dict[str, float]) -> None:
        """Record the metrics of version 0 as step 0, since they belong to no training step."""
        self._log(metrics, 0)

    async def validation(self, result: ValidationResult) -> None:
        """Record the samples and episodes of a validation. Its metrics are recorded with those of its step."""
        count, decoder = self._samples_per_step, self._decoder
        self._samples.write(await asyncio.to_thread(readable_validation, result, count, decoder))
        for picture in await asyncio.to_thread(hang_up, result.episodes, self.run.episodes, result.version):
            self._trackers.picture(picture.name, picture.path, result.version)

    def ended(self, status: FinalStatus, error: BaseException | str | None) -> None:
        """Record how the run has ended, before everything is closed: closing may fail or hang."""
        self._finish(status, error)

    def close(self, status: FinalStatus, error: BaseException | str | None = None) -> FinalStatus:
        """Write the end of the run, release the terminal and return the final status.

        A success becomes a failure if files cannot be completed (for example on a full disk).
        """
        self._log_watch.close()
        try:
            self.timeline.close()
            self._samples.close()
            self._trackers.close()
        except OSError as unwritten:
            status, error = "failed", error or unwritten
        if not self._finish(status, error) and status == "success":
            status = "failed"
        summary = self.summary.as_dict()
        self._plug_ins.end(Ending(status, summary, summary["error"]))
        self.console.close(summary)
        return status

    def _finish(self, status: FinalStatus, error: BaseException | str | None) -> bool:
        """Write the final summary; return True if it is on the disk. Otherwise the console still shows the cause."""
        try:
            self.summary.finish(status, error, ledger=self.ledger)
        except OSError as unwritten:
            logger.error("how the run ended is not on the disk: %s", unwritten)
            if status == "success":
                with suppress(OSError):
                    self.summary.finish("failed", unwritten, ledger=self.ledger)
            return False
        return True

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self._trackers.log(metrics, step)
        self._plug_ins.log(metrics, step)
        self.summary.update(metrics, step, self.ledger)
        self.console.step(metrics, step)

    def _draw(self, spans: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        """Add the work of other processes to the timeline, each span once.

        A role without numbered workers is one lane.
        """
        for name, busy in spans.items():
            role, _, worker = name.rpartition("/")
            known_until = self._drawn_until.get(name, 0.0)
            for start, end in busy:
                if end > known_until:
                    self.timeline.busy(role or name, start, end, worker if role else "all")
                    self._drawn_until[name] = end

    def _rates(
        self, engines: Sequence[dict[str, Any]], window: tuple[float, float], others: Sequence[str]
    ) -> dict[str, float]:
        """Return the token rates and idle shares of a step. ``others``: roles besides trainer and engine."""
        seconds = max(window[1] - window[0], 1e-9)
        totals = {name: float(sum(engine[name] for engine in engines)) for name in self._engine_totals}
        gained = {name: max(0.0, totals[name] - before) for name, before in self._engine_totals.items()}
        self._engine_totals = totals
        counted, self._tokens = self._tokens, dict.fromkeys(self._tokens, 0)
        for role, since in self._busy_since.items():
            # The next batch is often in training already; its part so far belongs to this window.
            self.timeline.busy(role, since, window[1])
        rates = {
            "tokens_per_second/actor_infer": gained["generated_tokens"] / seconds,
            "tokens_per_second/actor_train": counted["actor_train"] / seconds,
            "idle/actor_infer": max(0.0, 1.0 - gained["busy_seconds"] / (seconds * max(1, len(engines)))),
            "idle/actor_train": self.timeline.idle_share("actor_train", window),
        }
        for role in others:
            rates[f"tokens_per_second/{role}"] = counted[role] / seconds
            rates[f"idle/{role}"] = self.timeline.idle_share(role, window)
        return rates
