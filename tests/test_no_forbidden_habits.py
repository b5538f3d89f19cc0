"""Habits that have cost others weeks and are never ours: hidden failures, code made from text, pickled files, other
people's libraries patched.

The product's syntax trees are searched, so a comment or a text that mentions one is no offence, and an alias is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PRODUCT = ("roll", "examples")

FORBIDDEN_NAMES = {
    "os._exit": "ends a process without clean-up",
    "builtins.eval": "makes code from text",
    "builtins.exec": "makes code from text",
    "pickle.load": "executes what is in the file",
    "pickle.loads": "executes what is in the data",
    "pickle.Unpickler": "executes what is in the file",
    "cloudpickle.load": "executes what is in the file",
    "cloudpickle.loads": "executes what is in the data",
    "torch.load": "reads pickles; weights are safetensors",
}
GIVEN_BY_THE_CALLER = {
    "roll/configs/given.py: pickle.loads executes what is in the data",
    "roll/api/training.py: pickle.load executes what is in the file",
}
"""The only pickles that are loaded: objects that a Python program gave to `roll.train`. They come through a pipe from
that program and through arguments of workers, never from a file or a service."""
ENGINES = ("vllm", "sglang", "megatron", "deepspeed")
"""Used through their public interfaces: nothing of theirs is replaced."""
CONFIGURATION = re.compile(r"(?:^|_)(?:cfg|conf|config|configuration|args)$")


def offences(source: str) -> list[str]:
    """The bad habits in a module, as ``line: what``."""
    tree = ast.parse(source)
    aliases = _aliases(tree)
    return [f"{node.lineno}: {problem}" for node in ast.walk(tree) for problem in _problems(node, aliases)]


def _aliases(tree: ast.AST) -> dict[str, str]:
    """What the imported names of a module stand for, such as ``p`` -> ``pickle`` or ``load`` -> ``torch.load``."""
    names = {"eval": "builtins.eval", "exec": "builtins.exec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _problems(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        name = _dotted(node, aliases)
        if name in FORBIDDEN_NAMES:
            yield f"{name} {FORBIDDEN_NAMES[name]}"
        elif isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node, ast.Attribute) and _is_of_an_engine(name):
            yield f"{name} is replaced"
    elif isinstance(node, ast.ExceptHandler):
        yield from _handler_problems(node)
    elif isinstance(node, ast.Call):
        yield from _call_problems(node, aliases)


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """``p.load`` -> ``pickle.load``; empty where the expression is no name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _is_of_an_engine(name: str) -> bool:
    return name.split(".")[0] in ENGINES


def _handler_problems(handler: ast.ExceptHandler) -> Iterator[str]:
    if handler.type is None:
        yield "bare except"
        return
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in types)
    if broad and all(_does_nothing(statement) for statement in handler.body):
        yield "every exception caught and nothing done about it"


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def _call_problems(call: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if _dotted(call.func, aliases).split(".")[-1] == "gather" and _may_be_true(keywords.get("return_exceptions")):
        yield "gather(return_exceptions=True) swallows failures"
    if _dotted(call.func, aliases) == "numpy.load" and _may_be_true(keywords.get("allow_pickle")):
        yield "numpy.load(allow_pickle=True) executes what is in the file"
    if isinstance(call.func, ast.Name) and call.func.id in ("setattr", "delattr"):
        owner = _dotted(call.args[0], aliases)
        if _is_of_an_engine(owner):
            yield f"{owner} is patched"
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3:
        owner = _dotted(call.args[0], aliases).split(".")[-1]
        if CONFIGURATION.search(owner):
            yield f"getattr({owner}, ..., default): configuration is typed"


def _may_be_true(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and not value.value)


def product_modules() -> list[Path]:
    return sorted(path for folder in PRODUCT for path in (REPOSITORY / folder).rglob("*.py"))


def test_the_product_has_no_forbidden_habit():
    found = [
        f"{path.relative_to(REPOSITORY)}: {offence.partition(': ')[2]}"
        for path in product_modules()
        for offence in offences(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(GIVEN_BY_THE_CALLER)


def test_the_product_is_where_the_search_looks():
    assert REPOSITORY / "roll" / "configs" / "run.py" in product_modules()


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "f = exec",
        "import builtins\nbuiltins.eval('1')",
        "import os\nos._exit(1)",
        "from os import _exit as leave\nleave(1)",
        "try:\n    f()\nexcept:\n    g()",
        "try:\n    f()\nexcept Exception:\n    pass",
        "for x in y:\n    try:\n        f()\n    except (ValueError, BaseException):\n        continue",
        "try:\n    f()\nexcept Exception:\n    'it happens'",
        "import asyncio\nasync def f():\n    await asyncio.gather(a(), return_exceptions=True)",
        "from asyncio import gather\nasync def f(flag):\n    await gather(a(), return_exceptions=flag)",
        "def f(config):\n    return getattr(config, 'x', None)",
        "def f(self):\n    return getattr(self.training_args, 'x', 1)",
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from torch import load as read\nread(path)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import torch.nn\nimport torch.cuda\ntorch.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import vllm\nvllm.LLM.generate = mine",
        "from megatron.core import parallel_state as state\nstate.initialize = mine",
        "from deepspeed.runtime.engine import DeepSpeedEngine\nsetattr(DeepSpeedEngine, 'step', mine)",
        "from sglang.srt import server_args\ndel server_args.ServerArgs.check",
    ],
)
def test_a_bad_habit_is_found(source):
    assert len(offences(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "'eval(x) and pickle.load'  # torch.load",
        "import re\nre.compile('x').exec",
        "try:\n    f()\nexcept Exception as error:\n    raise RuntimeError('x') from error",
        "try:\n    f()\nexcept FileNotFoundError:\n    pass",
        "import asyncio\nasync def f():\n    await asyncio.gather(a(), return_exceptions=False)",
        "import torch.distributed as dist\ndist.gather(t, parts)",
        "def f(config, name):\n    return getattr(config, name)",
        "def f(module):\n    return getattr(module, 'x', None)",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "from vllm import AsyncEngineArgs\nself.engine = AsyncEngineArgs(model)\nself.engine.seed = 1",
        "import vllm\nversion = vllm.__version__\nsetattr(self, 'x', vllm)",
    ],
)
def test_a_good_habit_is_let_through(source):
    assert offences(source) == []
