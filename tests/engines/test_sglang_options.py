"""Server arguments: the release decides what exists, the run decides what is its own, some would spoil the record."""

from __future__ import annotations

import sys

import pytest

from roll.engines import options
from roll.engines.base import ModelSpec
from roll.engines.options import check_sglang_options, server_arguments, sglang_argument_names
from tests.engines.sglang_helpers import STAND_IN

PATH = "actor_infer.strategy_args.strategy_config"


@pytest.fixture
def installed(monkeypatch):
    """The stand-in where SGLang would be."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    sglang_argument_names.cache_clear()
    yield
    sglang_argument_names.cache_clear()


def arguments(strategy_config=(), **changes):
    spec = ModelSpec("m", "cuda", "bfloat16", "sdpa", changes.pop("max_length", 96))
    chosen = dict(tensor_parallel_size=4, sleeps=False, port=7, api_key="k")
    return server_arguments(dict(strategy_config), spec, **(chosen | changes))


def test_where_sglang_is_not_installed_all_but_unknown_names_is_judged(monkeypatch):
    monkeypatch.setattr(options, "sglang_argument_names", lambda: None)
    chosen = {"tp_size": 2, "speculative_algorithm": "EAGLE", "max_running_requests": 1, "mem_fraction_statik": 0.5}
    found = [problem.path for problem in check_sglang_options(chosen, PATH)]
    assert found == [f"{PATH}.{key}" for key in ("tp_size", "speculative_algorithm", "max_running_requests")]


def test_names_are_read_from_one_class_or_from_several(installed, tmp_path, monkeypatch):
    assert {"model_path", "mem_fraction_static", "attention_backend"} <= sglang_argument_names()
    assert "sglang" not in sys.modules
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(
        "class ServerArgs:\n    LIMIT: int = 3\n\nclass PortArgs:\n    nccl_port: int = 3\n"
    )
    (fields / "memory.py").write_text("class Memory:\n    _NS: str = ''\n    page_size: A[int, 'help'] = 1\n")
    (fields / "model.py").write_text("class Model:\n    dtype: str = 'auto'\n    def method(self): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sglang_argument_names.cache_clear()
    assert sglang_argument_names() == {"page_size", "dtype"}


def test_unknown_arguments_are_reported_with_the_nearest_name(installed):
    problems = check_sglang_options({"max_running_request": 8, "mem_fraction": 0.5, "max_running_requests": 8}, PATH)
    assert [problem.path for problem in problems] == [f"{PATH}.max_running_request", f"{PATH}.mem_fraction"]
    assert "`max_running_requests`" in str(problems[0]) and "`mem_fraction_static`" in str(problems[1])


@pytest.mark.parametrize("key", ["model_path", "dtype", "context_length", "tp_size", "port", "weight_version"])
def test_what_the_run_decides_is_refused_with_the_key_to_use(installed, key):
    (problem,) = check_sglang_options({key: 1}, PATH)
    assert problem.path == f"{PATH}.{key}" and "the run itself sets this" in str(problem)


def test_what_would_spoil_the_record_is_refused_unless_it_is_off(installed):
    (problem,) = check_sglang_options({"speculative_algorithm": "EAGLE"}, PATH)
    assert problem.path == f"{PATH}.speculative_algorithm" and "one distribution" in problem.message
    assert check_sglang_options({"speculative_algorithm": None, "quantization": "fp8"}, PATH) == []


def test_an_engine_without_a_place_for_requests_is_refused(installed):
    (problem,) = check_sglang_options({"max_running_requests": 1}, PATH)
    assert problem.path == f"{PATH}.max_running_requests"


def test_a_users_arguments_go_before_the_defaults_and_never_before_the_runs_own():
    chosen = arguments({"max_running_requests": 3, "disable_overlap_schedule": False, "mem_fraction_static": 0.5})
    assert (chosen["max_running_requests"], chosen["disable_overlap_schedule"]) == (3, False)
    assert chosen["mem_fraction_static"] == 0.5
    assert (chosen["tp_size"], chosen["weight_version"], chosen["skip_tokenizer_init"]) == (4, "0", True)
    assert chosen["host"] == "127.0.0.1" and chosen["incremental_streaming_output"] is True
    assert arguments()["disable_overlap_schedule"] is True


def test_the_longest_sequence_fits_into_what_sglang_leaves_of_its_context():
    """A prompt must be shorter than the context by more than 6, prompt and response together by 2."""
    context = arguments(max_length=96)["context_length"]
    assert 95 < context - 6 and 96 <= context - 2


def test_only_an_engine_that_shares_its_devices_can_sleep_and_keeps_its_weights_meanwhile():
    for sleeps in (True, False):
        chosen = arguments(sleeps=sleeps)
        assert chosen["enable_memory_saver"] is chosen["enable_weights_cpu_backup"] is sleeps
