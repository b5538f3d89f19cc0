"""Rules about models, prompts, environments, rewards and validation."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from roll.configs.derived import (
    groups_ahead,
    learns_from_rewards,
    model_path,
    roles_and_reward_models,
    sequence_length,
    validation_settings,
)
from roll.configs.errors import ConfigProblem, choose_among, count, shown, without_effect
from roll.configs.fields import IMPORT_PATH, changes
from roll.configs.given import is_given
from roll.configs.rewards import VERIFIERS
from roll.configs.roles import MODEL_REWARDS, DataArguments, GeneratingArguments, ReasoningGymSource, RowArguments
from roll.configs.run import (
    AGENTS,
    AgenticConfig,
    EnvManagerConfig,
    ImageConfig,
    PipelineConfig,
    PromptConfig,
    RunConfig,
    SFTConfig,
)

TRAIN_DATA = "actor_train.data_args"
VALIDATION_DATA = "validation.data_args"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Patterns of the files that tokenizers are read from."""


def files_of(data: RowArguments) -> list[str]:
    """Return the files of a data section as a list."""
    return [data.file_name] if isinstance(data.file_name, str) else data.file_name


def needs_datasets(data: RowArguments) -> bool:
    """Return True if a data section is read by the package `datasets`."""
    return bool(data.hub) or any(name.endswith(".parquet") for name in files_of(data))


def task_sets(data: RowArguments) -> list[ReasoningGymSource]:
    """Return the procedural task sets of a data section; examples have none."""
    return data.reasoning_gym if isinstance(data, DataArguments) else []


def data_sections(config: PromptConfig | SFTConfig) -> dict[str, RowArguments]:
    """Return the sections of prompts or examples, of training and of validation, by path."""
    sections: dict[str, RowArguments] = {TRAIN_DATA: config.actor_train.data_args}
    return sections if config.validation is None else sections | {VALIDATION_DATA: config.validation.data_args}


def has_model(folder: Path) -> bool:
    """Return True if a folder has the configuration of a text model, or of a diffusers pipeline."""
    return any((folder / name).is_file() for name in ("config.json", "model_index.json"))


def models_exist(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject a model folder without its files, or a policy without a tokenizer. Hub names are not checked here."""
    paths = {"pretrain": config.pretrain}
    if isinstance(config, PipelineConfig):
        paths["reward_pretrain"] = config.reward_pretrain or ""
    for name, role in roles_and_reward_models(config).items():
        paths[f"{name}.model_args.model_name_or_path"] = role.model_args.model_name_or_path or ""
    for path, model in paths.items():
        if is_local(model) and not (Path(model) / "config.json").is_file():
            reason = "is a folder without a config.json" if Path(model).is_dir() else "is no folder"
            remedy = "give a folder that has a config.json and the weights, or a hub name `owner/name`"
            yield ConfigProblem(path, f"{shown(model)} {reason}", remedy)
    path = "actor_train.model_args.model_name_or_path"
    path, policy = (path, Path(paths[path])) if paths[path] else ("pretrain", Path(config.pretrain))
    if (policy / "config.json").is_file() and not any(list(policy.glob(pattern)) for pattern in TOKENIZER_FILES):
        remedy = "put `tokenizer.json` and `tokenizer_config.json` beside the model, as `save_pretrained` writes them"
        yield ConfigProblem(path, f"{shown(str(policy))} is a folder without a tokenizer", remedy)


def lengths_fit_the_model(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject sequences that are longer than the positions of the policy, if its files are here."""
    model, longest = Path(model_path(config, config.actor_train)), sequence_length(config)
    positions, is_scaled = positions_of(model)
    if positions is None or longest <= positions:
        return
    is_cut = isinstance(config, SFTConfig)
    if isinstance(config, PipelineConfig):
        if is_scaled and config.actor_infer.strategy_args.strategy_name != "hf_infer":
            return
        is_cut = (config.sequence_length or longest + 1) < config.prompt_length + config.response_length
    path = "sequence_length" if is_cut else "response_length"
    message = f"sequences of up to {longest:,} tokens are longer than the {positions:,} positions of {model}"
    lower = "it" if is_cut else "`prompt_length` or `response_length`"
    yield ConfigProblem(path, message, f"lower {lower} by {longest - positions:,}, or take a model with more positions")


def written_lengths_fit_the_model(config: RunConfig) -> Iterator[ConfigProblem]:
    """Apply `lengths_fit_the_model` if every length is written; a default may be due to a misspelt key."""
    names = ("sequence_length",) if isinstance(config, SFTConfig) else ("prompt_length", "response_length")
    usual = type(config)()
    if all(getattr(config, name) != getattr(usual, name) for name in names):
        yield from lengths_fit_the_model(config)


def positions_of(model: Path) -> tuple[int | None, bool]:
    """Return the maximum position of a model in a folder (None: unknown), and True if its RoPE is scaled."""
    try:
        facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
        text = facts.get("text_config", facts)
        positions, rope = text.get("max_position_embeddings"), text.get("rope_scaling") or text.get("rope_parameters")
    except (OSError, ValueError, AttributeError):
        return None, False
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    return positions if isinstance(positions, int) else None, kind != "default"


def is_local(model: str) -> bool:
    """Return True if a model's name can only be a path: a hub name is ``name`` or ``owner/name``."""
    if not model:
        return False
    first, _, rest = model.partition("/")
    looks_local = model.startswith((".", "/", "~")) or "\\" in model or "/" in rest or model.endswith("/")
    return looks_local or Path(model).exists() or (bool(rest) and Path(first).is_dir())


def prompts_are_named(config: PromptConfig | SFTConfig) -> Iterator[ConfigProblem]:
    """Reject a data section without a source, repeated files, unnamed task sets, and validation on training tasks."""
    trained = [(source.dataset, source.config, source.seed) for source in task_sets(config.actor_train.data_args)]
    rows = "examples" if isinstance(config, SFTConfig) else "prompts"
    for path, data in data_sections(config).items():
        files = files_of(data)
        if not files and not task_sets(data) and not data.hub:
            use = "training" if path == TRAIN_DATA else "validation"
            remedy = f"set `{path}.file_name`, `{path}.hub` or `{path}.reasoning_gym`"
            if isinstance(config, SFTConfig):
                remedy = f"set `{path}.file_name` or `{path}.hub`"
            yield ConfigProblem(path, f"there are no {use} {rows}", remedy)
        for name, times in Counter(files).items():
            if times > 1:
                yield ConfigProblem(f"{path}.file_name", f"{shown(name)} is named {times} times", "name each file once")
        for index, hub in enumerate(data.hub):
            if not hub.dataset:
                remedy = "write `owner/name` of a data set of the hub, or a folder"
                yield ConfigProblem(f"{path}.hub[{index}].dataset", "no dataset is named", remedy)
        for field, column in changes(data.columns):
            if not files and not data.hub:
                remedy = "remove it, or name files or data sets"
                yield without_effect(f"{path}.columns.{field}", column, "task sets have no columns", remedy)
        for index, source in enumerate(task_sets(data)):
            if not source.dataset:
                remedy = "write the name of a reasoning-gym dataset, for example basic_arithmetic"
                yield ConfigProblem(f"{path}.reasoning_gym[{index}].dataset", "no dataset is named", remedy)
            elif path == VALIDATION_DATA and (source.dataset, source.config, source.seed) in trained:
                message = f"{source.seed} makes the very tasks of training"
                yield ConfigProblem(f"{path}.reasoning_gym[{index}].seed", message, "give validation another seed")


def why_unreadable(file: Path) -> str:
    """Return why a file cannot hold rows: it is missing, a folder or empty; an empty text if it may hold some."""
    if not file.is_file():
        return "is a folder" if file.is_dir() else "is no file"
    return "is empty" if file.stat().st_size == 0 else ""


def prompts_exist(config: PromptConfig | SFTConfig) -> Iterator[ConfigProblem]:
    """Reject a file of prompts or examples that is missing or empty."""
    row = "example" if isinstance(config, SFTConfig) else "prompt"
    for path, data in data_sections(config).items():
        for index, name in enumerate(files_of(data)):
            reason = why_unreadable(Path(name))
            if reason:
                where = f"{path}.file_name" + ("" if isinstance(data.file_name, str) else f"[{index}]")
                yield ConfigProblem(
                    where, f"{shown(name)} {reason}", f"give a JSONL file with one {row} per line, or a Parquet file"
                )


def domain_shares_fit(config: PromptConfig | SFTConfig) -> Iterator[ConfigProblem]:
    """Reject domain shares that are not numbers of at least 0, or that do not match the domains known in advance."""
    for section, data in data_sections(config).items():
        path, shares = f"{section}.domain_interleave_probs", data.domain_interleave_probs
        if shares is None:
            continue
        wrong = {domain: share for domain, share in shares.items() if not (math.isfinite(share) and share >= 0)}
        for domain, share in wrong.items():
            yield ConfigProblem(f"{path}.{domain}", f"{share} is no share", "write a number of at least 0")
        if not wrong and sum(shares.values()) == 0:
            yield ConfigProblem(path, f"{shown(shares)} adds up to 0", "give at least one domain a share above 0")
        domains = {_domain(source) for source in task_sets(data) if source.dataset}
        if files_of(data) or data.hub or not domains:
            continue
        for domain in sorted(set(shares) - domains):
            yield ConfigProblem(f"{path}.{domain}", "no prompt has this domain", choose_among(domain, sorted(domains)))
        for domain in sorted(domains - set(shares)):
            yield ConfigProblem(path, f"says nothing about the domain `{domain}`", f"give `{domain}` a share, or 0")


def _domain(source: ReasoningGymSource) -> str:
    return source.domain or source.dataset


def _leads_to_an_object(name: str) -> bool:
    return is_given(name) or IMPORT_PATH.fullmatch(name) is not None


def rewards_are_complete(config: PromptConfig) -> Iterator[ConfigProblem]:
    """Require a verifier for each reward, and exactly one reward for each domain known in advance."""
    if not config.rewards:
        if not learns_from_rewards(config):
            return
        remedy = "add one, for example `rewards: {math: {verifier: math}}`"
        yield ConfigProblem("rewards", "there is no reward, so there is nothing to learn", remedy)
        return
    known = (*VERIFIERS.names(), *MODEL_REWARDS)
    owners: dict[str, str] = {}
    for name, reward in config.rewards.items():
        if not reward.verifier:
            remedy = f"write one of {', '.join(known)}, or `package.module:function`"
            yield ConfigProblem(f"rewards.{name}.verifier", "no verifier is named", remedy)
        elif reward.verifier not in known and not _leads_to_an_object(reward.verifier):
            message = f"{shown(reward.verifier)} is neither a built-in verifier nor `package.module:function`"
            yield ConfigProblem(f"rewards.{name}.verifier", message, choose_among(reward.verifier, known))
        for tag in reward.tag_included or [name]:
            if tag in owners:
                message = f"the domain `{tag}` is judged by rewards.{owners[tag]} already"
                yield ConfigProblem(f"rewards.{name}.tag_included", message, "let each domain be judged by one reward")
            owners[tag] = name
    for path, data in data_sections(config).items():
        for index, source in enumerate(task_sets(data)):
            if source.dataset and _domain(source) not in owners:
                judged = ", ".join(f"`{tag}`" for tag in owners)
                remedy = f"add it to the `tag_included` of a reward; judged now: {judged}"
                message = f"no reward judges its domain `{_domain(source)}`"
                yield ConfigProblem(f"{path}.reasoning_gym[{index}]", message, remedy)


def validation_is_asked_for(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require validation data if there are `eval_steps`, and the reverse."""
    section, key, what = "validation", VALIDATION_DATA, "examples" if isinstance(config, SFTConfig) else "prompts"
    if isinstance(config, AgenticConfig):
        section = key = "val_env_manager"
        what = "environments"
    is_there = vars(config)[section] is not None
    if config.eval_steps > 0 and not is_there:
        message = f"{config.eval_steps} asks for validation, but there are no validation {what}"
        yield ConfigProblem("eval_steps", message, f"add `{key}`, or set 0")
    if config.eval_steps == 0 and is_there:
        remedy = f"set `eval_steps` to how often, or remove this section (on the command line: `{section}=null`)"
        yield ConfigProblem(section, "has no effect: eval_steps is 0", remedy)


def validation_samples_as_asked(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject sampling settings of validation that have no effect because it is greedy."""
    settings, agentic = validation_settings(config), isinstance(config, AgenticConfig)
    if settings is None or isinstance(config, ImageConfig):
        return  # samples of one prompt differ by their initial noise
    sampling, neutral = settings.generating_args, GeneratingArguments()
    for key in ("num_return_sequences", "top_p", "top_k"):
        path, value = f"validation.generating_args.{key}", vars(sampling)[key]
        if value == vars(neutral)[key]:
            continue
        if sampling.temperature == 0:
            remedy = "set `validation.generating_args.temperature` above 0, or remove this key"
            yield without_effect(path, value, "temperature 0 is greedy and gives one and the same sample", remedy)
        elif agentic and key == "num_return_sequences":
            yield ConfigProblem(path, f"{value} has no effect on episodes", "set `val_env_manager.group_size` instead")


def data_warnings(config: PromptConfig | SFTConfig) -> Iterator[str]:
    """Warn about data that works but may not be intended."""
    train = config.actor_train.data_args
    if config.validation is not None:
        for name in sorted(set(files_of(train)) & set(files_of(config.validation.data_args))):
            yield f"{name} is used for training and for validation: validation will not show over-fitting"
    if isinstance(config, SFTConfig) and config.validation is not None:
        for key in ("template", "system_prompt", "chat_template_kwargs"):
            own, theirs = vars(train)[key], vars(config.validation.data_args)[key]
            if own != theirs:
                both = f"{TRAIN_DATA}.{key} is {shown(own)}, and that of validation {shown(theirs)}"
                yield f"{both}: what is measured is not what is learned"
    shares = train.domain_interleave_probs
    if shares is not None and not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        yield f"{TRAIN_DATA}.domain_interleave_probs adds up to {sum(shares.values()):g}; each is divided by the sum"
    if isinstance(config, SFTConfig):
        row, size = "example", config.train_batch_size
    else:
        row, size = "prompt", config.rollout_batch_size
    if train.max_samples is not None and train.max_samples < size:
        yield f"{TRAIN_DATA}.max_samples keeps {count(train.max_samples, row)}: a step of {size} repeats them"


ENV_MANAGERS = ("trajectory", "step", "agent")
_AGENTS = " and ".join(f"`env_type: {each}`" for each in AGENTS)
_TAG = re.compile(r"[\w.-]+")
"""Pattern of a tag, which becomes part of metric names and file names."""


def managers(config: AgenticConfig) -> dict[str, EnvManagerConfig]:
    """Return the sets of environments of a run by their key."""
    sets = {"train_env_manager": config.train_env_manager}
    return sets if config.val_env_manager is None else sets | {"val_env_manager": config.val_env_manager}


def environments_are_named(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Require for each tag an environment, a known environment manager, and turns that fit into a sequence."""
    room = sequence_length(config) - 1
    if not config.custom_envs:
        remedy = "add one, for example `custom_envs: {lake: {env_type: frozen_lake}}`"
        yield ConfigProblem("custom_envs", "there is no environment", remedy)
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        if not _TAG.fullmatch(tag):
            message = f"{shown(tag)} is part of metric and file names"
            yield ConfigProblem(path, message, "use letters, digits, '-', '_' and '.'")
        if not env.env_type:
            yield ConfigProblem(f"{path}.env_type", "no environment is named", "write one, for example `frozen_lake`")
        if env.env_manager_cls not in ENV_MANAGERS and not _leads_to_an_object(env.env_manager_cls):
            message = f"{shown(env.env_manager_cls)} is neither a built-in environment manager nor an import path"
            yield ConfigProblem(f"{path}.env_manager_cls", message, choose_among(env.env_manager_cls, ENV_MANAGERS))
        of_its_own = ":" in env.env_type  # a class that is looked up later
        if not of_its_own and (env.env_type in AGENTS) != (env.env_manager_cls == "agent"):
            other = "env_manager_cls" if env.env_type in AGENTS else "env_type"
            message = f"{shown(getattr(env, other))} does not fit an agent: {_AGENTS} go with `env_manager_cls: agent`"
            yield ConfigProblem(f"{path}.{other}", message, f"set `{path}.{other}: agent`, or change the other one")
        if env.max_tokens_per_step is not None and env.max_tokens_per_step > room:
            message = f"{env.max_tokens_per_step} is more than a sequence of {room + 1} tokens has room for"
            remedy = "lower it, or raise `response_length` or `sequence_length`"
            yield ConfigProblem(f"{path}.max_tokens_per_step", message, remedy)


def tags_are_known(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Reject unknown, repeated and unused tags, and shares that do not match the tags."""
    used: set[str] = set()
    for path, manager in managers(config).items():
        used |= set(manager.tags or config.custom_envs)
        for index, tag in enumerate(manager.tags):
            if tag not in config.custom_envs:
                remedy = choose_among(tag, list(config.custom_envs))
                yield ConfigProblem(f"{path}.tags[{index}]", f"{shown(tag)} is no key of `custom_envs`", remedy)
        for tag, times in Counter(manager.tags).items():
            if times > 1:
                yield ConfigProblem(f"{path}.tags", f"{shown(tag)} is named {times} times", "name each tag once")
        yield from _partition_fits(path, manager, len(manager.tags or config.custom_envs))
    for tag in config.custom_envs:
        if tag not in used:
            message = "has no effect: neither training nor validation uses this tag"
            yield ConfigProblem(f"custom_envs.{tag}", message, "add it to `train_env_manager.tags`, or remove it")


def _partition_fits(path: str, manager: EnvManagerConfig, tags: int) -> Iterator[ConfigProblem]:
    shares = manager.num_groups_partition
    if not shares:
        return
    path = f"{path}.num_groups_partition"
    if len(shares) != tags:
        message = f"{shown(shares)} has {count(len(shares), 'number')} for {count(tags, 'tag')}"
        yield ConfigProblem(path, message, "write one number per tag")
    elif min(shares) < 0 or sum(shares) == 0:
        yield ConfigProblem(path, f"{shown(shares)} leaves no groups", "write numbers of at least 0, one above it")
    elif manager.num_env_groups is not None and sum(shares) != manager.num_env_groups:
        message = f"{shown(shares)} adds up to {sum(shares)}, and num_env_groups is {manager.num_env_groups}"
        yield ConfigProblem(path, message, "let the numbers add up to `num_env_groups`")


def groups_are_enough(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Require enough environments for the groups of a step, the tags of validation, and the episodes of a group."""
    train, val = config.train_env_manager, config.val_env_manager
    if train.max_traj_per_env is not None and train.num_env_groups is not None:
        path = "train_env_manager.max_traj_per_env"
        if train.num_env_groups * train.max_traj_per_env < config.rollout_batch_size:
            message = (
                f"{count(train.num_env_groups, 'group')} x {train.max_traj_per_env} = "
                f"{train.num_env_groups * train.max_traj_per_env} a step, and a step needs {config.rollout_batch_size}"
            )
            yield ConfigProblem(path, message, "raise it or `num_env_groups`, or lower `rollout_batch_size`")
    if val is not None:
        path, tags = "val_env_manager.num_env_groups", len(val.tags or config.custom_envs)
        if val.num_env_groups is None:
            yield ConfigProblem(path, "the size of the validation set is not given", "set it, for example 64")
        elif val.num_env_groups < tags:
            message = f"{val.num_env_groups} is less than the {count(tags, 'tag')}: not every tag would be validated"
            yield ConfigProblem(path, message, "raise it, or name fewer `tags`")
    for path, manager in managers(config).items():
        if manager.group_size > config.env_workers.max_sessions:
            message = f"{manager.group_size} episodes, and only {config.env_workers.max_sessions} may be in progress"
            yield ConfigProblem(f"{path}.group_size", message, "lower it, or raise `env_workers.max_sessions`")


def env_warnings(config: AgenticConfig) -> Iterator[str]:
    """Warn about environments that work but may not be intended."""
    train = config.train_env_manager
    wanted = config.rollout_batch_size + groups_ahead(config)
    if train.num_env_groups is not None and train.num_env_groups < wanted:
        yield (
            f"train_env_manager.num_env_groups {train.num_env_groups} is below the {wanted} groups that may be in "
            "flight: the others wait for a place"
        )
    val = config.val_env_manager
    if val is not None and val.group_size > 1 and config.validation.generating_args.temperature == 0:
        yield (
            f"val_env_manager.group_size {val.group_size} with greedy sampling: episodes of a group differ only where "
            "their environment is random beyond its seed"
        )
