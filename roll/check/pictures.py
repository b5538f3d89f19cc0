"""Rules of `pipeline: image`: sampling, the abilities of the model, and keys that only have a meaning for text.

Features that are not built for pictures are rejected by name, so that no key is silently ignored. At the end: what a
run needs if its prompts have pictures (vision-language models).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from roll.configs import derived
from roll.configs.errors import ConfigProblem, count, shown, without_effect
from roll.configs.fields import changes
from roll.configs.pictures import FAMILIES, MODEL_INDEX, PictureModel, settings
from roll.configs.rewards import RewardConfig
from roll.configs.roles import PictureSampling
from roll.configs.run import ImageConfig, PipelineConfig, PromptConfig
from roll.configs.strategies import ENGINES, Engine, Trainer, strategies_of, strategy_of

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""The scheduler class of diffusers whose noise levels are supported."""
_PLAIN_LEVELS = {
    "num_train_timesteps": 1000,
    "invert_sigmas": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}
"""Settings of a scheduler that change its levels or steps, with the values that are built."""
_TEXT_KEYS = (
    "response_length", "sequence_length", "length_penalty", "repetition_penalty", "max_len_mask",
    "actor_infer.generating_args", "validation.generating_args", "actor_train.use_sequence_packing",
    "actor_train.model_args.attn_implementation", "entropy_loss_coef", "actor_train.data_args.template",
    "validation.data_args.template", "on_control_tokens", "reference.use_sequence_packing",
    "reference.model_args.attn_implementation",
)  # fmt: skip
"""Keys that concern text only: its tokens, attention, probabilities and entropy."""
_NOT_BUILT = (
    "add_token_level_kl", "teacher", "distillation", "critic", "actor_logp",
)  # fmt: skip
_DENSITIES = {
    "dppo": "bounds differences of probabilities, and a denoising step has a density, which may be above 1",
    "clip_cov": "keeps up the entropy of choices, and that of a denoising step is fixed by its noise",
    "kl_cov": "keeps up the entropy of choices, and that of a denoising step is fixed by its noise",
}
"""Policy loss that is meaningless for a denoising step -> the reason."""


def engines_fit_the_pipeline(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require an engine that generates text or pictures as the pipeline needs, and for pictures a fitting trainer."""
    draws = isinstance(config, ImageConfig)
    engine, path = strategy_of("actor_infer", config.actor_infer), "actor_infer.strategy_args.strategy_name"
    if isinstance(engine, Engine) and engine.draws != draws:
        able = [f"`{name}`" for name, each in ENGINES.built_in.items() if each.draws == draws]
        makes = "generates text" if draws else "draws pictures"
        message = f"{config.actor_infer.strategy_args.strategy_name} {makes}, and this is `pipeline: {config.pipeline}`"
        yield ConfigProblem(path, message, f"use {' or '.join(able)}")
    computing = {"actor_train": config.actor_train, "reference": config.reference}
    for role, section in computing.items():
        trainer = None if section is None else strategy_of(role, section)
        if draws and section is not None and isinstance(trainer, Trainer) and not trainer.draws:
            able = [f"`{name}`" for name, each in strategies_of(role).built_in.items() if each.draws]
            message = f"{section.strategy_args.strategy_name} computes with models of text only"
            yield ConfigProblem(f"{role}.strategy_args.strategy_name", message, f"use {' or '.join(able)}")


def text_keys_are_left_alone(config: ImageConfig) -> Iterator[ConfigProblem]:
    """Reject keys that concern text only, and features that are not built for pictures yet."""
    for path, value in _changed(config, _TEXT_KEYS):
        if path == "validation.generating_args.num_return_sequences":
            continue
        yield without_effect(path, value, "it says something of text, and this run draws pictures", "remove this key")
    for path, value in _changed(config, _NOT_BUILT):
        what = "this section is" if is_dataclass(value) else f"{shown(value)}:"
        yield ConfigProblem(path, f"{what} not built for `pipeline: image` yet", "remove it")
    for path, value in _changed(config, ("kl_estimator",)):
        reason = "the divergence of two denoising steps has a closed form, so nothing is estimated"
        yield without_effect(path, value, reason, "remove this key")
    if config.weight_update.in_flight == "resume":
        message = "resume drops caches, and a picture has none: between two steps it is nothing but its latents"
        yield ConfigProblem("weight_update.in_flight", message, "write `keep` or `drain`")
    for role, section in (("actor_train", config.actor_train), ("actor_infer", config.actor_infer)):
        if section.model_args.dtype == "float16":
            message = "float16: velocities and their gradients are computed in float32 or bfloat16"
            yield ConfigProblem(f"{role}.model_args.dtype", message, "write `float32` or `bfloat16`")
    trained, drawn = config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype
    reference = derived.present_roles(config).get("reference")
    if trained != drawn:
        message = f"{drawn}, but the trainer computes in {trained}: their log-probabilities would differ by rounding"
        yield ConfigProblem("actor_infer.model_args.dtype", message, f"write `{trained}`")
    elif reference is not None and reference.model_args.dtype != trained:
        message = f"the trainer computes in {trained}: part of the divergence would be one of rounding"
        yield ConfigProblem("reference.model_args.dtype", message, f"write `{trained}`")
    elif config.sampling.log_prob == "sum" and trained != "float32":
        message = f"sum: a sum over all dimensions is wrong by more than a clip range in {trained}"
        yield ConfigProblem("sampling.log_prob", message, "write `mean`, or `dtype: float32` for trainer and engine")
    for name, own in derived.present_roles(config).items():
        if own.model_args.trust_remote_code:
            reason = "pipelines of pictures bring no code"
            yield without_effect(f"{name}.model_args.trust_remote_code", True, reason, "remove this key")
    if config.actor_infer.num_gpus_per_engine > 1:
        message = (
            f"{config.actor_infer.num_gpus_per_engine}: diffusers_infer computes on one GPU, the others would idle"
        )
        yield ConfigProblem("actor_infer.num_gpus_per_engine", message, "write 1")
    if config.adv_estimator == "remax":
        message = "remax compares with a greedy response, which pictures do not have"
        yield ConfigProblem("adv_estimator", message, "use grpo, rloo or reinforce")
    if config.actor_train.pg_variant in _DENSITIES:
        message = f"{config.actor_train.pg_variant} {_DENSITIES[config.actor_train.pg_variant]}"
        yield ConfigProblem("actor_train.pg_variant", message, "use another one, for example `ppo`")
    if config.sampling.log_prob == "guard" and config.actor_train.pg_variant == "vanilla":
        message = "guard: it normalises ratios, and `pg_variant: vanilla` has none"
        yield ConfigProblem("sampling.log_prob", message, "write `mean`, or use another loss, for example `ppo`")
    for name, reward in config.rewards.items():
        yield from _blind(name, reward)


def _changed(config: ImageConfig, paths: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each key at or below the paths that differs from its default."""
    for path in paths:
        *parents, key = path.split(".")
        section: Any = config
        for parent in parents:
            section = None if section is None else vars(section)[parent]
        if section is not None:
            prefix = path.removesuffix(key)
            yield from ((prefix + below, value) for below, value in changes(section, key))


def _blind(name: str, reward: RewardConfig) -> Iterator[ConfigProblem]:
    if reward.verifier == "reward_model":
        message = "reward_model reads texts, and sees no pictures"
        remedy = "use `judge`, `scoring_service` or a function of an `image`"
        yield ConfigProblem(f"rewards.{name}.verifier", message, remedy)


def steps_are_possible(config: ImageConfig) -> Iterator[ConfigProblem]:
    """Require steps, a window and a noise that fit together."""
    sampling = config.sampling
    steps, last = sampling.num_inference_steps, sampling.num_inference_steps - 1
    if steps < 2:
        message = f"{steps}: the last step has no noise, so there would be nothing to learn from"
        yield ConfigProblem("sampling.num_inference_steps", message, "write at least 2")
    elif sampling.window_reach is None and sampling.window_size > last:
        message = f"{sampling.window_size} of {count(steps, 'step')}: the last one has no noise"
        yield ConfigProblem("sampling.window_size", message, f"write at most {last}")
    elif sampling.reach > last:
        message = f"{sampling.reach} of {count(steps, 'step')}: the last one has no noise"
        yield ConfigProblem("sampling.window_reach", message, f"write at most {last}")
    elif sampling.window_size > sampling.reach:
        message = f"{sampling.window_size} steps do not fit into the first {sampling.reach} of {steps}"
        remedy = f"write at most {sampling.reach}, or raise `window_reach` (at most {last})"
        yield ConfigProblem("sampling.window_size", message, remedy)
    if sampling.kind == "cps" and sampling.noise_level >= 1:
        message = (
            f"{sampling.noise_level:g}: at 1 all noise is new, and of the picture so far only its prediction stays"
        )
        yield ConfigProblem("sampling.noise_level", message, "write less than 1, for example 0.8")
    yield from _noise_is_stable(sampling)


def _noise_is_stable(sampling: PictureSampling) -> Iterator[ConfigProblem]:
    """Require a noise level that does not make latents grow.

    A step of length d multiplies the pure noise it starts from by 1 - a^2 / 2 under `flow_sde` and 1 - a^2 d / 2 under
    `dance`, beside what the ODE does; below -1 the noise grows. Without a shift, d is 1 / steps.
    """
    most = {"flow_sde": 2.0, "dance": 2 * math.sqrt(sampling.num_inference_steps)}.get(sampling.kind, math.inf)
    if sampling.noise_level > most:
        message = (
            f"{sampling.noise_level:g}: above {most:.3g}, with `kind: {sampling.kind}` and "
            f"{sampling.num_inference_steps} steps, the first step reverses the noise and makes it grow"
        )
        yield ConfigProblem("sampling.noise_level", message, f"write at most {math.floor(most * 10) / 10:g}")


def pictures_fit_the_model(config: ImageConfig) -> Iterator[ConfigProblem]:
    """Require a model that can be trained, is the same for trainer and engine, and can draw pictures of this size.

    Only the model's configuration files are read.
    """
    path, model = _model(config)
    if str(model) != str(Path(derived.model_path(config, config.actor_infer))):
        remedy = "remove this key: both begin with the same model"
        message = "the engine would draw with the text encoders of another model"
        yield ConfigProblem("actor_infer.model_args.model_name_or_path", message, remedy)
    if config.reference is not None and derived.model_path(config, config.reference) != str(model):
        message = "the reference can only be the model that training begins with, so far"
        yield ConfigProblem("reference.model_args.model_name_or_path", message, "remove this key")
    kind = settings(model / MODEL_INDEX).get("_class_name")
    if kind is None:
        return
    if kind not in FAMILIES:
        message = f"{model} is a {kind}; so far a {' or '.join(FAMILIES)} can be trained"
        remedy = f"take a model of that kind, such as {', '.join(family.title for family in FAMILIES.values())}"
        yield ConfigProblem(path, message, remedy)
        return
    known = PictureModel.read(model)
    yield from _levels(path, model, known)
    yield from _guidance(config.sampling, model, known)
    yield from _prompts(config, model, known)
    unit, most = known.token_pixels, known.most_pixels
    for key in ("height", "width"):
        pixels = vars(config.sampling)[key]
        if pixels % unit:
            message = f"{pixels} pixels are no whole number of the model's patches of {unit} pixels"
            yield ConfigProblem(f"sampling.{key}", message, f"write a multiple of {unit}")
        elif most is not None and pixels > most:
            message = f"{pixels} pixels are more than the {most} that the model has positions for"
            yield ConfigProblem(f"sampling.{key}", message, f"write at most {most}")


def _levels(path: str, model: Path, known: PictureModel) -> Iterator[ConfigProblem]:
    scheduler = known.scheduler
    if scheduler and scheduler.get("_class_name") != SCHEDULER:
        message = f"{model} has a {scheduler.get('_class_name')}; its noise levels must be those of {SCHEDULER}"
        yield ConfigProblem(path, message, "take a model with that scheduler")
    for key, plain in _PLAIN_LEVELS.items():
        if scheduler.get(key, plain) != plain:
            message = f"{model} has {key}: {shown(scheduler[key])} in its scheduler, which is not built yet"
            yield ConfigProblem(path, message, f"take a model with {key}: {shown(plain)}")


def _guidance(sampling: PictureSampling, model: Path, known: PictureModel) -> Iterator[ConfigProblem]:
    """Require guidance that the model can have, and no key of guidance without it."""
    family = known.family
    if family.guidance != "guidance_scale" and sampling.guidance_scale != 1 and not known.embeds_guidance:
        message = f"{sampling.guidance_scale:g}: {model} was not distilled with guidance, so it does not read its scale"
        remedy = "remove this key; `sampling.true_cfg_scale` is classifier-free guidance, for models that need it"
        yield ConfigProblem("sampling.guidance_scale", message, remedy)
    if family.guidance != "true_cfg_scale" and sampling.true_cfg_scale != 1:
        reason = f"the guidance of {family.title} is `guidance_scale`"
        remedy = f"write `guidance_scale: {sampling.true_cfg_scale:g}` in its place"
        yield without_effect("sampling.true_cfg_scale", sampling.true_cfg_scale, reason, remedy)
    elif known.guidance(sampling) == 1 and sampling.negative_prompt:
        reason = f"{family.guidance} is 1, which is no guidance"
        remedy = f"set `sampling.{family.guidance}` above 1, or remove this key"
        yield without_effect("sampling.negative_prompt", sampling.negative_prompt, reason, remedy)


def _prompts(config: ImageConfig, model: Path, known: PictureModel) -> Iterator[ConfigProblem]:
    short = settings(model / "tokenizer" / "tokenizer_config.json").get("model_max_length", config.prompt_length)
    longest = known.longest_prompt(config.sampling, int(short))
    if config.prompt_length > longest:
        message = f"{config.prompt_length}: the model's text encoders cut prompts at {longest} tokens"
        yield ConfigProblem("prompt_length", message, f"write at most {longest}")


def _model(config: ImageConfig) -> tuple[str, Path]:
    """Return the key that names the model, and its folder."""
    own = config.actor_train.model_args.model_name_or_path
    path = "actor_train.model_args.model_name_or_path" if own else "pretrain"
    return path, Path(derived.model_path(config, config.actor_train))


def pipelines_exist(config: ImageConfig) -> Iterator[ConfigProblem]:
    """Reject a model that is not a folder in the format of diffusers pipelines."""
    path, model = _model(config)
    if not (model / MODEL_INDEX).is_file():
        message = f"{shown(str(model))} is no folder with a {MODEL_INDEX}"
        remedy = "give the folder of a pipeline, as diffusers' `save_pretrained` writes it; hub names are not read yet"
        yield ConfigProblem(path, message, remedy)


def prompt_picture_problems(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each key that does not go with pictures in prompts."""
    roles = derived.present_roles(config)
    for role, section in roles.items():
        strategy = strategy_of(role, section)
        if isinstance(strategy, Engine | Trainer) and not strategy.sees:
            kind, name = strategies_of(role), section.strategy_args.strategy_name
            able = [f"`{each}`" for each, record in kind.built_in.items() if record.sees]
            message = f"{name} cannot be given the pictures in the prompts"
            yield ConfigProblem(f"{role}.strategy_args.strategy_name", message, f"use {' or '.join(able)}")
        if section.use_sequence_packing is True:
            message = "pictures give tokens positions in three dimensions, and packed rows have positions in one"
            yield ConfigProblem(f"{role}.use_sequence_packing", message, "set it to false")
        if derived.context_ranks(section) > 1:
            path = f"{role}.strategy_args.strategy_config.context_parallel_size"
            yield ConfigProblem(path, "a picture's positions are not split over ranks", "write 1")
    if config.actor_train.model_args.lora_target is not None:
        message = "adapters are not supported for prompts with pictures"
        yield ConfigProblem("actor_train.model_args.lora_target", message, "leave it out, and train all weights")
    if config.teacher is not None:
        message = "a teacher is not supported for prompts with pictures"
        yield ConfigProblem("teacher", message, "leave it out, or take the pictures out of the prompts")
    if "critic" in roles:
        message = "a critic is not supported for prompts with pictures: transformers has no value model that sees them"
        yield ConfigProblem("critic", message, "use an `adv_estimator` without one, such as `grpo`")
