"""What `deepspeed_train` does beside training like the others (`test_trainers_agree`), on real processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.configs.errors import ConfigError
from roll.configs.roles import ModelArguments, TrainingArguments
from roll.configs.strategies import FORWARD_STRATEGIES, option_problems
from roll.trainers import options as trainer_options
from roll.trainers.base import build_trainer
from roll.trainers.model import save
from roll.trainers.options import PASSED_ON, RESERVED, parse_deepspeed_options, zero_option_names
from tests.tiers import soak_but
from tests.trainers.moves import Moves, on_a_gpu, places_of_states
from tests.trainers.nursery import on_ranks
from tests.trainers.ranks import Job, Results, run_job
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

needs_deepspeed = pytest.mark.needs("deepspeed")
everything = pytest.mark.tier("all")
BFLOAT16 = ModelArguments(dtype="bfloat16")
SMALL_STEPS = TrainingArguments(learning_rate=1e-5, max_grad_norm=0.0)
"""Too small to change most bfloat16 weights."""


def zero(stage: int, **options):
    return {"zero_optimization": {"stage": stage, **options}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    """Of odd sizes, which do not divide by the ranks."""
    return write_model(tmp_path_factory.mktemp("model"), tied=False, hidden_size=15, head_dim=8)


def deepspeed_job(work, model_path, strategy_config, argument=None, ranks=2, **setup):
    return Job(work, "deepspeed_train", model_path, argument, {"strategy_config": strategy_config, **setup}, ranks)


def file_weights(path: str) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], value) for name, value in right.items())


def save_and_load(trainer, folders):
    """Train, export, go back to the first model, return to the export. Rank by rank the same."""
    original, export, odd_one = folders
    first = trainer.log_probs(make_batch(), 1.0)
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    trained, weights = trainer.log_probs(make_batch(), 1.0), weights_of(trainer)
    save(trainer, export)
    trainer.load(original)
    assert np.array_equal(trainer.log_probs(make_batch(), 1.0), first)
    assert same(weights_of(trainer), file_weights(original))
    trainer.load(export)
    assert np.array_equal(trainer.log_probs(make_batch(), 1.0), trained) and not np.array_equal(first, trained)
    assert same(weights_of(trainer), weights)
    with pytest.raises(ValueError, match="lm_head.weight"):
        trainer.load(odd_one)
    # The optimizer goes on from what was loaded.
    assert trainer.train_step(make_batch(1), OBJECTIVE, 1.0)["skipped_updates"] == 0.0
    return weights


@needs_deepspeed
@everything
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (zero(0), "float32"),
        (zero(2), "float32"),
        (zero(3), "float32"),
        (zero(1), "bfloat16"),
        (zero(3, stage3_param_persistence_threshold=0), "bfloat16"),
    ],
    ids=["ZeRO 0", "ZeRO 2", "ZeRO 3", "ZeRO 1, bfloat16", "ZeRO 3, bfloat16"],
)
def test_exports_are_complete_and_return_the_same_weights(model_path, tmp_path, options, dtype):
    export, tied = tmp_path / "export", write_model(tmp_path / "tied", tied=True)
    job = deepspeed_job(
        save_and_load, model_path, options, (model_path, str(export), tied),
        model_args=ModelArguments(dtype=dtype), training_args=ALMOST_SGD,
    )  # fmt: skip
    first, second = run_job(job)
    assert same(first, second) and all(weight.dtype == np.float32 for weight in first.values())
    assert same(file_weights(str(export)), first)
    assert (export / "tokenizer.json").read_text() == '{"made": "by the test"}'


def precise(trainer, _):
    """Weights before and after steps too small for bfloat16, and what is computed with them."""
    before = weights_of(trainer)
    metrics = [trainer.train_step(make_batch(step), OBJECTIVE, 0.9) for step in range(3)]
    return before, weights_of(trainer), metrics, {str(parameter.dtype) for parameter in trainer.model.parameters()}


IN_BFLOAT16 = {
    "ZeRO 1": zero(1),
    "ZeRO 2": zero(2),
    # DeepSpeed's own linear layer rounds in other places.
    "ZeRO 3": zero(3, memory_efficient_linear=False),
    "ZeRO 2, optimizer on the CPU": zero(2, offload_optimizer={"device": "cpu"}),
}


def in_parts(trainer, _):
    """Metrics of the same steps, each batch in two parts."""

    def step(batch):
        first, rest = batch.select(range(3)), batch.select(range(3, len(batch)))
        trainer.train_part(first, OBJECTIVE, 0.9, completes=False)
        return trainer.train_part(rest, OBJECTIVE, 0.9, completes=True)[0]

    return [step(make_batch(number)) for number in range(3)]


@pytest.fixture(scope="module")
def in_bfloat16(model_path):
    setup = {"model_args": BFLOAT16, "training_args": SMALL_STEPS, "max_tokens": 14}
    jobs = {name: deepspeed_job(precise, model_path, options, **setup) for name, options in IN_BFLOAT16.items()}
    parts = {f"{name}, in parts": deepspeed_job(in_parts, model_path, IN_BFLOAT16[name], **setup) for name in jobs}
    return Results(jobs | parts | {"fsdp2": Job(precise, "fsdp2_train", model_path, setup=setup)})


@needs_deepspeed
@everything
@pytest.mark.parametrize("case", soak_but(("ZeRO 1", "ZeRO 3"), IN_BFLOAT16))
def test_gradients_of_parts_are_divided_by_the_totals_of_their_batch_in_bfloat16(in_bfloat16, case):
    _, _, expected, _ = in_bfloat16[case][0]
    for values, wanted in zip(in_bfloat16[f"{case}, in parts"][0], expected, strict=True):
        assert values["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
        assert values["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


@needs_deepspeed
@everything
@pytest.mark.parametrize("case", soak_but(("ZeRO 1", "ZeRO 3"), IN_BFLOAT16))
def test_masters_are_float32_where_computing_is_bfloat16(in_bfloat16, model_path, case):
    (before, after, metrics, dtypes), (_, other_after, _, _) = in_bfloat16[case]
    assert dtypes == {"torch.bfloat16"}
    # Not what bfloat16 made of them.
    assert same(before, file_weights(model_path)) and same(after, other_after)
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.mean(after[name] != before[name]) > 0.9 and np.abs(after[name] - before[name]).max() < 1e-4
    _, expected, expected_metrics, _ = in_bfloat16["fsdp2"][0]
    for step, values in enumerate(metrics):
        for metric in ("loss", "grad_norm"):
            assert values[metric] == pytest.approx(expected_metrics[step][metric], rel=1e-3), (step, metric)
    for name, weight in expected.items():
        # Adam moves by the sign of a gradient, which rounding decides where the gradient is almost zero.
        np.testing.assert_allclose(after[name], weight, rtol=0, atol=6.5e-5, err_msg=name)
        assert np.mean(np.abs(after[name] - weight) < 1e-6) > 0.9, name


def as_reference(trainer, _):
    with pytest.raises(RuntimeError, match="forward-only"):
        trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    values = [trainer.log_probs(make_batch(), temperature) for temperature in (1.0, 0.6)]
    return values, weights_of(trainer), {str(parameter.dtype) for parameter in trainer.model.parameters()}


@needs_deepspeed
@everything
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_forward_only_roles_compute_what_the_plain_model_does(model_path, stage, dtype):
    job = deepspeed_job(
        as_reference, model_path, zero(stage), forward_only=True, model_args=ModelArguments(dtype=dtype), max_tokens=14
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tolerance = 1e-5 if dtype == "float32" else 0.1
    rounded = {
        name: parameter.detach().to(getattr(torch, dtype)).float().numpy()
        for name, parameter in model.named_parameters()
    }
    for values, weights, dtypes in run_job(job):
        assert dtypes == {f"torch.{dtype}"} and same(weights, rounded)
        for temperature, logprobs in zip((1.0, 0.6), values, strict=True):
            expected = plain_logprobs(model, make_batch(), temperature)
            np.testing.assert_allclose(logprobs, expected, rtol=tolerance, atol=tolerance)


def plain_logprobs(model, batch, temperature):
    """Of each sample alone, without padding."""
    values = []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        ids = torch.from_numpy(batch.tokens["token_ids"][start:end].astype(np.int64))
        with torch.no_grad():
            table = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        values += [0.0, *table[:-1].gather(-1, ids[1:, None])[:, 0].tolist()]
    return np.array(values)


def three_steps(trainer, _):
    return [trainer.train_step(make_batch(step), OBJECTIVE, 1.0) for step in range(3)], weights_of(trainer)


@needs_deepspeed
@everything
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_changes_nothing(model_path, stage):
    (plain,), (recomputed,) = (
        run_job(
            deepspeed_job(
                three_steps, model_path, {**zero(stage), "gradient_checkpointing": recomputed}, ranks=1,
                training_args=ALMOST_SGD,
            )
        )
        for recomputed in (False, True)
    )  # fmt: skip
    assert plain[0] == [pytest.approx(metrics, rel=1e-5) for metrics in recomputed[0]]
    for name, weight in plain[1].items():
        np.testing.assert_allclose(recomputed[1][name], weight, rtol=1e-4, atol=1e-6)


def without_references(trainer, _):
    batch = make_batch()
    del batch.tokens["reference_logprobs"]
    with pytest.raises(ValueError, match="lacks reference_logprobs"):
        trainer.train_step(batch, OBJECTIVE, 1.0)
    return trainer.train_step(make_batch(), OBJECTIVE, 1.0)


@needs_deepspeed
@everything
def test_a_batch_that_lacks_a_field_is_refused_without_a_trace(model_path):
    (after_refusal,) = run_job(deepspeed_job(without_references, model_path, zero(3), ranks=1))
    (undisturbed,) = run_job(deepspeed_job(three_steps, model_path, zero(3), ranks=1))
    assert after_refusal == undisturbed[0][0]


def move_whole_states(trainer, _):
    """Names of an unsplit trainer's states, and those that did not leave the device or did not come back."""
    trainer.train_step(make_batch(), OBJECTIVE, 1.0)
    states = places_of_states(trainer)
    with Moves() as nothing:
        trainer.offload_states()
        trainer.load_states()
    on_a_gpu(trainer)
    left_out = []
    for move, place in ((trainer.offload_states, "cpu"), (trainer.load_states, "cuda")):
        with Moves() as moves:
            move()
        left_out.append(moves.left_out(place, states))
    return sorted(states), nothing.any(), left_out


def move_split_states(trainer, _):
    """Calls that DeepSpeed gets; its own moves need a GPU."""
    asked = []
    trainer.engine.offload_states = lambda: asked.append("offload")
    trainer.engine.reload_states = lambda: asked.append("reload")
    trainer.offload_states()
    trainer.load_states()
    on_a_gpu(trainer)
    try:
        trainer.offload_states()
        trainer.load_states()
    except RuntimeError as refusal:
        asked.append(str(refusal))
    return asked


@needs_deepspeed
@everything
def test_states_leave_the_device_and_come_back_or_it_is_said_why_not(model_path):
    (names, moved_on_a_cpu, left_out) = run_job(deepspeed_job(move_whole_states, model_path, zero(0), ranks=1))[0]
    assert any(name.startswith("exp_avg of") for name in names) and left_out == [set(), set()] and not moved_on_a_cpu
    assert run_job(deepspeed_job(move_split_states, model_path, zero(2), ranks=1)) == [["offload", "reload"]]
    (refusal,) = run_job(deepspeed_job(move_split_states, model_path, zero(3), ranks=1))[0]
    assert "stage 3: DeepSpeed moves no states" in refusal and "offload_optimizer" in refusal


@needs_deepspeed
def test_stage_0_in_bfloat16_is_refused_with_the_reason():
    setup = trainer_setup("/nowhere", strategy_config=zero(0), model_args=BFLOAT16)
    with pytest.raises(ValueError, match="stage: 1"):
        build_trainer("deepspeed_train", setup)
    build_trainer("deepspeed_train", replace(setup, forward_only=True))


PATH = "actor_train.strategy_args.strategy_config"


@pytest.mark.parametrize(
    ("options", "key", "message", "remedy"),
    [
        ({"train_batch_size": 8}, "train_batch_size", "decides", "per_device_train_batch_size"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "decides", "training_args.max_grad_norm"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer", "decides", "training_args.learning_rate"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "decides", "lr_scheduler_type"),
        ({"bf16": {"enabled": True}}, "bf16", "decides", "model_args.dtype"),
        ({"fp16": {"enabled": True}}, "fp16", "decides", "model_args.dtype"),
        ({"activation_checkpointing": {}}, "activation_checkpointing", "decides", "gradient_checkpointing"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "no such key", "did you mean `zero_optimization`"),
        ({"gradient_checkpoint": True}, "gradient_checkpoint", "no such key", "did you mean `gradient_checkpointing`"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing", "does not fit", "true or false"),
        ({"process_group_timeout_seconds": 0}, "process_group_timeout_seconds", "0 does not fit", "> 0"),
        (zero(4), "zero_optimization.stage", "4 is no stage", "0, 1, 2 or 3"),
        (zero(True), "zero_optimization.stage", "true is no stage", "0, 1, 2 or 3"),
        ({"zero_optimization": 3}, "zero_optimization", "no mapping", "stage: 2"),
        pytest.param(
            zero(2, overlap_com=True),
            "zero_optimization.overlap_com",
            "no such key",
            "did you mean `overlap_comm`",
            marks=needs_deepspeed,
        ),
        (zero(3, mics_shard_size=2), "zero_optimization.mics_shard_size", "decides", "split over all ranks"),
        (zero(2, compute_grad_norm=False), "zero_optimization.compute_grad_norm", "decides", "reports the norm"),
    ],
)
def test_options_that_cannot_work_are_named_with_a_remedy(options, key, message, remedy):
    (problem,) = option_problems(FORWARD_STRATEGIES, "deepspeed_train", options, PATH)
    assert problem.path == f"{PATH}.{key}" and message in problem.message and remedy in problem.remedy
    with pytest.raises(ConfigError, match=key.rsplit(".", 1)[-1]):
        parse_deepspeed_options(options)


def test_options_of_other_launchers_that_leave_a_key_open_are_taken():
    options = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": {"device": "cpu"},
        },
        "wall_clock_breakdown": False,
    }  # fmt: skip
    assert option_problems(FORWARD_STRATEGIES, "deepspeed_train", options, PATH) == []
    parsed = parse_deepspeed_options(options)
    assert parsed.zero_stage == 3 and parsed.engine.keys() == {"zero_optimization", "wall_clock_breakdown"}
    assert parse_deepspeed_options({}).zero_stage == 0


def test_where_deepspeed_is_not_installed_all_but_unknown_names_of_zero_is_judged(monkeypatch):
    monkeypatch.setattr(trainer_options, "zero_option_names", lambda: None)
    options = {"optimizr": {}, **zero(2, overlap_com=True, zenflow={})}
    found = [problem.path for problem in option_problems(FORWARD_STRATEGIES, "deepspeed_train", options, PATH)]
    assert found == [f"{PATH}.optimizr", f"{PATH}.zero_optimization.zenflow"]


class Watched(dict):
    """A mapping that writes down which keys are looked up."""

    seen: set[str] = set()

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return Watched(self)


def looked_up(rank, port):
    """Keys looked up at the top level, and those that DeepSpeed's own model of ZeRO has."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    DeepSpeedConfig(Watched(train_micro_batch_size_per_gpu=1))
    fields = DeepSpeedZeroConfig.model_fields
    return Watched.seen, {*fields, *(field.alias for field in fields.values() if field.alias)}


@needs_deepspeed
@everything
def test_the_known_keys_are_those_of_the_installed_release():
    ((top, zero_names),) = on_ranks(looked_up, ranks=1, engine="deepspeed")
    ours = {"compile"}  # an option of this trainer, which takes the place of DeepSpeed's section
    assert top == PASSED_ON | RESERVED.keys() | ours and not PASSED_ON & RESERVED.keys()
    assert zero_names == zero_option_names()
