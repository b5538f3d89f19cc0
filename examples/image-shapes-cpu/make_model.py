"""Make the world of the picture example: a tiny Stable Diffusion 3 that draws coloured shapes, and prompts for it.

Flow matching warms the model up on the drawings of an inattentive painter, who draws every other circle as a square.
The model learns to do the same, and a quarter of its pictures are right. Reinforcement learning has to teach it to
draw circles more often than its teacher. The same seed on the same machine makes the same files. This script needs
torch, diffusers and one or two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.utils import logging
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from roll.rewards.pictures import COLOURS, Description, Shapes, parse_description

SIDE = 24
"""Pixels of a picture's side."""
SCALE = 2
"""Pixels of a latent, on each side."""
PATCH = 4
"""Latents that the transformer takes together, on each side; a shape fills such a patch, and a picture has 3 x 3."""
STEPS = 8
"""Denoising steps of a picture."""
MAX_SEQUENCE_LENGTH = 1
"""Tokens of the third text encoder, in place of the 256 that are the pipeline's default. It sees one word."""
USED_COLOURS = ("red", "green", "blue", "yellow")
USED_FORMS = ("circle", "square")
HELD_OUT = 32
MARKER = "made_by_image_shapes.json"
"""Written last, so a folder that holds it is complete."""


@dataclass(frozen=True)
class WarmUp:
    """Settings of flow matching."""

    steps: int = 720
    attentive: float = 5 / 6
    """Share of the steps in which the painter draws what is asked for; later, half of the circles are squares.
    A model that has seen right pictures knows what to come back to."""
    learning_rate: float = 2e-3
    """Rises over the first 20 steps, falls to half of it by the end of the attentive ones, and stays there."""
    batch_size: int = 128
    mistaken: float = 0.5
    """Share of the circles that the inattentive painter draws as squares."""
    noisiness: float = 0.7
    """Noise levels are sigmoid(N(noisiness, 1)): what goes where is decided while there is much noise."""
    averaged: tuple[float, float] = (0.99, 0.97)
    """What is kept of the attentive and of the other steps is a moving average of the weights with this decay, less at
    the beginning."""


@dataclass(frozen=True)
class WarmedModel:
    """Contents of the marker file about the model next to it."""

    seed: int
    steps: int
    accuracy: float
    """Share of held-out prompts with a right picture, by the deterministic sampler."""
    parameters: int


def all_prompts() -> list[str]:
    """Return single shapes, pairs of equal ones, and two different ones beside or above each other."""
    kinds = [f"{colour} {form}" for colour, form in product(USED_COLOURS, USED_FORMS)]
    relations = product(kinds, ("left of", "above"), kinds)
    pairs = [f"{one} {where} {other}" for one, where, other in relations if one != other]
    return [*kinds, *(f"two {kind}s" for kind in kinds), *pairs]


def split_prompts(seed: int) -> tuple[list[str], list[str]]:
    """Return the prompts as (training, validation), shuffled. Only relations are held out."""
    prompts = all_prompts()
    relations = [prompt for prompt in prompts if parse_description(prompt).relation]
    held_out = set(random.Random(seed).sample(relations, HELD_OUT))
    training = [prompt for prompt in prompts if prompt not in held_out]
    random.Random(seed).shuffle(training)
    return training, sorted(held_out)


def mistaken(description: Description, slips: list[bool]) -> Description:
    """Return what a painter makes of a description who draws a square for every shape that ``slips``."""
    kinds = [
        (colour, "square" if slip else form) for (colour, form), slip in zip(description.kinds, slips, strict=False)
    ]
    return replace(description, kinds=tuple(kinds))


def draw(descriptions: list[Description], generator: torch.Generator) -> Tensor:
    """Draw a picture of each, ``[batch, 3, SIDE, SIDE]`` of -1 to 1, with the shapes at random places."""
    count = len(descriptions)
    chance = torch.rand(count, 2, 2, generator=generator)
    beside = torch.tensor([each.relation == "left of" for each in descriptions])
    alike = torch.tensor([each.relation is None for each in descriptions])
    beside = torch.where(alike, torch.rand(count, generator=generator) < 0.5, beside)
    single = torch.tensor([len(each.kinds) == 1 for each in descriptions])

    cell = (3 * chance).long()  # column and row of the first and the second shape
    for axis, chosen in enumerate((beside & ~single, ~beside & ~single)):
        cell[chosen, 0, axis], cell[chosen, 1, axis] = 0, 2  # a gap keeps equal colours apart

    pixel = (torch.arange(SIDE // SCALE) + 0.5)[None, None]  # from -1 to 1 within the shape's place:
    x = ((pixel / PATCH - cell[:, :, 0, None]) * 2 - 1)[:, :, None, :].abs()
    y = ((pixel / PATCH - cell[:, :, 1, None]) * 2 - 1)[:, :, :, None].abs()
    circles = torch.tensor([[kind[1] == "circle" for kind in _two(each)] for each in descriptions])[:, :, None, None]
    masks = torch.where(circles, x**2 + y**2 <= 1, torch.maximum(x, y) <= 1)
    masks[:, 1] &= ~single[:, None, None]
    colours = torch.tensor([[COLOURS[kind[0]] for kind in _two(each)] for each in descriptions]).float()
    light = (masks[:, :, None] * colours[:, :, :, None, None]).amax(1)
    large = light.repeat_interleave(SCALE, 2).repeat_interleave(SCALE, 3)
    return large * 2 - 1


def make_tokenizer(frame: bool = True) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word; a prompt has at most six. ``frame``: a beginning and an end, too."""
    words = sorted({word for prompt in all_prompts() for word in prompt.split()})
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<begin>", "<end>", "<unknown>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if frame:
        special = [(token, vocabulary[token]) for token in ("<begin>", "<end>")]
        tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        unk_token="<unknown>",
        model_max_length=8,
    )


def make_text_encoder(tokenizer: PreTrainedTokenizerFast) -> CLIPTextModelWithProjection:
    """Make a text encoder that stays as it is: Stable Diffusion 3 reads the states before the last layer."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    for name, weights in encoder.named_parameters():
        if "embedding" in name:
            torch.nn.init.normal_(weights, std=0.7)  # those of CLIP are small because it is deep
    return encoder


def make_autoencoder() -> AutoencoderTiny:
    """Make an autoencoder whose latents are every second pixel, and that repeats them.

    The decoder's ReLU sees the positive and the negative part of each.
    """
    autoencoder = AutoencoderTiny(
        latent_channels=3,
        encoder_block_out_channels=(3, 3),
        decoder_block_out_channels=(6, 6),
        num_encoder_blocks=(0, 0),
        num_decoder_blocks=(0, 0),
    )
    unclamped = 1 / (3 * torch.tanh(torch.tensor(1 / 3)))  # the decoder begins with 3 tanh(x / 3)
    with torch.no_grad():
        for weights in autoencoder.parameters():
            weights.zero_()
        first, shrink, last = autoencoder.encoder.layers
        split, _, _, keep, join = autoencoder.decoder.layers
        for channel in range(3):
            first.weight[channel, channel, 1, 1] = 2.0
            shrink.weight[channel, channel, 1, 1] = last.weight[channel, channel, 1, 1] = 1.0
            for place, sign in ((channel, 1.0), (channel + 3, -1.0)):
                split.weight[place, channel, 1, 1] = sign
                keep.weight[place, place, 1, 1] = 1.0
                join.weight[channel, place, 1, 1] = sign * unclamped / 2
        last.bias.fill_(-1.0)
        join.bias.fill_(0.5)
    return autoencoder


def make_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """Make a new float32 pipeline; its transformer has 0.97 million parameters."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    encoders = [make_text_encoder(tokenizer) for _ in range(2)]
    last = T5Config(vocab_size=len(tokenizer), d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)
    transformer = SD3Transformer2DModel(
        sample_size=SIDE // SCALE,
        patch_size=PATCH,
        in_channels=3,
        out_channels=3,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=24,
        caption_projection_dim=96,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=SIDE // SCALE // PATCH,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=make_autoencoder(),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel(last),
        tokenizer_3=make_tokenizer(frame=False),
    )


@torch.no_grad()
def embed(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return the prompts' token embeddings ``[prompts, tokens, 64]`` and pooled ones ``[prompts, 64]``."""
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompts,
        prompts,
        prompts,
        device=torch.device("cpu"),
        do_classifier_free_guidance=False,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
    )
    return tokens, pooled


def warm_up(pipeline: StableDiffusion3Pipeline, prompts: list[str], options: WarmUp, seed: int) -> None:
    """Learn from the painter, attentive at first."""
    generator = torch.Generator().manual_seed(seed)
    first = round(options.attentive * options.steps)
    last = options.learning_rate / 2
    match_flow(pipeline, prompts, options, first, (options.learning_rate, last), 0.0, options.averaged[0], generator)
    rest = options.steps - first
    match_flow(pipeline, prompts, options, rest, (last, last), options.mistaken, options.averaged[1], generator)


def match_flow(
    pipeline: StableDiffusion3Pipeline,
    prompts: list[str],
    options: WarmUp,
    steps: int,
    learning_rates: tuple[float, float],
    mistakes: float,
    averaged: float,
    generator: torch.Generator,
) -> None:
    """Train the transformer to predict e - x_0 from x_s = (1 - s) x_0 + s e (flow matching, arXiv 2210.02747).

    ``learning_rates``: at the first and the last step. ``mistakes``: share of circles drawn as squares.
    """
    model = pipeline.transformer.train()
    tokens, pooled = embed(pipeline, prompts)
    descriptions = [parse_description(prompt) for prompt in prompts]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    average = [weight.detach().clone() for weight in model.parameters()]
    for step in range(steps):
        rows = torch.randint(len(prompts), (options.batch_size,), generator=generator)
        slips = (torch.rand(options.batch_size, 2, generator=generator) < mistakes).tolist()
        drawn = [mistaken(descriptions[row], slip) for row, slip in zip(rows.tolist(), slips, strict=True)]
        pictures = draw(drawn, generator)[:, :, ::SCALE, ::SCALE]
        noise = torch.randn(pictures.shape, generator=generator)
        level = (torch.randn(options.batch_size, generator=generator) + options.noisiness).sigmoid()
        s = level[:, None, None, None]
        velocity = model(
            hidden_states=(1 - s) * pictures + s * noise,
            timestep=1000 * level,
            encoder_hidden_states=tokens[rows],
            pooled_projections=pooled[rows],
            return_dict=False,
        )[0]
        loss = (velocity - (noise - pictures)).square().mean()
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (step + 1) / 20) * float(np.interp(step / steps, (0, 1), learning_rates))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for kept, weight in zip(average, model.parameters(), strict=True):
            kept.lerp_(weight.detach(), 1 - min(averaged, step / (step + 10)))
    for kept, weight in zip(average, model.parameters(), strict=True):
        weight.detach().copy_(kept)
    model.eval()


def accuracy_of(pipeline: StableDiffusion3Pipeline, prompts: list[str], pictures_each: int = 8, seed: int = 0) -> float:
    """Return the share of right pictures."""
    checker = Shapes()
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        prompts,
        num_images_per_prompt=pictures_each,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        height=SIDE,
        width=SIDE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        generator=torch.Generator().manual_seed(seed),
    ).images
    described = [prompt for prompt in prompts for _ in range(pictures_each)]
    scores = [checker(picture, prompt)["score"] for picture, prompt in zip(pictures, described, strict=True)]
    return sum(scores) / len(scores)


def write_data(folder: Path, training: list[str], validation: list[str]) -> None:
    """Write ``train.jsonl`` and ``validation.jsonl``."""
    folder.mkdir(parents=True)
    for name, prompts in (("train", training), ("validation", validation)):
        rows = [
            {"id": prompt.replace(" ", "-"), "prompt": prompt, "ground_truth": prompt, "domain": "shapes"}
            for prompt in prompts
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def existing(out: Path, seed: int, steps: int) -> WarmedModel | None:
    """Return the record of a model finished by an earlier call with the same arguments, or None."""
    marker = out / "model" / MARKER
    if not marker.exists():
        return None
    found = WarmedModel(**json.loads(marker.read_text()))
    return found if (found.seed, found.steps) == (seed, steps) else None


def make(out: Path, seed: int, options: WarmUp) -> WarmedModel:
    """Write ``out/data`` and ``out/model``. An interrupted call leaves no folder that looks complete."""
    training, validation = split_prompts(seed)
    pipeline = make_pipeline(seed)
    warm_up(pipeline, training, options, seed)
    warmed = WarmedModel(
        seed=seed,
        steps=options.steps,
        accuracy=accuracy_of(pipeline, validation),
        parameters=pipeline.transformer.num_parameters(),
    )
    partial = out / f".partial-{os.getpid()}"
    write_data(partial / "data", training, validation)
    pipeline.save_pretrained(partial / "model")
    (partial / "model" / MARKER).write_text(json.dumps(asdict(warmed), indent=2) + "\n")
    for name in ("data", "model"):  # the model last: its marker vouches for both
        shutil.rmtree(out / name, ignore_errors=True)
        (partial / name).rename(out / name)
    partial.rmdir()
    return warmed


def _two(description: Description) -> list[tuple[str, str]]:
    return [description.kinds[0], description.kinds[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets model/ and data/")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts' split, the weights and the pictures")
    parser.add_argument("--threads", type=int, default=1, help="computing threads")
    parser.add_argument("--steps", type=int, default=WarmUp.steps, help="steps of flow matching")
    arguments = parser.parse_args()

    logging.set_verbosity_error()  # it would remark on the shortened third prompt
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    warmed = existing(arguments.out, arguments.seed, arguments.steps)
    if warmed is None:
        print("making a model that draws badly, by flow matching; one or two minutes", flush=True)
        warmed = make(arguments.out, arguments.seed, WarmUp(steps=arguments.steps))
        print(f"made {arguments.out / 'model'} in {time.monotonic() - started:.0f} s and {warmed.steps} steps")
    else:
        print(f"{arguments.out / 'model'} is complete already")
    print(f"{warmed.parameters:,} parameters, {warmed.accuracy:.0%} of the pictures of held-out prompts are right")


if __name__ == "__main__":
    main()
