"""Break one place at a time, and see whether the tests notice: `make mutants COUNT=60 SEED=1`.

Each mutant is one small change of the source (a comparison, an operator, a constant, a branch, a lost statement) in a
copy of the tree. The quick tests of its area run until the first failure; a mutant that lets them all pass has
survived: either a test is missing, or the change has no effect, and then `tests/mutants.toml` says why. Names and
wording are left alone. It ends with 1 if fewer than nine in ten were caught.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENOUGH = 0.9
COPIED = ("roll", "tests", "docs", "examples", "benchmarks")
PIPELINE, TRAINERS, WEIGHTS = "tests/pipeline", "tests/trainers", "tests/weights"
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "algorithms": (["roll/algorithms"], ["tests/algorithms"]),
    "rollout": (["roll/rollout"], ["tests/rollout"]),
    "weight update": (
        [
            "roll/weights/buckets.py",
            "roll/weights/transports.py",
            "roll/weights/buffers.py",
            "roll/weights/publisher.py:BucketPublisher,PushPublisher,copied,build_publisher,check_weights,_draw",
        ],
        [
            "tests/engines/test_hf_weights.py",
            f"{WEIGHTS}/test_weight_buffers.py",
            f"{WEIGHTS}/test_checksums.py",
            f"{WEIGHTS}/test_publishers.py",
            f"{WEIGHTS}/test_transports.py",
            f"{PIPELINE}/test_weight_folder.py",
            f"{WEIGHTS}/test_pushed_weights.py",
        ],
    ),
    "stages": (
        ["roll/pipeline/stages.py:param_update,validation_due,publication_due,gather,publish,announce"],
        [f"{PIPELINE}/test_publication_schedule.py", f"{PIPELINE}/test_weight_settings.py"],
    ),
    "checkpoints": (
        [
            "roll/pipeline/checkpoints.py",
            "roll/trainers/state.py:own_share,common_updates,write_state,StoredTensors,SavedState,state_file",
            "roll/trainers/worker.py:WritingProgress,Writing",
        ],
        [
            f"{TRAINERS}/test_sharded_state.py",
            f"{PIPELINE}/test_durability.py",
            f"{PIPELINE}/test_resume_point.py",
            f"{PIPELINE}/test_checkpoints.py",
            f"{TRAINERS}/test_writing.py",
        ],
    ),
}
"""Name -> what is changed (files, folders, or some definitions of a file), and the tests, fast ones first."""

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    area: str
    path: str
    line: int
    source: str
    """The whole file."""
    before: str
    after: str
    """The changed lines."""

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.before.splitlines()] + [f"+ {line}" for line in self.after.splitlines()]
        return "\n".join([f"{self.path}:{self.line}", *(f"    {line}" for line in lines)])


def mutations(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Each place of a file that can be changed, and what would stand there instead."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.arg | ast.Assert):
            if isinstance(node, ast.Raise):
                yield node, "pass"
            continue
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node.value)):
            continue
        if getattr(node, "name", None) == "__repr__" or getattr(node, "arg", None) == "strict":
            continue
        if isinstance(node, ast.expr | ast.stmt):
            for changed in _changes(node):
                yield node, changed
        yield from mutations(_without_types(node))


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[operator, *_]):
            yield _with(node, ops=[COMPARISONS[type(operator)](), *node.ops[1:]])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node):
            yield _with(node, op=OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            for left_out in range(len(node.values)):
                yield _with(node, values=[value for index, value in enumerate(node.values) if index != left_out])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Constant(value=bool()):
            yield str(not node.value)
        case ast.Constant(value=int() | float()):
            yield str(node.value + 1)
        case ast.If(test=test) if not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            yield f"if not ({ast.unparse(test)}):"
        case ast.Return(value=ast.expr() as value) if not _is_constant(value, None, True, False):
            yield "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Continue() | ast.Break():
            yield "break" if isinstance(node, ast.Continue) else "continue"


def _with(node: ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _without_types(node: ast.AST) -> ast.AST:
    """Leave out annotations and decorators, which compute nothing."""
    bare = copy.copy(node)
    for name in ("annotation", "returns", "decorator_list", "bases"):
        if hasattr(bare, name):
            setattr(bare, name, [] if name in ("decorator_list", "bases") else None)
    return bare


def _is_constant(value: ast.expr, *constants: object) -> bool:
    return isinstance(value, ast.Constant) and any(value.value is each for each in constants)


def _is_log(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("logger.")


def _is_text(node: ast.BinOp) -> bool:
    texts = (each for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))
    return any(True for _ in texts) or (isinstance(node.op, ast.BitOr) and ast.unparse(node).endswith("None"))


def mutants_of(area: str, target: str) -> Iterator[Mutant]:
    """All that can be made of a file, a folder, or some definitions of a file."""
    where, _, names = target.partition(":")
    for path in sorted((ROOT / where).rglob("*.py")) if (ROOT / where).is_dir() else [ROOT / where]:
        source = path.read_text()
        tree = ast.parse(source)
        if names:
            tree.body = [each for each in tree.body if getattr(each, "name", None) in names.split(",")]
        for node, changed in mutations(tree):
            yield _mutant(area, str(path.relative_to(ROOT)), source, node, changed)


def _mutant(area: str, path: str, source: str, node: ast.expr | ast.stmt, changed: str) -> Mutant:
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    start, end = node.col_offset, node.end_col_offset
    if isinstance(node, ast.If):  # only its first line: the branches stay as they are
        last, end = (node.test.end_lineno or node.lineno) - 1, None
        keyword = "elif" if lines[first].encode()[start:].startswith(b"elif") else "if"
        changed = changed.replace("if", keyword, 1) + "\n"
    before = "".join(lines[first : last + 1])
    tail = b"" if end is None else lines[last].encode()[end:]
    after = (lines[first].encode()[:start] + changed.encode() + tail).decode()
    return Mutant(area, path, first + 1, "".join([*lines[:first], after, *lines[last + 1 :]]), before, after)


class Workshop:
    """A copy of the tree in which mutants are tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tried = 0
        ignored = shutil.ignore_patterns("__pycache__", "output", "site", "model", ".*")
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.yml"), *ROOT.glob("*.md"), ROOT / "Makefile"):
            shutil.copy(path, folder)
        shutil.copytree(ROOT / "requirements", folder / "requirements")

    def survives(self, mutant: Mutant, limit: float) -> bool:
        path = self.folder / mutant.path
        whole = path.read_text()
        self._write(path, mutant.source)
        try:
            return self.passes(AREAS[mutant.area][1], limit)
        finally:
            self._write(path, whole)

    def passes(self, tests: list[str], limit: float) -> bool:
        """Run the tests; true if all pass within so many seconds."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tier", "quick", *tests]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return process.wait(limit) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _write(self, path: Path, source: str) -> None:
        """With a time of its own: compiled files of an earlier mutant of the same size must not be taken for it."""
        path.write_text(source)
        self.tried += 1
        os.utime(path, (self.tried, self.tried))


def draw(count: int, seed: int, areas: list[str]) -> list[Mutant]:
    """So many mutants, from each area alike. Those that are listed as equivalent are never drawn; an entry of the list
    that no mutant fits any more is an error."""
    listed = tomllib.loads((ROOT / "tests/mutants.toml").read_text()).get("equivalent", [])
    known = {(entry["path"], entry["before"], entry["after"]) for entry in listed}
    found: set[tuple[str, str, str]] = set()
    drawn: list[Mutant] = []
    to_come = len(areas)
    for area, (targets, _) in AREAS.items():
        able = []
        for mutant in (mutant for target in targets for mutant in mutants_of(area, target)):
            key = (mutant.path, mutant.before.strip(), mutant.after.strip())
            found.add(key)
            if key not in known:
                able.append(mutant)
        if area in areas:
            share = -(-(count - len(drawn)) // to_come)
            drawn += random.Random(f"{seed} {area}").sample(able, min(share, len(able)))
            to_come -= 1
    if not drawn:
        raise SystemExit("no mutant to try: --count is at least 1")
    if known - found:
        raise SystemExit(f"tests/mutants.toml names what is not there any more: {sorted(known - found)[0]}")
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--workers", type=int, default=2, help="how many at once")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS), help="what is changed")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed, options.areas)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.workers) as threads:
        workshops: queue.Queue[Workshop] = queue.Queue()
        for number in range(options.workers):
            workshops.put(Workshop(Path(folder, str(number))))
        limits: dict[str, float] = {}
        for area in options.areas:
            workshop, started = workshops.get(), time.monotonic()
            if not workshop.passes(AREAS[area][1], 1200):
                raise SystemExit(f"the tests of {area} fail as it is: {' '.join(AREAS[area][1])}")
            limits[area] = 30 + 4 * (time.monotonic() - started)
            workshops.put(workshop)

        def survives(mutant: Mutant) -> bool:
            workshop = workshops.get()
            try:
                return workshop.survives(mutant, limits[mutant.area])
            finally:
                workshops.put(workshop)

        survivors = []
        for mutant, survived in zip(drawn, threads.map(survives, drawn), strict=True):
            if survived:
                survivors.append(mutant)
                print(f"survived: {mutant}", flush=True)
    share = 1 - len(survivors) / len(drawn)
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} mutants caught ({share:.0%}; seed {options.seed})")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
