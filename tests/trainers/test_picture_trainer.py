"""`fsdp2_train` on pictures: the engine's log-probabilities, and one update however the batch is split."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import ModelArguments, PictureSampling, TrainingArguments
from roll.data.records import SampleBatch
from roll.engines.base import GenerateRequest, PictureRequest, SamplingParams
from roll.trainers.step import build_micro_batch
from tests.tiers import need
from tests.tiny_pictures import (
    DISTILLED,
    FLUX,
    QWEN,
    SAMPLING,
    make_distilled_flux,
    make_flux,
    make_pipeline,
    make_qwen,
)
from tests.trainers.ranks import Job, run_here, run_job
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

need("diffusers")

PLAIN = PictureSampling(**SAMPLING)
KINDS = {
    "cps": PLAIN,
    "flow_sde, guided": replace(PLAIN, kind="flow_sde", guidance_scale=3.0, negative_prompt="blue"),
    "dance": replace(PLAIN, kind="dance"),
}
FAMILIES = {
    "FLUX, guided": (make_flux, PictureSampling(**SAMPLING | FLUX)),
    "FLUX, distilled": (make_distilled_flux, PictureSampling(**SAMPLING | DISTILLED)),
    "Qwen-Image, guided": (make_qwen, PictureSampling(**SAMPLING | QWEN)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_pipeline(tmp_path_factory.mktemp("model")))


def recorded(model: str, sampling: PictureSampling, count: int = 6, first_steps: bool = False) -> SampleBatch:
    """What an engine records of some pictures, with advantages."""
    from roll.engines.hf.engine import ActiveRequest
    from roll.engines.options import DiffusersInferConfig
    from roll.engines.pictures import PictureEngine

    engine = PictureEngine(model, torch.float32, torch.device("cpu"), DiffusersInferConfig())
    prompts = [("red", "two blue", "green")[number % 3] for number in range(count)]
    for number, prompt in enumerate(prompts):
        begin = 0 if first_steps else number % 2
        picture = PictureRequest(prompt, sampling, range(begin, begin + 2))
        request = GenerateRequest(f"{number}", np.zeros(1, np.int32), SamplingParams(1, seed=number), picture=picture)
        engine.submit(ActiveRequest(request))
    while engine.running or engine.waiting:
        engine.step()
    done = sorted((each for _, each in engine.take_events()), key=lambda each: int(each.request_id))
    flat = {
        "token_ids": np.concatenate([np.append(0, each.token_ids) for each in done]).astype(np.int32),
        "response_mask": np.tile([False, True, True], count),
        "behaviour_logprobs": np.concatenate([np.append(0, each.logprobs) for each in done]).astype(np.float32),
        "advantages": np.repeat(np.linspace(-1, 1, count), 3).astype(np.float32),
    }
    fields = {"latents": np.stack([each.picture.latents for each in done]), "prompts": np.array(prompts)}
    if sampling.log_prob == "guard":
        fields["means"] = np.stack([each.picture.means for each in done])
    return SampleBatch(np.full(count, 3), flat, fields)


OBJECTIVE = PolicyObjective(max_response_length=2, pg_variant="vanilla")


def logprobs(trainer, batch):
    return trainer.log_probs(batch, 1.0)


def updated(trainer, batch):
    """Metrics and weights after an update, and the log-probabilities then."""
    metrics = trainer.train_step(batch, OBJECTIVE, 1.0)
    weights = {name: weight.clone() for name, weight in trainer.published_weights()}
    return metrics, weights, trainer.log_probs(batch, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_engine(model, kind):
    batch = recorded(model, KINDS[kind])
    (found,) = run_here(Job(logprobs, "fsdp2_train", model, batch, {"pictures": KINDS[kind]}, ranks=1))
    mask = batch.tokens["response_mask"]
    np.testing.assert_allclose(found[mask], batch.tokens["behaviour_logprobs"][mask], atol=1e-5, rtol=0)
    assert not found[~mask].any() and np.ptp(found[mask]) > 1e-2


def trained_twice(trainer, batch):
    """Metrics of two updates on one batch, which the second finds off policy; log-probabilities and means between."""
    bounds = {"clip_low": 1e-4, "clip_high": 1e-4}
    ratios = PolicyObjective(max_response_length=2, pg_variant="ppo", pg_variant_args=bounds)
    first = trainer.train_step(batch, ratios, 1.0)
    between = trainer.log_probs(batch, 1.0), trainer.step_means(batch)
    return first, between, trainer.train_step(batch, ratios, 1.0)


def test_guarded_ratios_are_those_of_the_recorded_means(model):
    """Against the formula of GRPO-Guard on the trainer's own means after one update; the first update is on policy."""
    from roll.pictures.model import Schedule

    sampling = replace(PLAIN, log_prob="guard", kind="flow_sde")
    batch, setup = recorded(model, sampling), {"training_args": TrainingArguments(learning_rate=3e-3)}
    job = Job(trained_twice, "fsdp2_train", model, batch, setup | {"pictures": sampling}, ranks=1)
    ((first, (plain, means), second),) = run_here(job)
    assert first["ratio_max"] == pytest.approx(1, abs=1e-5)
    mask, levels = batch.tokens["response_mask"], Schedule.of(sampling, model).levels
    steps = batch.tokens["token_ids"][mask]
    drift = ((means - batch.per_sample["means"]) ** 2).reshape(len(steps), -1).mean(-1)
    s, after = levels[steps].numpy(), levels[steps + 1].numpy()
    g = sampling.noise_level * np.sqrt(s / (1 - np.where(s == 1, float(levels[1]), s)))
    std = g * np.sqrt(s - after)
    ratio = np.exp(std * (plain[mask] - batch.tokens["behaviour_logprobs"][mask] + drift / (2 * std**2)))
    assert second["ratio_max"] - 1 == pytest.approx(ratio.max() - 1, rel=1e-2) and ratio.max() > 1 + 1e-4
    assert second["ratio_mean"] == pytest.approx(ratio.mean(), abs=1e-6)


@pytest.fixture(scope="module", params=FAMILIES)
def other_family(request, tmp_path_factory):
    """Model, sampling settings and a recorded batch of another family than Stable Diffusion 3."""
    make, sampling = FAMILIES[request.param]
    model = str(make(tmp_path_factory.mktemp("model")))
    return model, sampling, recorded(model, sampling)


def compared_and_updated(trainer, batch):
    """Log-probabilities, and the result of an update after them."""
    return trainer.log_probs(batch, 1.0), *updated(trainer, batch)


def test_other_families_have_the_log_probabilities_of_the_engine_and_learn(other_family):
    model, sampling, batch = other_family
    settings = {**SETUP, "pictures": sampling, "max_samples": 6}
    saving = {"strategy_config": {"gradient_checkpointing": True, "process_group_timeout_seconds": 60}}
    job = Job(compared_and_updated, "fsdp2_train", model, batch, settings, ranks=1)
    ((found, metrics, weights, after),) = run_here(job)
    mask, drawn = batch.tokens["response_mask"], batch.tokens["behaviour_logprobs"]
    np.testing.assert_allclose(found[mask], drawn[mask], atol=1e-5, rtol=0)
    assert np.ptp(found[mask]) > 1e-2 and metrics["grad_norm"] > 0.01 and np.abs(after - found).max() > 1e-4
    ((_, other, theirs, _),) = run_here(replace(job, setup={**settings, "max_samples": 2, **saving}))
    assert_same_update((metrics, weights), (other, theirs))


@pytest.mark.tier("soak")
def test_two_ranks_take_the_update_of_one_in_other_families(other_family):
    model, sampling, batch = other_family
    job = Job(updated, "fsdp2_train", model, batch, {**SETUP, "pictures": sampling, "max_samples": 6}, ranks=1)
    ((metrics, weights, _),) = run_here(job)
    shared = {**SETUP, "pictures": sampling, "max_samples": 2}
    for other, theirs, _ in run_job(replace(job, setup=shared, ranks=2)):
        assert_same_update((metrics, weights), (other, theirs))


def of_the_last_steps(trainer, batch):
    wanted = np.tile([False, False, True], len(batch))
    micro_batch = build_micro_batch(batch, range(len(batch)), wanted, (), torch.device("cpu"))
    return trainer.forward.logprobs(micro_batch, 1.0).detach().numpy()


def test_steps_that_are_left_out_move_no_other(model):
    batch = recorded(model, PLAIN)
    (found,) = run_here(Job(of_the_last_steps, "fsdp2_train", model, batch, {"pictures": PLAIN}, ranks=1))
    np.testing.assert_allclose(found, batch.tokens["behaviour_logprobs"][2::3, None], atol=1e-5, rtol=0)


def pulled_back(trainer, batch):
    """Divergences at the beginning, after a step away and after a step back; and the means before each of these."""
    far = replace(OBJECTIVE, use_kl_loss=True, kl_loss_coef=0.0, closed_form_kl=True)
    back = replace(far, kl_loss_coef=0.1)
    batch.per_sample["reference_means"] = trainer.step_means(batch)
    nothing = SampleBatch(
        batch.lengths, {**batch.tokens, "advantages": np.zeros_like(batch.tokens["advantages"])}, batch.per_sample
    )
    found, means = [], []
    for objective, part in ((far, batch), (back, nothing), (far, nothing)):
        means.append(trainer.step_means(batch))
        found.append(trainer.train_step(part, objective, 1.0)["kl_loss"])
    return found, means


def test_the_divergence_from_the_reference_is_what_samples_say_and_a_loss_lowers_it(model):
    batch = recorded(model, PLAIN)
    gentle = {"training_args": replace(ALMOST_SGD, learning_rate=1e-3, adam_beta1=0.0), "max_samples": 4}
    job = Job(pulled_back, "fsdp2_train", model, batch, SETUP | gentle, ranks=1)
    (((begun, away, back), means),) = run_here(job)
    assert begun == 0 and 0 < back < away
    from roll.pictures.model import Schedule

    steps = torch.from_numpy(batch.tokens["token_ids"][batch.tokens["response_mask"]]).long()
    std = Schedule.of(PLAIN, model).levels[steps + 1] * np.sin(0.8 * np.pi / 2)
    reference, moved = (torch.from_numpy(each).flatten(0, 1) for each in means[:2])
    one, other = (torch.distributions.Normal(mean, std[:, None, None, None]) for mean in (moved, reference))
    torch.manual_seed(0)
    drawn = one.sample((4000,))
    estimates = (one.log_prob(drawn) - other.log_prob(drawn)).mean((1, 2, 3, 4))
    assert away == pytest.approx(float(estimates.mean()), abs=4 * float(estimates.std()) / 4000**0.5)
    assert away > 20 * float(estimates.std()) / 4000**0.5, "else the estimate says nothing"


SETUP = {"pictures": PLAIN, "training_args": ALMOST_SGD, "max_tokens": None}


def whole_batch(model, batch) -> Job:
    return Job(updated, "fsdp2_train", model, batch, {**SETUP, "max_samples": 6}, ranks=1)


def test_the_update_does_not_depend_on_micro_batches_or_recomputed_activations(model):
    batch = recorded(model, PLAIN)
    alone = whole_batch(model, batch)
    ((metrics, weights, after),) = run_here(alone)
    begun = recorded(model, PLAIN).tokens["behaviour_logprobs"]
    assert metrics["grad_norm"] > 0.1 and np.abs(after - begun).max() > 1e-3
    saving = {"strategy_config": {"gradient_checkpointing": True, "process_group_timeout_seconds": 60}}
    for job in (
        replace(alone, setup={**SETUP, "max_samples": 1}),
        replace(alone, setup={**SETUP, "max_samples": 6, **saving}),
    ):
        ((other, theirs, _),) = run_here(job)
        assert_same_update((metrics, weights), (other, theirs))


@pytest.mark.tier("soak")
def test_two_ranks_take_the_update_of_one(model):
    batch = recorded(model, PLAIN)
    alone = whole_batch(model, batch)
    ((metrics, weights, _),) = run_here(alone)
    for other, theirs, _ in run_job(replace(alone, setup={**SETUP, "max_samples": 2}, ranks=2)):
        assert_same_update((metrics, weights), (other, theirs))


def assert_same_update(one, other):
    assert other[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        apart = (other[1][name] - weight).abs().max()
        assert apart < 1e-5, f"{name} by {apart}"


def test_bfloat16_computes_near_float32(model):
    batch = recorded(model, PLAIN, first_steps=True)
    short = {"pictures": PLAIN, "model_args": ModelArguments(dtype="bfloat16")}
    (found,) = run_here(Job(logprobs, "fsdp2_train", model, batch, short, ranks=1))
    mask = batch.tokens["response_mask"]
    apart = np.abs(found[mask] - batch.tokens["behaviour_logprobs"][mask])
    assert 0 < apart.max() < 0.05


def test_an_export_of_a_checkpoint_takes_the_parts_of_its_pipeline_and_nothing_else(model, tmp_path):
    from roll.pictures.model import load_transformer
    from roll.trainers.model import build_export

    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(model, source)
    for file in ("state/rank", "adapter/weights", ".git/config", "vae/old.bin", "whole.safetensors"):
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).write_text("old")
    (target / "state").mkdir(parents=True)
    (target / "state" / "rank").write_text("new")

    def adapter(path: str) -> None:
        Path(path, "adapter").mkdir(exist_ok=True)
        Path(path, "adapter", "weights").write_text("new")

    like = load_transformer(str(source), torch.float32)
    weights = {name: weight.detach() + 1 for name, weight in like.named_parameters()}
    export = replace(build_export(like, weights, trainer_setup(str(source), pictures=PLAIN)), beside=adapter)
    for _ in range(2):  # what a cut off checkpoint has left is written over
        export.write(str(target))
    new = ["state/rank", "adapter/weights"]
    assert [(target / file).read_text() for file in new] == ["new", "new"]
    files, before = ({str(each.relative_to(at)) for each in at.rglob("*.*")} for at in (target, Path(model)))
    assert files == before
    for file in files - {"transformer/diffusion_pytorch_model.safetensors", "transformer/config.json"}:
        assert (target / file).read_bytes() == Path(model, file).read_bytes()
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (target / vae).samefile(source / vae), "a frozen part takes no room of its own"
    scheduler = "scheduler/scheduler_config.json"
    assert not (target / scheduler).samefile(source / scheduler), "someone may edit it"
    bias = "pos_embed.proj.bias"
    assert torch.equal(load_transformer(str(target), torch.float32).get_parameter(bias), weights[bias])
    assert torch.equal(load_transformer(str(source), torch.float32).get_parameter(bias), like.get_parameter(bias))
