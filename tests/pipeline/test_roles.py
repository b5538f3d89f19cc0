"""The end of a run's processes, whatever goes wrong with it."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import OutOfMemoryError

from roll.configs.loader import config_from_tree
from roll.pipeline.preflight import Prepared
from roll.pipeline.roles import Roles, trainer_setup
from roll.runtime.placement import Placement
from roll.tracking.run_directory import RunDirectory


class NotedPlacement(Placement):
    """Without devices; knows whether it gave them back."""

    released = 0

    def release(self) -> None:
        self.released += 1


class Workers:
    """Processes of a rollout side whose end is not in order."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    async def shutdown(self) -> None:
        raise self._failure


@pytest.mark.parametrize("failure", [OutOfMemoryError("the node ran low on memory"), TimeoutError(), OSError("gone")])
def test_devices_and_published_weights_go_although_a_process_does_not_end_in_order(failure, tmp_path, caplog):
    tree = {"pretrain": "model", "actor_train": {"device_mapping": [0]}, "actor_infer": {"device_mapping": [1]}}
    config = config_from_tree({**tree, "weight_update": {"transport": "checkpoint"}})
    config.cluster.num_devices_per_node = 2
    nothing = dict.fromkeys(
        ("tokenizer", "rollouts", "source", "objective", "value_objective", "advantages", "correction")
    )
    prepared = Prepared(config=config, stages=[], worker_classes={}, **nothing)
    run = RunDirectory.create(str(tmp_path / "run"), "addition")
    placement = NotedPlacement(config.cluster)

    async def main() -> None:
        roles = Roles(prepared, placement, {}, Workers(failure), run, lambda event: None)
        (run.weights / "own" / "version-000001").mkdir(parents=True)
        await roles.shutdown()

    asyncio.run(main())
    assert placement.released == 1 and not run.weights.exists()
    assert "end with Ray" in caplog.text


@pytest.mark.parametrize(
    ("strategy", "packing"), [("fsdp2_train", "auto"), ("tests.pipeline.custom_parts:OwnTrainer", False)]
)
def test_a_trainer_that_does_not_say_that_it_packs_gets_padded_rows(strategy, packing):
    tree = {"pretrain": "model", "actor_train": {"device_mapping": [0]}, "actor_infer": {"device_mapping": [1]}}
    tree["actor_train"]["strategy_args"] = {"strategy_name": strategy}
    config = config_from_tree({**tree, "cluster": {"num_devices_per_node": 2}})
    assert trainer_setup(config, "actor_train").config.use_sequence_packing == packing
