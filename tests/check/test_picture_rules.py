"""What a run of pictures cannot do is refused by name, with the key and the reason, before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

import roll
from roll.check.config import check_config
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from tests.tiny_pictures import make_distilled_flux, make_flux, make_picture_task, make_qwen, picture_config

pytestmark = pytest.mark.needs("diffusers")


LORA = {"actor_train__model_args": {"lora_target": "to_q,to_v", "lora_rank": 4}}


OTHERS = {"flux": make_flux, "distilled": make_distilled_flux, "qwen": make_qwen}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Tasks with models of other families, by name."""
    folders = {name: tmp_path_factory.mktemp(name) for name in OTHERS}
    for name, folder in folders.items():
        make_picture_task(folder, OTHERS[name])
    return folders


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("flux", {"max_sequence_length": 6, "true_cfg_scale": 2.0, "negative_prompt": "blue"}),
        ("distilled", {"max_sequence_length": 6, "guidance_scale": 3.5}),
        ("qwen", {"max_sequence_length": 11, "true_cfg_scale": 4.0, "width": 4000}),
    ],
)
def test_other_families_are_accepted(others, model, changes):
    found = {f"sampling__{key}": value for key, value in changes.items()}
    assert problems(others[model], **found) == {}
    assert problems(others[model], **LORA, **found) == {}


@pytest.mark.parametrize(
    ("model", "changes", "path", "words"),
    [
        ("flux", {"guidance_scale": 3.5}, "sampling.guidance_scale", "was not distilled with guidance"),
        ("qwen", {"guidance_scale": 4.0}, "sampling.guidance_scale", "was not distilled with guidance"),
        (
            "distilled",
            {"guidance_scale": 3.5, "negative_prompt": "red"},
            "sampling.negative_prompt",
            "true_cfg_scale is",
        ),
        ("flux", {"height": 10}, "sampling.height", "patches of 4 pixels"),
        ("qwen", {"width": 6}, "sampling.width", "patches of 4 pixels"),
        ("qwen", {"max_sequence_length": 10}, "prompt_length", "cut prompts at 5 tokens"),
    ],
)
def test_what_another_family_cannot_do_is_named(others, model, changes, path, words):
    whole = {"max_sequence_length": 16, **changes}
    found = problems(others[model], **{f"sampling__{key}": value for key, value in whole.items()})
    assert list(found) == [path] and words in found[path]


JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "sees"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_picture_task(folder)
    return folder


def problems(task, **changes) -> dict[str, str]:
    found = roll.check(picture_config(task, **changes)).problems
    return {each.path: each.message for each in found}


def test_a_configuration_that_works_has_no_problems(task):
    assert problems(task) == {}
    assert problems(task, sampling__guidance_scale=3.0, sampling__negative_prompt="blue", adv_estimator="rloo") == {}
    assert problems(task, **LORA) == {}
    assert problems(task, **LORA, weight_update__content="adapter") == {}
    assert problems(task, reference={}, use_kl_loss=True, **LORA) == {}
    assert problems(task, reference={"device_mapping": [0]}, use_kl_loss=True) == {}
    rounded = {"dtype": "bfloat16"}
    in_bfloat16 = {"actor_train__model_args": LORA["actor_train__model_args"] | rounded, "use_kl_loss": True}
    assert problems(task, actor_infer__model_args=rounded, reference={}, **in_bfloat16) == {}
    assert problems(task, async_generation_ratio=1, weight_update__in_flight="drain") == {}
    for kind, most in (("flow_sde", 2.0), ("dance", 4.0)):  # of four steps
        assert problems(task, sampling__kind=kind, sampling__noise_level=most) == {}
    assert problems(task, sampling__log_prob="sum", actor_train__pg_variant_args={}) == {}
    seen = {"verifier": "judge", "judge": JUDGE | {"template": "Like {prompt}? Score: 1"}}
    seen["timeout_seconds"] = 60
    service = {
        "timeout_seconds": 60,
        "verifier": "scoring_service",
        "verifier_args": {"url": "http://127.0.0.1:1/score"},
    }
    for reward in (seen, service):
        check_config(config_from_tree(picture_config(task, rewards={"colours": reward})))
    assert problems(task, actor_train__pg_variant="tis", actor_train__pg_variant_args={"lower": 0.0}) == {}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"sampling__window_reach": 4}, "sampling.window_reach", "4 of 4 steps: the last one has no noise"),
        ({"sampling__window_size": 3, "sampling__window_reach": 2}, "sampling.window_size", "do not fit"),
        ({"sampling__num_inference_steps": 1}, "sampling.num_inference_steps", "nothing to learn from"),
        ({"sampling__height": 9}, "sampling.height", "patches of 2 pixels"),
        ({"sampling__width": 18}, "sampling.width", "more than the 16 that the model has positions for"),
        ({"sampling__noise_level": 1.0}, "sampling.noise_level", "all noise is new"),
        ({"sampling__kind": "dance", "sampling__noise_level": 50}, "sampling.noise_level", "makes it grow"),
        ({"sampling__kind": "dance", "sampling__noise_level": 4.1}, "sampling.noise_level", "above 4"),
        ({"sampling__kind": "flow_sde", "sampling__noise_level": 2.1}, "sampling.noise_level", "above 2"),
        ({"sampling__true_cfg_scale": 4.0}, "sampling.true_cfg_scale", "is `guidance_scale`"),
        ({"sampling__negative_prompt": "blue"}, "sampling.negative_prompt", "no guidance"),
        ({"sampling__kind": "ddim"}, "sampling.kind", "ddim"),
        ({"sampling__guidance_scale": 0.5}, "sampling.guidance_scale", "must be >= 1"),
        ({"sampling__steps": 4}, "sampling.steps", "unknown"),
        ({"actor_train__pg_variant": "dppo"}, "actor_train.pg_variant", "density"),
        ({"actor_train__pg_variant": "kl_cov"}, "actor_train.pg_variant", "fixed by its noise"),
        (
            {"actor_infer__strategy_args": {"strategy_name": "hf_infer"}},
            "actor_infer.strategy_args.strategy_name",
            "text",
        ),
        (
            {"actor_train__strategy_args": {"strategy_name": "deepspeed_train"}},
            "actor_train.strategy_args.strategy_name",
            "text only",
        ),
        (
            {"reference": {"device_mapping": [0]}, "use_kl_loss": True, "kl_estimator": "k2"},
            "kl_estimator",
            "closed form",
        ),
        ({"reference": {"device_mapping": [0]}, "add_token_level_kl": True}, "add_token_level_kl", "not built"),
        (
            {"reference": {"device_mapping": [0], "strategy_args": {"strategy_name": "deepspeed_train"}}},
            "reference.strategy_args.strategy_name",
            "text only",
        ),
        (
            {"reference": {"device_mapping": [0], "model_args": {"dtype": "bfloat16"}}, "use_kl_loss": True},
            "reference.model_args.dtype",
            "one of rounding",
        ),
        (
            {"reference": {"device_mapping": [0], "model_args": {"model_name_or_path": "other"}}, "use_kl_loss": True},
            "reference.model_args.model_name_or_path",
            "that training begins with",
        ),
        *(
            ({"reference": {"device_mapping": [0], **unread}, "use_kl_loss": True}, path, "has no effect")
            for unread, path in (
                ({"model_args": {"trust_remote_code": True}}, "reference.model_args.trust_remote_code"),
                ({"model_args": {"attn_implementation": "eager"}}, "reference.model_args.attn_implementation"),
                ({"use_sequence_packing": True}, "reference.use_sequence_packing"),
            )
        ),
        (
            {"actor_train__model_args": {"lora_target": "q_prj"}},
            "actor_train.model_args.lora_target",
            "no module of this",
        ),
        ({"actor_infer__generating_args": {"top_k": 5}}, "actor_infer.generating_args.top_k", "says something of text"),
        ({"response_length": 9}, "response_length", "says something of text"),
        ({"weight_update__in_flight": "resume"}, "weight_update.in_flight", "nothing but its latents"),
        ({"entropy_loss_coef": 0.1}, "entropy_loss_coef", "says something of text"),
        ({"actor_train__pg_variant_args": {}}, "actor_train.pg_variant_args.clip_low", "0.2 never acts"),
        (
            {"actor_train__pg_variant": "cispo", "actor_train__pg_variant_args": {"epsilon_low": 1.0}},
            "actor_train.pg_variant_args.epsilon_high",
            "0.28 never acts",
        ),
        (
            {"old_logprobs": "recompute", "train_infer_correction": {"weight": {"level": "token"}}},
            "train_infer_correction.weight.upper",
            "2 never acts",
        ),
        ({"actor_train__model_args": {"dtype": "bfloat16"}}, "actor_infer.model_args.dtype", "computes in bfloat16"),
        (
            {
                "actor_train__model_args": {"dtype": "bfloat16"},
                "actor_infer__model_args": {"dtype": "bfloat16"},
                "sampling__log_prob": "sum",
            },
            "sampling.log_prob",
            "more than a clip range",
        ),
        (
            {"actor_infer__model_args": {"trust_remote_code": True}},
            "actor_infer.model_args.trust_remote_code",
            "no code",
        ),
        ({"prompt_length": 1000}, "prompt_length", "cut prompts at 6 tokens"),
        (
            {"sampling__log_prob": "guard", "old_logprobs": "recompute", "actor_train__pg_variant": "decoupled_ppo"},
            "sampling.log_prob",
            "needs recomputed ones",
        ),
        ({"sampling__log_prob": "guard", "actor_train__pg_variant": "vanilla"}, "sampling.log_prob", "has none"),
        ({"sampling__max_sequence_length": 0}, "sampling.max_sequence_length", "must be >= 1"),
        ({"sampling__max_sequence_length": 513}, "sampling.max_sequence_length", "<= 512"),
        ({"critic": {"device_mapping": [0]}, "adv_estimator": "gae"}, "critic", "this section is not built"),
        (
            {"sampling__window_size": 4, "sampling__window_reach": None},
            "sampling.window_size",
            "4 of 4 steps: the last one has no noise",
        ),
        ({"actor_train__data_args__template": "chat"}, "actor_train.data_args.template", "says something of text"),
        ({"adv_estimator": "gigpo"}, "adv_estimator", "`image` has one"),
        ({"adv_estimator": "remax"}, "adv_estimator", "greedy"),
        ({"rewards": {"colours": {"verifier": "reward_model"}}}, "rewards.colours.verifier", "sees no pictures"),
        (
            {"rewards": {"colours": {"verifier": "judge", "judge": JUDGE | {"template": "{prompt} {response}"}}}},
            "rewards.colours.judge.template",
            "this run draws pictures",
        ),
    ],
)
def test_what_cannot_work_is_named(task, changes, path, words):
    found = problems(task, **changes)
    assert path in found and words in found[path], found


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"pretrain": "owner/hub-model"}, "pretrain", "no folder with a model_index.json"),
        ({"actor_train__data_args": {"file_name": "nowhere.jsonl"}}, "actor_train.data_args.file_name", "no file"),
    ],
)
def test_what_is_missing_on_the_machine_of_the_run_is_named(task, changes, path, words):
    with pytest.raises(ConfigError) as refused:
        check_config(config_from_tree(picture_config(task, **changes)))
    (found,) = refused.value.problems
    assert found.path == path and words in found.message


def test_text_runs_cannot_have_an_engine_of_pictures(task):
    tree = picture_config(task, pipeline="rlvr", actor_infer__strategy_args={"strategy_name": "diffusers_infer"})
    del tree["sampling"]
    found = {each.path: each.message for each in roll.check(tree).problems}
    assert "diffusers_infer draws pictures" in found["actor_infer.strategy_args.strategy_name"]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model_index.json", {"_class_name": "SanaPipeline"}, "is a SanaPipeline; so far a StableDiffusion3Pipeline"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas: true"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 500}, "num_train_timesteps: 500"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "has a DDIMScheduler"),
    ],
)
def test_models_that_cannot_be_trained_are_named(task, tmp_path, file, change, words):
    shutil.copytree(task / "pictures", tmp_path / "pictures")
    settings = json.loads((tmp_path / "pictures" / file).read_text())
    (tmp_path / "pictures" / file).write_text(json.dumps(settings | change))
    assert words in problems(task, pretrain=str(tmp_path / "pictures"))["pretrain"]
