"""Check that a checkpoint is of the model that a resumed run is to train.

The headers of files tell this before any model loads, if the model is a folder. For a model on a hub, the trainers find
it out.
"""

from __future__ import annotations

import re
from pathlib import Path

from roll.configs.derived import model_path, trained_roles
from roll.configs.errors import ConfigProblem
from roll.configs.schema import PipelineConfig
from roll.pipeline.checkpoints import Checkpoint
from roll.strategies.train.megatron.files import CheckpointFiles
from roll.strategies.train.sharded_state import SavedState, UnfitState

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def model_problems(config: PipelineConfig, checkpoint: Checkpoint) -> list[ConfigProblem]:
    """Return a problem for each trained role whose model has other tensors than its state in the checkpoint."""
    problems = []
    for name, role in trained_roles(config).items():
        path = Path(model_path(config, role))
        if not path.is_dir():
            continue
        try:
            difference = _difference(path, SavedState(checkpoint.role(name)))
        except (UnfitState, FileNotFoundError) as unfit:
            difference = str(unfit)
        if difference is not None:
            key = f"{name}.model_args.model_name_or_path" if role.model_args.model_name_or_path else "pretrain"
            message = f"the checkpoint of step {checkpoint.step} cannot go on with {path}: {difference}"
            problems.append(ConfigProblem(key, message, "give the model that the run began with"))
    return problems


def _difference(folder: Path, state: SavedState) -> str | None:
    """Return the first difference, or None. Tensors of the same name are compared, and the numbers of layers.

    Heads and experts have other names in some files than in the model.
    """
    with CheckpointFiles(folder) as files:
        weights = sorted(state.weights())
        for weight in sorted(set(weights) - set(files.missing(weights))):
            there, here = state.shape(f"weight/{weight}"), files.shape(weight)
            if there != here:
                return f"that is another model: {weight} is {list(there)} in the checkpoint, {list(here)} in the model"
        trained, known = _layers(weights), _layers(files.names)
    # The files may have more layers: some that transformers leaves out, and some that have no adapter.
    return None if trained <= known else f"that is another model, of {known} layers, not {trained}"


def _layers(names: list[str]) -> int:
    return len({match[1] for match in map(_LAYER.search, names) if match})
