"""The picture example's world: a prompt's drawing is right, and no other; the folder is a pipeline of diffusers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from roll.rewards.pictures import Shapes, parse_description
from tests.tiers import need

need("diffusers")
SCRIPT = Path(__file__).parents[2] / "examples" / "image-shapes-cpu" / "make_model.py"
spec = importlib.util.spec_from_file_location("image_shapes_make_model", SCRIPT)
world = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = world
spec.loader.exec_module(world)


def pictures(prompts, seed=0):
    drawn = world.draw([parse_description(prompt) for prompt in prompts], torch.Generator().manual_seed(seed))
    pixels = ((drawn / 2 + 0.5) * 255).byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(each) for each in pixels]


def test_the_checker_agrees_with_the_drawings_and_with_no_other_prompt():
    prompts, checker = world.all_prompts(), Shapes()
    assert len(prompts) == len(set(prompts)) == 128
    for seed in range(4):
        drawn = pictures(prompts, seed)
        assert all(checker(image, prompt)["score"] == 1 for image, prompt in zip(drawn, prompts, strict=True))
    for image, prompt in zip(drawn[::8], prompts[::8], strict=True):
        also = {other for other in prompts if checker(image, other)["score"] == 1}
        kinds = sorted(parse_description(prompt).kinds)
        assert prompt in also and all(sorted(parse_description(other).kinds) == kinds for other in also)


def test_held_out_prompts_are_relations_that_training_has_not():
    for seed in range(3):
        training, validation = world.split_prompts(seed)
        assert not set(training) & set(validation) and len(validation) == world.HELD_OUT
        assert sorted(training + validation) == sorted(world.all_prompts())
        assert all(parse_description(prompt).relation for prompt in validation)
    assert world.split_prompts(0) == world.split_prompts(0) != world.split_prompts(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("shapes")
    return out, world.make(out, 3, world.WarmUp(steps=2, batch_size=8))


def test_the_folder_loads_as_stable_diffusion_and_draws(folder):
    from diffusers import DiffusionPipeline, StableDiffusion3Pipeline

    out, made = folder
    pipeline = DiffusionPipeline.from_pretrained(out / "model")
    assert isinstance(pipeline, StableDiffusion3Pipeline) and made.parameters < 1e6
    assert world.accuracy_of(pipeline, world.all_prompts()[:2], pictures_each=2) == 0
    assert world.existing(out, 3, 2) == made and world.existing(out, 3, 3) is world.existing(out, 4, 2) is None
    rows = [json.loads(line) for line in (out / "data" / "validation.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [row["ground_truth"] for row in rows] == world.split_prompts(3)[1]


def test_the_same_seed_makes_the_same_files(folder, tmp_path):
    out, made = folder
    assert world.make(tmp_path, 3, world.WarmUp(steps=2, batch_size=8)) == made
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert len(files) > 15 and all((out / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


def test_latents_are_pixels():
    autoencoder = world.make_autoencoder()
    picture = world.draw([parse_description("red circle above blue square")], torch.Generator())
    latents = autoencoder.encode(picture).latents
    torch.testing.assert_close(latents, picture[:, :, ::2, ::2])
    torch.testing.assert_close(autoencoder.decode(latents).sample, picture, atol=1e-5, rtol=0)
    grey = torch.linspace(-1, 1, 12).expand(1, 3, 12, 12)
    torch.testing.assert_close(autoencoder.decode(grey).sample[:, :, ::2, ::2], grey, atol=0.02, rtol=0)


def test_every_word_is_a_token():
    tokenizer = world.make_tokenizer()
    for prompt in world.all_prompts():
        ids = tokenizer(prompt)["input_ids"]
        assert len(ids) == len(prompt.split()) + 2 <= tokenizer.model_max_length
        assert tokenizer.unk_token_id not in ids
