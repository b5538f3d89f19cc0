"""Loads models in Hugging Face format. Weights are read from safetensors only, never from pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from roll.configs.schema import ModelArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ModelKind = Literal["policy", "value"]


def model_class(kind: ModelKind) -> Any:
    """Return transformers' class for models of this kind: a causal language model, or one that gives each token a
    number."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification


def load_model(
    path: str, arguments: ModelArguments, dtype: torch.dtype, kind: ModelKind = "policy"
) -> PreTrainedModel:
    """Load the model at ``path`` (folder or hub name) on the CPU.

    A value model made from another kind of model gets a new head that gives 0 everywhere, the best guess before the
    first return is known. If part of a head exists (a reward model's has no bias), only the rest is new. Raises
    ``ValueError`` naming a tensor if any other one is missing: transformers would invent its values.
    """
    options = {} if kind == "policy" else {"num_labels": 1}
    model, found = model_class(kind).from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    body = f"{model.base_model_prefix}."
    missing = sorted(found["missing_keys"])
    lost = missing if kind == "policy" else [name for name in missing if name.startswith(body)]
    if lost:
        raise ValueError(f"{path} lacks {lost[0]}" + (f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""))
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model


def load_weights(
    path: str,
    arguments: ModelArguments,
    dtype: torch.dtype,
    shapes: Mapping[str, torch.Size],
    kind: ModelKind = "policy",
) -> dict[str, Tensor]:
    """Return the weights of an export by name, tied ones once, for a model whose parameters have these ``shapes``.

    Raises ``ValueError`` naming the tensor if the export does not fit the model.
    """
    source = {name: weight.detach() for name, weight in load_model(path, arguments, dtype, kind).named_parameters()}
    if source.keys() != shapes.keys():
        raise ValueError(f"the weights in {path} do not fit the model: {sorted(source.keys() ^ shapes.keys())}")
    for name, shape in shapes.items():
        if source[name].shape != shape:
            raise ValueError(f"{name} is {tuple(source[name].shape)} in {path}, {tuple(shape)} in the model")
    return source
