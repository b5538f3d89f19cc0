"""Models in, in Hugging Face format. Weights are read from safetensors only, never from pickles."""

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
    """Transformers' class for models of a kind: a causal language model, or one with a number for each token."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification


def load_model(
    path: str, arguments: ModelArguments, dtype: torch.dtype, kind: ModelKind = "policy"
) -> PreTrainedModel:
    """The model at ``path`` (folder or hub name), on the CPU. A value model that comes from another kind of model gets
    a new head, which says 0 for everything: there is nothing better to say before the first return was seen."""
    options = {} if kind == "policy" else {"num_labels": 1, "output_loading_info": True}
    model = model_class(kind).from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
        use_safetensors=True,
        **options,
    )
    if kind == "policy":
        return model
    model, found = model
    new = {name.rpartition(".")[0] for name in found["missing_keys"]}
    with torch.no_grad():
        for name in new:
            for parameter in model.get_submodule(name).parameters():
                parameter.zero_()
    return model


def load_weights(
    path: str,
    arguments: ModelArguments,
    dtype: torch.dtype,
    shapes: Mapping[str, torch.Size],
    kind: ModelKind = "policy",
) -> dict[str, Tensor]:
    """The weights of an export by name, tied ones once, for a model with parameters of these ``shapes``.

    Raises ``ValueError`` naming the tensor if the export does not fit the model.
    """
    source = {name: weight.detach() for name, weight in load_model(path, arguments, dtype, kind).named_parameters()}
    if source.keys() != shapes.keys():
        raise ValueError(f"the weights in {path} do not fit the model: {sorted(source.keys() ^ shapes.keys())}")
    for name, shape in shapes.items():
        if source[name].shape != shape:
            raise ValueError(f"{name} is {tuple(source[name].shape)} in {path}, {tuple(shape)} in the model")
    return source
