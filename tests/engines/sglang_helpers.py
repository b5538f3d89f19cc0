"""SGLang for tests: the adapter, and either the stand-in for its server or, where there is a GPU, the real one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from roll.engines.sglang.strategy import SGLangInferStrategy
from tests.engines.vllm_helpers import MAX_LENGTH, RunningEngine, make_model

STAND_IN = Path(__file__).parent / "sglang_stand_in"
PLACES = 12
"""Requests that run at once; one place more is kept for scores."""


def make_wide_model(seed: int = 0, **changes):
    """A model with heads of 64, as SGLang's kernels for GPUs want them."""
    return make_model(seed, hidden_size=256, **changes)


def sglang_strategy(
    model_path: str, device: str = "cpu", shares_devices: bool = False, records_routing: bool = False, **config
):
    return SGLangInferStrategy(
        model_path,
        device=device,
        dtype="float32",
        attn_implementation="sdpa",
        max_length=MAX_LENGTH,
        shares_devices=shares_devices,
        records_routing=records_routing,
        strategy_config={"max_running_requests": PLACES + 1, **config},
    )


@contextmanager
def running_stand_in(
    model_path: str,
    *,
    fault_file: Path | None = None,
    shares_devices: bool = False,
    records_routing: bool = False,
    **config,
) -> Iterator[RunningEngine]:
    """An engine whose server is the stand-in. What is written into ``fault_file`` goes wrong from then on."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "SGLANG_STAND_IN_FAULT")}
    os.environ |= {"PYTHONPATH": str(STAND_IN), "SGLANG_STAND_IN_FAULT": str(fault_file or "")}
    try:
        settings = {"shares_devices": shares_devices, "records_routing": records_routing}
        strategy = sglang_strategy(model_path, **settings, **config)
        engine = RunningEngine(model_path, strategy=strategy)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def running_sglang(model_path: str) -> Iterator[RunningEngine]:
    """An engine whose server is the real one; skips where there is none."""
    if importlib.util.find_spec("sglang") is None or not torch.cuda.is_available():
        pytest.skip("needs SGLang (requirements/sglang.txt) and a GPU")
    config = {"mem_fraction_static": 0.3, "enable_deterministic_inference": True}
    engine = RunningEngine(model_path, strategy=sglang_strategy(model_path, "cuda", shares_devices=True, **config))
    yield engine
    engine.close()
