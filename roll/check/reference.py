"""Generator of the reference pages of keys, losses, advantages and corrections: `python -m roll.check.reference docs`.

The text above the first `## ` of a page is written by hand. Everything below is generated from the schema, and from the
signatures and descriptions of the functions. A test compares pages and code, so they cannot drift apart. Keys that
nothing reads are left out; setting one is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS
from roll.algorithms.correction import (
    Correction,
    DivergenceRejection,
    ImportanceWeight,
    RatioRejection,
    SecondMomentRejection,
)
from roll.algorithms.losses.base import POLICY_LOSSES
from roll.algorithms.registry import about_of, settings_of
from roll.configs.errors import shown
from roll.configs.fields import default_of, describe, is_optional, range_of, section_below, walk
from roll.configs.loader import PIPELINES
from roll.configs.plugins import Kind, PlugIn, help_text, parameters_of
from roll.configs.roles import UNREAD_PATHS
from roll.configs.run import ImageConfig, PipelineConfig, PromptConfig, RunConfig

CORRECTION_PARTS = {
    "`train_infer_correction`": Correction,
    "`weight`": ImportanceWeight,
    "`reject`: by ratio": RatioRejection,
    "`reject`: by divergence": DivergenceRejection,
    "`reject`: by second moment": SecondMomentRejection,
}


def keys() -> str:
    """Return the sections of all keys: first the shared ones, then those of each pipeline."""
    rollouts = [name for name, cls in PIPELINES.items() if issubclass(cls, PipelineConfig)]
    parts = ["## Every pipeline\n\n" + _key_tables(RunConfig, UNREAD_PATHS)]
    title = "## Pipelines " + " and ".join(f"`{name}`" for name in rollouts)
    shared = _key_tables(PipelineConfig, _documented(RunConfig, PipelineConfig))
    parts.append(f"{title}\n\n{PipelineConfig.__doc__}\n\n{shared}")
    for name, cls in PIPELINES.items():
        above: type[RunConfig] = PipelineConfig if name in rollouts else RunConfig
        if cls is ImageConfig:
            above = PromptConfig  # its keys are listed under `rlvr`
        parts.append(f"## Pipeline `{name}`\n\n{cls.__doc__}\n\n{_key_tables(cls, _documented(above, cls))}")
    return "\n".join(parts)


def _documented(above: type, cls: type) -> list[str]:
    """Return the paths of ``cls`` that need no row: keys that ``above`` has with the same text, and unread keys."""
    known = {path: (item.metadata["help"], kind) for path, item, kind in walk(above)}
    same = [path for path, item, kind in walk(cls) if known.get(path) == (item.metadata["help"], kind)]
    return [*same, *UNREAD_PATHS]


def _key_tables(cls: type, without: Sequence[str]) -> str:
    titles, rows = {"": "Keys of the whole run."}, dict[str, list[str]]({"": []})
    for path, item, kind in walk(cls, without=without):
        section = section_below(kind)
        if section is None:
            rows[path.rpartition(".")[0]].append(_key_row(item, kind))
        else:
            below = path + section[1]
            titles[below] = item.metadata["help"] + (" Left out by default." if is_optional(kind) else "")
            rows[below] = []
    return "\n".join(
        (f"### `{path}`" if path else "### Top level") + f"\n\n{titles[path]}\n" + _table("key", rows[path])
        for path in rows
        if path or rows[path]
    )


def _key_row(item: Field[Any], kind: Any) -> str:
    limits = str(range_of(kind) or "")
    words = describe(kind).replace("|", "\\|") + (f", {limits}" if limits else "")
    return f"| `{item.name}` | {words} | `{shown(default_of(item))}` | {item.metadata['help']} |\n"


def plug_ins(kind: Kind[PlugIn]) -> str:
    """Return a section for each built-in loss or estimator."""
    return "\n".join(_plug_in(kind, name) for name in sorted(kind.built_in))


def _plug_in(kind: Kind[PlugIn], name: str) -> str:
    function = kind.load(name, name)
    about = about_of(function)
    assert about is not None, f"{name} has no description"
    table = _arguments(settings_of(function, name, name)) or "\nNo arguments.\n"
    return f"## `{name}`\n\n{about.formula}\n\n- Source: {about.source}\n- When: {about.use}\n{table}"


def corrections() -> str:
    """Return the sections of the parts of a correction."""
    return "\n".join(
        f"## {title}\n{_arguments(parameters_of(record, title, title))}" for title, record in CORRECTION_PARTS.items()
    )


def _arguments(parameters: Mapping[str, Parameter]) -> str:
    rows = []
    for name, each in parameters.items():
        default, text = each.default, shown(each.default)
        if isinstance(default, str):
            text = default
        elif isinstance(default, (int, float)) and not isinstance(default, bool):
            text = f"{default:g}"
        given = "none: it must be given" if default is Parameter.empty else f"`{text}`"
        meaning = help_text(each.annotation).replace("|", "\\|")
        rows.append(f"| `{name}` | {describe(each.annotation)} | {given} | {meaning} |\n")
    return _table("argument", rows)


def _table(first: str, rows: Sequence[str]) -> str:
    return f"\n| {first} | type | default | meaning |\n|---|---|---|---|\n{''.join(rows)}" if rows else ""


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": keys,
    "algorithms/policy_losses.md": partial(plug_ins, POLICY_LOSSES),
    "algorithms/advantages.md": partial(plug_ins, ADVANTAGE_ESTIMATORS),
    "algorithms/correction.md": corrections,
}
"""Path below the folder `docs` -> function that generates the lower part of the page."""


def page(folder: Path, name: str) -> str:
    """Return a page of the folder `docs` with its lower part generated anew."""
    by_hand = (folder / name).read_text(encoding="utf-8").partition("\n## ")[0]
    return f"{by_hand}\n{PAGES[name]()}"


if __name__ == "__main__":
    for page_name in PAGES:
        (Path(sys.argv[1]) / page_name).write_text(page(Path(sys.argv[1]), page_name), encoding="utf-8")
