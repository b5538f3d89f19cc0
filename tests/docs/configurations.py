"""Judges blocks of YAML: each loads strictly and can work, a fragment within a small configuration that lacks it."""

from __future__ import annotations

import copy
from typing import Any

from roll.check.config import check_elsewhere
from roll.check.plan import missing_packages
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.loader import config_from_tree, parse_yaml
from roll.pipeline.preflight import look_up
from tests.docs.pages import Block, Page

OTHER_PROJECTS = ("ROLL", "verl", "TRL")
"""Titles of blocks that are another project's configuration."""
MOST_FOREIGN_BLOCKS = 1
"""On a page of migration; elsewhere there are none."""

ROLES = {
    "pretrain": "Qwen/Qwen2.5-7B",
    "cluster": {"device": "cuda", "num_nodes": 3, "num_devices_per_node": 8, "address": "auto"},
    "prompt_length": 1024,
    "response_length": 3072,
    "async_generation_ratio": 1,
    "actor_train": {"device_mapping": "0-3"},
    "actor_infer": {"device_mapping": "4-7", "strategy_args": {"strategy_name": "vllm"}},
}
IMAGES = {
    "pipeline": "image",
    "pretrain": "models/sd3.5-medium",
    "cluster": {"device": "cuda", "num_devices_per_node": 3},
    "async_generation_ratio": 1,
    "actor_train": {"device_mapping": [0], "pg_variant_args": {"clip_low": 1e-4, "clip_high": 1e-4}},
    "actor_infer": {"device_mapping": "1-2"},
    "rewards": {"shapes": {"verifier": "shapes"}},
}
BASES: dict[str, dict[str, Any]] = {
    "image": IMAGES,
    "rlvr": ROLES | {"rewards": {"math": {"verifier": "math"}}},
    "agentic": ROLES | {"pipeline": "agentic", "custom_envs": {"lake": {"env_type": "frozen_lake"}}},
}
"""What a fragment is laid over: runs that can work, on more devices than any fragment names."""
TRAINING_PROMPTS = {"actor_train": {"data_args": {"file_name": "data/train.jsonl"}}}
AGENTIC_KEYS = {"custom_envs", "train_env_manager", "val_env_manager", "env_workers", "raw_turns"}
WHOLE = {"pretrain", "actor_train", "actor_infer"}
"""A block with these keys is a configuration of its own."""


def problems_of_configurations(page: Page) -> list[str]:
    """What is wrong with the YAML of a page."""
    blocks = [block for block in page.blocks if block.language == "yaml"]
    foreign = [block for block in blocks if block.title in OTHER_PROJECTS]
    found = [problem for block in blocks if block not in foreign for problem in _problems(block)]
    allowed = MOST_FOREIGN_BLOCKS if page.name.startswith("docs/migration/") else 0
    if len(foreign) > allowed:
        found.append(f"{foreign[allowed].where}: more than {allowed} configurations of other projects on this page")
    return found


def configuration_of(block: Block) -> dict[str, Any]:
    """The whole tree that a block stands for. Raises `ConfigError`."""
    tree = parse_yaml(block.text, block.where)
    if not isinstance(tree, dict):
        raise ConfigError([ConfigProblem(block.info, f"{tree!r:.60} is no configuration", "write `key: value` lines")])
    if tree.keys() >= (WHOLE - {"actor_infer"} if tree.get("pipeline") == "sft" else WHOLE):
        return tree
    pipeline = "agentic" if tree.get("pipeline") == "agentic" or tree.keys() & AGENTIC_KEYS else "rlvr"
    if block.where.startswith("docs/images.md"):
        pipeline = "image"
    parts = [BASES[pipeline], {} if pipeline == "agentic" else TRAINING_PROMPTS, tree]
    merged = _laid_over(*(copy.deepcopy(part) for part in parts))
    if "shares" in merged["cluster"]:  # in place of the mappings of the base
        for role in ("actor_train", "actor_infer"):
            del merged[role]["device_mapping"]
    return merged


def _problems(block: Block) -> list[str]:
    try:
        config = config_from_tree(configuration_of(block))
        check_elsewhere(config)
        look_up(config, with_model=False, without=missing_packages(config))
    except ConfigError as error:
        return [f"{block.where}: {problem}" for problem in error.problems]
    return []


def _laid_over(*trees: dict[str, Any]) -> dict[str, Any]:
    """Later ones win; environments and rewards replace those of the base, as a reader's own would."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = _laid_over(merged[key], value) if both and key not in ("custom_envs", "rewards") else value
    return merged
