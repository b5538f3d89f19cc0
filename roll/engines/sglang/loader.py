"""Verification of SGLang's weight loader, by SGLang's own checksums of its parameters.

The loader silently skips unknown names, and silently leaves parameters unchanged for which an update has no tensor.
SGLang also fuses and renames tensors, differently for each model, so the expected parameters cannot be computed here.
But its checksums show what an update did:

- If a tensor of the update is altered and the update loaded again, some parameter must change; otherwise the loader
  ignores the tensor.
- If all parameters are overwritten with random numbers and the update is loaded again, each must get its earlier value;
  otherwise the update does not set it.

Loaders match names, and treat all layers and all experts alike: tensors whose names differ only in numbers are of one
*kind*. Therefore one tensor per layer can be altered at a time, a different kind in each layer, and a deep model needs
few loads. This shows which kinds of parameters each kind of tensor goes into. From then on, after each update, a
parameter must have changed if one of its tensors did.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from roll.weights.buckets import WeightMismatch

ParameterChecksums = Mapping[tuple[int, str], str]
"""(Rank, parameter name) -> SGLang's checksum."""


def place_of(name: str) -> tuple[str, str]:
    """Return the layer of a tensor or parameter, such as ``layers.3.`` (empty outside of layers), and its kind: its
    name with ``#`` for each number between dots."""
    layer = re.search(r"(?:^|\.)(\w+\.\d+\.)", name)
    return layer[1] if layer else "", re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


class LoaderCheck:
    """Verifies the weight updates of one engine. Created after the first update was loaded once."""

    def __init__(self, sent: Mapping[str, int | None], held: ParameterChecksums) -> None:
        """``sent``: checksums of the update's tensors. ``held``: SGLang's checksums of its parameters after it."""
        self._sent = dict(sent)
        self._held = dict(held)
        self._own_names = {name for _, name in held} & sent.keys()
        """Tensors that SGLang has as parameters under the same name."""
        self._targets: dict[str, set[str]] = {}
        """Kind of tensor -> kinds of parameters that it goes into."""

    def rounds(self) -> list[list[str]]:
        """Return the tensors to alter in each load: first all with the same name in SGLang, then one tensor of each
        other kind, at most one per layer at a time."""
        rounds = [[name for name in self._sent if name in self._own_names]]
        waiting: dict[str, list[str]] = defaultdict(list)
        for name in self._sent.keys() - self._own_names:
            waiting[place_of(name)[0]].append(name)
        seen: set[str] = set()
        while True:
            chosen = []
            for names in waiting.values():
                fresh = next((name for name in sorted(names) if place_of(name)[1] not in seen), None)
                if fresh is not None:
                    chosen.append(fresh)
                    seen.add(place_of(fresh)[1])
            if not chosen:
                return [names for names in rounds if names]
            rounds.append(chosen)

    def learn(self, version: int, altered: Iterable[str], held: ParameterChecksums) -> None:
        """Record which parameters changed in a load with altered tensors. Raises `WeightMismatch` naming a tensor that
        changed no parameter."""
        changed = self._changed(held)
        for name in altered:
            layer, kind = place_of(name)
            if name in self._own_names:
                targets = {kind} if name in changed else set()
            else:
                places = (place_of(each) for each in changed - self._own_names)
                targets = {target for its_layer, target in places if its_layer == layer}
            if not targets:
                raise WeightMismatch(
                    f"SGLang does not load tensor {name!r} of version {version}: none of its parameters changes with it"
                )
            self._targets.setdefault(kind, set()).update(targets)

    def require_filled(self, version: int, held: ParameterChecksums) -> None:
        """Check the load that follows overwriting with random numbers. Raises `WeightMismatch` naming a parameter that
        did not get its earlier value."""
        changed = sorted(self._changed(held))
        if changed:
            raise WeightMismatch(
                f"SGLang's parameter {changed[0]!r} is not filled by version {version} ({len(changed)} such parameters)"
            )

    def compare(self, version: int, sent: Mapping[str, int | None], held: ParameterChecksums) -> None:
        """Verify an update after the first one.

        If a tensor changed since the update before, each SGLang parameter that it is loaded into must have changed.
        Raises `WeightMismatch` naming the tensor otherwise.
        """
        changed = {place_of(name) for name in self._changed(held)}
        for name, checksum in sent.items():
            layer, kind = place_of(name)
            stale = {target for target in self._targets[kind] if (layer, target) not in changed}
            if self._sent[name] != checksum and stale:
                raise WeightMismatch(
                    f"version {version} brought a new tensor {name!r}, but SGLang's parameter {min(stale)!r} holds the "
                    "same as before"
                )
        self._sent, self._held = dict(sent), dict(held)

    def _changed(self, held: ParameterChecksums) -> set[str]:
        """Return the names of parameters whose checksums differ from the last update's on some rank."""
        everything = self._held.keys() | held.keys()
        return {name for rank, name in everything if self._held.get((rank, name)) != held.get((rank, name))}
