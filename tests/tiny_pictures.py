"""A tiny pipeline of pictures with random weights, in diffusers' format, and the YAML of a run that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SAMPLING = {
    "height": 8,
    "width": 8,
    "num_inference_steps": 4,
    "max_sequence_length": 2,
    "kind": "cps",
    "noise_level": 0.8,
    "window_reach": 3,
}
PROMPTS = ("red", "blue", "red left of blue", "two blue", "green above red", "green")


def make_pipeline(folder: Path, seed: int = 0) -> Path:
    """Write ``folder/pictures`` and return it: pictures of up to 16 pixels in patches of 2, one text encoder twice."""
    from diffusers import (
        AutoencoderTiny,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<begin>", "<end>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<begin>", 1), ("<end>", 2)]
    plain.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<begin>", eos_token="<end>", model_max_length=6
    )
    torch.manual_seed(seed)
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        intermediate_size=16,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        caption_projection_dim=16,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    with torch.no_grad():
        for parameter in transformer.parameters():  # the output layers begin at 0, and would show nothing
            parameter.add_(0.05 * torch.randn_like(parameter))
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderTiny(
            latent_channels=3,
            encoder_block_out_channels=(4,),
            decoder_block_out_channels=(4,),
            num_encoder_blocks=(0,),
            num_decoder_blocks=(0,),
        ),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(folder / "pictures")
    return folder / "pictures"


def make_picture_task(folder: Path) -> None:
    """Write ``folder/pictures``, ``folder/train.jsonl`` and ``folder/val.jsonl``."""
    make_pipeline(folder)
    rows = [{"prompt": prompt, "domain": "colours"} for prompt in PROMPTS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))


def picture_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of a few seconds. ``changes`` are dotted keys with ``__`` for the dots."""
    config: dict[str, Any] = {
        "pipeline": "image",
        "exp_name": "pictures",
        "pretrain": str(folder / "pictures"),
        "seed": 7,
        "cluster": {"device": "cpu", "num_devices_per_node": 2, "cpu_threads_per_device": 1},
        "max_steps": 3,
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 4,
        "prompt_length": 6,
        "track_with": [],
        "sampling": dict(SAMPLING),
        "actor_train": {
            "device_mapping": [0],
            "pg_variant_args": {"clip_low": 1e-3, "clip_high": 1e-3},
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 4},
            "data_args": {"file_name": str(folder / "train.jsonl")},
        },
        "actor_infer": {"device_mapping": [1]},
        "rewards": {"colours": {"verifier": "picture_rewards:redness"}},
        "stall_timeout_seconds": 120,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config
