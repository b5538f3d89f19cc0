"""When the reference computes: a model of its own at any time, the trainer without adapters only between steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tiny import tiny_config

from roll.configs.loader import config_from_tree
from roll.pipeline.context import RunContext
from roll.pipeline.stage import StepCounter
from roll.pipeline.stages import BUILT_IN
from roll.rollout.clock import run_virtual


@pytest.mark.parametrize(("reference", "waits"), [({}, True), ({"device_mapping": [1]}, False)])
def test_the_base_of_the_trainer_waits_until_the_step_before_is_over_and_takes_the_trainers_devices(
    tmp_path, reference, waits
):
    async def scenario():
        changes = {"reference": reference, "actor_train__model_args": {"lora_target": "q_proj"}}
        held_by: list[str] = []
        lock, own = SimpleNamespace(hold=held_by.append), SimpleNamespace(hold=held_by.append)
        run = SimpleNamespace(
            config=config_from_tree(tiny_config(tmp_path, use_kl_loss=True, **changes)),
            locks={"actor_train": lock, "reference": own, "actor_infer": None},
            steps=StepCounter(1),
        )
        run.holder = lambda role: RunContext.holder(run, role)
        (stage,) = (each for each in BUILT_IN if each.name == "reference")
        RunContext.hold(run, stage.role)()
        assert held_by == ["actor_train" if waits else "reference"]
        await stage.before(run, SimpleNamespace(step=1))
        later = asyncio.create_task(stage.before(run, SimpleNamespace(step=2)))
        await asyncio.sleep(10)
        assert later.done() == (not waits)
        run.steps.advance(2)
        await later

    run_virtual(scenario())
