"""Make the world of the counting example: a tiny Qwen2-VL that counts shapes badly, and pictures to count them in.

Supervised steps warm up the model on the work of a careless pupil, who overlooks every third shape. The model learns to
do the same: its greedy answers are mostly too small. Reinforcement learning (`rlvr.yaml`) then has to teach it to look
more closely than its teacher. The same seed and thread count on the same machine make the same files. This script does
not import `roll`, and needs torch, transformers, Pillow and about a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PAD, EOS, IMAGE, VIDEO = "<pad>", "<eos>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (PAD, EOS, "<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)
COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (60, 90, 240), "yellow": (230, 210, 40)}
LARGEST_COUNT = 4
WORDS = ("how", "many", *COLOURS, "?", *map(str, range(LARGEST_COUNT + 1)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
CELLS = 3
"""Cells of a picture's side; each has a shape or none."""
CELL = 8
"""Pixels of a cell's side: a cell is one vector for the language model, of 2 x 2 patches."""
TRAINING_PICTURES, VALIDATION_PICTURES = 768, 128
MARKER = "made_by_count_shapes.json"
"""Written last, so a folder that holds it is complete."""


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised steps."""

    learning_rate: float = 1e-3
    """Constant for the first half of the steps, then falling linearly."""
    batch_size: int = 64
    steps: int = 500
    attentive: float = 0.6
    """Share of the steps, at the beginning, in which the pupil overlooks nothing."""
    overlooked: float = 0.35
    """Share of the shapes that the pupil overlooks later."""


@dataclass(frozen=True)
class WarmedModel:
    """Contents of the marker file about the model next to it."""

    seed: int
    steps: int
    greedy_accuracy: float
    parameters: int


@dataclass(frozen=True)
class Question:
    """A picture, and the number of shapes of a colour in it."""

    image: Image.Image
    colour: str
    count: int

    @property
    def text(self) -> str:
        return f"how many {self.colour} ?"


def draw(rng: np.random.Generator) -> Question:
    """Draw 1 to `LARGEST_COUNT` shapes of a colour, and up to as many of others, in different cells."""
    colour, count = rng.choice(list(COLOURS)), int(rng.integers(1, LARGEST_COUNT + 1))
    others = [other for other in COLOURS if other != colour]
    colours = [colour] * count + list(rng.choice(others, rng.integers(0, LARGEST_COUNT + 1)))
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL))
    pencil = ImageDraw.Draw(image)
    for each, cell in zip(colours, rng.permutation(CELLS**2), strict=False):
        x, y = CELL * (cell % CELLS), CELL * (cell // CELLS)
        shape = pencil.ellipse if rng.random() < 0.5 else pencil.rectangle
        shape((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill=COLOURS[each])
    return Question(image, str(colour), count)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word; a chat of one user message renders to that message alone."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor() -> Qwen2VLImageProcessorPil:
    """Make an image processor that leaves pictures of this example as large as they are."""
    return Qwen2VLImageProcessorPil(
        min_pixels=CELL**2, max_pixels=(8 * CELL) ** 2, patch_size=CELL // 2, merge_size=2, temporal_patch_size=2
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2VLForConditionalGeneration:
    """Make a new float32 model: a language model of three layers, a vision tower of two."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "initializer_range": 0.08,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "embed_dim": 48,
        "hidden_size": text["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    places = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
            tokenizer.convert_tokens_to_ids(list(SPECIAL[2:])),
            strict=True,
        )
    )
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, initializer_range=0.08, **places
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


class Asker:
    """Maker of the model's inputs for a batch of questions, which all have the same length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._processor = tokenizer, make_processor()

    def inputs(self, questions: list[Question], answers: list[int]) -> dict[str, torch.Tensor]:
        """Return keyword arguments with token ids ``[questions, length]`` whose last two are answer and end."""
        pictures = self._processor(images=[question.image for question in questions], return_tensors="pt")
        place = f"<|vision_start|>{IMAGE * CELLS**2}<|vision_end|>"
        texts = [f"{place}{question.text} {answer} {EOS}" for question, answer in zip(questions, answers, strict=True)]
        ids = torch.tensor(self._tokenizer(texts)["input_ids"])
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == self._tokenizer.convert_tokens_to_ids(IMAGE)).int(),
            "pixel_values": pictures["pixel_values"],
            "image_grid_thw": pictures["image_grid_thw"],
        }


@torch.no_grad()
def greedy_accuracy(model: Qwen2VLForConditionalGeneration, asker: Asker, questions: list[Question]) -> float:
    """Return the share of questions that greedy decoding answers right: the true answer and the end are likeliest."""
    inputs = asker.inputs(questions, [question.count for question in questions])
    predicted = model(**inputs).logits[:, -3:-1].argmax(-1)
    return float((predicted == inputs["input_ids"][:, -2:]).all(dim=1).float().mean())


def warm_up(model: Qwen2VLForConditionalGeneration, asker: Asker, options: WarmUp, rng: np.random.Generator) -> None:
    """Train the model to imitate the careless pupil, on new pictures in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    for step in range(options.steps):
        questions = [draw(rng) for _ in range(options.batch_size)]
        overlooked = options.overlooked if step >= options.attentive * options.steps else 0.0
        answers = [int(rng.binomial(question.count, 1 - overlooked)) for question in questions]
        inputs = asker.inputs(questions, answers)
        loss = cross_entropy(model(**inputs).logits[:, -3:-1].flatten(0, 1), inputs["input_ids"][:, -2:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / 50, 2 - 2 * step / options.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def write_data(folder: Path, name: str, questions: list[Question]) -> None:
    """Write ``name.jsonl``, and the pictures beside it."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, question in enumerate(questions):
        path = f"pictures/{name}-{number}.png"
        question.image.save(folder / path)
        rows.append(
            {
                "prompt": f"<image>{question.text}",
                "images": [path],
                "ground_truth": str(question.count),
                "domain": "count",
            }
        )
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
    rng = np.random.default_rng(seed)
    training = [draw(rng) for _ in range(TRAINING_PICTURES)]
    validation = [draw(rng) for _ in range(VALIDATION_PICTURES)]
    tokenizer = make_tokenizer()
    model, asker = new_model(tokenizer, seed), Asker(tokenizer)
    warm_up(model, asker, options, rng)
    warmed = WarmedModel(
        seed=seed,
        steps=options.steps,
        greedy_accuracy=greedy_accuracy(model, asker, validation),
        parameters=model.num_parameters(),
    )
    partial = out / f".partial-{os.getpid()}"
    write_data(partial / "data", "train", training)
    write_data(partial / "data", "val", validation)
    for part in (model, tokenizer, make_processor()):
        part.save_pretrained(partial / "model")
    (partial / "model" / MARKER).write_text(json.dumps(asdict(warmed), indent=2) + "\n")
    for name in ("data", "model"):  # the model last: its marker vouches for both
        shutil.rmtree(out / name, ignore_errors=True)
        (partial / name).rename(out / name)
    partial.rmdir()
    return warmed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets model/ and data/")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures, the weights and the pupil")
    parser.add_argument("--threads", type=int, default=1, help="computing threads; for matrices this small one is best")
    parser.add_argument("--steps", type=int, default=WarmUp.steps, help="supervised steps of the warm-up")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    warmed = existing(arguments.out, arguments.seed, arguments.steps)
    if warmed is None:
        print("making a model that counts badly, by supervised steps; about a minute", flush=True)
        warmed = make(arguments.out, arguments.seed, WarmUp(steps=arguments.steps))
        print(f"made {arguments.out / 'model'} in {time.monotonic() - started:.0f} s and {warmed.steps} steps")
    else:
        print(f"{arguments.out / 'model'} is complete already")
    print(f"{warmed.parameters:,} parameters, greedy validation accuracy {warmed.greedy_accuracy:.1%}")


if __name__ == "__main__":
    main()
