"""Tables that translate the keys of another system, and the functions that apply them.

"Their" keys are those of the other system, "our" keys those of this toolkit. A rule is data: a pattern of their key,
our key, and a mapping of values. Functions of the system's module add to the `Translation` the settings that depend
on several keys. Every key is accounted for: translated, reported as without effect, reported as lost, or left in place
for the loader to check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from roll.configs.errors import ConfigProblem, shown
from roll.configs.run import TENSORBOARD, TRACKERS

Path = tuple[str, ...]
"""A key as its parts: ``actor_train.infer_batch_size`` is two."""
NOTHING: Any = object()
"""Marker of a missing value."""
_LOSS = ("pg_variant", "pg_variant_args")
RETURN_ARGUMENTS = {"gae": ("gamma", "lambda_"), "reinforce_plus_plus": ("gamma",)}
"""Our advantage estimator -> its arguments among those that other systems set for all estimators."""
OFF: tuple[Any, ...] = (None, False, "", [], {}, "null", "none", "None")
"""Values that switch a setting off."""


@dataclass(frozen=True)
class Rule:
    """Translation of one key, or the reason why it has none."""

    to: str | None = None
    """Path of our key: a ``*`` is replaced by what matched the pattern's ``*``; ``=`` is their path. None: left out."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Their value -> ours. Other values are kept, or, if ``closed``, reported as lost."""
    closed: bool = False
    note: str = ""
    """Difference in meaning, reason why the key has no effect, or description of what is lost."""
    lost: bool = False
    """True for a setting that has no counterpart."""
    later: bool = False
    """True if a function of the system's module reads the key, together with others."""
    advice: str = ""
    """Remedy for the key where it stands in a file of ours. Default: derived from the other fields."""


def to(path: str, values: Mapping[Any, Any] | None = None, note: str = "", closed: bool = False) -> Rule:
    """Return the rule of a key that has another name or other values here."""
    return Rule(path, values or {}, closed, note)


def none(reason: str) -> Rule:
    """Return the rule of a key that has no effect here and needs none."""
    return Rule(note=reason)


def lost(reason: str) -> Rule:
    """Return the rule of a setting that this toolkit does not have."""
    return Rule(note=reason, lost=True)


def later(advice: str = "") -> Rule:
    """Return the rule of a key that is read together with others."""
    return Rule(later=True, advice=advice)


def table(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return a table with one row per key. In ``rules``, keys that share a rule are separated by spaces."""
    return {key: rule for keys, rule in rules.items() for key in keys.split()}


@dataclass
class Translation:
    """A translation in progress: our configuration so far, and the messages about it."""

    origin: str
    """Name of the other system."""
    given: dict[Path, Any]
    """Their keys and values."""
    values: dict[Path, Any] = field(default_factory=dict)
    """Our keys and values."""
    notes: dict[Path, str] = field(default_factory=dict)
    """Our key -> how its meaning differs from theirs."""
    lines: list[str] = field(default_factory=list)
    """A sentence for each key that is not taken over unchanged."""
    lost: list[str] = field(default_factory=list)
    """A sentence for each setting that has no counterpart."""
    without_effect: list[str] = field(default_factory=list)
    """A sentence for each key that has no effect here."""
    missing: list[str] = field(default_factory=list)
    """A sentence for each setting that we need and their configuration does not have; each begins with our path."""
    problems: list[ConfigProblem] = field(default_factory=list)
    """Problems of values that have no meaning here: the loader rejects them, `roll convert` lists them as missing."""
    unread: set[Path] = field(default_factory=set)
    """Their keys that are left to functions and that no function has read yet."""
    unnamed: set[Path] = field(default_factory=set)
    """The part of ``unread`` whose names match only a wildcard; a key here is unknown unless a function reads it."""
    read: list[str] = field(default_factory=list)
    """Their keys in the order in which functions read them."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of their key, or ``default``. A section has no value, only its keys do."""
        parts = tuple(path.split("."))
        self.unread.discard(parts)
        self.unnamed.discard(parts)
        if parts in self.given:
            self.read.append(path)
        return self.given.get(parts, default)

    def flag(self, path: str, default: bool = False) -> bool:
        """Return their boolean; ``default`` if it is missing or null, or, after noting a problem, of another type."""
        value = self.get(path)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(path, value, "write `true` or `false`")
        return default

    def number(self, path: str, default: float) -> float:
        """Return their number; ``default`` if it is missing or null, or, after noting a problem, of another type."""
        value = self.get(path)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return default if value is None else value
        self.refuse(path, value, "write a number")
        return default

    def choice(self, path: str, values: Mapping[Any, Any], default: Any) -> Any:
        """Return our value for theirs, by the mapping ``values``.

        ``default`` is one of their values. It stands for a missing value and for one without a counterpart, which is
        reported as lost.
        """
        value = self.get(path, default)
        found = _looked_up(values, value)
        if found is not NOTHING:
            return found
        if value is not None:
            self.lose(path, value, f"there is no such value here; {shown(default)} is taken")
        return values[default]

    def anywhere(self, suffix: str, default: Any = None) -> Any:
        """Return the value of their first key that ends in ``suffix``, in any section, or ``default``."""
        wanted = tuple(suffix.split("."))
        found = next((parts for parts in self.given if parts[-len(wanted) :] == wanted), None)
        return default if found is None else self.get(".".join(found), default)

    def refuse(self, path: str, value: Any, remedy: str) -> None:
        """Add the problem that a value of theirs has no meaning here."""
        message = f"{shown(value, path.rpartition('.')[2])} has no meaning here"
        self.problems.append(ConfigProblem(path, message, remedy))

    def take(self, *steps: Callable[[Translation], None]) -> None:
        """Call each function with this translation. A value that makes one fail becomes a problem."""
        for step in steps:
            self.read.clear()
            try:
                step(self)
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                path = ", ".join(dict.fromkeys(self.read)) or self.origin
                message = f"a value has the wrong form: {error}"
                self.problems.append(ConfigProblem(path, message, f"write the values as {self.origin} has them"))

    def has(self, path: str) -> bool:
        """Return True if their key is given."""
        return tuple(path.split(".")) in self.given

    def ours(self, path: str, default: Any = None) -> Any:
        """Return the value of our key so far, or ``default``."""
        return self.values.get(tuple(path.split(".")), default)

    def put(self, path: str | Path, value: Any, note: str = "", origin: str = "") -> None:
        """Set our key, unless it has a value already. ``origin`` names the key of theirs that decides the value."""
        parts = tuple(path.split(".")) if isinstance(path, str) else path
        name = ".".join(parts)
        if self.values.get(parts, value) != value:
            self.lines.append(f"{origin or name}: not used; `{name}` is {shown(self.values[parts], parts[-1])}")
            return
        self.values[parts] = value
        if note:
            self.notes[parts] = note
        if origin or note:
            what = f"{origin} is read as `{name}: {shown(value, parts[-1])}`" if origin else f"{name}: {shown(value)}"
            self.lines.append(what + (f" ({note})" if note else ""))

    def put_given(self, path: str, value: Any) -> None:
        """Set our key, unless ``value`` is None."""
        if value is not None:
            self.put(path, value)

    def put_default(self, path: str, value: Any) -> None:
        """Set our key to the default of the other system, unless it has a value: ours is another."""
        if self.ours(path) is None:
            self.values.pop(tuple(path.split(".")), None)
            self.put(path, value, f"{self.origin}'s default")

    def put_adamw(self, role: str, weight_decay: float = 0.0) -> None:
        """Set the role's AdamW to the defaults of the other system: this decay of the weights, and torch's betas."""
        if weight_decay:
            self.put_default(f"{role}.training_args.weight_decay", weight_decay)
        self.put_default(f"{role}.training_args.adam_beta2", 0.999)

    def keep_all_checkpoints(self) -> None:
        """Keep every checkpoint, as the other system does, unless the number to keep is given."""
        if whole(self.ours("save_steps")) is not None:
            self.put_default("max_ckpt_to_keep", 0)

    def put_name(self, value: Any) -> None:
        """Set the experiment's name, unless it is None. It becomes a folder name, so slashes are replaced."""
        self.put_given("exp_name", None if value is None else str(value).replace("/", "-"))

    def put_cluster(self, per_node: int, nodes: int) -> None:
        """Set the number of GPUs and nodes; several nodes need a Ray cluster that is already running."""
        self.put("cluster.device", "cuda")
        self.put("cluster.num_devices_per_node", per_node)
        if nodes > 1:
            self.put("cluster.num_nodes", nodes)
            self.put("cluster.address", "auto")

    def put_precision(self, dtype: str) -> None:
        """Set the precision of trainer and engine, unless the role already has one."""
        for role in ("actor_train", "actor_infer"):
            path = f"{role}.model_args.dtype"
            self.put(path, self.ours(path, dtype))

    def drop(self, path: str, reason: str) -> None:
        """Remove our key again, and report it as without effect."""
        parts = tuple(path.split("."))
        self.no_effect(path, self.values.pop(parts), reason)

    def no_effect(self, path: str, value: Any, reason: str) -> None:
        """Report a key that has no effect."""
        self.without_effect.append(f"{path}: {shown(value, path.rpartition('.')[2])} has no effect here: {reason}")
        self.lines.append(self.without_effect[-1])

    def lose(self, path: str, value: Any, reason: str) -> None:
        """Report a setting as lost."""
        self.lost.append(f"{path}: {shown(value, path.rpartition('.')[2])}: {reason}")
        self.lines.append(f"lost: {self.lost[-1]}")

    def unknown(self, parts: Path) -> None:
        """Report a key of theirs that the table does not know."""
        self.lose(".".join(parts), self.given[parts], f"roll knows no key of {self.origin} of this name")

    def without_ratio(self, why: str) -> None:
        """Replace the policy loss and its arguments by `vanilla`, the loss without a ratio."""
        for parts in [parts for parts in self.values if parts[0] == "actor_train" and parts[1] in _LOSS]:
            del self.values[parts]
            self.notes.pop(parts, None)
        self.put("actor_train.pg_variant", "vanilla", why)

    def lack(self, path: str, what: str) -> None:
        """Report a setting that the user has to add to the file."""
        self.missing.append(f"{path}: {what}")

    def tree(self) -> dict[str, Any]:
        """Return our configuration as nested mappings."""
        return nested(self.values)


def translated(
    origin: str, given: Mapping[Path, Any], rules: Mapping[str, Rule], *, unknown_is_ours: bool
) -> Translation:
    """Return the translation of their keys by a table.

    Keys without a rule are kept if ``unknown_is_ours``, else reported as lost.
    """
    done = Translation(origin, dict(given))
    pending = []
    for parts, value in given.items():
        found = rule_of(parts, rules)
        if found is not None:
            pending.append((parts, value, *found))
        elif unknown_is_ours:
            done.put(parts, value)
        else:
            done.unknown(parts)
    for parts, value, pattern, rule in pending:
        _apply(done, parts, value, pattern, rule)
    return done


def translation(
    origin: str, rules: Mapping[str, Rule], steps: Sequence[Callable[[Translation], None]], given: Mapping[Path, Any]
) -> Translation:
    """Return the translation of another system's keys: first by its table, then by each step.

    Every key is accounted for (`accounted`).
    """

    def translate(keys: Mapping[Path, Any]) -> Translation:
        done = translated(origin, keys, rules, unknown_is_ours=False)
        done.take(*steps)
        return done

    return accounted(translate, given)


def accounted(translate: Callable[[Mapping[Path, Any]], Translation], given: Mapping[Path, Any]) -> Translation:
    """Return a translation that also reports each key without influence on the outcome.

    Such a key is unknown if it matches only a wildcard and no function reads it; its value is lost if the number 1 in
    its place would change the outcome; otherwise the key has no effect, because other keys decide. To find out, the
    translation is repeated without the key, and with other values of it.
    """

    def complete(keys: Mapping[Path, Any]) -> Translation:
        done = translate(keys)
        for parts in sorted(done.unnamed):
            done.unknown(parts)
        return done

    done = complete(given)
    outcome = _outcome(done)
    for parts, value in given.items():
        if parts == ("entry",) or done.values.get(parts, NOTHING) == value:
            continue
        rest = {key: each for key, each in given.items() if key != parts}
        others = [rest] + [{**given, parts: each} for each in _other_values(value)]
        if any(_outcome(complete(each)) != outcome for each in others):
            continue
        readable = isinstance(value, str) or (isinstance(value, float) and not value.is_integer())
        if readable and value not in OFF and _outcome(complete({**given, parts: 1})) != outcome:
            done.lose(".".join(parts), value, "this is no value that the key has; without it, its default is taken")
        else:
            done.no_effect(".".join(parts), value, "other keys decide")
    return done


def _outcome(done: Translation) -> tuple[Any, ...]:
    return done.values, done.notes, [*done.lines], [*done.lost], done.missing, done.problems


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2]
    return [f"{value}x"] if isinstance(value, str) else []


def _apply(done: Translation, parts: Path, value: Any, pattern: str, rule: Rule) -> None:
    path = ".".join(parts)
    if rule.later:
        done.unread.add(parts)
        if "*" in pattern.rpartition(".")[2]:
            done.unnamed.add(parts)
        return
    new = _looked_up(rule.values, value)
    if rule.lost or (rule.closed and new is NOTHING):
        if value in OFF:
            done.no_effect(path, value, "it is off")
        else:
            done.lose(path, value, rule.note or "there is no such value here")
        return
    if rule.to is None:
        done.no_effect(path, value, rule.note)
        return
    target = _filled(rule.to, parts, pattern)
    changed = new is not NOTHING and new != value
    kept = value if new is NOTHING else new
    if target == parts and not changed:
        done.put(parts, kept)
    elif target == parts:
        done.values[parts] = kept
        done.lines.append(f"{path}: {shown(value)} is read as {shown(kept)}" + (f" ({rule.note})" if rule.note else ""))
        if rule.note:
            done.notes[parts] = rule.note
    else:
        done.put(target, kept, rule.note, f"{path}: {shown(value, parts[-1])}")


def _looked_up(values: Mapping[Any, Any], value: Any) -> Any:
    """Return the entry of a value; `NOTHING` without one. Types must agree: True is not 1."""
    return next((new for old, new in values.items() if old == value and type(old) is type(value)), NOTHING)


def _filled(path: str, parts: Path, pattern: str) -> Path:
    """Return our path: each ``*`` is replaced by what matched the pattern's, and ``=`` is their whole path."""
    stars = [part for part, wanted in zip(parts, pattern.split("."), strict=False) if wanted == "*"]
    return parts if path == "=" else tuple(stars.pop(0) if part == "*" else part for part in path.split("."))


def rule_of(parts: Path, rules: Mapping[str, Rule]) -> tuple[str, Rule] | None:
    """Return the pattern and the rule of a key; None without one. An exact name takes precedence over patterns.

    ``**.x`` matches ``x`` in any section, ``a.**`` everything below ``a``, and ``*`` one part.
    """
    path = ".".join(parts)
    if path in rules:
        return path, rules[path]
    return next((each for each in rules.items() if "*" in each[0] and _matches(parts, each[0])), None)


def _matches(parts: Path, pattern: str) -> bool:
    wanted = pattern.split(".")
    if wanted[0] == "**":
        wanted = wanted[1:]
        parts = parts[-len(wanted) :]
    elif wanted[-1] == "**":
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def whole(value: Any) -> int | None:
    """Return the value if it is a whole number above 0, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def in_epochs(origin: str, epochs: Any) -> str:
    """Return the message for a run whose length is given in epochs, or not at all (None)."""
    given = "their number was not given" if epochs is None else f"there are {epochs}"
    return f"{origin} counts epochs, and {given}: prompts of the data x epochs / `rollout_batch_size`"


def put_trackers(done: Translation, key: str, project: Any, no_trackers: Collection[str]) -> list[str]:
    """Set the trackers that their key names, and the project of each. Return the supported ones.

    Names in ``no_trackers`` stand for no tracker; any other unsupported name is reported as lost.
    """
    names = done.get(key, [])
    names = names if isinstance(names, list) else [names]
    known = [name for name in names if name in (TENSORBOARD, *TRACKERS.built_in)]
    for name in names:
        if name not in known and name not in no_trackers:
            done.lose(key, name, "there is no such tracker")
    done.put("track_with", known or [TENSORBOARD])
    for name in known:
        if project is not None and name != TENSORBOARD:
            done.put(f"tracker_kwargs.{name}.project", project)
    return known


def leaves(tree: Mapping[str, Any], parts: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of each key in a tree whose value is not a mapping, or an empty one."""
    for key, value in tree.items():
        path = (*parts, key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the tree with these leaves (see `leaves`). A mapping wins over a plain value at the same path."""
    tree: dict[str, Any] = {}
    for parts, value in values.items():
        section = tree
        for part in parts[:-1]:
            below = section.setdefault(part, {})
            if not isinstance(below, dict):
                below = section[part] = {}
            section = below
        if not isinstance(section.get(parts[-1]), dict) or not section[parts[-1]]:
            section[parts[-1]] = dict(value) if isinstance(value, dict) else value
    return tree
