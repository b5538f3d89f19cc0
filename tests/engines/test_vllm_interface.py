"""Calls that are made of vLLM fit the signatures of the installed release, those included that only GPUs reach."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import roll

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("vllm"), pytest.mark.timeout(300)]

ROLL = Path(roll.__file__).parent
CALLERS = (
    "engines/vllm/strategy.py",
    "engines/vllm/worker.py",
    "weights/publisher.py",
)
ENGINES = ("engine", "self._engine", "self._live_engine()")
"""How the strategy calls the engine."""


def tree_of(file: str) -> ast.Module:
    return ast.parse((ROLL / file).read_text())


def imported(file: str) -> dict[str, Any]:
    """What a module takes from vLLM, by the name that it has there."""
    return {
        alias.asname or alias.name: getattr(importlib.import_module(node.module), alias.name)
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "vllm"
        for alias in node.names
    }


def calls_of_vllm(file: str) -> Iterator[tuple[ast.Call, Callable[..., Any]]]:
    """Calls in a module, each with what is called."""
    from vllm.v1.engine.async_llm import AsyncLLM

    names = imported(file)
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, method = called.rpartition(".")
        if called in names:
            yield node, names[called]
        elif owner in names:
            yield node, getattr(names[owner], method)
        elif owner in ENGINES and file == CALLERS[0]:
            yield node, getattr(AsyncLLM, method).__get__(object())


def misfit(call: ast.Call, function: Callable[..., Any]) -> str | None:
    """Why a call does not fit; values are looked at where they are constants and the signature names the possible."""
    signature = inspect.signature(function)
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    try:
        bound = signature.bind(*call.args, **{each.arg: each.value for each in call.keywords})
    except TypeError as error:
        return str(error)
    for name, value in bound.arguments.items():
        possible = possible_values(function, signature.parameters[name].annotation)
        if possible and isinstance(value, ast.Constant) and value.value not in possible:
            return f"{name}={value.value!r} is none of {possible}"
    return None


def possible_values(function: Callable[..., Any], annotation: Any) -> tuple[Any, ...]:
    """Those that an annotation lists; nothing for one that needs names which are there for type checkers only."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(sys.modules[function.__module__]))
        except NameError:
            return ()
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


@pytest.mark.parametrize("file", CALLERS)
def test_calls_fit_the_signatures(file):
    calls = list(calls_of_vllm(file))
    assert len(calls) >= 2, "nothing was found to look at"
    misfits = {ast.unparse(call): misfit(call, function) for call, function in calls}
    assert {text: why for text, why in misfits.items() if why is not None} == {}


def test_the_calls_that_matter_are_looked_at():
    called = {ast.unparse(call.func).rpartition(".")[2] for call, _ in calls_of_vllm(CALLERS[0])}
    assert {"generate", "abort", "pause_generation", "sleep", "wake_up", "update_weights", "collective_rpc"} <= called
    assert {"update_weight_version", "finish_weight_update", "init_weight_transfer_engine"} <= called


def test_what_does_not_fit_is_found():
    def pause(*, mode: typing.Literal["keep", "wait"] = "wait") -> None: ...

    for text, words in [("pause(mode='hold')", "none of"), ("pause(1)", "too many"), ("pause(moed='keep')", "moed")]:
        assert words in misfit(ast.parse(text, mode="eval").body, pause)
    assert misfit(ast.parse("pause(mode='keep')", mode="eval").body, pause) is None


def test_our_end_of_a_transfer_has_the_methods_that_vllm_calls():
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient, WeightSource, WeightTransferEngine

    from roll.engines.vllm.worker import BucketTransferEngine
    from roll.weights.publisher import RayEngineCalls, buffer_source

    assert not BucketTransferEngine.__abstractmethods__
    assert isinstance(buffer_source({}), WeightSource)
    for ours, theirs in ((BucketTransferEngine, WeightTransferEngine), (RayEngineCalls, VLLMWeightSyncClient)):
        wanted = {name for name in vars(theirs) if name in vars(ours) and not name.startswith("_")}
        assert "finish_weight_update" in wanted
        for name in wanted & {name for name, method in vars(theirs).items() if inspect.isfunction(method)}:
            expected = list(inspect.signature(getattr(theirs, name)).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == expected, name
