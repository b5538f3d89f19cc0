"""The reference page of every key, generated from the schema: `python -m roll.check.reference_page`.

`docs/configuration.md` is this output, and a test keeps the two equal, so the page cannot drift from the code. Keys
that nothing reads are left out; the loader reports them when a user sets them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from roll.configs.errors import shown
from roll.configs.fields import default_of
from roll.configs.loader import PIPELINES, dataclass_of, describe, is_optional, member, walk
from roll.configs.roles import UNREAD_PATHS
from roll.configs.run import PipelineConfig

HEAD = """\
# Configuration

One YAML file describes a run. This page lists every key; `python -m roll.check.reference_page` writes it from the
dataclasses in `roll/configs`, so edit those.

- **Overrides.** `dotted.key=value` on the command line, the value in YAML: `max_steps=10`,
  `actor_train.training_args.learning_rate=3e-4`, `rewards.math.tag_included=[gsm8k]`, `track_with=[wandb]`.
  A mapping is merged into the one in the file, anything else replaces it.
- **References.** `${other.key}` is the value of another key (also of a default), `${.sibling}` of one beside it, and
  `${oc.env:NAME,default}` an environment variable. No other resolver is allowed. Write `\\${` for the characters.
- **Values** follow YAML 1.2: `1e-6` is a number, `true` and `false` are truth values, `yes` and `no` are text.
- **Mistakes.** Unknown keys, wrong types, repeated keys, settings that have no effect and numbers that do not fit
  together are reported at once, each with its path and a remedy, before anything loads (exit code 2).
- **Devices.** `device_mapping` is `[0, 1]`, `"0-3"`, `"0,2,5-7"`, `list(range(0,8,2))` or a sum of such lists. It is
  read by a small grammar and never evaluated. Two roles have the same devices, separate ones, or one a part of the
  other's.
- **Secrets.** Take them from the environment. Values of keys named like `token`, `secret`, `password` or `api_key` are
  masked in the saved `config.yaml`.
"""

_COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|\n"


def reference() -> str:
    """Return the page as Markdown."""
    common = [path for path, _, _ in walk(PipelineConfig)]
    parts = [HEAD, "\n## Every pipeline\n\n", _tables(PipelineConfig, UNREAD_PATHS)]
    for name, cls in PIPELINES.items():
        parts.append(f"\n## Pipeline `{name}`\n\n{cls.__doc__}\n\n{_tables(cls, common)}")
    return "".join(parts)


def _tables(cls: type, without: Sequence[str]) -> str:
    sections: dict[str, list[str]] = {"": []}
    titles = {"": "Keys of the whole run."}
    for path, item, kind in walk(cls, without=without):
        suffix = _section_suffix(kind)
        if suffix is not None:
            sections[path + suffix] = []
            titles[path + suffix] = item.metadata["help"] + (" Left out by default." if is_optional(kind) else "")
            continue
        sections[path.rpartition(".")[0]].append(_row(item, kind))
    return "\n".join(_section(path, titles[path], rows) for path, rows in sections.items() if path or rows)


def _section_suffix(kind: Any) -> str | None:
    """Return the suffix of a section's path if its type holds further keys; None for a plain value."""
    if dataclass_of(kind) is not None:
        return ""
    if dataclass_of(member(kind, "")) is not None:
        return ".<name>"
    return "[i]" if dataclass_of(member(kind, 0)) is not None else None


def _section(path: str, title: str, rows: list[str]) -> str:
    head = f"### `{path}`\n\n" if path else "### Top level\n\n"
    return head + title + "\n" + (f"\n{_COLUMNS}{''.join(rows)}" if rows else "")


def _row(item: Field[Any], kind: Any) -> str:
    limits = item.metadata.get("range")
    bounds = f", {limits}" if limits is not None and str(limits) else ""
    default = shown(default_of(item))
    cells = (f"`{item.name}`", describe(kind).replace("|", "\\|") + bounds, f"`{default}`", item.metadata["help"])
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
