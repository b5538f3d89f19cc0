"""No option is dead: what a user may write is read where something is done about it.

mypy says whose field an expression such as `role.device` reads, so that equal names of other classes
do not count, nor does what only writes. Modules that only judge, document, print or estimate do not count either: an
option that is checked and then forgotten is dead. A class that several roles share counts as a whole; that some of them
do not read a key is `UNREAD_KEYS` of the schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest
from mypy import build
from mypy.find_sources import create_source_list
from mypy.modulefinder import BuildSource
from mypy.nodes import AssignmentStmt, DelStmt, Lvalue, MemberExpr, TypeInfo
from mypy.options import Options
from mypy.traverser import TraverserVisitor
from mypy.types import Instance, Type, TypeVarType, UnionType, get_proper_type

from roll.configs import derived
from roll.configs.rules_envs import groups_are_enough
from roll.configs.schema import ROLL_KNOBS, ActorTrainConfig, AgenticConfig, EnvManagerConfig, RLVRConfig
from roll.configs.structure import alternatives, field_types

PACKAGE = Path(__file__).resolve().parent.parent.parent / "roll"

Option = tuple[str, str]
"""Class and field."""

DERIVING = {"roll.configs.derived", "roll.configs.device_mapping"}
"""Modules of `roll/configs` that work for the run; all others of that room judge, document, print or estimate."""


def does_something(module: str) -> bool:
    """Whether a read in this module of the package counts."""
    return not module.startswith("roll.configs") or module in DERIVING


def options_read(sources: list[BuildSource], schema: str, counts: Callable[[str], bool]) -> set[Option]:
    """The fields of classes of the module ``schema`` that modules which count read."""
    options = Options()
    options.incremental = False
    options.export_types = options.preserve_asts = True
    options.check_untyped_defs = True
    # What is read of a configuration is said by our own types; `make check` sees to it that these hold.
    options.ignore_errors = options.ignore_missing_imports = True
    options.follow_imports = "skip"
    result = build.build(sources, options)
    read: set[Option] = set()
    for module, state in result.graph.items():
        if state.tree is not None and counts(module):
            state.tree.accept(_Reads(schema, result.types, read))
    return read


class _Reads(TraverserVisitor):
    """Notes the class and the name of each attribute that is read."""

    def __init__(self, schema: str, types: dict, read: set[Option]) -> None:
        super().__init__()
        self._schema = schema
        self._types = types
        self._read = read

    def visit_member_expr(self, expression: MemberExpr, /) -> None:
        super().visit_member_expr(expression)
        for owner in _classes(self._types.get(expression.expr)):
            definer = next((base for base in owner.mro if expression.name in base.names), None)
            if definer is not None and definer.module_name == self._schema:
                self._read.add((definer.name, expression.name))

    def visit_assignment_stmt(self, statement: AssignmentStmt, /) -> None:
        for target in statement.lvalues:
            self._visit_target(target)
        statement.rvalue.accept(self)

    def visit_del_stmt(self, statement: DelStmt, /) -> None:
        self._visit_target(statement.expr)

    def _visit_target(self, target: Lvalue) -> None:
        """What is written to is not read; only what leads there is."""
        (target.expr if isinstance(target, MemberExpr) else target).accept(self)


def _classes(kind: Type | None) -> Iterator[TypeInfo]:
    kind = None if kind is None else get_proper_type(kind)
    if isinstance(kind, Instance):
        yield kind.type
    elif isinstance(kind, UnionType):
        for member in kind.items:
            yield from _classes(member)
    elif isinstance(kind, TypeVarType):
        for bound in (kind.upper_bound, *kind.values):
            yield from _classes(bound)


@cache
def read_in_the_package() -> frozenset[Option]:
    options = Options()
    sources = create_source_list([str(PACKAGE)], options)
    return frozenset(options_read(sources, "roll.configs.schema", does_something))


def all_options(roots: Collection[type]) -> set[Option]:
    """The fields of all dataclasses that can be reached from these, by the class that defines them."""
    found: set[type] = set()
    to_do = list(roots)
    while to_do:
        cls = to_do.pop()
        if cls in found:
            continue
        found.add(cls)
        to_do += [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        to_do += [inner for kind in field_types(cls).values() for inner in _dataclasses_in(kind)]
    return {(cls.__name__, name) for cls in found for name in vars(cls).get("__annotations__", ())}


def _dataclasses_in(kind: object) -> Iterator[type]:
    for option in alternatives(kind):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            yield option
        for argument in getattr(option, "__args__", ()):
            yield from _dataclasses_in(argument)


READ_BY_NAME = {("ActorTrainConfig", name) for name in ROLL_KNOBS}
"""Read from a table of names; `test_each_of_rolls_knobs_arrives` proves it."""


KEPT_BY_REFUSAL = {("EnvManagerConfig", "max_traj_per_env")}
"""An upper bound on what a step needs in the mean, which is known before the run: all it does is refuse one that needs
more. `test_a_bound_that_a_step_exceeds_is_refused` proves that."""


def dead(options: Collection[Option], read: Collection[Option]) -> list[str]:
    return sorted(f"{cls}.{name}" for cls, name in set(options) - set(read) - READ_BY_NAME - KEPT_BY_REFUSAL)


def test_no_option_is_dead():
    options = all_options([RLVRConfig, AgenticConfig])
    assert {("PipelineConfig", "max_steps"), ("ModelArguments", "dtype"), ("ChaosEvent", "kind")} <= options
    assert dead(options, read_in_the_package()) == []


@pytest.mark.parametrize("planted", [("ActorTrainConfig", "name"), ("RewardConfig", "device"), ("ChaosConfig", "size")])
def test_a_planted_option_is_found_although_others_have_its_name(planted):
    """Each is an attribute that the package reads of other classes."""
    options = all_options([RLVRConfig, AgenticConfig])
    assert dead(options | {planted}, read_in_the_package()) == [".".join(planted)]


@pytest.mark.parametrize("name", ROLL_KNOBS)
def test_each_of_rolls_knobs_arrives(name):
    config = RLVRConfig(actor_train=ActorTrainConfig(**{name: 0.625}))
    assert derived.pg_variant_args(config)[ROLL_KNOBS[name][1]] == 0.625


def test_a_bound_that_a_step_exceeds_is_refused():
    manager = EnvManagerConfig(num_env_groups=4, max_traj_per_env=2)
    assert not list(groups_are_enough(AgenticConfig(rollout_batch_size=8, train_env_manager=manager)))
    (problem,) = groups_are_enough(AgenticConfig(rollout_batch_size=9, train_env_manager=manager))
    assert problem.path == "train_env_manager.max_traj_per_env"


SCHEMA = """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class Part:
    name: str = ""
    in_union: int = 0
    in_list: int = 0
    in_call: int = 0

@dataclass
class Base:
    inherited: int = 0
    from_below: int = 0

@dataclass
class Root(Base):
    part: Part = field(default_factory=Part)
    maybe: Part | None = None
    parts: list[Part] = field(default_factory=list)
    written: int = 0
    removed: int = 0
    judged: int = 0
    unknown_owner: int = 0
    other_class: int = 0
    bound: int = 0
    path: str = ""
"""
WORK = """
from typing import Any, TypeVar
from tiny.schema import Base, Part, Root

Config = TypeVar("Config", bound=Root)

class Other:
    other_class: int = 0
    name: str = ""

def first(parts: list[Part]) -> Part:
    return parts[0]

def work(root: Root, anything: Any, other: Other, either: Part | Other) -> list[object]:
    root.written = 1
    del root.removed
    root.part.name = "x"
    anything.unknown_owner
    return [
        root.inherited, other.other_class, [part.in_list for part in root.parts], first(root.parts).in_call,
        root.maybe.in_union if root.maybe is not None else 0, lambda: root.path.upper(),
    ]

def generic(config: Config) -> int:
    return config.bound

def below(base: Base) -> int:
    root = base
    return root.from_below

def untyped(root):
    return root.unknown_owner
"""
JUDGE = """
from tiny.schema import Root

def judge(root: Root) -> bool:
    return root.judged > 0
"""


def test_only_what_is_read_of_the_class_itself_counts(tmp_path):
    """Written, deleted, judged, read of another class or of who knows what: none of these is a use."""
    package = tmp_path / "tiny"
    package.mkdir()
    sources = []
    for name, text in {"__init__": "", "schema": SCHEMA, "work": WORK, "judge": JUDGE}.items():
        (package / f"{name}.py").write_text(text)
        module = "tiny" if name == "__init__" else f"tiny.{name}"
        sources.append(BuildSource(str(package / f"{name}.py"), module, None))
    read = options_read(sources, "tiny.schema", lambda module: module == "tiny.work")
    assert read == {
        ("Base", "inherited"),
        ("Base", "from_below"),
        ("Root", "part"),
        ("Root", "maybe"),
        ("Root", "parts"),
        ("Root", "bound"),
        ("Root", "path"),
        ("Part", "in_union"),
        ("Part", "in_list"),
        ("Part", "in_call"),
    }
