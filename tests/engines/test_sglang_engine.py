"""SGLang's adapter against a running server: what every engine promises (`engine_contract.py`), and what SGLang does in
its own way.

Every test runs with the stand-in (tests/engines/sglang_stand_in says what that shows), those of what SGLang
itself samples also with SGLang, where it and a GPU are.
"""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from roll.engines.base import EngineFailed
from roll.engines.sglang import strategy as sglang
from roll.weights.buckets import WeightMismatch, tensor_checksum
from tests.engines.engine_checks import full_scores, logits_of
from tests.engines.engine_contract import *  # noqa: F403
from tests.engines.engines import PROMPT, begun, still_there
from tests.engines.sglang_helpers import running_stand_in
from tests.engines.vllm_helpers import MAX_LENGTH, request

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("aiohttp"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["sglang_stand_in", "sglang_server"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_its_load_is_told_in_totals(published, monkeypatch):
    monkeypatch.setattr(sglang, "_LOAD_SECONDS", 0.01)
    strategy, before = published.strategy, published.strategy.stats()["load"]

    async def scenario():
        for number in range(50):
            requests = [request(f"load {number} {i}", 60, seed=i, ignore_eos=True) for i in range(4)]
            await asyncio.gather(*map(strategy.generate, requests))
            if strategy.stats()["load"]["steps"] >= before["steps"] + 10:
                return

    published.run(scenario)
    gained = {name: total - before[name] for name, total in strategy.stats()["load"].items()}
    assert gained["steps"] >= 10 and 0 < gained["running"] / gained["steps"] <= 4
    assert 0 < gained["cache_use"] / gained["steps"] <= 1 and gained["waiting"] >= 0
    assert "preemptions" not in gained


def test_a_continued_response_goes_on_with_the_tokens_of_its_seed(published):
    strategy = published.strategy

    async def scenario():
        whole = await strategy.generate(request("a", 24, seed=7, ignore_eos=True))
        start = whole.token_ids[:10].tolist()
        rest = request("b", 14, (*PROMPT, *start), seed=7, first_token_index=10, ignore_eos=True)
        return whole, await strategy.generate(rest)

    whole, rest = published.run(scenario)
    assert rest.token_ids.tolist() == whole.token_ids[10:].tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 12, 0.8), (1.0, 90, 0.5)]
)
def test_logprobs_are_those_of_the_distribution_sampled_from(published, temperature, top_k, top_p):
    strategy = published.strategy
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)

    async def scenario():
        return await asyncio.gather(*(strategy.generate(request(str(i), 20, seed=i, **sampling)) for i in range(6)))

    for completion in published.run(scenario):
        logits = logits_of(published.model, [*PROMPT, *completion.token_ids.tolist()])[2:-1]
        probabilities, order = torch.softmax(logits / temperature, -1).sort(descending=True)
        kept = probabilities.clone()
        if top_k:
            kept[:, top_k:] = 0
        kept[probabilities.cumsum(-1) - probabilities > top_p] = 0
        kept = torch.zeros_like(kept).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        expected = kept[range(20), completion.token_ids.tolist()].log().numpy()
        published.assert_close(completion.logprobs, expected)


def test_the_most_probable_token_alone_is_certain_at_any_temperature(published):
    completion = published.run(published.strategy.generate, request("a", 20, ignore_eos=True, top_k=1))
    tokens = [*PROMPT, *completion.token_ids.tolist()]
    assert logits_of(published.model, tokens)[2:-1].argmax(-1).tolist() == tokens[3:]
    assert not completion.logprobs.any()


def test_one_token_fits_behind_the_longest_prompt(published):
    last = request("b", 10_000, (5,) * (MAX_LENGTH - 1), ignore_eos=True)
    assert len(published.run(published.strategy.generate, last).token_ids) == 1


def test_a_request_aborted_while_paused_ends_at_once(published):
    strategy = published.strategy

    async def scenario():
        running = [asyncio.create_task(strategy.generate(request(f"r{i}", 150, ignore_eos=True))) for i in range(2)]
        await begun(strategy, running, 4)
        await strategy.pause("keep")
        still_there(strategy, 2)
        await strategy.abort(["r0"])
        aborted = await asyncio.wait_for(running[0], 60)
        await strategy.resume()
        return aborted, await running[1]

    aborted, other = published.run(scenario)
    assert aborted.finish_reason == "abort" and len(other.token_ids) == 150


def test_a_server_that_does_not_start_says_so(sglang_path):
    with pytest.raises(EngineFailed, match="did not start: it ended with status 1"):
        with running_stand_in(sglang_path, no_such_argument=1):
            pass


class Faulty:
    """An engine on shared devices with overlap, of a model that can be read back; and what is to go wrong."""

    def __init__(self, engine, model, file) -> None:
        self.engine, self.model, self._file = engine, model, file

    def becomes(self, fault: str) -> None:
        self._file.write_text(fault)

    def publish(self) -> dict[str, torch.Tensor]:
        """Load other weights than ever before."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01
        self.receipt = self.engine.run(self.engine.load, self.model, self.engine.version + 1)
        self.engine.version += 1
        return dict(self.model.named_parameters())


@pytest.fixture(scope="module")
def one_engine(llama_path, tmp_path_factory):
    file = tmp_path_factory.mktemp("faults") / "fault"
    file.touch()
    model = LlamaForCausalLM.from_pretrained(llama_path, dtype=torch.float32)
    config = {"shares_devices": True, "disable_overlap_schedule": False}
    with running_stand_in(llama_path, fault_file=file, **config) as engine:
        yield Faulty(engine, model, file)


@pytest.fixture
def faulty(one_engine):
    one_engine.becomes("")
    return one_engine


def test_an_engine_of_shared_devices_gives_its_memory_up_and_takes_it_back(faulty):
    """The stand-in ends itself where the real one would: memory given up while requests run, or used while away. With
    overlap a pause leaves no step under way, whose tokens SGLang would count under the newer version."""
    strategy = faulty.engine.strategy

    async def state():
        return (await strategy._order("/server_info"))["internal_states"][0]

    async def scenario():
        running = asyncio.create_task(strategy.generate(request("a", 100, seed=4, ignore_eos=True)))
        await begun(strategy, [running], 8)
        await strategy.pause("keep")
        assert await state() == {"running": 0, "released": False}
        await strategy.sleep()
        assert await state() == {"running": 0, "released": True}
        await strategy.wake()
        await strategy.resume()
        completion = await running
        await strategy.sleep()
        late = asyncio.create_task(strategy.generate(request("late", 5, ignore_eos=True)))
        await strategy.progress({})
        await strategy.wake()
        return completion, await late

    completion, late = faulty.engine.run(scenario)
    assert len(completion.token_ids) == 100 and len(late.token_ids) == 5
    logprobs = full_scores(faulty.model, PROMPT, completion)
    assert np.abs(completion.logprobs - logprobs).max() < 1e-3


def test_a_response_that_was_cut_for_want_of_memory_is_no_success(faulty):
    generate = faulty.engine.strategy.generate
    faulty.becomes("has little memory")
    with pytest.raises(ValueError, match="'a' was cut at 10 of 20 tokens: .*`mem_fraction_static`"):
        faulty.engine.run(generate, request("a", 20, ignore_eos=True))
    assert len(faulty.engine.run(generate, request("b", 10, ignore_eos=True)).token_ids) == 10


def test_weights_that_can_be_read_back_are(faulty):
    sent = faulty.publish()
    assert faulty.receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in sent.items()}
    faulty.becomes("holds something else")
    sent = faulty.publish()
    told = faulty.receipt.checksums
    differing = {name for name, tensor in sent.items() if told[name] != tensor_checksum(tensor)}
    assert differing and all(sent[name].numel() <= 8192 for name in differing)


def test_an_update_that_changes_nothing_or_half_is_told_by_what_it_left(faulty):
    strategy = faulty.engine.strategy
    faulty.publish()
    faulty.becomes("keeps its weights")
    with pytest.raises(WeightMismatch, match="brought a new tensor .* holds the same as before"):
        faulty.publish()
    faulty.becomes("fails half-way")
    with pytest.raises(EngineFailed, match="were only partly loaded: .*Failed to update weights"):
        faulty.publish()
    faulty.engine.run(strategy.resume)


def test_a_server_that_dies_is_reported_to_every_request_and_call(faulty):
    """The last one with this engine."""
    strategy = faulty.engine.strategy

    async def scenario():
        running = [asyncio.create_task(strategy.generate(request(str(i), 120, ignore_eos=True))) for i in range(4)]
        await begun(strategy, running, 4)
        psutil.Process(strategy._engine._process.pid).kill()
        later = (strategy.progress({}), strategy.generate(request("later")), strategy.pause("keep"))
        for failing in (*running, *later):
            with pytest.raises(EngineFailed, match="SGLang cannot go on: its server ended with status -9"):
                await failing
        await strategy.shutdown()
        await strategy.shutdown()
        with pytest.raises(EngineFailed, match="was shut down"):
            await strategy.generate(request("after"))

    faulty.engine.run(scenario)
