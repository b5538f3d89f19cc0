"""vLLM for real: what every engine promises (`engine_contract.py`), what vLLM does in its own way, that a trainer
computes the same, and weights pushed through vLLM's own transfer. All on one engine, which takes half a minute to
start; the last test ends it.
"""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import TrainingArguments
from roll.data.records import SampleBatch
from roll.engines.base import EngineFailed
from roll.trainers.base import build_trainer
from roll.weights.buckets import WeightMismatch, pack_buckets, tensor_checksum
from roll.weights.delta import DeltaReceiver
from roll.weights.publisher import PushTarget, WeightsDiffer, check_weights
from roll.weights.transports import TRANSPORTS
from tests.engines import vllm_helpers
from tests.engines.engine_checks import full_scores, logits_of
from tests.engines.engine_contract import *  # noqa: F403
from tests.engines.engines import PROMPT, EngineOnTrial, begun
from tests.engines.vllm_helpers import RunningEngine, assert_close, make_model, request
from tests.trainers.trainers import trainer_setup
from tests.weights.test_delta import Trainer as DeltaTrainer

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("vllm"), pytest.mark.timeout(300)]
SAMPLES = 24


@pytest.fixture(scope="module")
def vllm_model():
    """The weights that the engine starts with."""
    return make_model()


@pytest.fixture(scope="module")
def engine(vllm_path, vllm_model):
    running = RunningEngine(vllm_path, disable_log_stats=False)
    yield EngineOnTrial(
        running,
        vllm_model,
        make_model,
        places=vllm_helpers.PLACES,
        tolerance=(1e-5, 1e-3),
        refused=(request("cold", temperature=0.001),),
        scored_lengths=(2, 17, 64),
        settling_looks=0,
    )
    running.close()


# vLLM's own ways


def test_its_load_is_told_in_totals_and_the_memory_of_its_worker(published):
    strategy, before = published.strategy, published.strategy.stats()["load"]
    prompt = tuple(np.random.default_rng(0).integers(2, 90, 140).tolist())  # a block has 128 tokens

    async def scenario():
        requests = [request(f"load {i}", 20, prompt=prompt, seed=i, ignore_eos=True) for i in range(8)]
        await strategy.generate(requests[0])
        await asyncio.gather(*map(strategy.generate, requests[1:]))
        return await strategy.memory()

    memory = published.run(scenario)
    gained = {name: total - before[name] for name, total in strategy.stats()["load"].items()}
    assert 38 <= gained["steps"] <= 80 and 1 < gained["running"] / gained["steps"] <= 7
    assert 0 < gained["cache_use"] / gained["steps"] <= 1 and gained["preemptions"] == 0
    assert (gained["prompt_tokens"], gained["shared_tokens"]) == (8 * 140, 7 * 128)
    assert memory["peak_gib"] > 0.1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 12, 0.8)]
)
def test_logprobs_are_those_of_the_processed_distribution(published, vllm_model, temperature, top_k, top_p):
    strategy = published.strategy
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)

    async def scenario():
        return await asyncio.gather(*(strategy.generate(request(str(i), 40, seed=i, **sampling)) for i in range(8)))

    for completion in published.run(scenario):
        logits = logits_of(vllm_model, [5, 6, 7, *completion.token_ids.tolist()])[2:-1]
        processed = TemperatureLogitsWarper(temperature)(None, logits)
        processed = TopKLogitsWarper(top_k)(None, processed) if top_k else processed
        processed = TopPLogitsWarper(top_p)(None, processed) if top_p < 1 else processed
        expected = torch.log_softmax(processed, -1)[range(40), completion.token_ids.tolist()].numpy()
        assert_close(completion.logprobs, expected)


def test_held_checksums_come_from_the_engine_itself(published, vllm_model):
    """Ask for tensors that differ from those held: embeddings and norms are readable, and show what is really there."""
    other = make_model(4)
    shapes = {name: ("float32", tuple(tensor.shape)) for name, tensor in other.named_parameters()}
    (held,) = published.run(published.strategy._engine.collective_rpc, "roll_held_checksums", None, (shapes, 1))
    expected = {name: tensor_checksum(tensor) for name, tensor in vllm_model.named_parameters()}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"} <= held.keys()
    assert all(expected[name] == checksum for name, checksum in held.items())


# Trainer and vLLM on the same weights: what one records the other computes again, before and after real updates


@pytest.fixture
def trainer(vllm_path):
    arguments = TrainingArguments(learning_rate=3e-3)
    trainer = build_trainer("fsdp2_train", trainer_setup(vllm_path, training_args=arguments))
    trainer.initialize()
    yield trainer
    dist.destroy_process_group()


def sampled(engine, step: int) -> SampleBatch:
    """Responses of the engine as the trainer gets them."""

    async def scenario():
        requests = [request(f"{step}-{i}", 40, PROMPT, seed=1000 * step + i) for i in range(SAMPLES)]
        return await asyncio.gather(*(engine.strategy.generate(each) for each in requests))

    completions = engine.run(scenario)
    head = np.zeros(len(PROMPT), dtype=np.float32)
    rng = np.random.default_rng(step)
    return SampleBatch(
        np.array([len(PROMPT) + len(each.token_ids) for each in completions], dtype=np.int64),
        {
            "token_ids": np.concatenate([part for each in completions for part in (np.array(PROMPT), each.token_ids)]),
            "response_mask": np.concatenate([[False] * 3 + [True] * len(each.token_ids) for each in completions]),
            "behaviour_logprobs": np.concatenate([part for each in completions for part in (head, each.logprobs)]),
            "advantages": np.concatenate(
                [np.full(3 + len(each.token_ids), rng.normal(), dtype=np.float32) for each in completions]
            ),
            "versions": np.concatenate([np.full(3 + len(each.token_ids), step) for each in completions]),
        },
    )


def assert_agreement(trainer, batch):
    mask = batch.tokens["response_mask"]
    assert_close(batch.tokens["behaviour_logprobs"][mask], trainer.log_probs(batch, 1.0)[mask])


async def take(engine, buckets):
    await engine.strategy.prepare_weights(buckets, engine.version)
    await engine.strategy.pause("keep")
    await engine.strategy.load_weights(engine.version)
    await engine.strategy.resume()


def test_a_trainers_logprobs_agree_before_and_after_updates(published, trainer):
    batch = first = sampled(published, 0)
    assert_agreement(trainer, batch)
    objective = PolicyObjective(SAMPLES, "ppo", {}, "token-mean")
    for step in range(1, 9):
        metrics = trainer.train_step(batch, objective, 1.0)
        assert metrics["skipped_updates"] == 0
        published.version += 1
        published.run(take, published, list(pack_buckets(trainer.published_weights(), 100_000)))
        batch = sampled(published, step)
        assert_agreement(trainer, batch)
    mask = first.tokens["response_mask"]
    moved = np.abs(trainer.log_probs(first, 1.0) - first.tokens["behaviour_logprobs"])[mask]
    assert moved.mean() > 0.05, "the updates changed nothing, so agreement after them proves nothing"


# Weights pushed through vLLM's own transfer. The loop of calls is the library's (trainer's engine, client, worker's
# engine); only the bytes take mapped memory instead of NCCL or CUDA IPC.


@pytest.fixture(scope="module")
def transfers():
    """Importing vLLM takes ten seconds."""
    from tests.engines import vllm_transfers

    return vllm_transfers


def push(engine, publisher, version):
    """What the pool and the engine's worker do for one replica."""
    engine.run(engine.strategy.pause, "keep")
    publisher.push(version, PushTarget("actor_infer/0", "this process", 1), [])
    publication = publisher.send(version)
    try:
        receipt = engine.run(engine.strategy.weights_pushed, version, publication.layout)
        check_weights("actor_infer/0", publication, receipt)
    finally:
        engine.run(engine.strategy.resume)
        engine.version = max(engine.version, version)
    return receipt


def test_deltas_are_rebuilt_in_memory_that_vllm_reads(published):
    """The same memory at each version: vLLM must keep no view of the one before."""
    trainer, receiver = DeltaTrainer(), DeltaReceiver(TRANSPORTS["shared_memory"].receiver())
    model, prompt = make_model(11), np.array(PROMPT, dtype=np.int32)
    for version in range(4):
        published.version += 1
        publication = trainer.publish(published.version, dict(model.named_parameters()), torch.float32)
        buckets = list(receiver.receive(publication))
        published.run(take, published, buckets)
        assert all(bucket.verified for bucket in buckets) == (version > 0)
        completion = published.run(published.strategy.generate, request(f"delta {version}", 20, seed=version))
        assert set(completion.versions) == {published.version}
        assert_close(completion.logprobs, full_scores(model, prompt, completion))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter * (torch.rand(parameter.shape) < 0.05)


def test_pushed_weights_are_held_verified_and_sampled_from(published, transfers):
    publisher = transfers.publisher_to(published)
    for seed in (1, 2):
        version, model = published.version + 1, make_model(seed)
        publisher.gather(version, seed % 2, model.named_parameters(), torch.float32, 1 << 20)
        receipt = push(published, publisher, version)
        assert receipt.version == version
        read_back = {name: checksum for name, checksum in receipt.checksums.items() if checksum is not None}
        assert read_back and set(receipt.checksums) == {name for name, _ in model.named_parameters()}
        assert all(tensor_checksum(dict(model.named_parameters())[name]) == read_back[name] for name in read_back)
        completion = published.run(published.strategy.generate, request("a", 20, ignore_eos=True))
        assert set(completion.versions) == {version}
        assert_close(completion.logprobs, full_scores(model, PROMPT, completion))


def test_an_engine_that_holds_something_else_than_was_pushed_is_named_with_the_tensor(published, transfers):
    publisher = transfers.publisher_to(published)
    version, model = published.version + 1, make_model(3)
    publisher.gather(version, 0, model.named_parameters(), torch.float32, 1 << 20)
    published.run(published.strategy.pause, "keep")
    publisher.push(version, PushTarget("actor_infer/0", "this process", 1), [])
    publisher.copies[0]["model.norm.weight"][3] += 1.0
    publication = publisher.send(version)
    receipt = published.run(published.strategy.weights_pushed, version, publication.layout)
    published.run(published.strategy.resume)
    published.version = version
    with pytest.raises(WeightsDiffer, match=r"model\.norm\.weight"):
        check_weights("actor_infer/0", publication, receipt)


def test_a_push_that_leaves_a_tensor_out_is_refused_by_name(published):
    layout = {name: ("float32", tuple(tensor.shape)) for name, tensor in make_model().named_parameters()}
    del layout["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(WeightMismatch, match=r"model\.layers\.2\.mlp\.down_proj\.weight.*missing"):
        published.run(published.strategy.weights_pushed, published.version, layout)


def test_an_unknown_step_of_a_transfer_is_refused(published):
    with pytest.raises(ValueError, match="one of init, start, update, finish"):
        published.run(published.strategy.transfer_step, "restart", None)


# The last one with this engine


def test_an_engine_process_that_dies_is_reported_to_every_request_and_call(published):
    """Also to a call that it has been given and will not answer: vLLM leaves such a call waiting."""
    strategy = published.strategy

    async def scenario():
        running = [asyncio.create_task(strategy.generate(request(str(i), 150, ignore_eos=True))) for i in range(4)]
        await begun(strategy, running, 8)
        process = vllm_helpers.engine_process(psutil.Process())
        process.suspend()
        unanswered = asyncio.create_task(strategy.progress({}))
        while not strategy._engine.engine_core.utility_results:
            await asyncio.sleep(0.002)
        process.kill()
        for failing in (*running, unanswered, strategy.generate(request("later")), strategy.progress({})):
            with pytest.raises(EngineFailed):
                await failing

    published.run(scenario)
