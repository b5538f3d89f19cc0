"""Parts of the user's own take the place of the built-in ones, from YAML alone: every kind of plug-in of RLVR."""

import pytest
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.pipeline.preflight import prepare
from roll.pipeline.stage import register_stage, resolve_stages
from roll.pipeline.stages import STAGE_ORDER, AdvantageStage

DEFAULTS = {name: name for name in STAGE_ORDER}


@pytest.mark.tier("all")
def test_a_run_uses_the_parts_that_its_configuration_names(tmp_path, ray_cluster):
    make_task(tmp_path)
    config = tiny_config(
        tmp_path,
        max_steps=2,
        async_generation_ratio=1,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_estimator="k1",
        stages={"advantage": "custom_parts:HalvedAdvantages"},
        actor_train__worker_cls="custom_parts:CountingTrainer",
        adv_estimator="custom_parts:centred",
        actor_train__pg_variant="custom_parts:doubled",
        actor_train__pg_variant_args={"factor": 2},
        actor_train__strategy_args={"strategy_name": "custom_parts:OwnTrainer"},
        actor_infer__strategy_args={"strategy_name": "custom_parts:OwnEngine"},
        track_with=["custom_parts:Diary"],
        tracker_kwargs={"custom_parts:Diary": {"title": "mine"}},
        reference={
            "device_mapping": [0],
            "strategy_args": {"strategy_name": "fsdp2_train", "strategy_cls": "custom_parts:OwnReference"},
        },
    )
    run = run_pipeline(tmp_path, ray_cluster, config)
    assert [step["advantage/halved"] for step in run.metrics] == [1.0, 1.0]
    assert [step["actor/samples_seen"] for step in run.metrics] == [32.0, 32.0]
    assert [step["actor/own_strategy"] for step in run.metrics] == [1.0, 1.0]
    assert {step["response/length_max"] for step in run.metrics} == {2}
    assert run.metrics[0]["actor/reference_kl"] == pytest.approx(1.0, abs=1e-3)
    assert [step["actor/doubled"] for step in run.metrics] == [2.0, 2.0]
    titles, *steps = (run.folder / "trackers" / "custom_parts.Diary" / "diary.txt").read_text().splitlines()
    assert titles == "mine" and steps == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("role", "name", "own", "reason"),
    [
        ("actor_train", "fsdp2_train", "custom_parts:Missing", "has no 'Missing'"),
        ("actor_train", "fsdp2_train", "no_such_module:Own", "cannot be imported"),
        pytest.param(
            "actor_train", "deepspeed_train", "custom_parts:OwnTrainer", "not a subclass of",
            marks=pytest.mark.needs("deepspeed"),
        ),
        ("actor_infer", "hf_infer", "custom_parts:OwnTrainer", "not a subclass of"),
        ("actor_infer", "hf_infer", "custom_parts:CountingTrainer", "not a subclass of"),
        ("reference", "hf_infer", "custom_parts:OwnReference", "not a subclass of"),
    ],
)  # fmt: skip
def test_a_strategy_that_cannot_stand_in_is_refused_with_the_reason(tmp_path, role, name, own, reason):
    make_task(tmp_path)
    chosen = {"strategy_name": name, "strategy_cls": own}
    section = {"device_mapping": [0], "strategy_args": chosen}
    changes = {"reference": section, "use_kl_loss": True} if role == "reference" else {f"{role}__strategy_args": chosen}
    with pytest.raises(ConfigError) as refusal:
        prepare(config_from_tree(tiny_config(tmp_path, **changes)))
    assert [problem.path for problem in refusal.value.problems] == [f"{role}.strategy_args.strategy_cls"]
    assert reason in refusal.value.problems[0].message and refusal.value.problems[0].remedy


def test_a_registered_stage_can_be_named_and_a_name_is_taken_once():
    @register_stage("test_only_advantage")
    class Own(AdvantageStage):
        """Registered by this test."""

    assert resolve_stages(DEFAULTS, {"advantage": "test_only_advantage"})["advantage"] is Own
    with pytest.raises(ValueError, match="already registered"):
        register_stage("test_only_advantage")(Own)


@pytest.mark.parametrize(
    ("chosen", "path", "reason"),
    [
        ({"advantages": "custom_parts:HalvedAdvantages"}, "stages.advantages", "there is no stage"),
        ({"advantage": "custom_parts:Missing"}, "stages.advantage", "has no 'Missing'"),
        ({"advantage": "no_such_module:Stage"}, "stages.advantage", "cannot be imported"),
        ({"advantage": "custom_parts:NotAStage"}, "stages.advantage", "not a subclass of AdvantageStage"),
        ({"train": "custom_parts:HalvedAdvantages"}, "stages.train", "not a subclass of TrainStage"),
    ],
)
def test_a_stage_that_cannot_stand_in_is_refused_with_the_reason(chosen, path, reason):
    with pytest.raises(ConfigError) as refusal:
        resolve_stages(DEFAULTS, chosen)
    assert [problem.path for problem in refusal.value.problems] == [path]
    assert reason in refusal.value.problems[0].message
