"""Episodes to look at: the best, the worst and a random one of each tag and validation.

Each is written as text, PNG (beginning and end) and animated GIF.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roll.agentic.env.pictures import frames_to_gif, text_to_png
from roll.agentic.episode import Episode
from roll.data.seeds import derive_seed

SAID = {True: "success", False: "no success", None: "success not told"}


@dataclass(frozen=True)
class Picture:
    """An animated GIF on disk, and its name in trackers."""

    name: str
    path: Path


def hang_up(episodes: Sequence[Episode], folder: Path, version: int) -> list[Picture]:
    """Write the chosen episodes below ``folder``. Returns the pictures of those whose environment can be rendered."""
    place = folder / f"version-{version:06d}"
    pictures = []
    for (tag, which), episode in chosen(episodes, version).items():
        place.mkdir(parents=True, exist_ok=True)
        base = place / f"{tag}-{which}"
        base.with_name(base.name + ".txt").write_text(as_text(episode), encoding="utf-8")
        frames = frames_of(episode)
        if not frames:
            continue
        gif = base.with_name(base.name + ".gif")
        frames_to_gif(frames, gif)
        text_to_png("\n\n".join([frames[0], *frames[1:][-1:]]), base.with_name(base.name + ".png"))
        pictures.append(Picture(f"val/{tag}/{which}_episode", gif))
    return pictures


def chosen(episodes: Sequence[Episode], version: int) -> dict[tuple[str, str], Episode]:
    """Return the episodes by (tag, ``best``, ``worst`` or ``random``). At equal scores the shorter one is better."""
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
    """Return the frames before each action and at the end, with captions; empty if none can be rendered."""
    frames = [
        f"turn {number}: {turn.response!r}\n{turn.frame}"
        for number, turn in enumerate(episode.turns)
        if turn.frame is not None
    ]
    if frames and episode.last_frame is not None:
        frames.append(f"{episode.end}, score {episode.score:g}\n{episode.last_frame}")
    return frames


def as_text(episode: Episode) -> str:
    """Return the episode as text, turn by turn."""
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
