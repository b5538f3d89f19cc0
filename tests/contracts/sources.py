"""Definitions in the sources of libraries, found without importing them: what a name stands for, the members of a class
with its bases, and signatures.

Imports would need CUDA, or ten seconds, or the library in the environment. The same code reads an installed package,
and a wheel that was unpacked somewhere (`python -m tests.contracts.check`).
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path

import roll

VARIABLE = "ROLL_CONTRACT_SOURCES"
"""Environment variable: folder of unpacked wheels, which go before the installed packages."""
Definition = ast.stmt | ast.alias
Function = ast.FunctionDef | ast.AsyncFunctionDef
OWN, KEYWORD = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
RECORDS = ("dataclass", "config", "Struct", "BaseModel", "NamedTuple", "ConfigModel", "DeepSpeedConfigModel")
"""Decorators and bases that make annotated names the arguments of a class."""


def folders() -> list[Path]:
    """Where libraries are looked for, the chosen wheels first."""
    chosen = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    return [*chosen, *(Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib"))]


def unpacked(library: str) -> Path | None:
    """Return the folder of a library among the chosen wheels, if it is one of them."""
    folder = Path(os.environ.get(VARIABLE, "nowhere")) / library
    return folder if folder.is_dir() else None


class Missing(LookupError):
    """A library does not have what we use of it."""


@dataclass(frozen=True)
class Symbol:
    """A module, a class, a function, or another name that is defined."""

    module: Module
    node: ast.AST
    name: str
    owner: Symbol | None = None
    """Class that it is a member of."""

    def __str__(self) -> str:
        place = f"{self.owner}." if self.owner else f"{self.module.name}." if self.name else self.module.name
        return place + self.name

    @property
    def is_class(self) -> bool:
        """True if the name is that of a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_function(self) -> bool:
        """True if it can be called with the arguments of its definition; a property cannot."""
        return isinstance(self.node, Function) and not any(word.endswith("property") for word in decorators(self.node))


@dataclass
class Module:
    """A file with what it defines."""

    name: str
    file: Path

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed source."""
        return ast.parse(self.file.read_text(encoding="utf-8"))

    @cached_property
    def definitions(self) -> dict[str, list[Definition]]:
        """Name -> statements that give it a meaning, in whatever branch."""
        found: dict[str, list[Definition]] = {}
        for name, node in _defined(self.tree.body):
            found.setdefault(name, []).append(node)
        return found

    @cached_property
    def starred(self) -> list[ast.ImportFrom]:
        """Imports of everything."""
        return [each for each in ast.walk(self.tree) if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"]

    @cached_property
    def origin(self) -> dict[int, ast.ImportFrom]:
        """Identity of an imported name's node -> its statement."""
        imports = (each for each in ast.walk(self.tree) if isinstance(each, ast.ImportFrom))
        return {id(alias): each for each in imports for alias in each.names}

    def absolute(self, statement: ast.ImportFrom) -> str:
        """Return the full name of the module that a statement imports from."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - statement.level + (self.file.name == "__init__.py")]
        return ".".join([*kept, *([statement.module] if statement.module else [])])


class Sources:
    """Libraries below some folders; earlier folders win."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = [*places, Path(roll.__file__).parents[1]]
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], Symbol] = {}
        self._sought: set[tuple[str, str]] = set()

    def replacing(self, module: Module) -> Sources:
        """Return sources with this module in the place of their own; the others are not parsed again."""
        changed = Sources(self.places[:-1])
        changed._modules = self._modules | {module.name: module}
        return changed

    def module(self, name: str) -> Module | None:
        """Return a module by its full name. A folder without ``__init__.py`` is a module without definitions."""
        if name not in self._modules:
            self._modules[name] = self._opened(name)
        return self._modules[name]

    def _opened(self, name: str) -> Module | None:
        path = Path(*name.split("."))
        top = path.parts[0]
        for place in self.places:
            for file in (place / path / "__init__.py", (place / path).with_suffix(".py")):
                if file.is_file():
                    return Module(name, file)
            if (place / path).is_dir():
                return Module(name, Path(os.devnull))
            if (place / top).is_dir():  # another release of the same library must not fill its gaps
                return None
        return None

    def find(self, name: str) -> Symbol:
        """Return what a full name stands for. Raises `Missing` naming what lacks."""
        parts = name.split(".")
        module = self.module(parts[0])
        if module is None:
            raise Missing(f"{parts[0]} has no sources here")
        symbol = Symbol(module, module.tree, "")
        for part in parts[1:]:
            following = self.member(symbol, part)
            if following is None:
                raise Missing(f"{symbol} has no {part!r}")
            symbol = following
        return symbol

    def member(self, symbol: Symbol, name: str) -> Symbol | None:
        """Return what a module or a class has under a name; None if nothing."""
        if isinstance(symbol.node, ast.Module):
            return self._in_module(symbol.module, name)
        return self._in_class(symbol, name) if symbol.is_class else None

    def _in_module(self, module: Module, name: str) -> Symbol | None:
        key = module.name, name
        if key in self._found or key in self._sought:  # modules import each other in circles
            return self._found.get(key)
        self._sought.add(key)
        symbol = self._looked_up(module, name)
        self._sought.discard(key)
        if symbol is not None:
            self._found[key] = symbol
        return symbol

    def _looked_up(self, module: Module, name: str) -> Symbol | None:
        for node in reversed(module.definitions.get(name, [])):
            if not isinstance(node, ast.alias):
                return Symbol(module, node, name)
            found = self._imported(module, node)
            if found is not None:
                return found
        submodule = self.module(f"{module.name}.{name}")
        if submodule is not None:
            return Symbol(submodule, submodule.tree, "")
        for statement in module.starred:
            source = self.module(module.absolute(statement))
            found = source and self._in_module(source, name)
            if found:
                return found
        return None

    def _imported(self, module: Module, alias: ast.alias) -> Symbol | None:
        statement = module.origin.get(id(alias))
        try:
            if statement is None:
                return self.find(alias.name if alias.asname else alias.name.partition(".")[0])
            source = self.module(module.absolute(statement))
            return None if source is None else self._in_module(source, alias.name)
        except Missing:
            return None

    def _in_class(self, owner: Symbol, name: str) -> Symbol | None:
        for each in (owner, *self.bases(owner)):
            body = [node for found, node in _defined(each.node.body) if found == name]  # type: ignore[attr-defined]
            if body:
                return Symbol(each.module, body[-1], name, each)
            for node in ast.walk(each.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                    if ast.unparse(node.value) == "self":
                        return Symbol(each.module, node, name, each)
        return None

    def bases(self, owner: Symbol) -> Iterator[Symbol]:
        """Yield the classes that a class inherits from, nearest first, as far as they have sources."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            found = self.named(owner.module, base.value if isinstance(base, ast.Subscript) else base)
            if found is not None and found.is_class:
                yield found
                yield from self.bases(found)

    def abstract_methods(self, owner: Symbol) -> set[str]:
        """Return the names of methods that a class leaves to those that inherit from it; a protocol leaves them all."""
        names = {name for each in (owner, *self.bases(owner)) for name, _ in _defined(each.node.body)}  # type: ignore[attr-defined]
        found = [self._in_class(owner, name) for name in names]
        methods = [each for each in found if each is not None and isinstance(each.node, Function)]
        return {
            each.name
            for each in methods
            if "Protocol" in _head(each.owner) or any("abstract" in word for word in decorators(each.node))  # type: ignore[arg-type]
        }

    def named(self, module: Module, expression: ast.expr) -> Symbol | None:
        """Return what a dotted name stands for in a module."""
        names = ast.unparse(expression).split(".")
        symbol = self._in_module(module, names[0])
        for name in names[1:]:
            symbol = symbol and self.member(symbol, name)
        return symbol

    def signature(self, symbol: Symbol) -> Signature:
        """Return what a function, or a class, is called with. Raises `Missing` if it cannot be called."""
        if symbol.is_function:
            return self._function_signature(symbol)
        if not symbol.is_class:
            raise Missing(f"{symbol} is not called by its definition")
        lineage = [symbol, *self.bases(symbol)]
        for number, each in enumerate(lineage):
            for name in ("__init__", "__new__"):
                body = [node for found, node in _defined(each.node.body) if found == name]  # type: ignore[attr-defined]
                if body:
                    return self._function_signature(Symbol(each.module, body[-1], name, each))
            if _is_record(each, lineage[number:]):
                return self._record_signature(lineage[number:])
        return Signature()

    def _function_signature(self, symbol: Symbol) -> Signature:
        found = _signature_of(symbol)
        return found.replace(
            parameters=[self._without_alias(symbol.module, each) for each in found.parameters.values()]
        )

    def _without_alias(self, module: Module, parameter: Parameter) -> Parameter:
        """Return the parameter with the annotation that an alias stands for."""
        annotation = parameter.annotation
        alias = self.named(module, annotation) if isinstance(annotation, (ast.Name, ast.Attribute)) else None
        if alias is None or not isinstance(alias.node, (ast.Assign, ast.AnnAssign)) or alias.node.value is None:
            return parameter
        return parameter.replace(annotation=alias.node.value)

    def _record_signature(self, lineage: Sequence[Symbol]) -> Signature:
        fields: dict[str, Parameter] = {}
        keywords_only = any("kw_only=True" in _head(each) or "BaseModel" in _head(each) for each in lineage)
        for each in reversed(lineage):
            for node in each.node.body:  # type: ignore[attr-defined]
                if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                    continue
                if "ClassVar" in ast.unparse(node.annotation) or "init=False" in ast.unparse(node.value or node.target):
                    continue
                default = Parameter.empty if _is_required(node.value) else node.value
                name = node.target.id
                kind = KEYWORD if keywords_only or "kw_only=True" in ast.unparse(node.value or node.target) else OWN
                field = Parameter(name, kind, default=default, annotation=node.annotation)
                fields[name] = self._without_alias(each.module, field)
        # As a data class would have it: keywords last, and nothing required after a default.
        order = sorted(fields.values(), key=lambda each: (each.kind, each.default is not Parameter.empty))
        return Signature(order)


def decorators(function: Function | ast.ClassDef) -> list[str]:
    """Return the decorators as text, without their arguments."""
    return [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in function.decorator_list]


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name.partition(".")[0], alias) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (name.id, node)
                for each in targets
                for name in ast.walk(each)
                if isinstance(getattr(name, "ctx", None), ast.Store) and isinstance(name, ast.Name)
            )
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)


def _signature_of(symbol: Symbol) -> Signature:
    """Return the signature of a function; that of a method as it is called on an object."""
    assert isinstance(symbol.node, Function)
    arguments = symbol.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [Parameter.empty] * (len(positional) - len(arguments.defaults))
    parameters = [
        Parameter(each.arg, OWN, default=default, annotation=each.annotation)
        for each, default in zip(positional, [*missing, *arguments.defaults], strict=True)
    ]
    if symbol.owner is not None and "staticmethod" not in decorators(symbol.node):
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = Parameter.empty if default is None else default
        parameters.append(Parameter(each.arg, KEYWORD, default=value, annotation=each.annotation))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _head(symbol: Symbol) -> str:
    assert isinstance(symbol.node, ast.ClassDef)
    parts = [*symbol.node.decorator_list, *symbol.node.bases, *symbol.node.keywords]
    return " ".join(ast.unparse(part) for part in parts)


def _is_record(symbol: Symbol, lineage: Sequence[Symbol]) -> bool:
    assert isinstance(symbol.node, ast.ClassDef)
    if any(name.rpartition(".")[2] in RECORDS for name in decorators(symbol.node)):
        return True
    bases = " ".join(ast.unparse(base) for each in lineage for base in each.node.bases)  # type: ignore[attr-defined]
    return any(f"{record}" in bases for record in RECORDS[2:])


def _is_required(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("field", "Field"):
        return not value.args and not any("default" in (each.arg or "") for each in value.keywords)
    return value is None
