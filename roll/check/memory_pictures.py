"""Memory of the roles of a run of pictures: a rank of the trainer or of the reference, and the engine.

Sizes come from the files of a pipeline's folder, or from a table of published models, which need not be present.
Activations are what autograd keeps of a transformer's blocks, counted in multiples of the model's width per token;
they were measured on diffusers' blocks, and a test compares them. With adapters the estimate is too high by what the
frozen layers need not keep.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from roll.check.memory_parts import ELEMENT_BYTES, Part, Phase, RoleMemory, ShapeUnknown, billions, overhead, states
from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import count
from roll.configs.pictures import FAMILIES, KEPT_PROMPTS, MODEL_INDEX, PictureFamily, PictureModel
from roll.configs.roles import ModelArguments, PictureSampling, WorkerConfig
from roll.configs.run import LARGEST_DELTA, ImageConfig
from roll.configs.strategies import Options, strategy_of

MAX_RUNNING = 64
"""Default of `DiffusersInferConfig.max_running_requests`."""
CLIP_TOKENS = 77
"""Tokens of the CLIP encoders in Stable Diffusion 3, besides those of T5."""
PASSING = 16
"""Width multiples per token of one block that keeps nothing: stream, queries, keys, values and feed-forward part."""
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Linear layers of a block that are as wide as the model, by the names that `lora_target` takes."""
ALL_LAYERS = 50
"""Inputs and outputs of all linear layers of a block, in multiples of the model's width."""
DECODED_WIDTHS = 4 * 256
"""Numbers per pixel while a VAE decodes an image."""


@dataclass(frozen=True)
class PictureShape:
    """Sizes of an image model, in elements."""

    family: PictureFamily
    parameters: int
    """Elements of the transformer."""
    blocks: int
    largest_block: int
    """Elements of the largest block."""
    width: int
    """Width of the transformer's stream."""
    kept: float
    """Activations of a block that its backward pass needs, per token, in multiples of the width."""
    encoders: int
    """Elements of all text encoders."""
    vae: int
    context: int
    """Width of the prompts' embeddings."""
    token_pixels: int = 16
    """Pixels per token, in each direction."""

    def tokens(self, sampling: PictureSampling) -> int:
        """Return the tokens of one image and its prompt."""
        pixels = (sampling.height // self.token_pixels) * (sampling.width // self.token_pixels)
        clip = CLIP_TOKENS if self.family.guidance == "guidance_scale" else 0
        return pixels + clip + sampling.max_sequence_length

    def passes(self, sampling: PictureSampling) -> int:
        """Return the rows of a forward pass per image and step: two with classifier-free guidance."""
        return 2 if vars(sampling)[self.family.guidance] > 1 else 1


KEPT = {"StableDiffusion3Pipeline": 25.5, "FluxPipeline": 25.6, "QwenImagePipeline": 32.0}
"""Class of a pipeline -> width multiples per token that a block keeps."""
KEPT_BY_SECOND_ATTENTION = 8.5
"""Width multiples that a block with a second attention of the image (Stable Diffusion 3.5 medium) keeps besides."""
_SD3, _FLUX, _QWEN = FAMILIES.values()
_CLIP, _BIG_CLIP, _T5, _QWEN_VL = 123_650_304, 694_659_840, 4_762_310_656, 8_292_166_656
_VAE, _QWEN_VAE = 83_819_683, 126_892_531
KNOWN: dict[str, PictureShape] = {
    "stable-diffusion-3.5-medium": PictureShape(
        _SD3, 2_243_171_520, 24, 101_506_944, 1536, 34.0, _CLIP + _BIG_CLIP + _T5, _VAE, 4096
    ),
    "flux.1-dev": PictureShape(_FLUX, 11_901_408_320, 57, 339_831_296, 3072, 25.6, _CLIP + _T5, _VAE, 4096),
    "flux.1-schnell": PictureShape(_FLUX, 11_891_178_560, 57, 339_831_296, 3072, 25.6, _CLIP + _T5, _VAE, 4096),
    "qwen-image": PictureShape(_QWEN, 20_430_401_088, 60, 339_831_296, 3072, 32.0, _QWEN_VL, _QWEN_VAE, 3584),
}
"""Name of a folder -> sizes of the published model."""


def find_picture_shape(model: str) -> PictureShape:
    """Return the sizes of an image model by its folder. Raises `ShapeUnknown`."""
    folder = Path(model)
    if not (folder / MODEL_INDEX).is_file():
        name = folder.name.lower()
        if name not in KNOWN:
            raise ShapeUnknown(
                f"the sizes of {model} are not known: give a folder with a pipeline in diffusers' format"
            )
        return KNOWN[name]
    try:
        return _from_files(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShapeUnknown(f"the files of {model} do not tell its sizes: {error!r}") from error


def _from_files(folder: Path) -> PictureShape:
    model = PictureModel.read(folder)
    own = model.transformer
    tensors = _tensors(folder / "transformer")
    tensors.pop("pos_embed.pos_embed", None)  # Stable Diffusion 3's constant positions, which are no parameter
    blocks: dict[tuple[str, ...], int] = {}
    for name, size in tensors.items():
        root = tuple(name.split(".")[:2])
        if root[0].endswith("transformer_blocks"):
            blocks[root] = blocks.get(root, 0) + size
    parts = [name for name, kind in model.index.items() if name.startswith("text_encoder") and kind[0] is not None]
    return PictureShape(
        model.family,
        sum(tensors.values()),
        len(blocks),
        max(blocks.values()),
        int(own["num_attention_heads"]) * int(own["attention_head_dim"]),
        KEPT[model.pipeline] + KEPT_BY_SECOND_ATTENTION * bool(own.get("dual_attention_layers")),
        sum(sum(_tensors(folder / part).values()) for part in parts),
        sum(_tensors(folder / "vae").values()),
        int(own["joint_attention_dim"]),
        model.token_pixels,
    )


def _tensors(folder: Path) -> dict[str, int]:
    """Return name -> number of elements of each tensor in a folder's safetensors files, from their headers."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes |= {name: math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__"}
    if not sizes:
        raise FileNotFoundError(f"{folder} has no safetensors files")
    return sizes


def picture_memory(config: ImageConfig, name: str, section: WorkerConfig, shape: PictureShape) -> RoleMemory:
    """Estimate a role of a run of pictures."""
    if name == "actor_infer":
        memory = _engine(config, shape)
    else:
        memory = _trainer(config, section, shape) if name == "actor_train" else _reference(config, section, shape)
    element = ELEMENT_BYTES[section.model_args.dtype]
    tokens = KEPT_PROMPTS * config.sampling.max_sequence_length
    how = f"{name}: of {count(KEPT_PROMPTS, 'prompt')}, {config.sampling.max_sequence_length} tokens each"
    stored = 4 if name == "actor_train" and section.model_args.lora_target is None else element
    loading = shape.parameters * stored + shape.encoders * element
    start = Part("models while they load", loading, f"{name}: each process reads the transformer and the text encoders")
    prompts = Part("prompt embeddings", tokens * shape.context * element, how)
    encoders = states("text encoders", shape.encoders, 1, element, f"{section.model_args.dtype}, frozen")
    always = (*memory.always[:1], encoders, *memory.always[1:])
    return replace(memory, always=always, host=(*memory.host, prompts), start=start)


def _engine(config: ImageConfig, shape: PictureShape) -> RoleMemory:
    role, sampling, on_gpu = config.actor_infer, config.sampling, config.cluster.device == "cuda"
    dtype = role.model_args.dtype
    element, most = ELEMENT_BYTES[dtype], Options.of(role).get("max_running_requests", MAX_RUNNING)
    started = (derived.groups_ahead(config) + config.rollout_batch_size) * derived.group_size(config)
    pictures = max(1, min(most, -(-started // max(1, derived.engine_replicas(config)))))
    rows, tokens = pictures * shape.passes(sampling), shape.tokens(sampling)
    how = f"{count(rows, 'row')} of {tokens:,} tokens x {PASSING * shape.width * element / 1000:,.0f} kB of one block"
    drawing = Part("activations", rows * tokens * PASSING * shape.width * element, how)
    pixels = sampling.height * sampling.width
    decoding = Part("decoding", pixels * DECODED_WIDTHS * element, f"one image of {sampling.width} x {sampling.height}")
    copy = Part("new weights", shape.parameters * element, "the next version beside the present one, mapped or staged")
    host = () if on_gpu else (copy,)
    if config.weight_update.content == "delta":
        how = "the last version, from which the next one is made"
        host = (*host, Part("base of deltas", shape.parameters * element, how))
    return RoleMemory(
        (
            states("weights", shape.parameters, 1, element, dtype),
            states("VAE", shape.vae, 1, element, f"{dtype}, frozen"),
            overhead(on_gpu, 1),
        ),
        (Phase("a step is drawn", (drawing,)), Phase("an image is decoded", (decoding,))),
        processes=derived.engine_replicas(config),
        host=host,
    )


def _trainer(config: ImageConfig, role: WorkerConfig, shape: PictureShape) -> RoleMemory:
    arguments, options, ranks = role.model_args, Options.of(role), len(parse_device_mapping(role.device_mapping))
    element, on_gpu, learned = (
        ELEMENT_BYTES[arguments.dtype],
        config.cluster.device == "cuda",
        _learned(shape, arguments),
    )
    always = [states("weights", shape.parameters, ranks, 4, "float32")]
    if arguments.lora_target is not None:
        frozen = states("weights", shape.parameters, ranks, element, f"{arguments.dtype}, frozen")
        always = [frozen, states("adapters", learned, ranks, 4, "float32")]
    always.append(states("optimizer", learned, ranks, 8, "AdamW's two moments, float32"))
    gathered = Part("gathered weights", 2 * element * shape.largest_block, f"two blocks in {arguments.dtype}")
    gradients = states("gradients", learned, ranks, 4, "float32")
    backward = Phase("the backward pass begins", (_activations(config, role, shape, options), gradients, gathered))
    update = Phase("the optimizer steps", (gradients,))
    publication, host, stays = _publication(config, learned, shape), list[Part](), 0.0
    if derived.weight_transport(config) == "cuda_ipc":
        always.append(publication)
        stays = publication.size
    else:
        host.append(publication)
    if config.weight_update.content == "delta":
        host.append(Part("deltas", LARGEST_DELTA * publication.size, f"at most {LARGEST_DELTA:g} of each buffer"))
    host.append(Part("model being saved", 4 * shape.parameters, "float32, of the first rank, until it is written"))
    state = 12 * learned / ranks
    saved = (Part("state being saved", state, "actor_train: 12 bytes for each weight that learns"),)
    return RoleMemory(
        (*always, overhead(on_gpu, ranks)),
        (backward, update),
        processes=ranks,
        host=saved if config.save_steps > 0 else (),
        host_of_first=tuple(host),
        state=state,
        stays=stays,
    )


def _publication(config: ImageConfig, learned: int, shape: PictureShape) -> Part:
    buffers, dtype = derived.weight_buffers(config), config.actor_infer.model_args.dtype
    sent = learned if config.weight_update.content == "adapter" else shape.parameters
    holder = "each rank" if derived.weight_transport(config) == "cuda_ipc" else "the first rank"
    how = f"{count(buffers, 'buffer')} of {billions(sent)} weights in {dtype}, of {holder}"
    return Part("publication", buffers * sent * ELEMENT_BYTES[dtype], how)


def _reference(config: ImageConfig, role: WorkerConfig, shape: PictureShape) -> RoleMemory:
    """Estimate a rank of the reference: no gradients, no optimizer, and one block that computes at a time."""
    dtype, ranks, sampling = role.model_args.dtype, len(parse_device_mapping(role.device_mapping)), config.sampling
    element, strategy = ELEMENT_BYTES[dtype], strategy_of("reference", role)
    owners = 1 if strategy is not None and strategy.replicates else ranks
    images = role.infer_batch_size
    if role.use_dynamic_batching_in_infer:
        images = max(1, role.max_tokens_per_microbatch_in_infer // (sampling.window_size + 1))
    images = min(images, derived.samples_per_step(config))
    rows, tokens = images * sampling.window_size * shape.passes(sampling), shape.tokens(sampling)
    how = f"{count(rows, 'row')} of {tokens:,} tokens x {PASSING * shape.width * element / 1000:,.0f} kB of one block"
    parts = [Part("activations", rows * tokens * PASSING * shape.width * element, how)]
    if owners > 1:
        parts.append(Part("gathered weights", 2 * element * shape.largest_block, f"two blocks in {dtype}"))
    weights = states("weights", shape.parameters, owners, element, dtype)
    phase = Phase("means of the steps are computed", tuple(parts))
    on_gpu = config.cluster.device == "cuda"
    return RoleMemory((weights, overhead(on_gpu, owners)), (phase,), processes=ranks)


def _activations(config: ImageConfig, role: WorkerConfig, shape: PictureShape, options: Options) -> Part:
    """Return what a micro-batch keeps: all steps of its images share a forward pass."""
    sampling, element = config.sampling, ELEMENT_BYTES[role.model_args.dtype]
    images = role.training_args.per_device_train_batch_size
    if role.use_dynamic_batching_in_train:
        images = max(1, role.max_tokens_per_microbatch_in_train // (sampling.window_size + 1))
    images = min(images, derived.samples_per_step(config))
    tokens = images * sampling.window_size * shape.passes(sampling) * shape.tokens(sampling)
    one = shape.kept * shape.width * element
    if options.get("gradient_checkpointing", False):
        size = tokens * (shape.blocks * shape.width * element + one)
        inputs = f"inputs of {count(shape.blocks, 'block')}"
        how = f"{tokens:,} tokens x ({inputs} + one block of {one / 1000:,.0f} kB, recomputed)"
    else:
        size = tokens * shape.blocks * one
        how = f"{tokens:,} tokens x {count(shape.blocks, 'block')} x {one / 1000:,.0f} kB"
    return Part("activations", size, how)


def _learned(shape: PictureShape, arguments: ModelArguments) -> int:
    """Return the number of elements that learn. For layers wider than those of attention the count is rough."""
    target = arguments.lora_target
    if target is None:
        return shape.parameters
    names = [name.strip() for name in (target.split(",") if isinstance(target, str) else target)]
    widths = ALL_LAYERS if set(names) - {*ATTENTION_LAYERS} else 2 * len(names)
    return arguments.lora_rank * widths * shape.width * shape.blocks
