"""Runs as Python objects, finished or in progress. The run directory is only read, except for reports."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll.configs.loader import load_config
from roll.configs.run import RunConfig
from roll.report.files import read_run
from roll.report.page import render_comparison, render_page, status_of
from roll.tracking.files import read_json_lines, write_atomically
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import read_summary
from roll.tracking.trackers import read_metrics

PAGE_HEIGHT = 640
"""Height of a page in a notebook, in pixels."""


class Page(os.PathLike[str]):
    """A self-contained HTML page, which notebooks display."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Page({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return an iframe that embeds the whole page, since a notebook may not load files from other folders."""
        content = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{content}" width="100%" height="{PAGE_HEIGHT}" style="border: 0"></iframe>'


class Run:
    """A run directory. Attributes are read from disk at each access, so those of a run in progress are current."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a run directory. Raises `FileNotFoundError` if the folder holds no run."""
        self._files = RunDirectory.existing(Path(path).resolve())

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._files.root

    @property
    def status(self) -> str:
        """``running``, ``success``, ``failed``, ``interrupted``, ``died`` (its process is gone, and the
        summary still says that it runs), or ``unknown`` (no summary)."""
        return status_of(self.summary, self._files.is_held())

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`: steps, seconds, first and last validation, ledger, error. Empty before the run
        starts."""
        return read_summary(self._files.summary) if self._files.summary.is_file() else {}

    @property
    def config(self) -> RunConfig:
        """The resolved configuration. Raises `roll.ConfigError` if this version cannot read it."""
        return load_config(self._files.config)

    @property
    def metrics(self) -> Any:
        """One row per training step; step 0 is the validation of the initial model.

        A pandas frame with the index ``step`` if pandas is installed, else a list of dictionaries.
        """
        return _table(read_metrics(self._files.metrics), index="step")

    @property
    def samples(self) -> Any:
        """Recorded rollouts: a pandas frame if pandas is installed, else a list of dictionaries."""
        return _table(read_json_lines(self._files.samples) if self._files.samples.is_file() else [])

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest undamaged checkpoint, a model in Hugging Face format. None if there is none."""
        from roll.pipeline.checkpoints import checkpoint_folder, exported_steps, model_damage

        steps = reversed(exported_steps(self._files.checkpoints))
        folders = (checkpoint_folder(self._files.checkpoints, step) for step in steps)
        return next((folder for folder in folders if model_damage(folder) is None), None)

    def report(self, output: str | os.PathLike[str] | None = None) -> Page:
        """Write the HTML report of the run, by default to ``report.html`` in its folder. See docs/report.md."""
        return _written(render_page(read_run(self.path)), output or self.path / "report.html")

    def __repr__(self) -> str:
        summary = self.summary
        return f"<Run {self.path.name}: {self.status} after {summary.get('steps', 0)} steps, in {self.path}>"


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the directory of a run, finished or in progress. Raises `FileNotFoundError` if it holds no run."""
    return Run(path)


def compare(runs: Sequence[Run | str | os.PathLike[str]], output: str | os.PathLike[str] = "comparison.html") -> Page:
    """Write an HTML page that overlays the curves of several runs and lists the settings in which they differ.

    ``runs``: `Run` objects or run directories. Raises `ValueError` for fewer than two, and `FileNotFoundError` for a
    folder that holds no run.
    """
    if isinstance(runs, str | os.PathLike | Run) or len(runs) < 2:
        raise ValueError("a comparison takes at least two runs")
    folders = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    return _written(render_comparison([read_run(folder) for folder in folders]), output)


def _written(page: str, output: str | os.PathLike[str]) -> Page:
    path = Path(output).resolve()
    write_atomically(path, page)
    return Page(path)


def _table(rows: list[dict[str, Any]], index: str | None = None) -> Any:
    if find_spec("pandas") is None:
        return rows
    import pandas

    frame = pandas.DataFrame(rows)
    return frame.set_index(index) if index is not None and index in frame else frame
