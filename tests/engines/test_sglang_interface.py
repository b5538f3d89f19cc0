"""What the adapter says to SGLang, and what its stand-in answers, fits what SGLang's own sources say.

Calls are checked where they are made: the stand-in refuses those that do not fit, and ends itself where it would answer
with a name that the real server does not use.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import numpy as np
import pytest

import roll.engines
from roll.engines import options
from roll.engines.sglang.server import server_environment
from roll.engines.sglang.strategy import generate_body, score_body
from tests.engines.record_sglang_interface import VARIABLES, interface_of
from tests.engines.sglang_helpers import STAND_IN
from tests.engines.sglang_interface import ARGUMENTS, TABLE, problems_of_call, unknown_in_answer
from tests.engines.test_sglang_options import arguments
from tests.engines.vllm_helpers import request
from tests.tiers import need

HERE = Path(roll.engines.__file__).parent / "sglang"


def problems_of(**changes) -> list[str]:
    body = generate_body(request("a", seed=2**63 - 1, top_k=3), "roll-1", 0, (95,), 40)
    return problems_of_call("POST", "/generate", {}, body | changes)


def test_every_address_that_the_adapter_calls_is_known():
    sources = (HERE / "strategy.py").read_text() + (HERE / "server.py").read_text()
    called = set(re.findall(r'"(/[a-z_1/]+)"', sources))
    assert {"/generate", "/pause_generation", "/update_weights_from_disk"} <= called
    assert called == set(TABLE["endpoints"])


def calls_in_the_source() -> list[tuple[str, ast.expr | None]]:
    """Address and body of each call, if both are in the source; a body in a variable of the function included."""
    calls = []
    tree = ast.parse((HERE / "strategy.py").read_text())
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)):
        nodes = list(ast.walk(function))
        variables = {
            node.targets[0].id: node.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".call", "._order", ".stream")):
                address, *bodies = node.args
                if isinstance(address, ast.Constant):
                    body = bodies[0] if bodies else None
                    calls.append((address.value, variables.get(body.id) if isinstance(body, ast.Name) else body))
    return calls


def test_names_in_every_body_are_those_of_its_request_class():
    """Also of calls that no test makes. What is in a body of `/generate` is looked at below."""
    looked_at = set()
    for path, body in calls_in_the_source():
        request_class = TABLE["endpoints"][path]["body"]
        if path == "/generate" or (body is None and request_class is None):
            continue
        names = {key.value for key in body.keys} if body is not None else set()
        fields = TABLE["bodies"].get(request_class, {})
        assert names <= fields.keys(), path
        assert {name for name, field in fields.items() if field["required"]} <= names, path
        looked_at.add(path)
    assert len(looked_at) >= 8


def test_server_arguments_of_the_adapter_and_of_the_stand_in_exist(monkeypatch):
    monkeypatch.syspath_prepend(STAND_IN)
    stand_in = options.read_sglang_argument_names(STAND_IN / "sglang" / "srt")
    for names in (arguments(), options.SGLANG_RESERVED, options.SGLANG_HARMFUL, stand_in):
        assert len(names) > 5 and ARGUMENTS.issuperset(names)
    assert "sampling_mask_max_tokens" in ARGUMENTS


def test_variables_that_the_server_is_given_exist():
    given = {name for name in server_environment() if name.startswith("SGLANG_") and "STAND_IN" not in name}
    assert given == set(VARIABLES) == set(TABLE["environment"])


def test_a_request_fits():
    assert problems_of() == []
    assert problems_of_call("POST", "/generate", {}, score_body(np.arange(5, dtype=np.int32), "roll-2")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_slat": "x"}, "/generate has no 'cache_slat'"),
        ({"input_ids": ["5"]}, "'input_ids' is ['5'], not"),
        ({"return_sampling_mask": "yes"}, "'return_sampling_mask' is 'yes', not"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params has no 'max_tokens'"),
        ({"sampling_params": {"top_k": 1.5}}, "'top_k' is 1.5, not Optional[int]"),
    ],
)
def test_a_request_that_does_not_fit_is_told_why(changes, words):
    (problem,) = problems_of(**changes)
    assert words in problem


def test_other_calls_that_do_not_fit_are_told_why():
    for call, words in [
        (("GET", "/pause_generation", {}, None), "there is no GET /pause_generation"),
        (("POST", "/pause_generation", {}, {"mode": "keep"}), "'mode' is 'keep', not Literal['abort', 'retract'"),
        (("POST", "/update_weights_from_disk", {}, {"weight_version": "1"}), "wants 'model_path'"),
        (("POST", "/flush_cache", {"timeout_s": "3"}, None), "no query parameter 'timeout_s'"),
    ]:
        (problem,) = problems_of_call(*call)
        assert words in problem
    assert unknown_in_answer("/generate", {"meta_info": {"finish_reason": {"kind": "stop"}}}) == {"kind"}
    assert unknown_in_answer("/model_info", {"weight_version": "3", "weights": 3}) == {"weights"}


def test_the_table_is_that_of_the_installed_release():
    need("sglang")
    import sglang

    version = importlib.metadata.version("sglang")
    assert interface_of(Path(sglang.__file__).parent, version) == TABLE, "renew it: record_sglang_interface.py"
