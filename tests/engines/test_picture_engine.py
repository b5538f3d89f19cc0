"""`diffusers_infer`: pictures whose bits depend on nothing beside them, and a record that says how they were drawn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll.configs.roles import PictureSampling
from roll.engines.base import GenerateRequest, PictureRequest, SamplingParams, TokenChunk
from roll.engines.response import PartialResponse
from roll.weights.buckets import WeightMismatch, pack_buckets
from tests.tiers import need
from tests.tiny_pictures import SAMPLING, make_pipeline

need("diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")

from roll.algorithms import flow  # noqa: E402
from roll.engines.hf.engine import ActiveRequest  # noqa: E402
from roll.engines.options import DiffusersInferConfig  # noqa: E402
from roll.engines.pictures import DiffusersInferStrategy, PictureEngine  # noqa: E402
from roll.pictures.model import load_transformer  # noqa: E402

PLAIN = PictureSampling(**SAMPLING)
GUIDED = replace(PLAIN, kind="flow_sde", guidance_scale=4.0, negative_prompt="blue")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_pipeline(tmp_path_factory.mktemp("model")))


def engine(model, at_once: int = 64) -> PictureEngine:
    return PictureEngine(model, torch.float32, torch.device("cpu"), DiffusersInferConfig(at_once))


def asked(seed: int, window: range | None = range(1, 3), prompt: str = "red", sampling=PLAIN) -> GenerateRequest:
    params = SamplingParams(1, seed=seed)
    picture = PictureRequest(prompt, sampling, window)
    return GenerateRequest(f"picture-{seed}", np.zeros(1, np.int32), params, picture=picture)


def drawn(engine: PictureEngine, requests) -> list:
    for request in requests:
        engine.submit(ActiveRequest(request))
    return to_the_end(engine, len(requests))


def to_the_end(engine: PictureEngine, count: int) -> list:
    while engine.running or engine.waiting:
        engine.step()
    ended = [completion for _, completion in engine.take_events()]
    assert len(ended) == count
    return sorted(ended, key=lambda each: int(each.request_id.rpartition("-")[2]))


def bits(completion) -> tuple[bytes, ...]:
    picture = completion.picture
    arrays = (completion.token_ids, completion.logprobs, completion.versions, picture.image, picture.latents)
    return tuple(array.tobytes() for array in arrays)


MIXED = [asked(seed, range(seed % 2, seed % 2 + 2), ("red", "two blue")[seed % 2]) for seed in range(9)] + [
    asked(9, sampling=GUIDED),
    asked(10, None),
    asked(11, sampling=GUIDED),
]


@pytest.mark.parametrize("at_once", [5, 64])
def test_a_picture_has_the_same_bits_whatever_is_drawn_beside_it(model, at_once):
    alone = [bits(drawn(engine(model), [request])[0]) for request in MIXED[::3]]
    together = [bits(each) for each in drawn(engine(model, at_once), MIXED)]
    assert together[::3] == alone
    assert len(set(together)) == len(together)


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, replace(GUIDED, log_prob="sum"), replace(PLAIN, kind="dance"), replace(PLAIN, log_prob="guard")],
)
def test_the_record_is_that_of_the_transitions(model, sampling):
    (done,) = drawn(engine(model), [asked(3, range(1, 3), "two blue", sampling)])
    assert done.token_ids.tolist() == [1, 2] and done.versions.tolist() == [0, 0] and done.finish_reason == "stop"
    assert done.picture.latents.shape == (3, 3, 8, 8) and done.picture.image.shape == (8, 8, 3)
    from diffusers import FlowMatchEulerDiscreteScheduler

    made = engine(model)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    levels = scheduler.sigmas
    for number, step in enumerate(done.token_ids.tolist()):
        before, after = (torch.from_numpy(done.picture.latents[place])[None] for place in (number, number + 1))
        with torch.no_grad():
            wanted = [sampling.negative_prompt, "two blue"] if sampling.guidance_scale > 1 else ["two blue"]
            rows, embeddings = len(wanted), made._frozen._stacked(wanted, 2)
            level = levels[step].expand(rows) * 1000
            each = made._model(before.expand(rows, -1, -1, -1), timestep=level, **embeddings, return_dict=False)[0]
            velocity = each[:1] + sampling.guidance_scale * (each[1:] - each[:1]) if rows == 2 else each
        moments = flow.step_moments(
            sampling.kind, before, velocity, levels[step], levels[step + 1], 0.8, float(levels[1])
        )
        expected = torch.distributions.Normal(moments[0], moments[1].reshape(1, 1, 1, 1)).log_prob(after)
        expected = expected.sum() if sampling.log_prob == "sum" else expected.mean()
        assert done.logprobs[number] == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
        if sampling.log_prob == "guard":
            np.testing.assert_allclose(done.picture.means[number], moments[0][0].numpy(), atol=1e-5, rtol=0)
    assert done.picture.means is None or (sampling.log_prob == "guard" and len(done.picture.means) == 2)


def other_weights(model, scale: float = 1.5):
    transformer = load_transformer(model, torch.float32)
    buffers = [(name, transformer.get_buffer(name)) for name in ("pos_embed.pos_embed",)]
    changed = [(name, (tensor * scale).detach()) for name, tensor in transformer.named_parameters()]
    return list(pack_buckets(iter([*changed, *buffers]), 1 << 20))


def test_an_update_between_two_steps_changes_the_steps_that_follow_and_their_versions_only(model):
    untouched = drawn(engine(model), [asked(1)])[0]
    updated = engine(model)
    updated.submit(ActiveRequest(asked(1)))
    updated.step()
    updated.step()  # the first step of the window
    assert updated.load_weights(updated.stage_weights(other_weights(model), 7)).version == 7
    (done,) = to_the_end(updated, 1)
    assert done.versions.tolist() == [0, 7]
    assert (untouched.picture.newest_version, done.picture.newest_version) == (0, 7)
    kept, new = untouched.picture.latents, done.picture.latents
    assert np.array_equal(kept[:2], new[:2]) and not np.array_equal(kept[2], new[2])
    assert done.logprobs[0] == untouched.logprobs[0] and done.logprobs[1] != untouched.logprobs[1]
    from_the_start = drawn(updated, [asked(1)])[0]
    assert from_the_start.versions.tolist() == [7, 7]
    assert from_the_start.picture.latents[1].tobytes() != kept[1].tobytes()


def test_an_update_with_equal_weights_changes_no_bit_in_bfloat16(model):
    """The trainer publishes the position embeddings in float32, and they have these digits from the start."""
    wide = load_transformer(model, torch.float32)
    tensors = [(name, tensor.detach()) for name, tensor in wide.named_parameters()]
    tensors.append(("pos_embed.pos_embed", wide.pos_embed.pos_embed))
    begun, updated = (
        PictureEngine(model, torch.bfloat16, torch.device("cpu"), DiffusersInferConfig(64)) for _ in range(2)
    )
    assert begun._model.pos_embed.pos_embed.dtype == torch.float32
    updated.load_weights(updated.stage_weights(list(pack_buckets(iter(tensors), 1 << 20)), 0))
    assert bits(drawn(updated, [asked(1)])[0]) == bits(drawn(begun, [asked(1)])[0])


def test_a_tensor_that_is_missing_or_unknown_is_named(model):
    buckets = other_weights(model)
    broken = engine(model)
    with pytest.raises(WeightMismatch, match=r"'pos_embed\.proj\.weight' is missing"):
        broken.stage_weights([], 1)
    stray = pack_buckets(iter([("stray.weight", torch.zeros(2))]), 1 << 20)
    with pytest.raises(WeightMismatch, match=r"'stray\.weight' is not in"):
        broken.stage_weights([*buckets, *stray], 1)


def test_an_update_after_the_window_is_in_the_picture_and_not_in_its_tokens(model):
    untouched = drawn(engine(model), [asked(1)])[0]
    updated = engine(model)
    updated.submit(ActiveRequest(asked(1)))
    for _ in range(3):
        updated.step()
    updated.load_weights(updated.stage_weights(other_weights(model), 7))
    (done,) = to_the_end(updated, 1)
    assert done.versions.tolist() == [0, 0] and done.picture.newest_version == 7
    assert not np.array_equal(done.picture.image, untouched.picture.image)


def test_sleep_between_two_steps_changes_nothing(model):
    rested = engine(model)
    rested.submit(ActiveRequest(asked(2)))
    rested.step()
    rested.drop_caches()
    rested.sleep()
    rested.wake()
    assert bits(to_the_end(rested, 1)[0]) == bits(drawn(engine(model), [asked(2)])[0])


def test_progress_counts_steps_and_an_abort_ends_without_a_picture(model):
    running = engine(model, at_once=1)
    for seed in (0, 1):
        running.submit(ActiveRequest(asked(seed)))
    running.step()
    running.step()
    ((_, chunk),) = running.progress({})
    assert len(chunk.token_ids) == 2
    assert running.progress({"picture-0": 2}) == []
    running.abort(["picture-0", "picture-1", "picture-9"])
    ended = [completion for _, completion in running.take_events()]
    assert [(each.finish_reason, len(each.token_ids), each.picture) for each in ended] == [
        ("abort", 1, None),
        ("abort", 0, None),
    ]
    assert not running.running and not running.waiting


def test_a_picture_whose_engine_died_is_drawn_again_from_its_beginning():
    response = PartialResponse(asked(4), min_version=2, max_length=5)
    response.add(TokenChunk(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.full(3, 9, np.int32)))
    assert response.attempt_tokens == 3
    assert response.cut_off() == 0
    assert response.completion is None and response.min_version == 2
    again = response.remaining()
    assert again.first_token_index == 0 and again.sampling == asked(4).sampling and again.picture == asked(4).picture


def strategy(model) -> DiffusersInferStrategy:
    return DiffusersInferStrategy(
        model,
        device="cpu",
        dtype="float32",
        attn_implementation="sdpa",
        max_length=5,
        strategy_config={"max_running_requests": 2, "threads": 1},
    )


def test_draining_ends_running_pictures_first_and_others_see_the_new_weights(model):
    async def run():
        replica = strategy(model)
        await replica.start()
        await replica.prepare_weights(iter(other_weights(model)), 3)
        requests = [asyncio.ensure_future(replica.generate(asked(seed))) for seed in range(24)]
        while not replica.stats()["running"]:
            await asyncio.sleep(0)
        await replica.pause("drain")
        await replica.load_weights(3)
        await replica.resume()
        ended = await asyncio.gather(*requests)
        await replica.shutdown()
        return [each.versions.tolist() for each in ended]

    versions = asyncio.run(run())
    assert versions[0] == [0, 0] and versions[-1] == [3, 3]
    assert {tuple(each) for each in versions} == {(0, 0), (3, 3)}


def test_requests_that_ask_for_no_picture_or_for_steps_that_do_not_exist_are_refused(model):
    async def run():
        replica = strategy(model)
        await replica.start()
        text = GenerateRequest("text", np.zeros(1, np.int32), SamplingParams(4))
        with pytest.raises(ValueError, match="'text' cannot run: it asks for no picture"):
            await replica.generate(text)
        with pytest.raises(ValueError, match="not within 4 steps"):
            await replica.generate(asked(0, range(3, 5)))
        done = await replica.generate(asked(1))
        await replica.shutdown()
        return done

    assert asyncio.run(run()).finish_reason == "stop"
