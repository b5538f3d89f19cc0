"""Trainers of vision-language models: log-probabilities are the engine's, and ranks without pictures keep in step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import DataArguments
from roll.data.pictures import FAMILIES, PictureProcessor, picture_tokens
from roll.data.prompts import load_prompts
from roll.data.records import Prompt, SampleBatch
from roll.data.tokenizer import load_tokenizer
from roll.engines.base import Completion, GenerateRequest, ModelSpec, SamplingParams
from roll.engines.hf.engine import ActiveRequest, HFEngine
from roll.engines.hf.model import load_model
from roll.engines.options import HFInferConfig
from roll.trainers.trainer import ForwardStrategy, TrainStrategy
from tests.tiny_vision import make_model, make_task
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.tiny_models import weights_of
from tests.trainers.trainers import ALMOST_SGD

MAX_LENGTH = 40
TEXT = np.array([8, 9, 10, 11], np.int32)
OBJECTIVE = PolicyObjective(8, "ppo", {}, "token-mean")


def prompts_of(folder, model: str) -> list[Prompt]:
    data = DataArguments(file_name=str(make_task(folder)), template="chat")
    return load_prompts(
        data, load_tokenizer(model), prompt_length=20, path="data", seed=0, processor=PictureProcessor(model)
    )


def generated(model: str, requests: list[GenerateRequest], drops_caches: bool = False) -> list[Completion]:
    engine = HFEngine(
        load_model(ModelSpec(model, "cpu", "float32", "sdpa", MAX_LENGTH)), MAX_LENGTH, HFInferConfig(), (1,)
    )
    for request in requests:
        engine.submit(ActiveRequest(request))
    found: dict[str, Completion] = {}
    while engine.running or engine.waiting:
        engine.step()
        if drops_caches:
            engine.drop_caches()
        found |= {event.request_id: event for _, event in engine.take_events()}
    return [found[request.request_id] for request in requests]


def requests_of(prompts: list[Prompt]) -> list[GenerateRequest]:
    """A request for each prompt, and one without a picture."""
    made = [
        GenerateRequest(
            str(seed), prompt.token_ids, SamplingParams(9, seed=seed), prompt_pictures=tuple(prompt.pictures)
        )
        for seed, prompt in enumerate(prompts)
    ]
    return [*made, GenerateRequest("text", TEXT, SamplingParams(9, seed=99))]


def batch_of(requests: list[GenerateRequest], completions: list[Completion]) -> SampleBatch:
    both = list(zip(requests, completions, strict=True))
    pictures = np.empty(len(both), dtype=object)
    pictures[:] = [request.prompt_pictures for request, _ in both]

    def joined(before: float, name: str) -> np.ndarray:
        return np.concatenate(
            [np.concatenate([np.full(len(r.prompt_token_ids), before), getattr(c, name)]) for r, c in both]
        )

    return SampleBatch(
        np.array([len(r.prompt_token_ids) + len(c.token_ids) for r, c in both]),
        {
            "token_ids": np.concatenate([np.concatenate([r.prompt_token_ids, c.token_ids]) for r, c in both]),
            "response_mask": joined(-1, "versions") >= 0,
            "behaviour_logprobs": joined(0, "logprobs").astype(np.float32),
            "advantages": np.random.default_rng(0).normal(size=len(joined(0, "logprobs"))).astype(np.float32),
            "versions": joined(-1, "versions").astype(np.int32),
            "same_weights": np.ones(len(joined(0, "logprobs")), bool),
        },
        {"prompt_pictures": pictures},
    )


def train(trainer: TrainStrategy, batch: SampleBatch) -> dict[str, Any]:
    logprobs = trainer.log_probs(batch, 1.0)
    metrics = trainer.train_step(batch, OBJECTIVE, 1.0)
    return {"logprobs": logprobs, "norm": metrics["grad_norm"], "weights": weights_of(trainer)}


def scores(trainer: ForwardStrategy, batch: SampleBatch) -> np.ndarray:
    return trainer.log_probs(batch, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_reference_compute_the_log_probabilities_of_the_engine(tmp_path, family):
    model = make_model(tmp_path / "model", family)
    requests = requests_of(prompts_of(tmp_path, model)[::8])
    batch = batch_of(requests, generated(model, requests))
    mask = batch.tokens["response_mask"]
    for strategy in ("fsdp2_train", "hf_infer"):
        setup = {"forward_only": True, "max_tokens": 50}
        (found,) = run_here(Job(scores, strategy, model, batch, setup, ranks=1))
        assert np.abs(found - batch.tokens["behaviour_logprobs"])[mask].max() < 1e-5, strategy
    blind = replace(batch, per_sample={})
    (found,) = run_here(Job(scores, "hf_infer", model, blind, setup, ranks=1))
    assert np.abs(found - batch.tokens["behaviour_logprobs"])[mask].max() > 0.1, "the pictures change nothing"


def test_a_response_continues_where_it_was_after_its_cache_was_dropped_or_on_another_replica(tmp_path):
    model = make_model(tmp_path / "model")
    requests = requests_of(prompts_of(tmp_path, model)[::8])
    whole = generated(model, requests)
    for again, first in zip(generated(model, requests, drops_caches=True), whole, strict=True):
        assert np.array_equal(again.token_ids, first.token_ids)
        np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-5)
    (request, first) = max(zip(requests, whole, strict=True), key=lambda pair: len(pair[1].token_ids))
    assert len(first.token_ids) > 3 and request.prompt_pictures
    rest = replace(
        request,
        prompt_token_ids=np.concatenate([request.prompt_token_ids, first.token_ids[:3]]),
        first_token_index=3,
        sampling=replace(request.sampling, max_new_tokens=6),
    )
    (continued,) = generated(model, [rest])
    assert np.array_equal(continued.token_ids, first.token_ids[3:])
    np.testing.assert_allclose(continued.logprobs, first.logprobs[3:], atol=1e-5)


@pytest.mark.parametrize("which", ["with a picture", "of text"])
def test_a_response_ends_at_a_placeholder(tmp_path, which):
    """Also behind a text: the trainer, which cannot tell, would give the model another token in its place."""
    model = make_model(tmp_path / "model")
    (prompt,) = prompts_of(tmp_path, model)[:1]
    placeholders = picture_tokens(PictureProcessor(model).config)
    asked = dict(zip(("with a picture", "of text"), requests_of([prompt]), strict=True))[which]
    requests = [replace(asked, request_id=str(seed), sampling=SamplingParams(9, seed=seed)) for seed in range(60)]
    ended = [each for each in generated(model, requests) if np.isin(each.token_ids, placeholders).any()]
    assert ended
    for completion in ended:
        assert completion.finish_reason == "stop" and not np.isin(completion.token_ids[:-1], placeholders).any()


@pytest.mark.tier("all")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_ranks_and_micro_batches_without_pictures_keep_in_step(tmp_path, family):
    """One sample has a picture. Alone on a rank, or with gradient checkpointing, the step is the same."""
    model = make_model(tmp_path / "model", family)
    requests = requests_of(prompts_of(tmp_path, model)[:1])
    requests += [replace(requests[-1], request_id=f"text {seed}", sampling=SamplingParams(9, seed=seed))
                 for seed in range(3)]  # fmt: skip
    batch = batch_of(requests, generated(model, requests))
    setup = {"max_tokens": 20, "training_args": ALMOST_SGD}
    (alone,) = run_job(Job(train, "fsdp2_train", model, batch, setup, ranks=1))
    checkpointed = setup | {"strategy_config": {"process_group_timeout_seconds": 60, "gradient_checkpointing": True}}
    before = {name: weight.detach().numpy() for name, weight in policy_weights(model)}
    moved = [name for name, weight in alone["weights"].items() if not np.array_equal(weight, before[name])]
    assert any("visual.blocks.0" in name for name in moved) and any("patch_embed" in name for name in moved)
    for results in (
        run_job(Job(train, "fsdp2_train", model, batch, setup, ranks=2)),
        run_job(Job(train, "fsdp2_train", model, batch, checkpointed, ranks=1)),
    ):
        for result in results:
            np.testing.assert_allclose(result["logprobs"], alone["logprobs"], atol=1e-5)
            assert result["norm"] == pytest.approx(alone["norm"], rel=1e-4)
            for name, weight in alone["weights"].items():
                np.testing.assert_allclose(result["weights"][name], weight, atol=1e-5, err_msg=name)


def policy_weights(model: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return load_model(ModelSpec(model, "cpu", "float32", "sdpa", MAX_LENGTH)).named_parameters()
