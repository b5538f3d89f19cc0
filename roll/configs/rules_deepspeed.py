"""Rules about DeepSpeed on devices that roles share: where its states cannot leave, the other roles could never come.

DeepSpeed 0.19 moves the states of some settings only, and says so in the middle of a run, when a device changes hands
for the first time. What it can move is written down here once; the trainer asks here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roll.configs.derived import present_roles
from roll.configs.device_mapping import compact
from roll.configs.engine_options import Options
from roll.configs.errors import ConfigProblem
from roll.configs.rules_devices import readable_mappings
from roll.configs.schema import TRAINED_ROLES, PipelineConfig


@dataclass(frozen=True)
class Obstacle:
    """Why states cannot leave a device."""

    key: str
    """In `zero_optimization`."""
    message: str
    remedy: str


def obstacle_to_moving(options: Options, *, bfloat16: bool, learns: bool) -> Obstacle | None:
    """What is in the way of moving the states of a role to the host and back, if anything."""
    stage = options.get("zero_optimization.stage", 0)
    if not learns:
        if stage != 3:
            return None
        return Obstacle(
            "stage", "stage 3 of a role without an optimizer: DeepSpeed cannot move its weights",
            "write stage 0, or use `hf_infer` or `fsdp2_train`",
        )  # fmt: skip
    if stage in (1, 2, 3) and zero_device(options, "offload_param") != "none":
        return Obstacle(
            "offload_param", "DeepSpeed moves nothing where parameters are offloaded",
            "remove this key and set `offload_optimizer`, or use `fsdp2_train` with `offload: cpu`",
        )  # fmt: skip
    if stage == 3 and zero_device(options, "offload_optimizer") == "none":
        return Obstacle(
            "stage", "stage 3: DeepSpeed moves no states of torch's AdamW",
            "write `offload_optimizer: {device: cpu}`, which keeps them on the host, or stage 2",
        )  # fmt: skip
    if stage == 1 and bfloat16:
        return Obstacle(
            "stage", "stage 1 in bfloat16: DeepSpeed cannot move its states", "write stage 2, which can be moved"
        )
    return None


def zero_device(options: Options, section: str) -> str:
    """Where a section of `zero_optimization` keeps its states: `none` (on the device), `cpu` or `nvme`."""
    return str(options.get(f"zero_optimization.{section}.device", "none"))


def states_can_leave_shared_devices(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """On GPUs, roles that share devices take turns: the states of each have to leave for the others."""
    if config.cluster.device != "cuda":
        return
    mappings = readable_mappings(config)
    for name, role in present_roles(config).items():
        if role.strategy_args.strategy_name != "deepspeed_train":
            continue
        own = set(mappings.get(name, ()))
        sharing = [other for other, devices in mappings.items() if other != name and own & set(devices)]
        obstacle = obstacle_to_moving(
            Options.of(role),
            bfloat16=role.model_args.dtype == "bfloat16",
            learns=name in TRAINED_ROLES,
        )
        if sharing and obstacle is not None:
            shared = own & {device for other in sharing for device in mappings[other]}
            yield ConfigProblem(
                f"{name}.strategy_args.strategy_config.zero_optimization.{obstacle.key}",
                f"{obstacle.message}, and they have to make room on device {compact(sorted(shared))} for "
                f"{' and '.join(sharing)}",
                f"{obstacle.remedy}; or give {name} devices of its own",
            )
