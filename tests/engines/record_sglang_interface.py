"""Writes down what SGLang's own sources say of the calls that the adapter makes: `sglang_interface.json`.

SGLang needs a GPU and cannot be installed where the tests run, but its sources can be read anywhere. To renew the
table:

    python -m tests.contracts.check --keep /tmp/sglang sglang==<version>
    python -m tests.engines.record_sglang_interface /tmp/sglang/sglang <version>

Nothing of SGLang is imported or run. What is read: which addresses the server has and the fields of what they are sent,
the schema that `/generate` is checked against, server arguments, variables of the environment, the names in what is
answered, and what is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.engines.options import read_sglang_argument_names
from tests.contracts.sources import Sources
from tests.contracts.uses import uses_of

TABLE = Path(__file__).with_name("sglang_interface.json")
USED = """
/health /server_info /model_info /generate /abort_request /pause_generation /continue_generation /flush_cache
/update_weights_from_disk /weights_checker /get_weights_by_name /release_memory_occupation /resume_memory_occupation
/v1/loads
""".split()
VARIABLES = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
STREAMED = {
    "managers/tokenizer_manager.py": ("_handle_batch_output", "add_logprob_to_meta_info"),
    "utils/weight_versions.py": ("add_weight_versions_to_meta_info",),
}
"""Who writes an answer of `/generate`."""


def interface_of(package: Path, version: str) -> dict[str, Any]:
    """The table of the package in this folder."""
    runtime, sources = package / "srt", Sources([package.parent])
    structs = _classes(runtime / "managers" / "io_struct.py")
    files = ("http_server.py", "v1_loads.py")
    endpoints = dict(found for file in files for found in _endpoints(runtime / "entrypoints" / file))
    answers = {path: found.pop("answer") for path, found in endpoints.items()}
    answers["/generate"] = sorted(
        {key for file, names in STREAMED.items() for key in _keys(_functions(runtime / file, names))}
    )
    load = _classes(runtime / "managers" / "load_snapshot.py")["LoadSnapshot"]
    answers["/v1/loads"] = sorted({*answers["/v1/loads"], *_fields(load, {})})
    reasons = [node for name, node in _classes(runtime / "managers" / "schedule_batch.py").items() if "FINISH" in name]
    variables = (runtime / "environ.py").read_text(encoding="utf-8")
    bodies = sorted({found["body"] for found in endpoints.values() if found["body"]})
    return {
        "version": version,
        "endpoints": endpoints,
        "bodies": {name: _fields(structs[name], structs) for name in bodies},
        "schema": _schema(package / "api" / "v1" / "api_types.py", ("GenerateRequest", "SamplingParams")),
        "server_arguments": " ".join(sorted(read_sglang_argument_names(runtime))),
        "environment": [name for name in VARIABLES if f"\n    {name} = " in variables],
        "answers": answers,
        "imports": {use.name: use.problem(sources) for use in uses_of("sglang", sources)},
        "finish_reasons": sorted({key for reason in reasons for key in _keys([reason])}),
    }


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef)}


def _functions(file: Path, names: tuple[str, ...]) -> list[ast.AST]:
    found = [node for node in ast.walk(_tree(file)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [next(node for node in found if node.name == name) for name in names]


def _keys(nodes: list[Any]) -> set[str]:
    """Names under which these functions put something into a dictionary."""
    keys: set[Any] = set()
    for node in (each for root in nodes for each in ast.walk(root)):
        if isinstance(node, ast.Dict):
            keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
            keys.add(node.slice.value)
    return {key for key in keys if isinstance(key, str)}


def _fields(struct: ast.ClassDef, others: dict[str, ast.ClassDef]) -> dict[str, dict[str, Any]]:
    """Fields of a class and of its bases: the annotation, and whether there is no default."""
    fields: dict[str, dict[str, Any]] = {}
    for base in struct.bases:
        if isinstance(base, ast.Name) and base.id in others:
            fields |= _fields(others[base.id], others)
    for node in struct.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = {"type": ast.unparse(node.annotation), "required": node.value is None}
    return fields


def _schema(file: Path, names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Fields of a schema's objects, with the names of types written out."""
    aliases = {
        node.targets[0].id: node.value
        for node in _tree(file).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    class WriteOut(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return self.visit(aliases[node.id]) if node.id in aliases else node

    return {
        name: {
            field.target.id: ast.unparse(WriteOut().visit(field.annotation))
            for field in _classes(file)[name].body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for name in names
    }


def _endpoints(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Addresses that are used, with their methods, what they are sent, and the names of what they answer."""
    for function in _tree(file).body:
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        for decorator in function.decorator_list:
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
                continue
            path = decorator.args[0].value if decorator.args and isinstance(decorator.args[0], ast.Constant) else None
            if ast.unparse(decorator.func.value) not in ("app", "router") or path not in USED:
                continue
            methods = [decorator.func.attr.upper()]
            for keyword in decorator.keywords:
                if keyword.arg == "methods":
                    methods = ast.literal_eval(keyword.value)
            yield path, _sent(function) | {"methods": methods, "answer": sorted(_keys([function]))}


def _sent(function: ast.AsyncFunctionDef) -> dict[str, Any]:
    body, query = None, []
    for argument in function.args.args:
        if argument.annotation is None or ast.unparse(argument.annotation) == "Request":
            continue
        names = [node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)]
        if {*names} <= {"Optional", "int", "str", "float"}:
            query.append(argument.arg)
        else:
            (body,) = (name for name in names if name not in ("Annotated", "Optional", "Body"))
    return {"body": body, "query": query}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(interface_of(Path(sys.argv[1]), sys.argv[2]), indent=1) + "\n")
