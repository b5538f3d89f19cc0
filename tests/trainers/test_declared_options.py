"""What `roll.configs` says of a strategy's options is what the strategy says of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from roll.configs.strategies import ENGINES, FORWARD_STRATEGIES, OPTIONS, Options, option_problems
from tests.tiers import need

VALUES = (
    None, True, False, -1, 0, 1, 2, 4, 0.5, 2.0, 2e9, float("inf"), "auto", "abc", "none", "cpu", "nvme", "full",
    "selective", "uniform", "block", [1], {}, {"a": 1},
)  # fmt: skip
OWN = ("hf_infer", "fsdp2_train", "megatron_train")
"""Strategies that check every value themselves."""


def _refused(strategy, option, value):
    """Whether the strategy refuses the value, and whether `Options` does."""
    options = value
    for key in reversed(option.split(".")):
        options = {key: options}
    kind = ENGINES if strategy == "hf_infer" else FORWARD_STRATEGIES
    own = any(problem.path == f"options.{option}" for problem in option_problems(kind, strategy, options, "options"))
    return own, any(path == option for path, _, _ in Options(strategy, options).wrong())


@pytest.mark.parametrize(("strategy", "option"), [(name, option) for name in OWN for option in OPTIONS[name]])
def test_both_refuse_the_same_values(strategy, option):
    for value in VALUES:
        own, declared = _refused(strategy, option, value)
        assert own == declared, value


@pytest.mark.parametrize("option", OPTIONS["deepspeed_train"])
def test_what_the_deepspeed_trainer_refuses_is_refused(option):
    need("deepspeed")
    for value in VALUES:
        own, declared = _refused("deepspeed_train", option, value)
        assert declared or not own, value


@pytest.mark.parametrize("option", [name for name in OPTIONS["deepspeed_train"] if "." in name])
def test_deepspeed_takes_what_is_taken(option):
    """But numbers as texts and as truth values, which DeepSpeed takes."""
    need("deepspeed")
    from deepspeed.runtime.zero import config

    for value in VALUES:
        zero = {"stage": 3} if option.startswith("zero_optimization.offload_param") else {}
        section = value
        for key in reversed(option.split(".")[1:]):
            section = {key: section}
        try:
            config.DeepSpeedZeroConfig(**(zero | section))
            taken = True
        except ValueError:
            taken = False
        _, refused = _refused("deepspeed_train", option, value)
        if not (isinstance(value, bool) or value == {"a": 1} or option.endswith(".stage") and value == "auto"):
            assert taken != refused, value


def test_checking_the_options_of_trainers_loads_none_of_them():
    code = (
        "import sys; from roll.configs.strategies import ENGINES, FORWARD_STRATEGIES, option_problems\n"
        "assert all(option_problems(FORWARD_STRATEGIES, name, {'x': 1}, 'p') for name in FORWARD_STRATEGIES.built_in)\n"
        "for name in ENGINES.built_in: option_problems(ENGINES, name, {'x': 1}, 'p')\n"
        "sys.exit(' '.join({'deepspeed', 'megatron', 'transformers', 'vllm', 'ray'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
