"""Adapters trained by `fsdp2_train`: what learns, what leaves, what is kept, against peft and plain transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.algorithms.objective import PolicyObjective
from roll.configs.errors import ConfigError
from roll.configs.roles import ModelArguments, TrainingArguments
from roll.trainers.base import build_trainer
from roll.trainers.lora import resolve_targets
from roll.trainers.model import save
from roll.trainers.state import SavedState, UnfitState, write_state
from tests.trainers.nursery import on_ranks
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD, assert_close, trainer_setup

SOME = {"lora_target": "q_proj, down_proj", "lora_rank": 3, "lora_alpha": 5}
"""Two kinds of layers, with and without a bias; a rank that two processes do not share evenly."""
ADAM = TrainingArguments(learning_rate=0.01, lr_scheduler_type="linear", warmup_steps=2)
CHECKPOINTING = {"gradient_checkpointing": True}


def build(model_path, lora=SOME, dtype="float32", **changes):
    arguments = {"training_args": ALMOST_SGD, "model_args": ModelArguments(dtype=dtype, **lora)}
    trainer = build_trainer("fsdp2_train", trainer_setup(model_path, **arguments | changes))
    trainer.initialize()
    return trainer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(leave_process_group):
    """Build trainers of one rank, one after the other."""

    def build_one(model_path, *args, **changes):
        leave_process_group()
        return build(model_path, *args, **changes)

    return build_one


def train(trainer, steps=range(2)):
    return [trainer.train_step(make_batch(step), OBJECTIVE, 0.9) for step in steps]


def logprobs_of(model, batch):
    """Of each token but the first of a sample, each sample alone; 0 there."""
    values = np.zeros(len(batch.tokens["token_ids"]), dtype=np.float32)
    ids = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        table = model(input_ids=ids[None, begin:end]).logits[0, :-1].float().log_softmax(-1)
        values[begin + 1 : end] = table.gather(-1, ids[begin + 1 : end, None])[:, 0].detach().numpy()
    return values


def plain_model(path, trainer=None):
    """The plain model, filled with what a trainer publishes."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    if trainer is not None:
        model.load_state_dict({name: weight.clone() for name, weight in trainer.named_weights()}, strict=False)
        model.tie_weights()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_compute_what_the_adapted_model_does_under_the_names_of_the_base(start, tmp_path, tied):
    path = write_model(tmp_path, tied)
    trainer = start(path)
    base = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    before = weights_of(trainer)
    assert list(before) == list(base)
    assert all(np.array_equal(before[name], value.detach().numpy()) for name, value in base.items())
    train(trainer)
    published = weights_of(trainer)
    moved = {name for name in base if not np.array_equal(published[name], before[name])}
    assert moved == {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}
    batch = make_batch(5)
    expected = logprobs_of(plain_model(path, trainer), batch)
    assert np.abs(expected - logprobs_of(plain_model(path), batch)).max() > 0.1
    np.testing.assert_allclose(trainer.log_probs(batch, 1.0), expected, rtol=1e-5, atol=1e-5)
    # Asking changed nothing.
    assert all(np.array_equal(value, published[name]) for name, value in weights_of(trainer).items())


def test_one_step_is_the_update_that_peft_and_plain_autograd_predict(start, model_path):
    from peft import LoraConfig, get_peft_model

    trainer = start(model_path)
    adapters = {name: matrix.full_tensor() for name, matrix in learning(trainer).items()}
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path).eval(), config)
    own = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(adapters[name])
    batch = make_batch()
    batch.tokens["response_mask"][:] = True
    batch.tokens["advantages"] = np.linspace(-1, 1, len(batch.tokens["advantages"]), dtype=np.float32)
    metrics = trainer.train_step(batch, PolicyObjective(8, "vanilla", loss_agg_mode="token-mean"), 1.0)
    ids, loss, count = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64)), 0.0, 0
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        table = model(input_ids=ids[None, begin:end]).logits[0, :-1].log_softmax(-1)
        chosen = table.gather(-1, ids[begin + 1 : end, None])[:, 0]
        loss = loss - (torch.from_numpy(batch.tokens["advantages"][begin + 1 : end]) * chosen).sum()
        count += end - begin - 1
    (loss / count).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in own.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, matrix in learning(trainer).items():
        gradient = own[name].grad
        expected = own[name].detach() - ALMOST_SGD.learning_rate * gradient / (gradient.abs() + 1)
        np.testing.assert_allclose(matrix.full_tensor().numpy(), expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def learning(trainer):
    """What has gradients, by name."""
    return {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_only_adapters_have_gradients_moments_and_float32(start, model_path):
    trainer = start(model_path, dtype="bfloat16")
    train(trainer)
    parameters = dict(trainer.model.named_parameters())
    adapters = {name for name in parameters if "lora_" in name}
    assert len(adapters) == 2 * 2 * 2 and learning(trainer).keys() == adapters
    assert {parameters[name].dtype for name in adapters} == {torch.float32}
    assert {parameter.dtype for name, parameter in parameters.items() if name not in adapters} == {torch.bfloat16}
    assert len(trainer.optimizer.state) == len(adapters)
    assert all(moments["exp_avg"].dtype == torch.float32 for moments in trainer.optimizer.state.values())


def test_in_bfloat16_merging_is_exact_all_the_same(start, model_path):
    trainer = start(model_path, dtype="bfloat16", strategy_config=CHECKPOINTING)
    train(trainer)
    adapters = {name: matrix.full_tensor() for name, matrix in learning(trainer).items()}
    base = dict(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).named_parameters())
    for name, weight in trainer.named_weights():
        expected, module = base[name].detach().float(), name.removesuffix(".weight")
        if f"{module}.lora_A.default.weight" in adapters:
            up, down = (adapters[f"{module}.lora_{end}.default.weight"] for end in "BA")
            expected = expected + 5 / 3 * up @ down
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6, msg=name)
    # The difference is in the log-probabilities too, within what bfloat16 keeps of them.
    batch = make_batch(5)
    merged, plain = logprobs_of(plain_model(model_path, trainer), batch), logprobs_of(plain_model(model_path), batch)
    assert np.abs(trainer.log_probs(batch, 1.0) - merged).mean() < 0.3 * np.abs(plain - merged).mean()


def everything(trainer):
    """What must not depend on ranks, micro-batches and options, flat."""
    results = {"base/before": trainer.base_log_probs(make_batch(3), 0.7)}
    for step, metrics in enumerate(train(trainer, range(3))):
        results |= {f"metric/{step}/{name}": np.array(value) for name, value in metrics.items()}
    # A batch smaller than the number of ranks: somebody has nothing to do.
    metrics = trainer.train_step(make_batch(7, lengths=(6,)), OBJECTIVE, 0.9)
    results |= {f"metric/one/{name}": np.array(value) for name, value in metrics.items()}
    results |= {"log_probs": trainer.log_probs(make_batch(3), 0.7), "base": trainer.base_log_probs(make_batch(3), 0.7)}
    return results | {f"weight/{name}": weight for name, weight in weights_of(trainer).items()}


@pytest.fixture(scope="module")
def expected(model_path):
    """One rank, one micro-batch a step."""
    trainer = build(model_path)
    results = everything(trainer)
    trainer.shutdown()
    return results


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 12, "strategy_config": CHECKPOINTING},
        {"strategy_config": {"reshard_after_forward": False}},
        {"strategy_config": {"offload": "cpu"}},
    ],
    ids=["small micro-batches, checkpointing", "gathered", "on the CPU"],
)
def test_micro_batches_checkpointing_resharding_and_offloading_change_nothing(start, model_path, expected, changes):
    assert_close(everything(start(model_path, **changes)), expected, rtol=2e-4, atol=1e-5)


def test_a_head_in_chunks_trains_the_same(start, model_path, expected):
    trainer = start(model_path)
    trainer.forward.chunk_elements = 100
    assert_close(everything(trainer), expected, rtol=2e-4, atol=1e-5)


def test_the_base_is_a_separate_reference_to_the_bit_whatever_the_adapters_are(start, model_path, expected):
    """Also where the first thing ever computed is the base: sharding then learns what trains."""
    trainer = start(model_path, lora={}, forward_only=True)
    assert np.array_equal(trainer.log_probs(make_batch(3), 0.7), expected["base/before"])
    assert np.array_equal(expected["base"], expected["base/before"])
    assert np.abs(expected["log_probs"] - expected["base"]).max() > 0.1
    with pytest.raises(RuntimeError, match="no adapters"):
        trainer.base_log_probs(make_batch(3), 0.7)


def test_nothing_is_frozen_while_adapters_are_off(start, model_path):
    """Sharding asks once, at its first pass, what trains."""
    trainer = start(model_path)
    names = set(learning(trainer))
    with trainer.adapters.disabled():
        assert set(learning(trainer)) == names != set()
    assert set(learning(trainer)) == names


def train_and_export(rank, port, model_path, folder):
    trainer = build(model_path, rank=rank, world_size=2, port=port, max_tokens=25)
    results = everything(trainer)
    save(trainer, f"{folder}/export")
    trainer.shutdown()
    return results


def load_and_go_on(rank, port, model_path, folder):
    trainer = build(model_path, rank=rank, world_size=2, port=port, training_args=ADAM, max_tokens=25)
    trainer.load(f"{folder}/export")
    train(trainer, range(2))
    snapshot = trainer.snapshot()
    write_state(Path(folder) / "state", rank, snapshot)
    train(trainer, range(2, 4))
    weights = weights_of(trainer)
    trainer.shutdown()
    return weights


def bfloat16_step(rank, port, model_path):
    trainer = build(
        model_path, rank=rank, world_size=2, port=port, dtype="bfloat16", strategy_config=CHECKPOINTING, max_tokens=25
    )
    metrics = trainer.train_step(make_batch(0), OBJECTIVE, 0.9)
    embedding = dict(trainer.named_weights())["model.embed_tokens.weight"].numpy()
    trainer.shutdown()
    return metrics, embedding


@dataclass(frozen=True)
class TwoRanks:
    """Results of two ranks, and the folder that they left behind."""

    folder: Path
    results: list[dict[str, np.ndarray]]
    continued: dict[str, np.ndarray]
    """Weights of one that went on from the export, after the state was taken."""


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("two")
    results = on_ranks(train_and_export, model_path, str(folder), ranks=2)
    return TwoRanks(folder, results, on_ranks(load_and_go_on, model_path, str(folder), ranks=2)[0])


@pytest.mark.tier("all")
def test_two_ranks_train_like_one(two_ranks, expected):
    first, second = two_ranks.results
    assert all(np.array_equal(second[name], value) for name, value in first.items())
    assert_close(first, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.tier("all")
def test_two_ranks_in_bfloat16_train_like_one_in_float32(model_path, expected):
    """Compared as closely as bfloat16 allows."""
    base = torch.from_numpy(expected["weight/model.embed_tokens.weight"]).bfloat16().float()
    for metrics, embedding in on_ranks(bfloat16_step, model_path, ranks=2):
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[f"metric/0/{name}"], rel=0.05)
        assert np.array_equal(embedding, base.numpy())


@pytest.mark.tier("all")
def test_one_rank_goes_on_where_two_were(start, model_path, two_ranks):
    trainer = start(model_path, training_args=ADAM, max_tokens=25)
    state = SavedState(two_ranks.folder / "state")
    assert all("lora_" in name for name in state.names()) and len(state.names()) == 3 * len(learning(trainer))
    trainer.restore(state)
    train(trainer, range(2, 4))
    for name, weight in weights_of(trainer).items():
        np.testing.assert_allclose(weight, two_ranks.continued[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.tier("all")
def test_an_export_is_the_merged_model_and_an_adapter_that_peft_loads(start, model_path, two_ranks):
    from peft import PeftModel

    export, published = two_ranks.folder / "export", two_ranks.results[0]
    merged = AutoModelForCausalLM.from_pretrained(export).eval()
    for name, parameter in merged.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), published[f"weight/{name}"]), name
    batch = make_batch(5)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), export / "adapter").eval()
    np.testing.assert_allclose(logprobs_of(adapted, batch), logprobs_of(merged, batch), rtol=1e-5, atol=1e-5)
    assert json.loads((export / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == model_path
    trainer = start(model_path)
    trainer.load(str(export))
    assert all(np.array_equal(weight, published[f"weight/{name}"]) for name, weight in weights_of(trainer).items())


@pytest.mark.tier("all")
def test_exports_that_do_not_fit_are_refused_by_name(start, model_path, two_ranks, tmp_path):
    export, same = str(two_ranks.folder / "export"), {"lora_rank": 3, "lora_alpha": 5}
    with pytest.raises(ValueError, match="has no adapter/adapter_model.safetensors"):
        start(model_path).load(model_path)
    for lora, message in (
        ({"lora_target": "q_proj,down_proj", "lora_rank": 4, "lora_alpha": 5}, r"lora_A.*is \(3, 16\).*\(4, 16\)"),
        ({"lora_target": "q_proj,down_proj", "lora_rank": 3, "lora_alpha": 6}, "lora_alpha 5, this trainer 6"),
        ({"lora_target": "q_proj"} | same, "more layers"),
        ({"lora_target": "all-linear"} | same, "nothing for model.layers.0.self_attn.k_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            start(model_path, lora=lora).load(export)
    with pytest.raises(ValueError, match="made for another base model"):
        start(write_model(tmp_path, seed=1)).load(export)


@pytest.mark.tier("all")
def test_the_state_of_other_training_is_refused(start, model_path, two_ranks, tmp_path):
    state = SavedState(two_ranks.folder / "state")
    with pytest.raises(UnfitState, match="made for another base model .*start from the model"):
        start(write_model(tmp_path / "other", seed=1)).restore(state)
    with pytest.raises(UnfitState, match="base weights in float32, here they are in bfloat16: set `model_args.dtype`"):
        start(model_path, dtype="bfloat16").restore(state)
    with pytest.raises(UnfitState, match=r"training adapters \(LoRA\), and this trainer trains all weights"):
        start(model_path, lora={}).restore(state)
    trainer = start(model_path, lora={})
    write_state(tmp_path / "all", 0, trainer.snapshot())
    with pytest.raises(UnfitState, match=r"training all weights, and this trainer trains adapters"):
        start(model_path).restore(SavedState(tmp_path / "all"))
    with pytest.raises(UnfitState, match="lora_A.*another model"):
        start(model_path, lora=SOME | {"lora_rank": 4}).restore(state)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("q_porj", "'q_porj' is no module of this model; did you mean `q_proj`? known: `down_proj`"),
        (["q_proj", "lm_head"], "'lm_head' is no linear layer of the decoder layers; known: `down_proj`"),
        ("norm,v_poj", "'norm' is no linear layer of the decoder layers, 'v_poj' is no module of this model"),
        (["q_proj", "all-linear"], "'all-linear' is no module"),
        ("proj", "'proj' is no module"),
        ("", "'' is no module"),
    ],
)
def test_targets_that_are_none_are_named_with_the_nearest(model_path, wanted, message):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with pytest.raises(ConfigError) as caught:
        resolve_targets(model, wanted)
    (problem,) = caught.value.problems
    assert problem.path == "actor_train.model_args.lora_target"
    assert f"{problem.message}; {problem.remedy}".startswith(message)


def test_targets_are_ends_of_names_or_all_linear_layers(model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    everywhere = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert resolve_targets(model, "all-linear") == resolve_targets(model, ["all-linear"]) == everywhere
    assert resolve_targets(model, "mlp.up_proj, layers.1.self_attn.v_proj") == [
        "mlp.up_proj", "layers.1.self_attn.v_proj"
    ]  # fmt: skip
