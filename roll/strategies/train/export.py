"""Exports of models in Hugging Face format: copied while training pauses, written while it continues.

An export is complete: weights (safetensors), configuration, generation settings and the tokenizer's files. It can be
loaded from its folder alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from roll.strategies.train.checkpoint import model_class
from roll.strategies.train.setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from roll.strategies.train.base import TrainStrategy

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


@dataclass(frozen=True)
class ModelExport:
    """A model in memory of its own, which any thread may write."""

    model: PreTrainedModel
    source: str
    """Folder or hub name that the model was loaded from; it holds the tokenizer."""
    trust_remote_code: bool
    beside: Callable[[str], None] | None = None
    """Function that writes further files into the folder."""

    def write(self, path: str) -> None:
        """Write the export into the folder ``path``. Raises `OSError` naming the folder."""
        try:
            if self.beside is not None:
                self.beside(path)
            self.model.save_pretrained(path)
        except SafetensorError as cause:
            raise OSError(f"cannot write the model into {path}: {cause}") from cause
        _write_tokenizer(self.source, Path(path), self.trust_remote_code)


def save(trainer: TrainStrategy, path: str) -> None:
    """Export and write at once; return when the model is in the folder ``path``. Collective."""
    export = trainer.export()
    if export is not None:
        export.write(path)
    dist.barrier()


def copied_weights(named_weights: Iterable[tuple[str, Tensor]], setup: TrainerSetup) -> dict[str, Tensor] | None:
    """Copy the tensors of `TrainStrategy.named_weights` to the CPU of rank 0; return None on other ranks.
    Collective."""
    copies = {}
    for name, weight in named_weights:
        if setup.rank == 0:
            copies[name] = weight.to("cpu", copy=True)
    return copies if setup.rank == 0 else None


def build_export(
    like: PreTrainedModel,
    weights: Mapping[str, Tensor],
    setup: TrainerSetup,
    beside: Callable[[str], None] | None = None,
) -> ModelExport:
    """Return ``weights`` (full tensors by name, tied ones once) as an export of a model like ``like``.

    Raises ``RuntimeError`` if some are missing.
    """
    trusted, kind = setup.model_args.trust_remote_code, setup.kind
    with torch.device("meta"):
        skeleton = model_class(kind).from_config(like.config, trust_remote_code=trusted)
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in like.named_buffers() if not buffer.is_meta}
    skeleton.load_state_dict({**weights, **buffers}, strict=False, assign=True)
    skeleton.tie_weights()
    missing = [name for name, parameter in skeleton.named_parameters() if parameter.is_meta]
    if missing:
        raise RuntimeError(f"the export lacks the weights {', '.join(missing)}")
    if kind == "policy":
        skeleton.generation_config = like.generation_config
    return ModelExport(skeleton, setup.model_path, trusted, beside)


def _write_tokenizer(source: str, path: Path, trust_remote_code: bool) -> None:
    if Path(source).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in Path(source).glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, path / file.name)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(path)
