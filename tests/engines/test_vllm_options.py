"""Engine arguments: the installed release decides what exists, the run decides what is its own."""

from __future__ import annotations

import asyncio
import sys

import pytest

from roll.check.memory_parts import GIB
from roll.check.memory_roles import VLLM_BATCHES
from roll.engines import options
from roll.engines.base import ModelSpec
from roll.engines.options import check_vllm_options, engine_arguments, vllm_argument_names
from roll.engines.vllm.strategy import sampling_params
from tests.engines.vllm_helpers import request

PATH = "actor_infer.strategy_args.strategy_config"
LOADING = {"dtype": "float32", "attn_implementation": "sdpa"}
vllm_is_here = pytest.mark.needs("vllm")


def arguments(strategy_config=(), **changes):
    model = {key: changes.pop(key) for key in ("device", "max_length") if key in changes}
    spec = ModelSpec(**({"model_path": "m", "device": "cpu", "max_length": 96} | model), **LOADING)
    chosen = dict(tensor_parallel_size=1, weight_backend="roll_buckets", sleeps=False, cache_bytes_per_token=1024)
    return engine_arguments(dict(strategy_config), spec, **(chosen | changes))


@pytest.mark.tier("all")  # importing vLLM takes ten seconds
@vllm_is_here
def test_names_are_those_of_the_installed_release_and_found_without_importing_it():
    from vllm import AsyncEngineArgs

    assert vllm_argument_names() == set(AsyncEngineArgs.__dataclass_fields__)


@pytest.mark.tier("all")
@vllm_is_here
@pytest.mark.parametrize("gigabytes", [24, 69, 71, 80, 141, 159, 161, 288])
def test_the_estimate_of_memory_knows_the_batches_that_the_release_chooses(monkeypatch, gigabytes):
    from vllm import AsyncEngineArgs
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    class Gpu:
        get_device_total_memory = staticmethod(lambda: int(gigabytes * GIB))
        get_device_name = staticmethod(lambda: "NVIDIA H100")
        is_cpu = is_tpu = staticmethod(lambda: False)

    monkeypatch.setattr(arg_utils, "current_platform", Gpu)
    tokens, requests = (found[UsageContext.OPENAI_API_SERVER] for found in AsyncEngineArgs.get_batch_defaults(1))
    assert next(usual for below, *usual in VLLM_BATCHES if gigabytes < below) == [tokens, requests]


def test_checking_options_imports_no_engine():
    import subprocess

    code = (
        "import sys; from roll.engines.options import check_vllm_options; "
        "assert not check_vllm_options({'max_num_seqs': 8}, 'p'); "
        "sys.exit(' '.join({'vllm', 'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_where_vllm_is_not_installed_all_but_unknown_names_is_judged(monkeypatch):
    monkeypatch.setattr(options, "vllm_argument_names", lambda: None)
    found = [problem.path for problem in check_vllm_options({"dtype": "half", "max_num_sequences": 8}, PATH)]
    assert found == [f"{PATH}.dtype"]


def test_an_engine_without_a_place_for_requests_is_refused():
    (problem,) = check_vllm_options({"max_num_seqs": 1}, PATH)
    assert problem.path == f"{PATH}.max_num_seqs"


@vllm_is_here
def test_unknown_arguments_are_reported_with_the_nearest_name():
    problems = check_vllm_options({"max_num_sequences": 8, "gpu_memory_utilisation": 0.5, "max_num_seqs": 8}, PATH)
    assert [problem.path for problem in problems] == [f"{PATH}.max_num_sequences", f"{PATH}.gpu_memory_utilisation"]
    assert "`max_num_seqs`" in str(problems[0]) and "`gpu_memory_utilization`" in str(problems[1])


@pytest.mark.parametrize("key", ["model", "dtype", "max_model_len", "tensor_parallel_size", "logprobs_mode"])
def test_what_the_run_decides_is_refused_with_the_key_to_use(key):
    (problem,) = check_vllm_options({key: 1}, PATH)
    assert problem.path == f"{PATH}.{key}" and "the run itself sets this" in str(problem)


def test_parts_of_a_prompt_are_not_computed_apart_on_a_cpu():
    """Seeded requests end vLLM's CPU engine where a prompt is computed in parts."""
    chosen = arguments(max_length=20_000)
    assert chosen["enable_chunked_prefill"] is False and chosen["max_num_batched_tokens"] == 20_000
    assert "enable_chunked_prefill" not in arguments(device="cuda")


def test_a_users_arguments_go_before_the_defaults_and_never_before_the_runs_own():
    chosen = arguments({"enforce_eager": False, "max_num_seqs": 3, "kv_cache_memory_bytes": 7})
    assert (chosen["enforce_eager"], chosen["max_num_seqs"], chosen["kv_cache_memory_bytes"]) == (False, 3, 7)
    assert chosen["logprobs_mode"] == "processed_logprobs" and chosen["max_model_len"] == 96


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_of_several_devices_starts_its_own_processes_also_inside_a_placement_group(device):
    assert arguments(device=device, tensor_parallel_size=2)["distributed_executor_backend"] == "mp"
    chosen = arguments({"distributed_executor_backend": "external_launcher"}, device=device, tensor_parallel_size=2)
    assert chosen["distributed_executor_backend"] == "external_launcher"


@pytest.mark.tier("all")
@vllm_is_here
def test_an_engine_gets_the_batch_sizes_of_vllms_own_server(monkeypatch):
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from roll.engines.vllm.strategy import VLLMInferStrategy

    class Asked(Exception):
        """Carries the context."""

    def ask(arguments, usage_context, stat_loggers):
        assert stat_loggers == [], "they cost time, and nobody asked for them"
        raise Asked(usage_context)

    monkeypatch.setattr(AsyncLLM, "from_engine_args", ask)
    engine = VLLMInferStrategy("m", device="cuda", max_length=96, strategy_config={}, **LOADING)
    shape = dict(num_hidden_layers=1, num_attention_heads=1, hidden_size=8, num_key_value_heads=1, head_dim=8)
    config = type("Config", (), {**shape, "to_dict": lambda self: shape, "get_text_config": lambda self, **_: self})()
    with pytest.raises(Asked) as asked:
        asyncio.run(engine._launch(config))
    tokens, requests = AsyncEngineArgs.get_batch_defaults(1)
    (context,) = asked.value.args
    assert context is UsageContext.OPENAI_API_SERVER and context in requests.keys() & tokens.keys()


def test_pickled_weights_are_not_read_unless_asked_for():
    assert arguments()["load_format"] == arguments(device="cuda")["load_format"] == "safetensors"
    assert arguments({"load_format": "dummy"})["load_format"] == "dummy"


def test_the_cache_on_a_cpu_holds_the_requests_that_can_run_and_no_more_than_its_bound():
    assert arguments({"max_num_seqs": 512})["kv_cache_memory_bytes"] == 512 * (96 + 128) * 1024
    assert arguments({"max_num_seqs": None})["kv_cache_memory_bytes"] == arguments()["kv_cache_memory_bytes"]
    assert arguments(max_length=100_000, cache_bytes_per_token=10**6)["kv_cache_memory_bytes"] == 4 * 1024**3
    assert "kv_cache_memory_bytes" not in arguments({"gpu_memory_utilization": 0.3})
    assert "kv_cache_memory_bytes" not in arguments(device="cuda")


def test_only_an_engine_that_shares_its_devices_can_sleep():
    assert arguments(device="cuda", sleeps=True)["enable_sleep_mode"] is True
    assert arguments(device="cuda")["enable_sleep_mode"] is False


@pytest.mark.tier("all")
@vllm_is_here
def test_the_seed_of_a_continued_response_differs_from_that_of_its_start():
    seeds = [sampling_params(request("a", seed=5, first_token_index=index), ()).seed for index in (0, 1, 2, 1)]
    assert seeds[0] == 5 and seeds[1] == seeds[3] and len(set(seeds)) == 3
    assert min(seeds) >= 0
