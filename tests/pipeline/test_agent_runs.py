"""Whole runs of agents: what they sample is what is trained on, whatever they do, and runs go on as of environments."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from test_agentic_runs import agentic_config, gain

pytestmark = pytest.mark.needs("aiohttp")

tier = pytest.mark.tier


@pytest.fixture(autouse=True)
def no_endpoint_is_left():
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "agent-endpoint"] == []


def agent(run="copy_agents:play", **changes):
    options = {"env_config": {"run": run}, "max_steps": 4, "max_tokens_per_step": 1}
    return {"env_type": "agent", "env_manager_cls": "agent", **options, **changes}


def agent_config(task, envs=None, **changes):
    return agentic_config(task, envs or {"copy": agent()}, **{"max_steps": 3, **changes})


def told(run, names=("reward/mean", "response/tokens", "actor/loss", "actor/grad_norm", "env/copy/right")):
    return [[step[name] for name in names] for step in run.metrics]


def test_an_agent_that_plays_a_game_is_trained_like_the_game_itself(task):
    """To the last bit: equal samples, equal gradients, equal weights that are sampled from next."""
    run = run_pipeline(task, IN_THIS_PROCESS, agent_config(task, async_generation_ratio=0))
    assert run.summary["ledger"]["consumed"] == 3 * 8 and run.summary["lag/max"] == 0
    game = run_pipeline(task, IN_THIS_PROCESS, agentic_config(task, max_steps=3, async_generation_ratio=0))
    assert told(run) == told(game)
    for step in run.metrics:
        assert step["env/copy/turns"] == step["env/copy/tokens"] == 2
        assert step["mismatch/tokens"] == step["response/tokens"] == 8 * 8 * 2
        assert step["mismatch/abs_mean"] < 1e-5


def test_a_command_is_an_agent(task):
    """In its own process, by the names of the usual environment variables."""
    script = Path(__file__).with_name("copy_agents.py")
    envs = {"copy": agent(env_config={"command": [sys.executable, str(script)]})}
    changes = {"max_steps": 1, "rollout_batch_size": 2, "train_env_manager__group_size": 2}
    run = run_pipeline(task, IN_THIS_PROCESS, agent_config(task, envs, async_generation_ratio=0, **changes))
    assert told(run) == told(
        run_pipeline(task, IN_THIS_PROCESS, agent_config(task, async_generation_ratio=0, **changes))
    )


@tier("all")
def test_agents_that_raise_hang_lie_or_say_nothing_cost_their_group_and_nothing_else(task):
    envs = {"copy": agent("copy_agents:trouble", step_timeout_seconds=2.0)}
    config = agent_config(
        task, envs, async_generation_ratio=1, train_env_manager__group_size=2, max_group_retries=0,
        max_consecutive_refunds=100,
    )  # fmt: skip
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == 3 * 8 and ledger["dropped/failed"] > 0
    last = run.metrics[-1]
    assert all(last[f"env_workers/failures/copy/{kind}"] > 0 for kind in ("raised", "hung", "nonsense"))
    log = (run.folder / "logs" / "driver.log").read_text()
    assert "the agent is on fire" in log and "ended without a token of the policy" in log


@tier("all")
def test_an_agent_that_a_limit_stops_is_trained_on(task):
    """Whether it minds or not; else long episodes would be left out for being long."""
    for limits, end in (({"max_steps": 3}, 3), ({"max_steps": 50}, 6)):
        envs = {"copy": agent("copy_agents:endless", **limits)}
        run = run_pipeline(task, IN_THIS_PROCESS, agent_config(task, envs, max_steps=1, response_length=20))
        assert run.metrics[0]["env/copy/turns"] == end and run.metrics[0]["reward/max"] == 0.0
        assert run.summary["ledger"]["dropped/failed"] == 0


@tier("all")
def test_a_run_of_agents_goes_on_as_if_nothing_had_been(task):
    """Interrupted and resumed, and with a trainer that dies while agents ask."""
    config = agent_config(task, max_steps=4, save_steps=2, async_generation_ratio=0)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    whole = told(run)
    assert told(go_on_from(2, run, task, IN_THIS_PROCESS, config)) == whole
    kill = {"kind": "kill", "role": "actor_train", "at_step": 3}
    config["chaos"] = {"enabled": True, "events": [kill]}
    config["restarts"] = {"max_in_a_row": 1, "delay_seconds": 0}
    assert told(run_pipeline(task, IN_THIS_PROCESS, config)) == whole


def test_a_run_whose_agents_never_ask_ends_with_the_cause(task):
    envs = {"copy": agent("copy_agents:mute")}
    config = agent_config(task, envs, max_group_retries=0, max_consecutive_refunds=3)
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert "ended without a token of the policy" in json.dumps(run.summary)


@tier("soak")
def test_a_run_of_agents_learns(task):
    config = agent_config(task, max_steps=40, async_generation_ratio=1)
    config["actor_train"]["training_args"]["learning_rate"] = 5e-3
    assert gain(run_pipeline(task, IN_THIS_PROCESS, config)) > 0.25


@pytest.mark.timeout(300)
@tier("all")
def test_an_agent_that_ends_its_process_costs_its_group_and_nothing_else(task, ray_cluster):
    """With real processes, at an address of the cluster's node."""
    envs = {"copy": agent("copy_agents:deadly")}
    config = agent_config(
        task, envs, async_generation_ratio=1, train_env_manager__group_size=4, env_workers__num_workers=2,
        max_group_retries=0,
    )  # fmt: skip
    run = run_pipeline(task, ray_cluster, config)
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == 3 * 8 and ledger["dropped/failed"] > 0
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    last = run.metrics[-1]
    assert last["env_workers/failures/copy/lost"] > 0 and last["env_workers/restarts"] > 0
