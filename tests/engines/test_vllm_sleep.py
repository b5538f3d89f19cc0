"""The calls that vLLM gets for a sleep and the way back, with a stand-in that records them: it sleeps on GPUs only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from roll.engines.base import BusyClock
from roll.engines.process_engine import EngineRequests
from roll.engines.vllm.strategy import VLLMInferStrategy
from roll.weights.buckets import pack_buckets
from tests.tiers import need

need("vllm")
pytestmark = pytest.mark.tier("all")


class RecordedEngine:
    """An `AsyncLLM` that decodes when vLLM would: unless paused, and with all memory resident."""

    errored = False

    def __init__(self, quantization=None, speculative=None):
        model = SimpleNamespace(quantization=quantization)
        self.vllm_config = SimpleNamespace(speculative_config=speculative, model_config=model)
        self.calls: list[tuple[str, object]] = []
        self.asleep: set[str] = set()
        self.weights = "the first"
        self.paused = False
        self.version = "0"

    def _note(self, name, argument=None):
        self.calls.append((name, argument))

    async def pause_generation(self, mode, clear_cache):
        self._note("pause", mode)
        self.paused = True

    async def resume_generation(self):
        assert not self.asleep and self.weights is not None
        self._note("resume")
        self.paused = False

    async def sleep(self, level, mode):
        self._note("sleep", level)
        self.paused, self.asleep = True, {"weights", "kv_cache"}
        if level == 2:
            self.weights = None

    async def wake_up(self, tags=None):
        self._note("wake", tags)
        self.asleep -= set(tags or self.asleep)
        if not self.asleep:
            assert self.weights is not None, "it would decode at once"
            self.paused = False

    async def start_weight_update(self):
        assert "weights" not in self.asleep
        self._note("load")

    async def update_weights(self, request):
        self.weights = "new"

    async def finish_weight_update(self, version):
        self.version = version

    async def get_weight_version(self):
        return self.version

    async def collective_rpc(self, method, args=()):
        return []


def strategy_over(engine, **settings):
    """An adapter that was started with this engine."""
    options = dict(device="cuda", dtype="float32", attn_implementation="sdpa", max_length=64, strategy_config={})
    strategy = VLLMInferStrategy("no/model", shares_devices=True, **options, **settings)
    strategy._engine, strategy._sleeps, strategy._shapes = engine, True, {"a": (3,)}
    strategy._clock, strategy._requests = BusyClock(), EngineRequests(4, strategy._tick)
    return strategy


async def load(strategy, version):
    await strategy.prepare_weights(pack_buckets([("a", torch.ones(3))], 1000), version)
    return await strategy.load_weights(version)


def test_weights_that_will_be_replaced_are_dropped_and_the_engine_decodes_with_the_new_ones_only():
    async def scenario():
        engine = RecordedEngine()
        strategy = strategy_over(engine)
        await strategy.pause("resume")
        assert await strategy.sleep(discard=True) and await strategy.sleep(discard=True)
        await strategy.wake()
        assert engine.asleep == {"kv_cache"} and engine.paused
        with pytest.raises(RuntimeError, match="discarded its weights"):
            await strategy.resume()
        assert (await load(strategy, 7)).version == 7
        assert engine.paused, "the caller resumes"
        await strategy.resume()
        assert engine.calls == [
            ("pause", "keep"), ("sleep", 2), ("wake", ["weights"]), ("load", None), ("wake", ["kv_cache"]),
            ("pause", "keep"), ("resume", None),
        ]  # fmt: skip
        await strategy.pause("keep")
        await load(strategy, 8)  # as ever
        assert engine.calls[-2:] == [("pause", "keep"), ("load", None)]

    asyncio.run(scenario())


def test_an_engine_that_was_not_paused_stays_so_until_it_has_weights():
    async def scenario():
        engine = RecordedEngine()
        strategy = strategy_over(engine)
        assert await strategy.sleep(discard=True)
        await strategy.wake()
        await load(strategy, 1)
        await strategy.resume()
        assert not engine.paused and engine.weights == "new"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("discard", "config"), [(False, {}), (True, {"quantization": "fp8"}), (True, {"speculative": "a draft model"})]
)
def test_weights_go_to_the_host_and_back_if_none_follow_or_an_update_would_not_bring_all(discard, config):
    async def scenario():
        engine = RecordedEngine(**config)
        strategy = strategy_over(engine)
        await strategy.pause("resume")
        assert not await strategy.sleep(discard)
        await strategy.wake()
        await strategy.resume()
        assert engine.calls == [("pause", "keep"), ("sleep", 1), ("wake", None), ("pause", "keep"), ("resume", None)]

    asyncio.run(scenario())
