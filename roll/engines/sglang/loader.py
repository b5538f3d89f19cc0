"""What SGLang's loader does with a weight update, found out from SGLang's own checksums of its parameters.

The loader skips names that it does not know, and leaves as it was what no tensor of the update goes into. Neither is
reported. SGLang also fuses and renames tensors, differently for each model, so its parameters cannot be computed here.
Its checksums still show what an update did:

- If one tensor of an update is altered, a parameter must change; else the loader does not take the tensor.
- If all parameters are overwritten with random numbers and the update is read again, each must be what it was; else the
  update does not fill it.

A loader goes by names. It treats all layers alike, and all experts: tensors whose names differ only in numbers are of
one *kind*. So one tensor per layer is altered at a time, a different kind in each layer, and a deep model needs few
readings. From then on it is known which kinds of parameters each kind of tensor goes into, and after each update a
parameter must have changed if one of its tensors did.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from roll.weights.buckets import WeightMismatch

ParameterChecksums = Mapping[tuple[int, str], str]
"""(Rank, name of a parameter) -> SGLang's checksum of it."""


def place_of(name: str) -> tuple[str, str]:
    """Return a name's layer, such as ``layers.3.`` (empty outside of layers), and its kind: numbers are left out."""
    layer = re.search(r"(?:^|\.)(\w+\.\d+\.)", name)
    return layer[1] if layer else "", re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


class LoaderCheck:
    """Knowledge of one engine's loader. It begins with an update that was read once."""

    def __init__(self, sent: Mapping[str, int | None], held: ParameterChecksums) -> None:
        """Take the checksums of the update's tensors, and those that SGLang then has of its parameters."""
        self._sent = dict(sent)
        self._held = dict(held)
        self._own_names = {name for _, name in held} & sent.keys()
        """Tensors that are parameters of SGLang under the same name."""
        self._targets: dict[str, set[str]] = {}
        """Kind of a tensor -> kinds of parameters that it goes into."""

    def rounds(self) -> list[list[str]]:
        """Return the tensors to alter in each reading: one of each kind; of those that SGLang calls differently, at
        most one per layer at a time."""
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
        """Take in the checksums after a reading with altered tensors. Raises `WeightMismatch` naming one that changed
        no parameter."""
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
        """Raise `WeightMismatch` naming a parameter that differs after a reading that followed random numbers."""
        changed = sorted(self._changed(held))
        if changed:
            raise WeightMismatch(
                f"SGLang's parameter {changed[0]!r} is not filled by version {version} ({len(changed)} such parameters)"
            )

    def compare(self, version: int, sent: Mapping[str, int | None], held: ParameterChecksums) -> None:
        """Take in a further update. Raises `WeightMismatch` naming a tensor that is new, but not in its parameter."""
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
        """Return the parameters whose checksums differ from the last update's on some rank."""
        everything = self._held.keys() | held.keys()
        return {name for rank, name in everything if self._held.get((rank, name)) != held.get((rank, name))}
