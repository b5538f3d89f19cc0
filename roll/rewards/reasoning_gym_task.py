"""The verifier `reasoning_gym`: procedural tasks, scored by the data set that generated them.

The prompt's ground truth is the task's whole entry. Its metadata names the data set and its arguments
(`roll.data.sources.read_reasoning_gym` writes both).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from roll.data.sources import REASONING_GYM_KEY
from roll.rewards.exact import extract_last

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


def reasoning_gym_task(
    response: str, ground_truth: Any, metadata: dict[str, Any], *, extract: re.Pattern[str] | None = None
) -> float:
    """Return the data set's own score of the answer, usually in [0, 1]; a partly right answer may get partial credit.

    ``extract`` is a regular expression whose last match (first group, if any) is the answer; without it, the whole
    response is. Raises `ValueError` for a prompt that is not a reasoning-gym task.
    """
    task_set = metadata.get(REASONING_GYM_KEY)
    if task_set is None:
        raise ValueError("the prompt is no reasoning-gym task: list its data set under `data_args.reasoning_gym`")
    answer = extract_last(response, extract)
    dataset = _dataset(task_set["dataset"], json.dumps(task_set["config"], sort_keys=True))
    return float(dataset.score_answer(None if answer is None else answer.strip(), ground_truth))


@lru_cache(maxsize=32)
def _dataset(name: str, config: str) -> ProceduralDataset:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config))
