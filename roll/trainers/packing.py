"""Attention over packed rows: each token attends to itself and earlier tokens of its own sample only.

On GPUs in half precision this is one call of torch's variable-length kernel (or of flash-attn, if configured).
Elsewhere attention is computed per sample, with samples of the same length batched. The cost is then the sum of the
squared lengths; a block mask would cost the square of the sum. Both are attention functions registered with
transformers, which passes them the sample boundaries; `megatron_train` calls the first for its own layers.

Before training, the model itself is tested: do its other parts keep samples independent too? If not, the model is
rejected, because it would silently train on wrong values.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from roll.data.pictures import is_seeing
from roll.trainers.step import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.trainers.base import TrainerSetup

logger = logging.getLogger(__name__)

PACKED_NAMES = {"sdpa": "roll_packed_sdpa", "eager": "roll_packed_eager"}
"""``attn_implementation`` -> name under which its packed form is registered with transformers."""
KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types, in transformers' terms, whose attention this module can restrict to a sample."""
TRIED_LENGTHS = (6, 4, 4, 1)
INFLUENCE_TOLERANCES = {torch.float32: 1e-4}
TOLERANCES = {torch.float32: 1e-3}
COARSE_TOLERANCE = 5e-2
"""Rounding tolerances for a sample's hidden states, relative to the largest one, by dtype (`COARSE_TOLERANCE`: others).

`INFLUENCE_TOLERANCES`: change when another sample's tokens change (only the batched matrix products of MoE experts may
cause one). `TOLERANCES`: difference between packed and unpacked.
"""

REMEDY = "write `use_sequence_packing: false`"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each ``[samples, heads, length, size]`` -> ``[samples, length, heads, size]``."""


class UnpackableModel(ValueError):
    """A model in which samples of a packed row may influence each other. Its arguments: the reason, and the remedy."""

    def __str__(self) -> str:
        return "use_sequence_packing: {}; {}".format(*self.args)


def packs_samples(model: PreTrainedModel, setup: TrainerSetup) -> bool:
    """Return True if samples are to be packed, and make the model ready for it. Collective.

    Rank 0 tries the model on a few tokens, and all ranks do what it finds. With `use_sequence_packing: auto`, a model
    that cannot be packed gets padded rows, and the log says why; with ``true``, `UnpackableModel` is raised. The model
    must be unsharded, on the CPU and without dropout.
    """
    wanted, attention = setup.config.use_sequence_packing, setup.model_args.attn_implementation
    if not wanted:
        return False
    found: list[str | None] = [None]
    if setup.rank == 0:
        try:
            if wanted == "auto" and is_seeing(model.config):
                raise _refusal(model, "positions of pictures have three dimensions, and packed rows have one")
            try_packed(model, attention)
        except UnpackableModel as error:
            found = [error.args[0]]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
    (reason,) = found
    if reason is None:
        install_packed_attention(model, attention)
        logger.info("samples are packed into rows without padding (use_sequence_packing: %s)", str(wanted).lower())
        return True
    if wanted != "auto":
        raise UnpackableModel(reason, REMEDY)
    logger.warning("use_sequence_packing: auto computes padded rows: %s", reason)
    model.set_attn_implementation(attention)
    return False


def install_packed_attention(model: PreTrainedModel, attn_implementation: str) -> None:
    """Make the model attend within the samples of packed rows only, and refuse masks, which it would not heed."""
    _set_attention(model, attn_implementation)
    model.register_forward_pre_hook(_refuse_mask, with_kwargs=True)


def _set_attention(model: PreTrainedModel, attn_implementation: str) -> None:
    from transformers import AttentionInterface

    for name, attend in {"sdpa": packed_sdpa, "eager": packed_eager}.items():
        # Compiled layers leave it out: it would be compiled anew for each set of lengths.
        AttentionInterface.register(PACKED_NAMES[name], torch.compiler.disable(attend))
    model.set_attn_implementation(PACKED_NAMES.get(attn_implementation, attn_implementation))


def _refuse_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a mask that hides a position: transformers gives attention like this module's none."""
    mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and not mask.all():
        raise ValueError(f"a model that packs samples heeds no `attention_mask`; {REMEDY}")


def try_packed(model: PreTrainedModel, attn_implementation: str) -> None:
    """Run the model on a few tokens, packed and alone. Raises `UnpackableModel` if it would mix samples.

    Its attention afterwards is that of the trial.
    """
    _refuse_unknown_parts(model)
    # flash-attn separates samples itself and cannot run on a CPU, so the rest of the model is tested with sdpa.
    tried = attn_implementation if attn_implementation in PACKED_NAMES else "sdpa"
    try:
        model.set_attn_implementation(tried)
    except ValueError as error:
        raise _refusal(model, f"it cannot be tested ({error})") from error
    # These ids, and each plus one (see `_refuse_influence`), exist in any vocabulary.
    ids = torch.arange(sum(TRIED_LENGTHS)) * 5 % (min(model.config.get_text_config().vocab_size, 1000) - 1)
    samples = [part[None] for part in ids.split(TRIED_LENGTHS)]
    alone = torch.cat([_hidden_states(model, sample) for sample in samples], dim=1)
    _set_attention(model, tried)
    if model.config._attn_implementation != PACKED_NAMES[tried]:
        raise _refusal(model, "it does not take its attention from transformers' interface")
    _refuse_influence(model, samples, alone)


def _refuse_influence(model: PreTrainedModel, samples: list[Tensor], alone: Tensor) -> None:
    """Raise ``UnpackableModel`` unless packed samples give the same results as alone, whatever shares their row."""
    packing = Packing.of(TRIED_LENGTHS, model.device)
    together = _hidden_states(model, torch.cat(samples, dim=1), packing)
    beside_others = _hidden_states(model, torch.cat([samples[0] + 1, *samples[1:]], dim=1), packing)
    first = TRIED_LENGTHS[0]
    influence = relative_difference(beside_others[:, first:], together[:, first:])
    if not influence <= INFLUENCE_TOLERANCES.get(model.dtype, COARSE_TOLERANCE):
        raise _refusal(model, f"samples in a row influence each other (by {influence:.1g}, relative)")
    difference = relative_difference(together, alone)
    if not difference <= TOLERANCES.get(model.dtype, COARSE_TOLERANCE):
        raise _refusal(model, f"its results change in a packed row (by {difference:.1g}, relative)")


def _refuse_unknown_parts(model: PreTrainedModel) -> None:
    text = model.config.get_text_config()
    settings = text.to_dict()
    # Some models derive their layer types, so these are missing from the settings dictionary.
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - KNOWN_LAYERS:
        names = ", ".join(sorted(kinds - KNOWN_LAYERS))
        raise _refusal(model, f"layers of the kind {names} may reach across samples")
    tricks = batch_dependent_positions(settings)
    if tricks:
        raise _refusal(model, f"its positions ({', '.join(sorted(tricks))}) depend on the longest sample of a row")
    has_windows = "sliding_attention" in kinds or (not kinds and settings.get("sliding_window"))
    if has_windows and not model._supports_flash_attn:
        # A model that works with flash-attn passes its window to the attention function; others put it into a mask.
        raise _refusal(model, "its sliding windows are known to its masks only")
    arguments = inspect.signature(model.forward).parameters
    hands_on = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    if "position_ids" not in arguments or not hands_on:
        raise _refusal(model, "it does not take positions, or does not hand on where samples begin")


def batch_dependent_positions(settings: Mapping[str, Any]) -> set[str]:
    """Return the types of rotary embeddings in a model's settings that depend on the longest position in a batch."""
    rope = settings.get("rope_parameters") or {}
    # Some models have one dictionary of rotary settings per layer type.
    tables = [rope, *(table for table in rope.values() if isinstance(table, dict))]
    return {table["rope_type"] for table in tables if "rope_type" in table} & {"dynamic", "longrope"}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _refusal(model: PreTrainedModel, reason: str) -> UnpackableModel:
    return UnpackableModel(f"{type(model).__name__} cannot be packed: {reason}", REMEDY)


def _hidden_states(model: PreTrainedModel, ids: Tensor, packing: Packing | None = None) -> Tensor:
    arguments = {} if packing is None else packing.model_arguments()
    try:
        return hidden_states(model, input_ids=ids, use_cache=False, **arguments)
    except Exception as error:  # models of any origin
        raise _refusal(model, f"it fails on {'plain' if packing is None else 'packed'} rows ({error})") from error


def hidden_states(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Return the last layer's hidden states. (Outputs would not do: a new value head returns 0 everywhere.)"""
    with torch.no_grad():
        return model(**arguments, output_hidden_states=True).hidden_states[-1].float()


def packed_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute ``sdpa`` attention within each sample of a packed row. Return ``[1, tokens, heads, size]`` and None.

    Has the signature of transformers' attention functions: query, key and value are ``[1, heads, tokens, size]``.
    Without ``cu_seq_lens_q``, each row is one sample, padded on the right or not at all.
    """
    _refuse_masks(attention_mask)
    window, boundaries = settings.pop("sliding_window", None), settings.pop("cu_seq_lens_q", None)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        has_window = window is not None and length > window
        mask = _visible(length, window, query.device) if has_window else None
        return sdpa_attention_forward(module, query, key, value, mask, **settings)[0]

    longest, scale = settings.get("max_length_q"), settings.get("scaling")
    return attend_within_samples(attend, query, key, value, boundaries, longest, scale=scale, window=window), None


def attend_within_samples(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor | None,
    longest: int | None,
    *,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each sample of a packed row, ``[1, tokens, heads, size]``.

    This is one call of the variable-length kernel if it accepts the tensors and the length of the longest sample is
    known, else calls of ``attend``, which must have the same scale and window. ``boundaries``: see `Packing`.
    """
    kernel = _kernel_for(query, value)
    if kernel is None or boundaries is None or longest is None:
        return _by_sample(attend, query, key, value, boundaries)
    longest = int(longest)
    # A window counts the token itself. The kernel counts only those to its left; -1 means all.
    left = -1 if window is None or window >= longest else window - 1
    attended: Tensor = kernel(
        *(tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.unsqueeze(0)


def packed_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Like `packed_sdpa`, by explicit matrix products. Supports the logit soft cap, which ``sdpa`` lacks."""
    _refuse_masks(attention_mask)
    scaling, softcap = settings.get("scaling"), settings.get("softcap")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        visible = _visible(query.shape[2], settings.get("sliding_window"), query.device)
        weights = functional.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=torch.float32)
        return (weights.to(query.dtype) @ value).transpose(1, 2)

    return _by_sample(attend, query, key, value, settings.get("cu_seq_lens_q")), None


def _refuse_masks(attention_mask: Tensor | None) -> None:
    """Raise ``ValueError`` for a mask. transformers makes none for custom attention functions, but a model might."""
    if attention_mask is not None:
        raise ValueError("the model makes an attention mask of its own, which packed rows cannot keep to")


def _by_sample(attend: Attend, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor | None) -> Tensor:
    """Compute attention per sample, ``[rows, tokens, heads, size]``; adjacent samples of equal length share a call."""
    if boundaries is None:
        return attend(query, key, value).contiguous()  # as from the attention that this replaces
    runs = [(len(list(same)), length) for length, same in groupby(boundaries.diff().tolist())]
    # One split instead of slices: the gradient of a slice is a tensor as large as the row.
    sizes = [count * length for count, length in runs]
    parts = zip(*(tensor.squeeze(0).split(sizes, dim=1) for tensor in (query, key, value)), strict=True)
    attended = []
    for (count, _), part in zip(runs, parts, strict=True):
        # [heads, count x length, size] becomes [count, heads, length, size].
        samples = (tensor.unflatten(1, (count, -1)).transpose(0, 1) for tensor in part)
        attended.append(attend(*samples).flatten(0, 1))
    return torch.cat(attended).unsqueeze(0)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal (and sliding-window) mask of a sample, bool ``[length, length]``: True where visible."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return visible if window is None else visible.triu(1 - window)


def _kernel_for(query: Tensor, value: Tensor) -> Callable[..., Any] | None:
    """Return torch's variable-length attention kernel if it exists and accepts these tensors, else None."""
    size = query.shape[-1]
    fits = (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )
    kernel = _kernel() if fits else None
    return kernel if kernel is not None and separates_samples(kernel, query.device, query.dtype, size) else None


@cache
def _kernel() -> Callable[..., Any] | None:
    """Return torch's variable-length attention; None if this torch lacks it or has an older signature of it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


@cache
def separates_samples(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Try a variable-length kernel: does it give attention within each sample, and its gradients, on this device?

    If not, the log says why, and attention is computed per sample instead. ``size`` is that of a head.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> Tensor:
        drawn = torch.randn(sum(TRIED_LENGTHS), heads, size, generator=generator, device=device)
        return drawn.to(dtype).requires_grad_()

    tensors = random(2), random(1), random(1)
    boundaries = Packing.of(TRIED_LENGTHS, device).boundaries
    longest, scale = max(TRIED_LENGTHS), size**-0.5

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.transpose(1, 2)

    def with_gradients(attended: Tensor) -> Tensor:
        gradients = torch.autograd.grad((attended.float() ** 2).sum(), tensors)
        return torch.cat([tensor.detach().flatten().float() for tensor in (attended, *gradients)])

    # The hooks of a surrounding checkpoint must not see these tensors.
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in tensors)
        expected = with_gradients(_by_sample(alone, query, key, value, boundaries)[0])
        try:
            arguments = (*tensors, boundaries, boundaries, longest, longest)
            found = with_gradients(kernel(*arguments, scale=scale, window_size=(-1, 0), enable_gqa=True))
        except Exception as error:  # of a kernel that this device or build cannot run
            logger.warning("packed rows do without torch's variable-length attention, which fails: %s", error)
            return False
    difference = relative_difference(found, expected)
    if not difference <= COARSE_TOLERANCE:
        logger.warning("packed rows do without torch's variable-length attention, which is off by %.1g", difference)
        return False
    return True
