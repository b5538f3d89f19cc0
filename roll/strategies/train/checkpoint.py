"""Models in Hugging Face format, in and out.

Weights are read and written as safetensors only, never as pickles. An export is complete: weights, configuration,
generation settings and the tokenizer's files, so that it loads again by its folder alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.schema import ModelArguments
from roll.strategies.train.setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)


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


def save_weights(
    model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]], setup: TrainerSetup, path: str
) -> None:
    """Export what `TrainStrategy.named_weights` gives as a model like ``model``; rank 0 writes. Collective."""
    state = {}
    for name, weight in named_weights:
        if setup.rank == 0:
            state[name] = weight.cpu().clone()
    if setup.rank == 0:
        export_model(model, state, setup.model_path, path, setup.model_args.trust_remote_code, setup.kind)
    dist.barrier()


def export_model(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    source: str,
    path: str,
    trust_remote_code: bool,
    kind: ModelKind = "policy",
) -> None:
    """Write ``weights`` (full tensors by name, tied ones once) as a model like ``model`` into the folder ``path``.

    The tokenizer comes from ``source``, the folder or hub name the model was loaded from. ``RuntimeError`` if weights
    are missing.
    """
    with torch.device("meta"):
        skeleton = model_class(kind).from_config(model.config, trust_remote_code=trust_remote_code)
    skeleton.load_state_dict({**weights, **dict(model.named_buffers())}, strict=False, assign=True)
    skeleton.tie_weights()
    missing = [name for name, parameter in skeleton.named_parameters() if parameter.is_meta]
    if missing:
        raise RuntimeError(f"the export lacks the weights {', '.join(missing)}")
    if kind == "policy":
        skeleton.generation_config = model.generation_config
    skeleton.save_pretrained(path)
    _export_tokenizer(source, Path(path))


def _export_tokenizer(source: str, path: Path) -> None:
    if Path(source).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in Path(source).glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, path / file.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(path)
