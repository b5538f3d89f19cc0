"""The memory estimate of image runs: sizes are those of diffusers' models, activations what autograd keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll.check.memory import estimate_memory
from roll.check.memory_parts import RoleMemory, ShapeUnknown
from roll.check.memory_pictures import KEPT, KEPT_BY_SECOND_ATTENTION, KNOWN, PASSING, find_picture_shape
from roll.configs.loader import config_from_tree
from roll.configs.run import LARGEST_DELTA
from tests.tiers import need
from tests.tiny_pictures import make_flux, make_picture_task, make_pipeline, make_qwen, picture_config

need("diffusers")


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (make_pipeline, "JointTransformerBlock"),
        pytest.param(make_flux, "Flux", marks=pytest.mark.tier("all")),
        pytest.param(make_qwen, "QwenImageTransformerBlock", marks=pytest.mark.tier("all")),
    ],
)
def test_sizes_are_those_of_the_files(tmp_path, make, blocks):
    from roll.pictures.model import FrozenParts, load_transformer

    path = str(make(tmp_path))
    model = load_transformer(path, torch.float32)
    frozen = FrozenParts(path, model, torch.float32, torch.device("cpu"), decodes=True)
    encoders = {
        id(each): each for name, each in frozen._pipeline.components.items() if name.startswith("text_encoder") and each
    }
    shape = find_picture_shape(path)
    layers = [each for each in model.modules() if type(each).__name__ in model._no_split_modules]
    assert all(type(each).__name__.startswith(blocks) for each in layers) and shape.blocks == len(layers) == 2
    assert shape.largest_block == max(sum(weight.numel() for weight in each.parameters()) for each in layers)
    assert shape.parameters == model.num_parameters() and shape.width == 16
    assert shape.encoders == sum(weight.numel() for each in encoders.values() for weight in each.parameters())
    assert shape.vae == sum(weight.numel() for weight in frozen._pipeline.vae.parameters())


def kept_by(block: torch.nn.Module, image: int, text: int, **inputs) -> float:
    """Numbers that a block of width 128 keeps for its backward pass, per token and width."""
    stream = {
        "hidden_states": torch.randn(1, image, 128, requires_grad=True),
        "encoder_hidden_states": torch.randn(1, text, 128, requires_grad=True),
        "temb": torch.randn(1, 128, requires_grad=True),
    }
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = block(**stream, **inputs)
    assert len(result) == 2
    return sum(kept.values()) / 4 / (image + text) / 128


def test_activations_are_those_that_autograd_keeps():
    from diffusers.models.attention import JointTransformerBlock
    from diffusers.models.transformers.transformer_flux import (
        FluxPosEmbed,
        FluxSingleTransformerBlock,
        FluxTransformerBlock,
    )
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformerBlock

    image, text = 64, 32
    places = FluxPosEmbed(10000, [8, 12, 12])(torch.zeros(image + text, 3))
    shape, mask = [(1, 8, 8)], torch.arange(text)[None] < text // 2
    turns = QwenEmbedRope(10000, [8, 12, 12], True)(shape, max_txt_seq_len=text, device=torch.device("cpu"))
    plain, flux = KEPT["StableDiffusion3Pipeline"], KEPT["FluxPipeline"]
    joint = JointTransformerBlock(128, 4, 32, qk_norm="rms_norm")
    double = JointTransformerBlock(128, 4, 32, qk_norm="rms_norm", use_dual_attention=True)
    assert kept_by(joint, image, text) == pytest.approx(plain, rel=0.05)
    assert plain < kept_by(double, image, text) <= plain + KEPT_BY_SECOND_ATTENTION
    assert kept_by(FluxTransformerBlock(128, 4, 32), image, text, image_rotary_emb=places) == pytest.approx(
        flux, rel=0.05
    )
    assert kept_by(FluxSingleTransformerBlock(128, 4, 32), image, text, image_rotary_emb=places) < flux
    inputs = {"image_rotary_emb": turns, "encoder_hidden_states_mask": mask}
    block = QwenImageTransformerBlock(128, 4, 32)
    assert kept_by(block, image, text, **inputs) == pytest.approx(KEPT["QwenImagePipeline"], rel=0.15)


@pytest.mark.tier("all")
def test_published_sizes_are_those_of_diffusers():
    from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel

    with torch.device("meta"):
        models = {
            "stable-diffusion-3.5-medium": SD3Transformer2DModel(
                attention_head_dim=64,
                caption_projection_dim=1536,
                dual_attention_layers=tuple(range(13)),
                joint_attention_dim=4096,
                num_attention_heads=24,
                num_layers=24,
                pooled_projection_dim=2048,
                pos_embed_max_size=384,
                qk_norm="rms_norm",
            ),
            "flux.1-dev": FluxTransformer2DModel(guidance_embeds=True),
            "flux.1-schnell": FluxTransformer2DModel(),
            "qwen-image": QwenImageTransformer2DModel(),
        }
    assert models.keys() == KNOWN.keys()
    for name, model in models.items():
        layers = [each for each in model.modules() if type(each).__name__ in model._no_split_modules]
        known = KNOWN[name]
        assert known.parameters == model.num_parameters() and known.blocks == len(layers)
        assert known.largest_block == max(sum(weight.numel() for weight in each.parameters()) for each in layers)


def test_a_run_is_estimated_by_role(tmp_path):
    make_picture_task(tmp_path)

    def peaks(**changes) -> dict[str, float]:
        config = config_from_tree(picture_config(tmp_path, **changes))
        estimate = estimate_memory(config)
        assert estimate.unknown == []
        return {role.role: role.largest.size for role in estimate.roles}

    plain = peaks()
    guided = peaks(sampling__guidance_scale=3.0)
    assert plain.keys() == {"actor_train", "actor_infer"}
    assert guided["actor_infer"] == 2 * plain["actor_infer"]
    saving = peaks(actor_train__strategy_args={"strategy_config": {"gradient_checkpointing": True}})
    assert saving["actor_train"] < plain["actor_train"] < guided["actor_train"]
    parts = []
    for content in ("full", "delta"):
        estimate = estimate_memory(config_from_tree(picture_config(tmp_path, weight_update__content=content)))
        parts.append({part.name: part.size for role in estimate.roles for part in (*role.host, *role.host_of_first)})
    full, delta = parts
    assert delta == full | {"deltas": full["publication"] / 2, "base of deltas": full["new weights"]}
    with_adapters = peaks(actor_train__model_args={"lora_target": "to_q", "lora_rank": 1})
    assert with_adapters["actor_train"] < plain["actor_train"]


def test_a_reference_learns_nothing_and_deltas_have_their_base(tmp_path):
    make_picture_task(tmp_path)

    def roles(**changes) -> dict[str, RoleMemory]:
        config = config_from_tree(picture_config(tmp_path, use_kl_loss=True, **changes))
        return {role.role: role for role in estimate_memory(config).roles}

    def sizes(parts) -> dict[str, float]:
        return {part.name: part.size for part in parts}

    plain = roles(reference={"device_mapping": [0, 1]})["reference"]
    shape = find_picture_shape(str(tmp_path / "pictures"))
    assert sizes(plain.always)["weights"] == 4 * shape.parameters / 2
    assert "optimizer" not in sizes(plain.always) and plain.host_of_first == () and plain.state == 0
    rows, tokens = 8 * 2, 16 + 77 + 2
    assert sizes(plain.largest.parts)["activations"] == rows * tokens * PASSING * 16 * 4
    fewer = roles(reference={"device_mapping": [0], "infer_batch_size": 2})["reference"]
    assert sizes(fewer.largest.parts) == {"activations": 2 * 2 * tokens * PASSING * 16 * 4}
    budget = {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 9}
    assert sizes(roles(reference={"device_mapping": [0], **budget})["reference"].largest.parts) == {
        "activations": 3 * 2 * tokens * PASSING * 16 * 4
    }
    whole = {"strategy_args": {"strategy_name": "hf_infer"}}
    assert sizes(roles(reference={"device_mapping": [0, 1], **whole})["reference"].always)["weights"] == (
        4 * shape.parameters
    )
    both = {"reference": {"device_mapping": [0]}}
    deltas, full = roles(**both, weight_update__content="delta"), roles(**both)
    assert sizes(deltas["actor_infer"].host)["base of deltas"] == 4 * shape.parameters
    buffers = sizes(full["actor_train"].host_of_first)["publication"]
    assert sizes(deltas["actor_train"].host_of_first)["deltas"] == LARGEST_DELTA * buffers
    assert "deltas" not in sizes(full["actor_train"].host_of_first)


def test_a_model_of_unknown_size_is_named():
    with pytest.raises(ShapeUnknown, match="the sizes of models/my-own are not known"):
        find_picture_shape("models/my-own")
    assert find_picture_shape(str(Path("anywhere") / "FLUX.1-dev")) is KNOWN["flux.1-dev"]
