"""A tiny pipeline of pictures with random weights, in diffusers' format, and the YAML of a run that trains it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.pipeline.tiny import changed

SAMPLING = {
    "height": 8,
    "width": 8,
    "num_inference_steps": 4,
    "max_sequence_length": 2,
    "kind": "cps",
    "noise_level": 0.8,
    "window_reach": 3,
}
FLUX = {"max_sequence_length": 5, "true_cfg_scale": 3.0, "negative_prompt": "two blue", "kind": "flow_sde"}
DISTILLED = {"max_sequence_length": 5, "guidance_scale": 3.5, "width": 12}
QWEN = {"max_sequence_length": 16, "true_cfg_scale": 4.0, "negative_prompt": "blue", "width": 12}
"""Changes of `SAMPLING` for models of the other families."""
PROMPTS = ("red", "blue", "red left of blue", "two blue", "green above red", "green")


PREFIX = (
    "system Describe the image by detailing the color , shape , size , texture , quantity , text , spatial "
    "relationships of the objects and background : user assistant"
)
"""Words of the template in which Qwen-Image embeds a prompt."""


def make_pipeline(folder: Path, seed: int = 0) -> Path:
    """Write ``folder/pictures`` and return it: pictures of up to 16 pixels in patches of 2, one text encoder twice."""
    from diffusers import (
        AutoencoderTiny,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    tokenizer = words_tokenizer(6)
    torch.manual_seed(seed)
    text = _clip(len(tokenizer))
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
    _stir(transformer)
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


def make_flux(folder: Path, seed: int = 0, distilled: bool = False) -> Path:
    """Write ``folder/pictures`` and return it: a FLUX model, which may be distilled with guidance. A token is 4 x 4
    pixels, and the shift of the schedule depends on the resolution."""
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    tokenizer = words_tokenizer(6)
    torch.manual_seed(seed)
    long = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
    transformer = FluxTransformer2DModel(
        in_channels=12,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        guidance_embeds=distilled,
        axes_dims_rope=(2, 4, 2),
    )
    _stir(transformer)
    pipeline = FluxPipeline(
        transformer=transformer,
        scheduler=_dynamic_scheduler(),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 4),
            norm_num_groups=2,
            latent_channels=3,
            scaling_factor=0.5,
            shift_factor=0.1,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(_clip(len(tokenizer))),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(long),
        tokenizer_2=words_tokenizer(6),
    )
    pipeline.save_pretrained(folder / "pictures")
    return folder / "pictures"


def make_qwen(folder: Path, seed: int = 0) -> Path:
    """Write ``folder/pictures`` and return it: a Qwen-Image model with tokens of 4 x 4 pixels."""
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = words_tokenizer(64, template=True)
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "pad_token_id": 0,
        },
        vision_config={"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16},
    )
    transformer = QwenImageTransformer2DModel(
        in_channels=12,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(2, 4, 2),
    )
    _stir(transformer)
    pipeline = QwenImagePipeline(
        transformer=transformer,
        scheduler=_dynamic_scheduler(shift_terminal=0.02),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=3,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, 0.0, -0.1],
            latents_std=[1.5, 1.0, 0.5],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
    )
    pipeline.save_pretrained(folder / "pictures")
    return folder / "pictures"


def make_distilled_flux(folder: Path, seed: int = 0) -> Path:
    """Write ``folder/pictures`` and return it: a FLUX model that reads the scale of guidance."""
    return make_flux(folder, seed, distilled=True)


def words_tokenizer(length: int, template: bool = False) -> Any:
    """A tokenizer of the words of `PROMPTS`, between a beginning and an end; or without, for Qwen-Image's template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    more = ["\n", "<|im_start|>", "<|im_end|>", *PREFIX.split()] if template else []
    words = sorted({word for prompt in PROMPTS for word in prompt.split()} | set(more))
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<begin>", "<end>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    if template:
        plain.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    else:
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        ends = [("<begin>", 1), ("<end>", 2)]
        plain.post_processor = processors.TemplateProcessing(single="<begin> $A <end>", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<begin>", eos_token="<end>", model_max_length=length
    )


def _clip(words: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=words,
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


def _dynamic_scheduler(**changes: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=1, max_image_seq_len=16, max_shift=2.0, **changes
    )


def _stir(transformer: torch.nn.Module) -> None:
    """Change all weights: output layers begin at 0, and would show nothing."""
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def make_picture_task(folder: Path, make: Callable[[Path], Path] = make_pipeline) -> None:
    """Write ``folder/pictures``, ``folder/train.jsonl`` and ``folder/val.jsonl``."""
    make(folder)
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
    return changed(config, changes)
