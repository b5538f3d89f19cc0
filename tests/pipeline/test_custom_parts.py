"""Parts of the user's own take the place of the built-in ones, from YAML alone: every kind of plug-in of RLVR."""

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.configs.run import InsertedStage
from roll.pipeline.preflight import prepare
from roll.pipeline.stages import STAGES, stage_chain


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
        stages={
            "advantage": "custom_parts:halved_advantages",
            "half": {"after": "rollout", "use": "custom_parts:every_other_group"},
            "count": {"before": "train", "use": "custom_parts:count_trained"},
        },
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
    for step in run.metrics:
        assert 0 < step["half/tokens"] == step["half/trained_tokens"] < 32 * 2 and step["half/has_advantages"]
        assert step["time/half"] >= 0 and step["time/count"] >= 0
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


OWN = "custom_parts:count_trained"


def names(chosen) -> list[str]:
    return [stage.name for stage in stage_chain(chosen)]


def test_stages_are_inserted_where_they_are_asked_for_in_the_order_of_the_file():
    assert names({}) == list(STAGES.built_in)
    assert names({"advantage": OWN}) == list(STAGES.built_in), "a replaced stage keeps its name and place"
    order = names({
        "first": InsertedStage(OWN, after="rollout"),
        "second": InsertedStage(OWN, after="first"),
        "third": InsertedStage(OWN, before="reference"),
        "last": InsertedStage(OWN, after="param_update"),
    })  # fmt: skip
    assert order[:5] == ["rollout", "first", "second", "third", "reference"]
    assert order[-2:] == ["param_update", "last"]


@pytest.mark.parametrize(
    ("chosen", "path", "reason", "remedy"),
    [
        ({"advantages": OWN}, "stages.advantages", "no stage `advantages`", f"{{after: <stage>, use: {OWN}}}"),
        ({"advantage": "custom_parts:Missing"}, "stages.advantage", "has no 'Missing'", "correct it"),
        ({"advantage": "no_such_module:stage"}, "stages.advantage", "cannot be imported", "importable"),
        ({"advantage": "my stage!"}, "stages.advantage", "there is no stage `my stage!`", "package.module:function"),
        ({"advantage": "custom_parts:NotAStage"}, "stages.advantage", "is no coroutine function", "async def"),
        ({"train": "custom_parts:not_async"}, "stages.train", "is no coroutine function", "async def"),
        ({"own": {"use": OWN}}, "stages.own", "needs a place", "`after` or `before`"),
        ({"own": {"use": OWN, "after": "train", "before": "train"}}, "stages.own", "needs a place", "not both"),
        ({"own": {"after": "train"}}, "stages.own.use", "needs a function", "set `use`"),
        ({"own": {"use": OWN, "after": "trian"}}, "stages.own.after", "no stage `trian`", "did you mean `train`?"),
        ({"own": {"use": OWN, "before": "rollout"}}, "stages.own.before", "no batch before", "after: rollout"),
        ({"train": {"use": OWN, "after": "train"}}, "stages.train", "is built in", "stages: {train:"),
        ({"own": {"use": "custom_parts:Missing", "after": "train"}}, "stages.own.use", "has no 'Missing'", "correct"),
        ({"own": {"use": OWN, "afer": "train"}}, "stages.own.afer", "unknown key", "did you mean `after`?"),
        ({"own": [OWN]}, "stages.own", "is not text or a mapping", "write"),
    ],
)  # fmt: skip
def test_a_stage_that_cannot_be_used_is_refused_with_the_reason(tmp_path, chosen, path, reason, remedy):
    make_task(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        prepare(config_from_tree(tiny_config(tmp_path, stages=chosen)))
    (problem,) = refusal.value.problems
    assert problem.path == path and reason in problem.message and remedy in problem.remedy


@pytest.mark.parametrize(
    ("stages", "reason"),
    [({"advantage": "custom_parts:forgetful"}, "stage 'advantage' returned nothing: a stage returns its batch")],
)
def test_a_stage_that_returns_no_batch_ends_the_run_with_its_name(tmp_path, stages, reason):
    make_task(tmp_path)
    run = run_pipeline(tmp_path, IN_THIS_PROCESS, tiny_config(tmp_path, max_steps=1, stages=stages), expect=1)
    assert reason in run.summary["error"]
