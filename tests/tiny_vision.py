"""A tiny vision-language model (Qwen2-VL) and the task it can learn: to count the squares in a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHARACTERS = "0123456789?#>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
CELLS = 2
"""Cells of a picture's side; each has a square or none."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    names = [*SPECIAL, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(SPECIAL[2:])
    )
    made.chat_template = TEMPLATE
    return made


KINDS = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}


def make_model(folder: Path, family: str = "qwen2_vl", seed: int = 0, initializer_range: float = 0.2) -> str:
    """Write a random model of a family in `KINDS` with tokenizer and image processor."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": initializer_range,
    }  # fmt: skip
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    wide = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        vision |= wide | {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        vision |= wide | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        text["head_dim"] = 32
    ids = {
        "vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config, model_class = KINDS[family]
    model = model_class(config(text_config=text, vision_config=vision, initializer_range=initializer_range, **ids))
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        min_pixels=64, max_pixels=64 * 64, patch_size=4, merge_size=2, temporal_patch_size=2
    ).save_pretrained(folder)
    return str(folder)


def draw(cells: np.ndarray) -> Image.Image:
    """A picture with a white square in each true cell; ``cells`` is bool ``[CELLS, CELLS]``."""
    pixels = np.zeros((8 * CELLS, 8 * CELLS, 3), np.uint8)
    for row, column in np.argwhere(cells):
        pixels[8 * row + 1 : 8 * row + 7, 8 * column + 1 : 8 * column + 7] = 255
    return Image.fromarray(pixels)


def make_task(folder: Path, repeats: int = 1) -> Path:
    """Write ``folder/train.jsonl`` and its pictures: all that have 1 to 4 squares, each count equally often."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(1, 2 ** (CELLS**2)):
        cells = np.array([number >> bit & 1 for bit in range(CELLS**2)], bool).reshape(CELLS, CELLS)
        draw(cells).save(folder / "pictures" / f"{number}.png")
        image = {"type": "image_url", "image_url": {"url": f"pictures/{number}.png"}}
        row = {
            "messages": [{"role": "user", "content": [image, {"type": "text", "text": "#?"}]}],
            "ground_truth": str(int(cells.sum())),
            "domain": "count",
        }
        rows += [row] * (repeats * 12 // [4, 6, 4, 1][int(cells.sum()) - 1])
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
