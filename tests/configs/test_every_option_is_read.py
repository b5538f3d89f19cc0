"""No option is dead: what a user may write is read where something is done about it.

mypy says whose field an expression such as `role.device` reads, so that equal names of other classes do not count, nor
does what only writes: it checks the package with a schema whose fields are properties marked as deprecated, and reports
each use. Modules that only judge, document, print or estimate do not count either: an option that is checked and then
forgotten is dead. A class that several roles share counts as a whole; that some of them do not read a key is
`UNREAD_KEYS` of the schema.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from roll.check.data import groups_are_enough
from roll.configs import derived
from roll.configs.fields import alternatives, field_types
from roll.configs.roles import ROLL_ARGUMENTS, ActorTrainConfig
from roll.configs.run import AgenticConfig, EnvManagerConfig, RLVRConfig, SFTConfig

pytestmark = pytest.mark.tier("all")  # mypy looks at the whole package, as in `make check`

PACKAGE = Path(__file__).resolve().parent.parent.parent / "roll"

Option = tuple[str, str]
"""Class and field."""

DERIVING = {"configs/derived.py", "configs/devices.py", "configs/pictures.py"}
"""Modules of `roll/configs` that work for the run; all others there and in `roll/check` judge, document or estimate."""
SCHEMA_FILES = ("configs/rewards.py", "configs/roles.py", "configs/run.py")

MYPY = (
    *(sys.executable, "-m", "mypy", "--config-file=", "--no-incremental", "--cache-dir=/dev/null"),
    *("--python-version=3.11", "--check-untyped-defs", "--enable-error-code=deprecated", "--no-error-summary"),
    # What is read of a configuration is said by our own types; `make check` sees to it that these hold.
    *("--follow-imports=skip", "--ignore-missing-imports"),
)
USE = re.compile(
    r"^(?P<file>[^:]+):(?P<line>\d+): error: .* is deprecated: (?P<cls>\w+)\.(?P<name>\w+)  \[deprecated\]$",
    re.MULTILINE,
)
WRITTEN = re.compile(
    r'^(?P<file>[^:]+):(?P<line>\d+): error: Property "(?P<name>\w+)" defined in "\w+" is read-only', re.MULTILINE
)
Place = tuple[str, str, str]
"""File, line and field."""


def does_something(file: str) -> bool:
    """Whether a read in this module of the package counts."""
    return not file.startswith(("configs/", "check/")) or file in DERIVING


def options_read(package: Path, schema: Sequence[str], counts: Callable[[str], bool]) -> frozenset[Option]:
    """The fields of data classes in ``schema``, files of a package, that its files which count read."""
    with tempfile.TemporaryDirectory() as folder:
        shadows: list[str] = []
        for source in map(package.joinpath, schema):
            text = source.read_text(encoding="utf-8")
            if "@dataclass" in text:
                marked = Path(folder) / source.name
                marked.write_text(with_marked_fields(text))
                shadows += ["--shadow-file", str(source.relative_to(package.parent)), str(marked)]
        command = [*MYPY, *shadows, package.name]
        told = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, timeout=280)
    written = {_place(match) for match in WRITTEN.finditer(told.stdout)}
    uses = [match for match in USE.finditer(told.stdout) if _place(match) not in written]
    assert uses, f"mypy tells of no use at all: {told.stdout[-2000:]} {told.stderr[-2000:]}"
    prefix = f"{package.name}/"
    return frozenset((use["cls"], use["name"]) for use in uses if counts(use["file"].removeprefix(prefix)))


def _place(match: re.Match[str]) -> Place:
    return match["file"], match["line"], match["name"]


def with_marked_fields(source: str) -> str:
    """A module whose data classes have properties for fields: using one is deprecated, setting it an error besides.
    (Of a property with a setter mypy does not tell at all.)"""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "dataclass" in map(ast.unparse, node.decorator_list):
            node.body = [marked for each in node.body for marked in _marked(node.name, each)]
    after_future = next(
        index for index, each in enumerate(tree.body, start=1) if ast.unparse(each).startswith("from __future__")
    )
    tree.body[after_future:after_future] = ast.parse("import typing_extensions as _marks").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _marked(cls: str, statement: ast.stmt) -> list[ast.stmt]:
    if not isinstance(statement, ast.AnnAssign):
        return [statement]
    name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
    return ast.parse(f"@property\n@_marks.deprecated({f'{cls}.{name}'!r})\ndef {name}(self) -> {kind}: ...").body


@cache
def read_in_the_package() -> frozenset[Option]:
    return options_read(PACKAGE, SCHEMA_FILES, does_something)


def owners(roots: Collection[type]) -> dict[Option, Option]:
    """The fields of all dataclasses that can be reached from these, and for each the one that it is: of a field that a
    class declares again, with a narrower type or another default, the first declaration."""
    found: dict[Option, Option] = {}
    seen: set[type] = set()
    to_do = list(roots)
    while to_do:
        cls = to_do.pop()
        if cls in seen:
            continue
        seen.add(cls)
        lineage = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
        for name in vars(cls).get("__annotations__", ()):
            first = next(base for base in lineage if name in vars(base).get("__annotations__", ()))
            found[cls.__name__, name] = first.__name__, name
        to_do += lineage
        to_do += [inner for kind in field_types(cls).values() for inner in _dataclasses_in(kind)]
    return found


def _dataclasses_in(kind: object) -> Iterator[type]:
    for option in alternatives(kind):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            yield option
        for argument in getattr(option, "__args__", ()):
            yield from _dataclasses_in(argument)


READ_BY_NAME = {("ActorTrainConfig", name) for name in ROLL_ARGUMENTS}
"""Read from a table of names; `test_each_of_rolls_arguments_arrives` proves it."""


KEPT_BY_REFUSAL = {("EnvManagerConfig", "max_traj_per_env")}
"""An upper bound on what a step needs in the mean, which is known before the run: all it does is refuse one that needs
more. `test_a_bound_that_a_step_exceeds_is_refused` proves that."""


OWNERS = owners([RLVRConfig, AgenticConfig, SFTConfig])
OPTIONS = set(OWNERS.values())


def dead(options: Collection[Option], read: Collection[Option]) -> list[str]:
    """Those of ``options`` that nothing reads."""
    alive = {OWNERS.get(option, option) for option in read} | READ_BY_NAME | KEPT_BY_REFUSAL
    return sorted(".".join(option) for option in set(options) - alive)


def test_no_option_is_dead():
    assert {("RunConfig", "max_steps"), ("ModelArguments", "dtype"), ("ChaosEvent", "kind")} <= OPTIONS
    assert dead(OPTIONS, read_in_the_package()) == []


@pytest.mark.parametrize("planted", [("ActorTrainConfig", "name"), ("RewardConfig", "device"), ("ChaosConfig", "size")])
def test_a_planted_option_is_found_although_others_have_its_name(planted):
    """Each is an attribute that the package reads of other classes."""
    assert dead(OPTIONS | {planted}, read_in_the_package()) == [".".join(planted)]


@pytest.mark.parametrize("name", ROLL_ARGUMENTS)
def test_each_of_rolls_arguments_arrives(name):
    config = RLVRConfig(actor_train=ActorTrainConfig(**{name: 0.625}))
    assert derived.pg_variant_args(config)[ROLL_ARGUMENTS[name][1]] == 0.625


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
    """Written, judged, read of another class or of who knows what: none of these is a use."""
    package = tmp_path / "tiny"
    package.mkdir()
    for name, text in {"__init__": "", "schema": SCHEMA, "work": WORK, "judge": JUDGE}.items():
        (package / f"{name}.py").write_text(text)
    assert options_read(package, ["schema.py"], lambda file: file == "work.py") == {
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
