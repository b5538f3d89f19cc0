"""Every example configuration is one that can run: all its keys, relations, environments, algorithms and its memory,
judged as `roll check` does, without a GPU and without its model."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll.algorithms.losses.base import POLICY_LOSSES
from roll.check.config import check_elsewhere, config_warnings
from roll.check.memory import estimate_memory
from roll.check.memory_parts import GIB
from roll.check.plan import missing_packages, needs, plan
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import ConfigError
from roll.configs.loader import load_config
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.preflight import look_up
from tests.docs.pages import Page
from tests.docs.settings import settings_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.yaml"))
MAKES_ITS_MODEL = (
    *("quickstart", "frozen_lake-tiny-cpu", "sokoban-tiny-cpu", "agent-tool-cpu"),
    *("count-shapes-cpu", "image-shapes-cpu"),
)
"""Examples that make their model and data; their own tests run them."""
PACKAGES = {
    "strategy_name: vllm": "vllm",
    "strategy_name: sglang": "sglang",
    "strategy_name: deepspeed_train": "deepspeed",
    "strategy_name: megatron_train": "megatron",
    "attn_implementation: flash_attention_2": "flash_attn",
    "lora_target:": "peft",
    "pipeline: image": "diffusers",
}
"""What stands in a file -> the package that it needs."""
OFF_POLICY = EXAMPLES / "qwen2.5-7B-rlvr-offpolicy"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_can_run_where_its_model_and_gpus_are(path):
    config = load_config(path)
    missing = check_elsewhere(config)
    assert config.exp_name in plan(config)
    text = path.read_text()
    if "verifier: ocr" not in text or find_spec("rapidocr"):
        look_up(config, with_model=False, without=missing_packages(config))
    shared_file = "used for training and for validation"
    assert [each for each in config_warnings(config) if shared_file not in each] == []
    estimate = estimate_memory(config)
    needed = [need.what for need in needs(config, estimate)]
    assert any(need.startswith("model ") for need in needed)
    assert {need for need in needed if need.startswith("package ")} == {
        f"package {package}" for written, package in PACKAGES.items() if re.search(written, text)
    }
    if path.parent.name in MAKES_ITS_MODEL:
        return
    assert estimate.unknown == [] and estimate.misfits == [] and estimate.tight == []
    assert any("GPU" in need and "GiB" in need for need in needed), "an example says how large its GPUs are"
    # Models of pictures have no hub names yet, so their folder is missing here.
    assert config.pipeline == "image" or "pretrain" not in [each.path for each in missing]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: folder.name)
def test_a_readme_names_every_file_of_its_folder(folder):
    text = (folder / "README.md").read_text()
    assert [path.name for path in folder.glob("*.yaml") if path.name not in text] == []


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent.name not in MAKES_ITS_MODEL and path.parent != OFF_POLICY],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_a_readme_says_the_memory_that_the_check_says(path):
    """Of each kind of device at its fullest, and of each role that computes with the trainer's engine."""
    text = (path.parent / "README.md").read_text()
    said = re.search(r"\*\*Expected memory\*\*: (.*?)(?=\n- |\Z)", text, re.DOTALL)
    estimate = estimate_memory(load_config(path))
    peaks = {f"{', '.join(each.roles)} together": each.peak for each in estimate.devices}
    peaks |= {role.role: role.peak for role in estimate.roles if role.role != "actor_infer"}
    numbers = {int(number) for number in re.findall(r"\d+", said[1])}
    assert {name: peak / GIB for name, peak in peaks.items() if round(peak / GIB) not in numbers} == {}


def proposed_settings() -> list[tuple[Path, list[str]]]:
    """Folder and overrides that a sentence of its README proposes, together as far as the next full stop."""
    found = []
    for folder in sorted({path.parent for path in FILES}):
        for sentence in re.split(r"[.;](?=\s)|\n(?=\||- )", (folder / "README.md").read_text()):
            codes = Page("", sentence).inline
            overrides = [f"{key}={value}" for _, code in codes for key, value in settings_of(code)]
            if overrides:
                found.append((folder, overrides))
    return found


@pytest.mark.parametrize(
    ("folder", "overrides"),
    [pytest.param(folder, overrides, id=f"{folder.name} {overrides[0]}") for folder, overrides in proposed_settings()],
)
def test_what_a_readme_proposes_to_change_can_run(folder, overrides):
    refused = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            config = load_config(path, overrides)
            check_elsewhere(config)
            rewards = getattr(config, "rewards", {}).values()  # an agentic run has none
            if "ocr" not in [reward.verifier for reward in rewards] or find_spec("rapidocr"):
                look_up(config, with_model=False, without=missing_packages(config))
        except ConfigError as error:
            refused.append(error)
    assert len(refused) < len(list(folder.glob("*.yaml"))), refused


def test_three_gpus_hold_two_ranks_of_the_picture_trainer_and_one_engine():
    folder = EXAMPLES / "sd3.5-medium-flow_grpo"
    (overrides,) = [
        each for found, each in proposed_settings() if found == folder and "actor_infer.device_mapping=[2]" in each
    ]
    config = load_config(folder / "fast_3gpu.yaml", overrides)
    check_elsewhere(config)
    assert parse_device_mapping(config.actor_train.device_mapping) == [0, 1] and config.async_generation_ratio == 1
    estimate = estimate_memory(config)
    assert estimate.unknown == [] and estimate.misfits == [] and estimate.tight == []
    assert [device.roles for device in estimate.devices] == [["actor_train"], ["actor_infer"]]


def off_policy_overrides() -> dict[str, list[str]]:
    """`pg_variant` -> the overrides that the README gives for it."""
    lines = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (OFF_POLICY / "README.md").read_text(), re.MULTILINE)
    return {name: shlex.split(overrides) for name, overrides in lines}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.names()))
def test_each_policy_loss_has_an_override_that_can_run(name):
    config = load_config(OFF_POLICY / "rlvr_config.yaml", off_policy_overrides()[name])
    check_elsewhere(config)
    build_algorithms(config)
    assert config.actor_train.pg_variant == name and config.exp_name.endswith(name)


def test_the_zoo_has_what_users_of_roll_look_for():
    wanted = {
        "quickstart/rlvr", "frozen_lake-tiny-cpu/agentic", "qwen2.5-0.5B-agentic/agent_val_frozen_lake",
        "qwen2.5-0.5B-agentic/agent_val_frozen_lake_async", "qwen2.5-0.5B-agentic/agent_val_sokoban",
        "qwen2.5-0.5B-agentic/agent_val_math_tools", "sokoban-tiny-cpu/agentic",
        "qwen2.5-7B-rlvr_megatron/rlvr_config", "qwen2.5-7B-rlvr_megatron/rlvr_config_async",
        "qwen2.5-7B-rlvr_fsdp2/rlvr_config", "qwen2.5-7B-rlvr_deepspeed/rlvr_config",
        "qwen2.5-7B-rlvr-offpolicy/rlvr_config", "qwen3-8B/rlvr_config", "qwen3-30B-A3B/rlvr_config",
        "llama3.1-8B/rlvr_config", "qwen2.5-0.5B-single_gpu/rlvr_config", "qwen2.5-1.5B-ppo_critic/rlvr_config",
        "qwen2.5-7B-rlvr_megatron/rlvr_config_async_vllm", "qwen2.5-7B-rlvr_lora/rlvr_config",
        "qwen2.5-7B-rlvr_mixed/rlvr_config", "quickstart/ppo_critic",
        "qwen2.5-3B-rlvr_one_node/rlvr_config", "qwen3-16B-A3B/rlvr_config",
        "sd3.5-medium-flow_grpo/fast_1gpu", "sd3.5-medium-flow_grpo/fast_3gpu", "sd3.5-medium-flow_grpo/fast_8gpu",
        "flux.1-dev-flow_grpo_lora/fast_8gpu", "qwen-image-flow_grpo_lora/fast_8gpu",
    }  # fmt: skip
    assert wanted <= {f"{path.parent.name}/{path.stem}" for path in FILES}


def test_asynchronous_recipes_are_one_step_off_policy_on_the_devices_that_they_name():
    found = {}
    for name in ("qwen2.5-0.5B-agentic/agent_val_frozen_lake_async", "qwen2.5-7B-rlvr_megatron/rlvr_config_async"):
        config = load_config(EXAMPLES / f"{name}.yaml")
        assert config.async_generation_ratio == 1
        for role in (config.actor_train, config.actor_infer):
            found.setdefault(role.strategy_args.strategy_name, []).append(parse_device_mapping(role.device_mapping))
    assert found == {
        "megatron_train": [[*range(4)], [*range(16)]],
        "vllm": [[*range(4, 8)]],
        "sglang": [[*range(16, 24)]],
    }


def test_the_critic_of_the_quick_start_is_what_its_page_changes_in_the_command_line():
    page = (EXAMPLES.parent / "docs" / "critic.md").read_text()
    command = re.search(r"^roll train examples/quickstart/rlvr.yaml (.*?)^```", page, re.MULTILINE | re.DOTALL)
    overrides = shlex.split(command[1].replace("\\\n", " "))
    quickstart = load_config(EXAMPLES / "quickstart" / "rlvr.yaml", [*overrides, "exp_name=quickstart-critic"])
    assert quickstart.adv_estimator == "gae"
    assert load_config(EXAMPLES / "quickstart" / "ppo_critic.yaml") == quickstart


def test_whoever_can_go_on_saves_on_the_way():
    on_gpus = [path for path in FILES if path.parent.name not in MAKES_ITS_MODEL]
    assert [path for path in on_gpus if load_config(path).save_steps == 0] == []
