"""`pipeline: image` in whole runs: exact at ratio 0, bounded beyond, killed and resumed, with pictures to look at.

The plain loop at the end shares nothing with a run but torch, diffusers and the formulas of `roll.algorithms.flow`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS, FakeCluster
from killed_runs import KilledRun, newest_checkpoint
from runs import run_pipeline
from safetensors.torch import load_file

from roll.algorithms import flow
from roll.cli.main import attempt_run
from roll.configs.loader import config_from_tree
from roll.data.records import derive_seed
from roll.pipeline.exact import exact_config, first_difference
from roll.pipeline.preflight import prepare
from roll.tracking.run_directory import RunDirectory
from tests.rewards.chat_server import Answer, chat_server
from tests.rewards.test_scoring_service import example
from tests.tiny_pictures import (
    DISTILLED,
    FLUX,
    PROMPTS,
    QWEN,
    SAMPLING,
    make_distilled_flux,
    make_flux,
    make_picture_task,
    make_pipeline,
    make_qwen,
    picture_config,
)

pytestmark = pytest.mark.needs("diffusers")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with a tiny pipeline and its prompts."""
    folder = tmp_path_factory.mktemp("pictures")
    make_picture_task(folder)
    return folder


def weights(run, step: int) -> dict[str, torch.Tensor]:
    folder = run.folder / "checkpoints" / f"step-{step}" / "transformer"
    return load_file(folder / "diffusion_pytorch_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def validated(folder, **changes):
    section = {"data_args": {"file_name": str(folder / "val.jsonl")}}
    return picture_config(folder, validation=section, eval_steps=2, **changes)


ONE_AT_A_TIME = {"max_running_requests": 1}
COLOCATED = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="split"),
        pytest.param(
            {
                **COLOCATED,
                "ppo_epochs": 2,
                "old_logprobs": "recompute",
                "train_infer_correction": {"weight": {"level": "token", "upper": 2.0}},
                "sampling__guidance_scale": 3.0,
                "sampling__log_prob": "sum",
            },
            id="colocated, two epochs, corrected, guided, sums",
            marks=pytest.mark.tier("all"),
        ),
        pytest.param(
            {
                "use_kl_loss": True,
                "kl_loss_coef": 100.0,
                "reference": {"device_mapping": [0]},
                "ppo_epochs": 2,
                "sampling__log_prob": "guard",
            },
            id="near a reference, guarded",
            marks=pytest.mark.tier("all"),
        ),
    ],
)
def test_the_run_is_the_plain_loop_to_the_last_bit(pictures, tmp_path, monkeypatch, changes):
    monkeypatch.chdir(tmp_path)
    config = exact_config(config_from_tree(picture_config(pictures, **changes)), 2)
    with FakeCluster():
        assert attempt_run("run.yaml", lambda: config, time.monotonic()).exit_code == 0
        run = RunDirectory.latest(config.exp_name)
        assert asyncio.run(first_difference(prepare(config), run)) is None
        with np.load(run.root / "exact" / "step-2.npz") as noted:
            assert noted["latents"].shape == (8, 3, 3, 8, 8)
            assert np.ptp(noted["behaviour_logprobs"][noted["behaviour_logprobs"] != 0]) > 0


@pytest.mark.tier("all")
def test_one_step_off_the_bound_holds_and_the_ledger_balances(pictures):
    run = run_pipeline(pictures, IN_THIS_PROCESS, validated(pictures, async_generation_ratio=1, max_steps=4))
    assert [step["lag/max"] for step in run.metrics][-1] == 1
    assert run.summary["lag/max"] == 1
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] + ledger["buffered"] + ledger["in_flight"]
    assert ledger["consumed"] == 8
    # The first pictures are drawn with the weights that train on them; later ones are older, and tell nothing.
    measured = [step for step in run.metrics if step.get("mismatch/tokens")]
    assert measured and max(step["mismatch/abs_mean"] for step in measured) < 1e-5
    assert all(step["actor/ratio_max"] != 1.0 for step in run.metrics[2:])


def test_pictures_of_training_and_validation_are_there_to_look_at(pictures):
    from PIL import Image

    run = run_pipeline(pictures, IN_THIS_PROCESS, validated(pictures, max_steps=2))
    files = {path.name for path in (run.folder / "samples").iterdir()}
    assert {"step-0-val-0.png", "step-2-val-1.png", "step-1-train-0.png", "step-2-train-2.png"} <= files
    assert {sample["response"] for sample in run.samples} == files
    before, after = (Image.open(run.folder / "samples" / f"step-{step}-val-0.png") for step in (0, 2))
    assert before.size == (8, 8) and before.tobytes() != after.tobytes()
    assert [step["val/colours/response_length"] for step in run.metrics[1:]] == [4.0]
    # At ratio 0 a trainer and an engine of equal weights are compared in each step: 8 pictures, 2 steps of each.
    assert [step["mismatch/tokens"] for step in run.metrics if "mismatch/tokens" in step] == [16, 16]
    assert max(step.get("mismatch/abs_mean", 0.0) for step in run.metrics) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"sampling__log_prob": "sum", "sampling__kind": "dance"}])
def test_each_weight_update_is_checked_by_log_probabilities(pictures, changes):
    checked = {"weight_update__canary_interval": 1, "weight_update__canary_prompts": 5, "async_generation_ratio": 1}
    run = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, **checked, **changes))
    assert [step["mismatch/canary_tokens"] for step in run.metrics] == [5, 5, 5]
    assert max(step["mismatch/canary_abs_mean"] for step in run.metrics) < 1e-4


def test_an_engine_that_computes_something_else_is_found(pictures, monkeypatch):
    from roll.engines.pictures import PictureEngine

    right = PictureEngine._score

    def with_another_prompt(self, asked):
        return right(self, replace(asked, prompt="green"))

    monkeypatch.setattr(PictureEngine, "_score", with_another_prompt)
    run = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=1), expect=1)
    assert "log-probabilities of the canary sequences differ" in run.summary["error"]


def judged_by(folder, **reward):
    config = picture_config(folder, max_steps=1, rewards={"colours": {"timeout_seconds": 60, **reward}})
    return run_pipeline(folder, IN_THIS_PROCESS, config).metrics[0]


def test_a_judge_sees_the_pictures_of_a_run(pictures):
    with chat_server(Answer("Nice.\nScore: 7"), models=["sees"]) as server:
        step = judged_by(pictures, verifier="judge", judge={"base_url": server.base_url, "model": "sees"})
    assert step["reward/mean"] == pytest.approx(0.7)
    shown = {request["messages"][0]["content"][0]["image_url"]["url"] for request in server.requests}
    assert len(server.requests) == len(shown) == 8


def test_a_service_scores_the_pictures_of_a_run(pictures):
    module = example()
    seen = []

    def scorer(prompts, images):
        seen.extend(image.tobytes() for image in images)
        return [float(np.asarray(image)[..., 0].mean()) for image in images]

    server = module.make_server(scorer, "127.0.0.1", 0)
    server.RequestHandlerClass.log_message = lambda *arguments: None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/score"
        step = judged_by(pictures, verifier="scoring_service", verifier_args={"url": url, "batch_size": 3})
    finally:
        server.shutdown()
        server.server_close()
    probe, *drawn = seen
    assert len(drawn) == len(set(drawn)) == 8 and len(probe) == 64 * 64 * 3
    assert step["reward/mean"] == pytest.approx(np.mean([np.frombuffer(each, np.uint8)[::3].mean() for each in drawn]))
    assert 1 <= step["reward/scoring_batch"] <= 3


@pytest.mark.tier("soak")
def test_groups_may_be_trained_on_as_they_finish(pictures):
    changes = {"actor_train__stream_groups": True, "actor_infer__strategy_args": {"strategy_config": ONE_AT_A_TIME}}
    streamed = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=2, **changes))
    whole = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=2))
    assert all("actor/streamed_share" in step for step in streamed.metrics)
    one, other = weights(streamed, 2), weights(whole, 2)
    assert all(torch.allclose(one[name], other[name], atol=3e-5) for name in one)


SOAK = pytest.mark.tier("soak")


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("ratio", "make", "sampling"),
    [
        pytest.param(0, make_pipeline, {}, id="SD3"),
        pytest.param(1, make_pipeline, {}, id="SD3, one step ahead", marks=SOAK),
        pytest.param(0, make_flux, FLUX, id="FLUX"),
        pytest.param(0, make_qwen, QWEN, id="Qwen-Image", marks=SOAK),
    ],
)
def test_a_killed_run_goes_on_and_ends_like_the_undisturbed_one(tmp_path, ratio, make, sampling):
    make_picture_task(tmp_path, make)
    ahead = {"async_generation_ratio": ratio, "consumption": "fifo" if ratio else None}
    config = picture_config(tmp_path, max_steps=3, save_steps=2, sampling=SAMPLING | sampling, **ahead)
    whole = run_pipeline(tmp_path, IN_THIS_PROCESS, config)
    killed = KilledRun(tmp_path, config)
    killed.kill_when(lambda out: newest_checkpoint(out) == 2)
    run = killed.finish()
    assert run.summary["resumed_at"] == [2]
    assert run.summary["ledger"]["consumed"] == 6
    if ratio == 0:
        assert same(weights(run, 3), weights(whole, 3))


@pytest.mark.tier("all")
def test_a_run_that_begins_from_a_checkpoint_resumes_from_its_own(pictures, tmp_path):
    first = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=1, save_steps=1, seed=8))
    begun = str(first.folder / "checkpoints" / "step-1")
    config = picture_config(pictures, max_steps=2, save_steps=1, pretrain=begun)
    killed = KilledRun(tmp_path, config)
    killed.kill_when(lambda out: newest_checkpoint(out) == 1)
    run = killed.finish()
    assert run.summary["resumed_at"] == [1]
    assert same(weights(run, 2), weights(run_pipeline(pictures, IN_THIS_PROCESS, config), 2))


def test_the_export_is_a_whole_pipeline(pictures):
    from diffusers import DiffusionPipeline

    run = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=1))
    exported = DiffusionPipeline.from_pretrained(
        run.folder / "checkpoints" / "step-1", text_encoder_3=None, tokenizer_3=None
    )
    exported.set_progress_bar_config(disable=True)
    trained = weights(run, 1)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in exported.transformer.state_dict().items())
    begun = load_file(pictures / "pictures" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert not same(trained, begun)
    drawn = exported("red", height=8, width=8, num_inference_steps=2, guidance_scale=1.0, max_sequence_length=2)
    assert drawn.images[0].size == (8, 8)


def plain_loop(folder, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Draw, judge, train; with nothing but diffusers' transformer, AdamW and the formulas."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder / "pictures", text_encoder_3=None, tokenizer_3=None)
    model: SD3Transformer2DModel = pipeline.transformer.eval()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors}], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    pipeline.scheduler.set_timesteps(SAMPLING["num_inference_steps"])
    levels, reached = pipeline.scheduler.sigmas, SAMPLING["num_inference_steps"] - 1

    def noise(seed: int, of: int | str) -> torch.Tensor:
        return torch.randn((3, 8, 8), generator=torch.Generator().manual_seed(derive_seed(seed, of)))

    def velocity(latents, step, tokens, pooled):
        return model(latents, tokens, pooled, levels[step].expand(len(latents)) * 1000, return_dict=False)[0]

    def moments(latents, step, tokens, pooled, strength):
        predicted = velocity(latents, step, tokens, pooled)
        return flow.step_moments("cps", latents, predicted, levels[step], levels[step + 1], strength, float(levels[1]))

    rows = [json.loads(line)["prompt"] for line in (folder / "train.jsonl").read_text().splitlines()]
    order, rewards = plain_order(folder), []
    for number in range(steps):
        transitions, means = [], []
        for group in (2 * number, 2 * number + 1):
            prompt = rows[order[group]]
            tokens, _, pooled, _ = pipeline.encode_prompt(
                prompt, prompt, prompt, do_classifier_free_guidance=False, max_sequence_length=2
            )
            tokens, pooled = tokens.expand(4, -1, -1), pooled.expand(4, -1)
            within = flow.window(reached + 1, 2, reached, derive_seed(7, "window", group))
            seeds = [derive_seed(7, "train", group, index, 0) for index in range(4)]
            latents, kept = torch.stack([noise(seed, "starting noise") for seed in seeds]), []
            with torch.no_grad():
                for step in range(reached + 1):
                    strength = SAMPLING["noise_level"] if step in within else 0.0
                    mean, std = moments(latents, step, tokens, pooled, strength)
                    drawn = mean
                    if strength:
                        drawn = mean + std[:, None, None, None] * torch.stack([noise(seed, step) for seed in seeds])
                        kept.append((step, latents, drawn, flow.log_prob(drawn, mean, std)))
                    latents = drawn
                image = pipeline.vae.decode(latents, return_dict=False)[0]
            pixels = (image / 2 + 0.5).clamp(0, 1).mul(255).round() / 255
            scores = (pixels[:, 0] - pixels[:, 2]).mean((1, 2)).double()
            means.append(float(scores.mean()))
            advantages = ((scores - scores.mean()) / (scores.std() + 1e-6)).float()
            transitions += [(*each, tokens, pooled, advantages) for each in kept]
        loss = 0.0
        for step, before, after, old, tokens, pooled, advantages in transitions:
            ratio = (flow.log_prob(after, *moments(before, step, tokens, pooled, 0.8)) - old).exp()
            loss = loss - torch.minimum(ratio * advantages, ratio.clamp(0.999, 1.001) * advantages).sum() / 16
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(np.mean(means)))
    return model.state_dict(), rewards


def plain_order(folder) -> list[int]:
    """The prompts of the first groups of the run, by their place in the file."""
    from roll.data.prompts import PromptStream

    config = prepare(config_from_tree(picture_config(folder)))
    stream = iter(PromptStream(config.rollouts.prompts, seed=7, shuffle=True, domain_interleave_probs=None))
    return [PROMPTS.index(next(stream).text) for _ in range(4)]


@pytest.mark.tier("all")
def test_a_run_is_what_a_loop_of_diffusers_and_torch_computes(pictures):
    run = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=2))
    mine, rewards = plain_loop(pictures, 2)
    assert [step["reward/mean"] for step in run.metrics] == pytest.approx(rewards, abs=1e-5)
    trained = weights(run, 2)
    begun = load_file(pictures / "pictures" / "transformer" / "diffusion_pytorch_model.safetensors")
    moved = {name: float((trained[name] - begun[name]).abs().max()) for name in trained}
    assert sum(each > 1e-4 for each in moved.values()) > 30
    for name, tensor in mine.items():
        torch.testing.assert_close(trained[name], tensor, atol=3e-5, rtol=0, msg=name)


@pytest.mark.tier("soak")
def test_an_engine_and_a_trainer_that_die_change_nothing(pictures):
    whole = run_pipeline(pictures, IN_THIS_PROCESS, picture_config(pictures, max_steps=4, save_steps=1))
    deaths = [
        {"kind": "kill", "role": "actor_infer", "at_step": 1},
        {"kind": "kill", "role": "actor_train", "at_step": 2},
    ]
    run = run_pipeline(
        pictures,
        IN_THIS_PROCESS,
        picture_config(
            pictures,
            max_steps=4,
            save_steps=1,
            chaos={"enabled": True, "events": deaths},
            restarts={"max_in_a_row": 2, "delay_seconds": 0},
        ),
    )
    assert run.summary["status"] == "success" and run.summary["ledger"]["consumed"] == 8
    assert max(step["engine/restarts"] for step in run.metrics) == 1
    assert same(weights(run, 4), weights(whole, 4))


ADAPTERS = {"lora_target": "to_q,to_v", "lora_rank": 4}


@pytest.mark.needs("peft")
def test_adapters_that_are_switched_off_are_the_reference(pictures):
    config = picture_config(
        pictures, max_steps=3, actor_train__model_args=ADAPTERS, reference={}, use_kl_loss=True, kl_loss_coef=0.1
    )
    config["actor_train"]["training_args"]["learning_rate"] = 1e-2
    run = run_pipeline(pictures, IN_THIS_PROCESS, config)
    first, *later = [step["actor/kl_loss"] for step in run.metrics]
    assert first == 0 and all(divergence > 0 for divergence in later)


@pytest.mark.needs("peft")
@pytest.mark.parametrize("content", ["full", pytest.param("adapter", marks=pytest.mark.tier("all"))])
def test_adapters_learn_beside_a_frozen_model_and_are_exported_merged(pictures, content):
    config = picture_config(
        pictures, max_steps=2, save_steps=1, actor_train__model_args=ADAPTERS, weight_update__content=content
    )
    config["actor_train"]["training_args"]["learning_rate"] = 1e-2
    run = run_pipeline(pictures, IN_THIS_PROCESS, config)
    begun = load_file(pictures / "pictures" / "transformer" / "diffusion_pytorch_model.safetensors")
    first, second = weights(run, 1), weights(run, 2)
    changed = {name for name in begun if not torch.equal(begun[name], second[name])}
    assert {name.rpartition(".attn.")[2] for name in changed} == {"to_q.weight", "to_v.weight"}
    assert all(not torch.equal(first[name], second[name]) for name in changed)
    assert (run.folder / "checkpoints" / "step-2" / "adapter" / "adapter_model.safetensors").is_file()
    # What drew the second batch were the weights that the first one had made, at full precision.
    assert max(step["mismatch/abs_mean"] for step in run.metrics) < 1e-5


@pytest.mark.tier("all")
@pytest.mark.needs("peft")
@pytest.mark.parametrize(
    ("make", "sampling", "changes"),
    [
        (make_distilled_flux, DISTILLED | {"true_cfg_scale": 2.0}, {"actor_train__model_args": ADAPTERS}),
        (
            make_distilled_flux,
            DISTILLED,
            {
                "actor_train__model_args": ADAPTERS,
                "weight_update__content": "adapter",
                "async_generation_ratio": 1,
                "reference": {},
                "use_kl_loss": True,
            },
        ),
        (make_flux, FLUX, {"async_generation_ratio": 1}),
        (
            make_qwen,
            QWEN,
            {"reference": {"device_mapping": [0], "strategy_args": {"strategy_name": "hf_infer"}}, "use_kl_loss": True},
        ),
    ],
    ids=["FLUX, distilled, LoRA", "FLUX, distilled, LoRA alone near its base", "FLUX", "Qwen-Image near a reference"],
)
def test_models_of_other_families_learn_and_are_exported_whole(tmp_path, make, sampling, changes):
    from diffusers import DiffusionPipeline

    make_picture_task(tmp_path, make)
    checked = {"weight_update__canary_interval": 1, **changes}
    config = picture_config(tmp_path, max_steps=2, save_steps=1, sampling=SAMPLING | sampling, **checked)
    config["actor_train"]["training_args"]["learning_rate"] = 1e-2
    config["actor_train"]["strategy_args"] = {"strategy_config": {"gradient_checkpointing": True}}
    run = run_pipeline(tmp_path, IN_THIS_PROCESS, config)
    assert run.summary["ledger"]["consumed"] == 4
    measured = [step["mismatch/abs_mean"] for step in run.metrics if step.get("mismatch/tokens")]
    assert measured and max(measured) < 1e-5
    assert max(step["mismatch/canary_abs_mean"] for step in run.metrics) < 1e-5
    divergences = [step["actor/kl_loss"] for step in run.metrics if "use_kl_loss" in changes]
    assert not divergences or divergences[0] == 0 < divergences[1]
    exported = DiffusionPipeline.from_pretrained(run.folder / "checkpoints" / "step-2")
    exported.set_progress_bar_config(disable=True)
    trained, first = weights(run, 2), weights(run, 1)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in exported.transformer.state_dict().items())
    assert not same(trained, first)
    length = sampling["max_sequence_length"]
    drawn = exported("red", height=8, width=12, num_inference_steps=2, max_sequence_length=length)
    assert drawn.images[0].size == (12, 8)
