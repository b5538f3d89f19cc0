"""Every example configuration is one that can run: all its keys, relations, environments and algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.agentic.env.registry import check_env_type
from roll.agentic.env_manager.registry import manager_factory
from roll.configs.checks import check_config, config_warnings
from roll.configs.loader import load_config
from roll.configs.plan import plan, render
from roll.configs.schema import AgenticConfig
from roll.pipeline.algorithms import build_algorithms

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.yaml"))
NEEDS_MADE_FILES = ("quickstart", "frozen_lake-tiny-cpu", "sokoban-tiny-cpu")
"""Examples that make their model and data; their own tests run them."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_can_run(path, tmp_path):
    overrides = []
    if path.parent.name in NEEDS_MADE_FILES:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer.json").write_text("{}")
        overrides += [f"pretrain={tmp_path}"]
        if "rlvr" in path.stem:
            data = tmp_path / "data.jsonl"
            data.write_text('{"prompt": "1+1=", "ground_truth": "2", "domain": "addition"}\n')
            overrides += [f"{part}.data_args.file_name={data}" for part in ("actor_train", "validation")]
    else:
        overrides += ["cluster.address=10.0.0.1:6379"]  # the GPUs are elsewhere
    config = load_config(path, overrides)
    check_config(config)
    build_algorithms(config)
    assert config.exp_name in render(plan(config))
    assert [each for each in config_warnings(config) if "used for training and for validation" not in each] == []
    if isinstance(config, AgenticConfig):
        for tag, env in config.custom_envs.items():
            assert check_env_type(tag, env.env_type, env.env_config) == []
            manager_factory(env.env_manager_cls)


def test_the_zoo_is_not_empty():
    assert {"quickstart", "qwen2.5-0.5B-agentic"} <= {path.parent.name for path in FILES}
