"""With router replay a trainer computes with the experts of the engine, whatever its own router would choose."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import ModelArguments
from roll.data.records import Sample, SampleBatch, joined_routing
from roll.engines.hf.strategy import HFInferStrategy
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.step import build_micro_batch, predicted_tokens
from tests.engines.hf_helpers import make_request
from tests.tiers import need
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.test_context_parallel import GENTLE
from tests.trainers.tiny_models import weights_of
from tests.trainers.trainers import trainer_setup

PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [13])
OBJECTIVE = PolicyObjective(16, "vanilla")


def write_moe(path, *, top_k, router_seed=0, **sizes):
    """A mixture in which the weight of a single expert is always 1, so that only the choice of it matters."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=top_k, norm_topk_prob=True, mlp_only_layers=[1], initializer_range=0.3, eos_token_id=1,
        bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config.update(sizes)
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(router_seed)
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].mlp.gate.weight.normal_(generator=generator)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(Number of experts per token, seed of the routers) -> folder."""
    folder = tmp_path_factory.mktemp("moe")
    keys = [(top_k, seed) for top_k in (1, 2) for seed in (0, 1)]
    return {key: write_moe(folder / f"{key[0]}-{key[1]}", top_k=key[0], router_seed=key[1]) for key in keys}


def sampled(path):
    """What an engine samples with the model, as a training batch."""

    async def generate():
        options = {"device": "cpu", "dtype": "float32", "attn_implementation": "sdpa", "max_length": 48}
        strategy = HFInferStrategy(path, **options, records_routing=True, strategy_config={})
        await strategy.start()
        requests = [make_request(str(place), prompt, 12, seed=place) for place, prompt in enumerate(PROMPTS)]
        try:
            return await asyncio.gather(*(strategy.generate(replace(each, with_routing=True)) for each in requests))
        finally:
            await strategy.shutdown()

    samples = []
    for prompt, done in zip(PROMPTS, asyncio.run(generate()), strict=True):
        zeros = np.zeros(len(prompt), np.int32)
        length = len(prompt) + len(done.token_ids)
        samples.append(
            Sample(
                np.concatenate([np.array(prompt, np.int32), done.token_ids]),
                np.arange(length) >= len(prompt),
                np.concatenate([zeros.astype(np.float32), done.logprobs]),
                np.concatenate([zeros - 1, done.versions]),
                done.finish_reason,
                routed_experts=joined_routing([done.routed_experts], length),
            )
        )
    batch = SampleBatch.from_samples(samples)
    batch.tokens["advantages"] = batch.tokens["response_mask"].astype(np.float32)
    batch.tokens["same_weights"] = np.ones(len(batch.tokens["advantages"]), dtype=bool)
    return batch


@pytest.fixture(scope="module")
def batches(models):
    return {top_k: sampled(models[top_k, 0]) for top_k in (1, 2)}


def trainer_of(path, **changes):
    trainer = Fsdp2TrainStrategy(trainer_setup(path, **{"replays_routing": True} | changes))
    trainer.initialize()
    return trainer


def differences(trainer, batch):
    """Of the response's log-probabilities from those of the engine."""
    found = trainer.log_probs(batch, 1.0) - batch.tokens["behaviour_logprobs"]
    return np.abs(found[batch.tokens["response_mask"]])


LAYOUTS = {
    "one padded micro-batch": {},
    "small padded micro-batches": {"max_tokens": 20},
    "packed": {"packed": True, "max_tokens": 30},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_the_engines_although_the_routers_differ(models, batches, layout, leave_process_group):
    batch = batches[1]
    trainer = trainer_of(models[1, 1], **LAYOUTS[layout])
    assert differences(trainer, batch).max() < 1e-5
    own = differences(trainer, batch.unrouted())
    assert np.median(own) > 1e-2, "with experts of its own the trainer is another model"


def test_weights_of_the_experts_come_from_the_trainers_router(models, batches, leave_process_group):
    same = trainer_of(models[2, 0])
    assert differences(same, batches[2]).max() < 1e-5
    leave_process_group()
    other = trainer_of(models[2, 1])
    replayed, own = differences(other, batches[2]), differences(other, batches[2].unrouted())
    assert 1e-4 < np.median(replayed) < np.median(own)


def step(trainer, batch):
    return trainer.train_step(batch, OBJECTIVE, 1.0), dict(trainer.named_weights())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_teaches_the_router_and_tells_how_often_it_disagrees(models, batches, layout, leave_process_group):
    before = {name: weight.clone() for name, weight in trainer_of(models[2, 1]).named_weights()}
    leave_process_group()
    metrics, after = step(trainer_of(models[2, 1], **LAYOUTS[layout]), batches[2])
    routers = [name for name in before if name.endswith("gate.weight")]
    assert len(routers) == 2 and all(not torch.equal(before[name], after[name]) for name in routers)
    assert 0.5 < metrics["routing_mismatch"] <= 1
    leave_process_group()
    agreeing = trainer_of(models[2, 0], **LAYOUTS[layout])
    assert agreeing.train_step(batches[2], OBJECTIVE, 1.0)["routing_mismatch"] == 0


def test_recomputed_activations_give_the_same_step(models, batches, leave_process_group):
    metrics, plain = step(trainer_of(models[2, 1]), batches[2])
    plain = {name: weight.clone() for name, weight in plain.items()}
    leave_process_group()
    again, recomputed = step(trainer_of(models[2, 1], strategy_config={"gradient_checkpointing": True}), batches[2])
    assert again == metrics
    assert all(torch.equal(recomputed[name], weight) for name, weight in plain.items())


def test_parts_of_a_batch_give_the_share_of_the_whole(models, batches, leave_process_group):
    whole = step(trainer_of(models[2, 1]), batches[2])[0]["routing_mismatch"]
    leave_process_group()
    trainer = trainer_of(models[2, 1])
    assert trainer.train_part(batches[2].select([0, 1]), OBJECTIVE, 1.0, completes=False)[0] == {}
    metrics, _ = trainer.train_part(batches[2].select([2, 3]), OBJECTIVE, 1.0, completes=True)
    assert metrics["routing_mismatch"] == pytest.approx(whole)


def test_a_batch_without_experts_is_not_trained_on(models, batches, leave_process_group):
    with pytest.raises(ValueError, match="the samples have no `routed_experts`"):
        trainer_of(models[2, 0]).train_step(batches[2].unrouted(), OBJECTIVE, 1.0)


def test_adapters_that_are_switched_off_leave_the_base_its_own_experts(models, batches, leave_process_group):
    arguments = ModelArguments(lora_target="q_proj", lora_rank=2)
    trainer = trainer_of(models[1, 1], model_args=arguments)
    base = trainer.base_log_probs(batches[1], 1.0)
    np.testing.assert_array_equal(base, trainer.log_probs(batches[1].unrouted(), 1.0))
    assert differences(trainer, batches[1]).max() < 1e-5


def test_nothing_is_replayed_at_padding_at_last_tokens_and_in_dummies(batches):
    batch, device = batches[2], torch.device("cpu")
    experts = torch.from_numpy(batch.tokens["routed_experts"])
    wanted, offsets = predicted_tokens(batch), batch.offsets
    padded = build_micro_batch(batch, [3, 0], wanted, (), device).routing
    width = int(batch.lengths[[3, 0]].max())
    for place, row in enumerate([3, 0]):
        known = padded.known.view(2, width)[place]
        length = int(batch.lengths[row])
        assert known.tolist() == [position < length - 1 for position in range(width)]
        rows = experts[offsets[row] : offsets[row + 1]]
        assert torch.equal(padded.experts.view(2, width, 3, 2)[place, :length], rows)
    packed = build_micro_batch(batch, [3, 0], wanted, (), device, packed=True).routing
    inside = torch.cat([torch.arange(width) < length for length in batch.lengths[[3, 0]].tolist()])
    assert torch.equal(packed.experts, padded.experts[inside])
    assert packed.known.nonzero().ravel().tolist() == [
        place for place in range(len(packed.known)) if place not in (batch.lengths[3] - 1, len(packed.known) - 1)
    ]
    for dummy in (build_micro_batch(batch, [], wanted, (), device, packed=packs).routing for packs in (False, True)):
        assert dummy.known.tolist() == [False, False] and len(dummy.experts) == 2


def test_a_packed_row_of_empty_samples_has_no_experts_to_replay(batches):
    batch = batches[2].select([0])
    empty = SampleBatch(np.array([0]), {name: values[:0] for name, values in batch.tokens.items()})
    micro_batch = build_micro_batch(empty, [0], predicted_tokens(empty), (), torch.device("cpu"), packed=True)
    assert micro_batch.input_ids.shape == (1, 2) and micro_batch.routing is None


def of_ranks(trainer, batch):
    metrics = trainer.train_step(batch, OBJECTIVE, 1.0)
    return metrics["routing_mismatch"], trainer.log_probs(batch, 1.0)


@pytest.mark.tier("all")
@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train"])
def test_ranks_share_a_batch_with_its_experts(models, batches, strategy, leave_process_group):
    setup = {"replays_routing": True}
    if strategy == "deepspeed_train":
        need("deepspeed")
        setup["strategy_config"] = {"zero_optimization": {"stage": 3}}
    share, logprobs = of_ranks(trainer_of(models[2, 1]), batches[2])
    for found, of_rank in run_job(Job(of_ranks, strategy, models[2, 1], batches[2], setup)):
        assert found == pytest.approx(share)
        np.testing.assert_allclose(of_rank, logprobs, atol=1e-4)


def train_often(trainer, batch):
    """All that must not depend on how rows are split, by name: also with odd widths and fewer rows than ranks."""
    results = {"logprobs": trainer.log_probs(batch, 0.7), "own": trainer.log_probs(batch.unrouted(), 0.7)}
    for step, rows in enumerate(([0, 1, 2, 3], [1, 3, 2], [3], [2, 0, 1])):
        metrics = trainer.train_step(batch.select(rows), OBJECTIVE, 0.9)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
    results["trained"] = trainer.log_probs(batch, 1.0)
    return results | {f"weight/{name}": weight for name, weight in weights_of(trainer).items()}


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("layout", "options", "ranks"),
    [
        (LAYOUTS["small padded micro-batches"], {}, 2),
        (LAYOUTS["packed"], {}, 2),
        (LAYOUTS["packed"], {"gradient_checkpointing": True}, 4),
    ],
)
def test_ranks_that_split_rows_replay_the_experts_of_their_own_positions(tmp_path, batches, layout, options, ranks):
    """The recording is that of a model with other routers, and none of the batch's lengths is even."""
    path = write_moe(tmp_path, top_k=2, router_seed=1, num_attention_heads=4, num_key_value_heads=2)
    setup = {"replays_routing": True, "training_args": GENTLE, **layout}
    (whole,) = run_here(Job(train_often, "fsdp2_train", path, batches[2], setup, ranks=1))
    difference = np.abs(whole["logprobs"] - whole["own"])[batches[2].tokens["response_mask"]]
    assert np.median(difference) > 1e-2 and whole["0/routing_mismatch"] > 0.5, "the recording has no effect"
    split = setup | {"strategy_config": options | {"context_parallel_size": 2, "process_group_timeout_seconds": 60}}
    for found in run_job(Job(train_often, "fsdp2_train", path, batches[2], split, ranks=ranks)):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
