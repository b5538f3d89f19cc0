"""Rules about DeepSpeed on shared devices: its states must be able to leave, or the other roles never get the device.

DeepSpeed 0.19 can move states only with some settings. It reports the others in the middle of a run, when a device is
handed over for the first time. The movable settings are listed here once; the trainer uses the same list.
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
    """The reason why states cannot leave a device."""

    key: str
    """Key in `zero_optimization`."""
    message: str
    remedy: str


def obstacle_to_moving(options: Options, *, bfloat16: bool, learns: bool) -> Obstacle | None:
    """Return what prevents moving the states of a role to the host and back; None if nothing does."""
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
    """Return the place of a `zero_optimization` section's states: `none` (on the device), `cpu` or `nvme`."""
    return str(options.get(f"zero_optimization.{section}.device", "none"))


def states_can_leave_shared_devices(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject DeepSpeed roles on shared GPUs whose states cannot make room for the other roles."""
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
