"""Rules about external inputs: models, prompts, rewards, validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from roll.configs.derived import model_path, present_roles, reward_models
from roll.configs.errors import ConfigProblem
from roll.configs.rules_keys import IMPORT_PATH
from roll.configs.schema import (
    BUILTIN_VERIFIERS,
    MODEL_REWARDS,
    DataArguments,
    GeneratingArguments,
    PipelineConfig,
    ReasoningGymSource,
    RLVRConfig,
)
from roll.configs.wording import choose_among, count, shown

TRAIN_DATA = "actor_train.data_args"
VALIDATION_DATA = "validation.data_args"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Patterns of the files that tokenizers are read from."""


def files_of(data: DataArguments) -> list[str]:
    """Return the JSONL files of a data section as a list."""
    return [data.file_name] if isinstance(data.file_name, str) else data.file_name


def tags_of(name: str, tag_included: list[str]) -> list[str]:
    """Return the domain tags that a reward scores."""
    return tag_included or [name]


def models_are_named(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject a run with a role without a model."""
    if not config.pretrain and not all(model_path(config, role) for role in present_roles(config).values()):
        yield ConfigProblem("pretrain", "no model is given", "write the folder or the hub name of the model to train")


def models_exist(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject a model folder without its files, or a policy without a tokenizer. A hub name is tried when the model
    loads."""
    paths = {"pretrain": config.pretrain}
    for name, role in present_roles(config).items():
        paths[f"{name}.model_args.model_name_or_path"] = role.model_args.model_name_or_path or ""
    paths["reward_pretrain"] = config.reward_pretrain or ""
    for name, reward in reward_models(config).items():
        paths[f"{name}.model_args.model_name_or_path"] = reward.model_args.model_name_or_path or ""
    for path, model in paths.items():
        reason = _model_fault(model)
        if reason:
            remedy = "give a folder that has a config.json and the weights, or a hub name `owner/name`"
            yield ConfigProblem(path, f"{shown(model)} {reason}", remedy)
    own = config.actor_train.model_args.model_name_or_path
    policy = Path(own or config.pretrain)
    if is_local(str(policy)) and not _model_fault(str(policy)) and not _has_tokenizer(policy):
        path = "actor_train.model_args.model_name_or_path" if own else "pretrain"
        remedy = "put `tokenizer.json` and `tokenizer_config.json` beside the model, as `save_pretrained` writes them"
        yield ConfigProblem(path, f"{shown(str(policy))} is a folder without a tokenizer", remedy)


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def _model_fault(model: str) -> str | None:
    if not is_local(model):
        return None
    if not Path(model).is_dir():
        return "is no folder"
    if not (Path(model) / "config.json").is_file():
        return "is a folder without a config.json"
    return None


def is_local(model: str) -> bool:
    """Return True if a model's name can only be a path: a hub name is ``name`` or ``owner/name``."""
    if not model:
        return False
    first, _, rest = model.partition("/")
    looks_local = model.startswith((".", "/", "~")) or "\\" in model or "/" in rest or model.endswith("/")
    return looks_local or Path(model).exists() or (bool(rest) and Path(first).is_dir())


def prompts_are_named(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Reject a data section without a source."""
    yield from _sources_are_named(TRAIN_DATA, config.actor_train.data_args, "training")
    if config.validation is not None:
        yield from _sources_are_named(VALIDATION_DATA, config.validation.data_args, "validation")


def prompts_exist(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Reject a file of prompts that is missing or empty."""
    yield from _files_exist(TRAIN_DATA, config.actor_train.data_args)
    if config.validation is not None:
        yield from _files_exist(VALIDATION_DATA, config.validation.data_args)


def _files_exist(path: str, data: DataArguments) -> Iterator[ConfigProblem]:
    for index, name in enumerate(files_of(data)):
        where = f"{path}.file_name" if isinstance(data.file_name, str) else f"{path}.file_name[{index}]"
        reason = _file_fault(Path(name))
        if reason:
            yield ConfigProblem(where, f"{shown(name)} {reason}", "give a JSONL file with one prompt per line")


def _sources_are_named(path: str, data: DataArguments, use: str) -> Iterator[ConfigProblem]:
    files = files_of(data)
    if not files and not data.reasoning_gym:
        remedy = f"set `{path}.file_name` or `{path}.reasoning_gym`"
        yield ConfigProblem(path, f"there are no {use} prompts", remedy)
    for name, times in Counter(files).items():
        if times > 1:
            yield ConfigProblem(f"{path}.file_name", f"{shown(name)} is named {times} times", "name each file once")
    for index, source in enumerate(data.reasoning_gym):
        if not source.dataset:
            remedy = "write the name of a reasoning-gym dataset, for example basic_arithmetic"
            yield ConfigProblem(f"{path}.reasoning_gym[{index}].dataset", "no dataset is named", remedy)


def _file_fault(path: Path) -> str | None:
    if path.is_dir():
        return "is a folder"
    if not path.is_file():
        return "is no file"
    if path.stat().st_size == 0:
        return "is empty"
    return None


def prompt_settings_fit(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Reject templates and domain shares that cannot work."""
    yield from _settings_fit(TRAIN_DATA, config.actor_train.data_args)
    if config.validation is not None:
        yield from _settings_fit(VALIDATION_DATA, config.validation.data_args)


def _settings_fit(path: str, data: DataArguments) -> Iterator[ConfigProblem]:
    if data.template == "raw" and data.system_prompt is not None:
        message = f"{shown(data.system_prompt)} has no effect: `template: raw` has no system message"
        yield ConfigProblem(f"{path}.system_prompt", message, "set `template: chat`, or remove this key")
    if data.domain_interleave_probs is not None:
        yield from _shares_fit(f"{path}.domain_interleave_probs", data, data.domain_interleave_probs)


def _shares_fit(path: str, data: DataArguments, shares: dict[str, float]) -> Iterator[ConfigProblem]:
    wrong = {domain: share for domain, share in shares.items() if not (math.isfinite(share) and share >= 0)}
    for domain, share in wrong.items():
        yield ConfigProblem(f"{path}.{domain}", f"{share} is no share", "write a number of at least 0")
    if not wrong and sum(shares.values()) == 0:
        yield ConfigProblem(path, f"{shown(shares)} adds up to 0", "give at least one domain a share above 0")
    domains = gym_domains(data)
    if not files_of(data) and domains:
        for domain in sorted(set(shares) - domains):
            remedy = choose_among(domain, sorted(domains))
            yield ConfigProblem(f"{path}.{domain}", "no prompt has this domain", remedy)
        for domain in sorted(domains - set(shares)):
            yield ConfigProblem(path, f"says nothing about the domain `{domain}`", f"give `{domain}` a share, or 0")


def gym_domains(data: DataArguments) -> set[str]:
    """Return the domain tags of the procedural tasks of a data section."""
    return {_domain(source) for source in data.reasoning_gym if source.dataset}


def _domain(source: ReasoningGymSource) -> str:
    return source.domain or source.dataset


def rewards_are_complete(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Require a verifier for each reward, and exactly one reward for each domain known in advance."""
    if not config.rewards:
        remedy = "add one, for example `rewards: {math: {verifier: math}}`"
        yield ConfigProblem("rewards", "there is no reward, so there is nothing to learn", remedy)
        return
    known = (*BUILTIN_VERIFIERS, *MODEL_REWARDS)
    owners: dict[str, str] = {}
    for name, reward in config.rewards.items():
        if not reward.verifier:
            remedy = f"write one of {', '.join(known)}, or `package.module:function`"
            yield ConfigProblem(f"rewards.{name}.verifier", "no verifier is named", remedy)
        elif reward.verifier not in known and not IMPORT_PATH.fullmatch(reward.verifier):
            message = f"{shown(reward.verifier)} is neither a built-in verifier nor `package.module:function`"
            remedy = choose_among(reward.verifier, known)
            yield ConfigProblem(f"rewards.{name}.verifier", message, remedy)
        for tag in tags_of(name, reward.tag_included):
            if tag in owners:
                message = f"the domain `{tag}` is judged by rewards.{owners[tag]} already"
                remedy = "let each domain be judged by one reward"
                yield ConfigProblem(f"rewards.{name}.tag_included", message, remedy)
            owners[tag] = name
    yield from _unjudged(f"{TRAIN_DATA}.reasoning_gym", config.actor_train.data_args, owners)
    if config.validation is not None:
        yield from _unjudged(f"{VALIDATION_DATA}.reasoning_gym", config.validation.data_args, owners)


def _unjudged(path: str, data: DataArguments, owners: dict[str, str]) -> Iterator[ConfigProblem]:
    for index, source in enumerate(data.reasoning_gym):
        if source.dataset and _domain(source) not in owners:
            remedy = f"add it to the `tag_included` of a reward; judged now: {', '.join(f'`{tag}`' for tag in owners)}"
            yield ConfigProblem(f"{path}[{index}]", f"no reward judges its domain `{_domain(source)}`", remedy)


def validation_is_complete(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Require prompts, `eval_steps` and meaningful sampling for validation."""
    if config.validation is None:
        if config.eval_steps > 0:
            message = f"{config.eval_steps} asks for validation, but there are no validation prompts"
            yield ConfigProblem("eval_steps", message, "add `validation.data_args`, or set 0")
        return
    if config.eval_steps == 0:
        yield ConfigProblem(
            "validation",
            "has no effect: eval_steps is 0",
            "set `eval_steps` to how often, or remove this section (on the command line: `validation=null`)",
        )
    yield from greedy_is_plain(config.validation.generating_args)
    trained = [(source.dataset, source.config, source.seed) for source in config.actor_train.data_args.reasoning_gym]
    for index, source in enumerate(config.validation.data_args.reasoning_gym):
        if source.dataset and (source.dataset, source.config, source.seed) in trained:
            message = f"{source.seed} makes the very tasks of training"
            remedy = "give validation another seed"
            yield ConfigProblem(f"{VALIDATION_DATA}.reasoning_gym[{index}].seed", message, remedy)


def greedy_is_plain(sampling: GeneratingArguments) -> Iterator[ConfigProblem]:
    """Reject settings that need a distribution in greedy validation."""
    if sampling.temperature != 0:
        return
    neutral = GeneratingArguments()
    for key in ("num_return_sequences", "top_p", "top_k"):
        if vars(sampling)[key] != vars(neutral)[key]:
            message = f"{vars(sampling)[key]} has no effect: temperature 0 is greedy and gives one and the same sample"
            remedy = "set `validation.generating_args.temperature` above 0, or remove this key"
            yield ConfigProblem(f"validation.generating_args.{key}", message, remedy)


def model_warnings(config: PipelineConfig) -> Iterator[str]:
    """Warn about models that work but may not be intended."""
    if config.actor_infer.model_args.model_name_or_path not in (None, model_path(config, config.actor_train)):
        yield "actor_infer starts from another model than actor_train: version 0 is not the policy that is trained"


def data_warnings(config: RLVRConfig) -> Iterator[str]:
    """Warn about data that works but may not be intended."""
    train = config.actor_train.data_args
    if config.validation is not None:
        for name in sorted(set(files_of(train)) & set(files_of(config.validation.data_args))):
            yield f"{name} is used for training and for validation: validation will not show over-fitting"
    shares = train.domain_interleave_probs
    if shares is not None and not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        yield f"{TRAIN_DATA}.domain_interleave_probs adds up to {sum(shares.values()):g}; each is divided by the sum"
    if train.max_samples is not None and train.max_samples < config.rollout_batch_size:
        prompts = count(train.max_samples, "prompt")
        yield f"{TRAIN_DATA}.max_samples keeps {prompts}: a step of {config.rollout_batch_size} repeats them"
