"""Each family of image models: without noise the engine draws what diffusers' own pipeline draws, in any company."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.configs.roles import PictureSampling
from roll.data.records import derive_seed
from roll.engines.base import GenerateRequest, PictureRequest, SamplingParams
from tests.tiers import need
from tests.tiny_pictures import (
    DISTILLED,
    FLUX,
    QWEN,
    SAMPLING,
    make_distilled_flux,
    make_flux,
    make_pipeline,
    make_qwen,
)

need("diffusers")
pytestmark = pytest.mark.usefixtures("one_thread")

import diffusers  # noqa: E402

from roll.engines.hf.engine import ActiveRequest  # noqa: E402
from roll.engines.options import DiffusersInferConfig  # noqa: E402
from roll.engines.pictures import STARTING_NOISE, PictureEngine  # noqa: E402
from roll.pictures.model import Schedule  # noqa: E402

GUIDED = {"guidance_scale": 4.0, "negative_prompt": "blue"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SD3": (make_pipeline, {"width": 12}),
    "SD3, guided": (make_pipeline, GUIDED),
    "SD3, shifted": (make_pipeline, {"shift": 1.5}),
    "FLUX": (make_flux, {"max_sequence_length": 5}),
    "FLUX, guided": (make_flux, FLUX),
    "FLUX, shifted": (make_flux, {"max_sequence_length": 5, "shift": 1.5}),
    "FLUX, distilled": (make_distilled_flux, DISTILLED),
    "FLUX, distilled and guided": (make_distilled_flux, DISTILLED | {"true_cfg_scale": 2.0}),
    "Qwen-Image": (make_qwen, {"max_sequence_length": 16}),
    "Qwen-Image, guided": (make_qwen, QWEN),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Function of a maker -> the folder of its pipeline, made once."""
    made: dict[Any, str] = {}

    def model_of(make: Any) -> str:
        if make not in made:
            made[make] = str(make(tmp_path_factory.mktemp(make.__name__)))
        return made[make]

    return model_of


def drawn(model: str, sampling: PictureSampling, prompts: dict[int, str], window: range | None) -> dict[int, Any]:
    """Draw one picture per seed and prompt, all at once."""
    engine = PictureEngine(model, torch.float32, torch.device("cpu"), DiffusersInferConfig(64))
    for seed, prompt in prompts.items():
        picture = PictureRequest(prompt, sampling, window)
        request = GenerateRequest(str(seed), np.zeros(1, np.int32), SamplingParams(1, seed=seed), picture=picture)
        engine.submit(ActiveRequest(request))
    while engine.running or engine.waiting:
        engine.step()
    return {int(done.request_id): done for _, done in engine.take_events()}


@pytest.mark.parametrize("case", CASES)
def test_without_noise_it_draws_what_diffusers_draws(models, case):
    make, changes = CASES[case]
    model, sampling = models(make), PictureSampling(**SAMPLING | changes)
    done = drawn(model, sampling, {5: "green above red"}, None)[5]
    schedule = Schedule.of(sampling, model)
    noise = torch.Generator().manual_seed(derive_seed(5, STARTING_NOISE))
    begun = torch.randn(schedule.latent_shape, generator=noise)[None]
    index = json.loads((Path(model) / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(model, **absent)
    if sampling.shift is not None:
        changed = {"shift": sampling.shift, "use_dynamic_shifting": False}
        pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, **changed)
    pipeline.set_progress_bar_config(disable=True)
    keys = ("height", "width", "num_inference_steps", "max_sequence_length", "guidance_scale", "true_cfg_scale")
    arguments = {key: vars(sampling)[key] for key in keys}
    if make is make_pipeline:
        del arguments["true_cfg_scale"]
    elif make is make_qwen:
        del arguments["guidance_scale"]
    arguments["negative_prompt"] = sampling.negative_prompt

    def theirs(**more: Any) -> Any:
        return pipeline("green above red", latents=begun.clone(), **arguments, **more).images

    latents = theirs(output_type="latent").numpy()
    np.testing.assert_allclose(done.picture.latents, latents, atol=1e-5, rtol=0)
    assert np.abs(latents - begun.numpy()).max() > 0.1
    image = np.asarray(theirs()[0]).astype(int)
    assert image.shape == done.picture.image.shape == (sampling.height, sampling.width, 3) and image.std() > 1
    assert np.abs(image - done.picture.image.astype(int)).max() <= 1


@pytest.mark.parametrize("case", ["FLUX, guided", "Qwen-Image, guided"])
def test_a_picture_has_the_same_bits_beside_prompts_of_other_lengths(models, case):
    make, changes = CASES[case]
    sampling = PictureSampling(**SAMPLING | changes)
    prompts = dict(enumerate(["red", "red left of blue", "two blue"] * 3))
    together = drawn(models(make), sampling, prompts, range(1, 3))
    for seed in (0, 1):
        alone = drawn(models(make), sampling, {seed: prompts[seed]}, range(1, 3))[seed]
        assert alone.picture.latents.tobytes() == together[seed].picture.latents.tobytes()
        assert alone.logprobs.tobytes() == together[seed].logprobs.tobytes()
    assert together[0].picture.latents.shape[1:] == Schedule.of(sampling, models(make)).latent_shape


def test_without_a_negative_prompt_guidance_leads_away_from_an_empty_one(models):
    sampling = PictureSampling(**SAMPLING | QWEN | {"negative_prompt": ""})
    one, other = (
        drawn(models(make_qwen), each, {1: "red"}, None)[1].picture.latents
        for each in (sampling, replace(sampling, true_cfg_scale=1.0))
    )
    assert np.abs(one - other).max() > 1e-3
