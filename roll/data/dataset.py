"""The prompts of a run, rendered and checked before anything else starts.

`load_prompts` returns prompts that a policy can start from, or raises every problem of the data at once. The order of
its result depends only on the files, the configuration and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.schema import DataArguments
from roll.data.names import nearest_name_hint
from roll.data.records import Prompt
from roll.data.seeds import derive_seed
from roll.data.sources import read_jsonl, read_reasoning_gym
from roll.data.templates import PromptRow, RenderError, conversation, render_text, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_OFFENDERS = 5
"""Number of prompts named in a message about many."""


def load_prompts(
    data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, *, prompt_length: int, path: str, seed: int
) -> list[Prompt]:
    """Read, render, check and select the prompts of one `data_args`.

    ``path`` is the configuration path of ``data_args`` and begins the path of each problem. ``prompt_length`` counts
    tokens. With ``max_samples`` the prompts kept are a random choice by ``seed`` (the first ones without ``shuffle``),
    in the order of the data. Raises `ConfigError`.
    """
    problems = _template_problems(data_args, tokenizer, path)
    rows, source_problems = _read_sources(data_args, path)
    problems += source_problems
    if problems:
        raise ConfigError(problems)
    rows = _select(rows, data_args.max_samples, data_args.shuffle, seed, path)
    prompts, problems = _render(rows, data_args, tokenizer, path)
    prompts, length_problems = _check_lengths(prompts, data_args, prompt_length, path)
    problems += length_problems
    if not prompts and not problems:
        message = f"all {len(rows)} prompts are longer than {prompt_length} tokens"
        problems.append(ConfigProblem(path, message, "raise `prompt_length`"))
    problems = problems or _share_problems(data_args.domain_interleave_probs, prompts, path)
    if problems:
        raise ConfigError(problems)
    return prompts


def _template_problems(data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, path: str) -> list[ConfigProblem]:
    if data_args.template == "raw" and data_args.system_prompt is not None:
        message = "a system prompt has no effect with `template: raw`"
        return [ConfigProblem(f"{path}.system_prompt", message, "use `template: chat`, or write it into the prompts")]
    if data_args.template == "chat" and not tokenizer.chat_template:
        message = "the tokenizer has no chat template"
        return [ConfigProblem(f"{path}.template", message, "use `template: raw`, or a model with a chat template")]
    return []


def _read_sources(data_args: DataArguments, path: str) -> tuple[list[PromptRow], list[ConfigProblem]]:
    file_names = [data_args.file_name] if isinstance(data_args.file_name, str) else data_args.file_name
    if not file_names and not data_args.reasoning_gym:
        return [], [ConfigProblem(path, "names no prompts", f"set `{path}.file_name` or `{path}.reasoning_gym`")]
    rows: list[PromptRow] = []
    problems: list[ConfigProblem] = []
    for file_name in file_names:
        new_rows, new_problems = read_jsonl(file_name, f"{path}.file_name")
        rows += new_rows
        problems += new_problems
    for position, source in enumerate(data_args.reasoning_gym):
        new_rows, new_problems = read_reasoning_gym(source, position, f"{path}.reasoning_gym.{position}")
        rows += new_rows
        problems += new_problems
    return rows, problems + _duplicate_problems(rows, path)


def _duplicate_problems(rows: Sequence[PromptRow], path: str) -> list[ConfigProblem]:
    origins: dict[str, str] = {}
    for row in rows:
        if row.prompt_id in origins:
            message = f"two prompts would be called `{row.prompt_id}` ({origins[row.prompt_id]} and {row.origin})"
            return [ConfigProblem(f"{path}.file_name", message, "name each file once, and give files different names")]
        origins[row.prompt_id] = row.origin
    return []


def _select(rows: list[PromptRow], max_samples: int | None, shuffle: bool, seed: int, path: str) -> list[PromptRow]:
    if max_samples is None:
        return rows
    if max_samples < 1:
        raise ConfigError([ConfigProblem(f"{path}.max_samples", f"{max_samples} leaves no prompts", "at least 1")])
    if not shuffle:
        return rows[:max_samples]
    chosen = np.random.default_rng(derive_seed(seed, "max_samples")).permutation(len(rows))[:max_samples]
    return [rows[index] for index in np.sort(chosen)]


def _render(
    rows: Sequence[PromptRow], data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, path: str
) -> tuple[list[Prompt], list[ConfigProblem]]:
    problems: list[ConfigProblem] = []
    rendered: list[tuple[PromptRow, str]] = []
    for row in rows:
        try:
            rendered.append((row, render_text(row, data_args.template, tokenizer, data_args.system_prompt)))
        except RenderError as cause:
            remedy = "correct the row, or choose the other `template`"
            problems.append(ConfigProblem(f"{path}.template", f"{row.origin}: {cause}", remedy))
            if len(problems) == SHOWN_OFFENDERS:
                break
    prompts = [
        Prompt(
            row.prompt_id,
            row.domain,
            token_ids,
            text,
            row.ground_truth,
            row.metadata,
            conversation(row, data_args.system_prompt),
        )
        for (row, text), token_ids in zip(rendered, tokenise([text for _, text in rendered], tokenizer), strict=True)
    ]
    empty = [prompt.prompt_id for prompt in prompts if len(prompt.token_ids) == 0]
    if empty:
        message = f"no token is left of {_named(empty)}"
        problems.append(ConfigProblem(path, message, "correct these prompts, or use the tokenizer they were made for"))
    return prompts, problems


def _check_lengths(
    prompts: list[Prompt], data_args: DataArguments, prompt_length: int, path: str
) -> tuple[list[Prompt], list[ConfigProblem]]:
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= prompt_length]
    if data_args.overlong_prompts == "drop" or len(fitting) == len(prompts):
        return fitting, []
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > prompt_length]
    longest = max(len(prompt.token_ids) for prompt in overlong)
    named = _named([f"{prompt.prompt_id} ({len(prompt.token_ids)} tokens)" for prompt in overlong])
    return fitting, [
        ConfigProblem(
            f"{path}.overlong_prompts",
            f"{len(overlong)} of {len(prompts)} prompts are longer than `prompt_length: {prompt_length}`: {named}",
            f"set `overlong_prompts: drop` to leave them out, or `prompt_length` to at least {longest}",
        )
    ]


def _named(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN_OFFENDERS
    return ", ".join(names[:SHOWN_OFFENDERS]) + (f" and {rest} more" if rest > 0 else "")


def _share_problems(shares: dict[str, float] | None, prompts: Sequence[Prompt], path: str) -> list[ConfigProblem]:
    """Require a share for each domain that has prompts, and for no other."""
    if shares is None:
        return []
    path = f"{path}.domain_interleave_probs"
    domains = {prompt.domain for prompt in prompts}
    problems = [
        ConfigProblem(f"{path}.{domain}", f"{share} is no share", "use a number of at least 0; they are normalised")
        for domain, share in shares.items()
        if not (math.isfinite(share) and share >= 0)
    ]
    problems += [
        ConfigProblem(f"{path}.{domain}", f"no prompt has the domain `{domain}`", nearest_name_hint(domain, domains))
        for domain in shares
        if domain not in domains
    ]
    problems += [
        ConfigProblem(path, f"the prompts of domain `{domain}` get no share", f"add `{domain}`; 0 leaves them out")
        for domain in sorted(domains - set(shares))
    ]
    if not problems and sum(shares.values()) <= 0:
        problems.append(ConfigProblem(path, "the shares add up to 0", "give at least one domain a share above 0"))
    return problems
