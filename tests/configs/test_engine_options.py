"""Options of engines and trainers that the arithmetic reads: what each may be, and that no other is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import roll.configs
from roll.check.config import check_config
from roll.check.rules import options_are_usable
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.configs.strategies import OPTIONS, Options
from roll.trainers.options import check_deepspeed_options

ENGINES = ("vllm", "sglang", "hf_infer")
SWITCHES = {
    "enforce_eager", "disable_cuda_graph", "reshard_after_forward", "gradient_checkpointing", "sequence_parallel",
    "use_distributed_optimizer", "enable_prefix_caching", "compile",
}  # fmt: skip
SECTIONS = {"zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"}
NUMBERS_THAT_WORK = {
    "kv_cache_memory_bytes": (0,), "chunked_prefill_size": (0, -1), "zero_optimization.stage": (0,),
}  # fmt: skip


def _wrong_values(option):
    yield from ("abc", [1])
    if option not in SECTIONS:
        yield {"a": 1}
    if option not in SWITCHES:
        yield True
    yield from (number for number in (-1, 0) if number not in NUMBERS_THAT_WORK.get(option, ()))


WRONG = [
    (strategy, option, value)
    for strategy, known in OPTIONS.items()
    for option in known
    for value in _wrong_values(option)
]
TAKEN = [
    *(("vllm", "gpu_memory_utilization", value) for value in (1, 0.5)),
    *(("vllm", "kv_cache_memory_bytes", value) for value in (None, 2e9, 20_000_000_000)),
    *(("vllm", key, value) for key in ("max_num_seqs", "max_num_batched_tokens") for value in (None, 8192, 8192.0)),
    *(("vllm", "enable_prefix_caching", value) for value in (None, True)),
    *(("sglang", "mem_fraction_static", value) for value in (None, 0.8)),
    *(("sglang", "chunked_prefill_size", value) for value in (None, 4096)),
    ("sglang", "max_running_requests", None),
    ("deepspeed_train", "zero_optimization.reduce_bucket_size", 5e8),
    ("deepspeed_train", "zero_optimization.reduce_bucket_size", "auto"),
    ("deepspeed_train", "zero_optimization.offload_optimizer", None),
    ("deepspeed_train", "zero_optimization.offload_optimizer", "auto"),
    *(("deepspeed_train", "zero_optimization.offload_param.device", value) for value in ("auto", "none", "nvme")),
    ("megatron_train", "expert_tensor_parallel_size", None),
    ("megatron_train", "recompute_num_layers", None),
]


def _nested(option, value):
    for key in reversed(option.split(".")):
        value = {key: value}
    return value


def _problems(tree, strategy, options):
    role = "actor_infer" if strategy in ENGINES else "actor_train"
    tree[role]["strategy_args"] = {"strategy_name": strategy, "strategy_config": options}
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_tree(tree))
    return f"{role}.strategy_args.strategy_config", caught.value.problems


@pytest.mark.parametrize(("strategy", "option", "value"), WRONG)
def test_a_wrong_value_is_a_problem_with_its_path_and_the_only_one_there(tree, strategy, option, value):
    path, problems = _problems(tree, strategy, _nested(option, value))
    (problem,) = (problem for problem in problems if problem.path.startswith(path))
    assert problem.path == f"{path}.{option}"
    assert problem.remedy.startswith("write ")


@pytest.mark.parametrize(("strategy", "option", "value"), TAKEN)
def test_what_the_engine_takes_is_no_problem(strategy, option, value):
    assert not list(Options(strategy, _nested(option, value)).wrong())


def test_options_are_reported_together_with_everything_else(tree):
    tree["max_steps"] = 0
    options = {"gpu_memory_utilization": 1.5, "max_num_seqs": "many", "kv_cache_memory_bytes": 10**400}
    path, problems = _problems(tree, "vllm", options)
    said = {problem.path: problem for problem in problems}
    assert set(said) == {"max_steps", *(f"{path}.{option}" for option in options)}
    assert said[f"{path}.gpu_memory_utilization"].remedy == "write a number, > 0 and <= 1"
    assert said[f"{path}.max_num_seqs"].remedy == "write a whole number, >= 1 or null"
    assert "is beyond 1e+15" in said[f"{path}.kv_cache_memory_bytes"].message


def test_a_reference_in_hf_infer_has_no_engine_options(tree):
    strategy = {"strategy_name": "hf_infer", "strategy_config": {"max_prefill_tokens": "abc"}}
    tree |= {"use_kl_loss": True, "reference": {"device_mapping": [1], "strategy_args": strategy}}
    assert list(options_are_usable(check_config(config_from_tree(tree)))) == []  # its own check refuses the name


def test_what_is_left_to_the_engine_reads_as_the_default():
    zero = {"reduce_bucket_size": "auto", "offload_param": {"device": "auto"}, "offload_optimizer": None}
    options = Options("deepspeed_train", {"zero_optimization": zero})
    assert options.get("zero_optimization.reduce_bucket_size", 7) == 7
    assert options.get("zero_optimization.offload_param.device", "none") == "none"
    assert options.get("zero_optimization.offload_optimizer.device", "none") == "none"
    assert Options("vllm", {"max_num_seqs": None}).get("max_num_seqs", 7) == 7


def test_options_of_a_strategy_from_outside_read_as_the_default():
    assert Options("my_package.engines:Engine", {"max_num_seqs": 3}).get("max_num_seqs", 7) == 7


def test_an_option_that_is_not_declared_cannot_be_read():
    with pytest.raises(KeyError):
        Options("vllm", {"max_model_len": 7}).get("max_model_len", 7)


def test_nothing_else_in_the_configuration_reads_the_options():
    root = Path(roll.configs.__file__).parents[1]  # dialects read other systems' files, before there are options
    readers = {
        str(path.relative_to(root))
        for room in ("configs", "check")
        for path in (root / room).rglob("*.py")
        if path.parent.name != "dialects"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "strategy_config"
        or isinstance(node, ast.Constant)
        and node.value == "strategy_config"
    }
    assert readers == {"configs/strategies.py"}


def test_deepspeed_compiles_no_layers_within_which_weights_are_gathered():
    for stage in range(4):
        options = {"compile": True, "zero_optimization": {"stage": stage}}
        found = {problem.path: problem.message for problem in check_deepspeed_options(options, "c")}
        assert [path for path in found if path == "c.compile"] == ["c.compile"] * (stage == 3)
        assert stage < 3 or "gathered within the layers" in found["c.compile"]
    assert not check_deepspeed_options({"compile": False, "zero_optimization": {"stage": 3}}, "c")
    (problem,) = check_deepspeed_options({"compile": {"deepcompile": True}}, "c")
    assert problem.path == "c.compile"
