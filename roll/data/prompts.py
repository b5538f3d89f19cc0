"""The prompts of a run: read, rendered and checked before anything else starts.

`load_prompts` returns prompts that a policy can start from, or raises every problem of the data at once. The order of
its result depends only on the files, the configuration and the seed. The text that is tokenised is exactly the text in
the logs. No special token is added to the data: a raw prompt that needs a leading token has to spell it, and a chat
template writes its own. Control tokens that messages spell stay plain text.

`PromptStream` is an endless stream of prompts or examples. Two promises hold for any number of prompts drawn: within
a domain each prompt comes exactly once per epoch, and no domain is ever a whole prompt away from its share. The stream
is a pure function of prompts and seed, so a resumed run draws what the first one drew.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from roll.configs.errors import Problems
from roll.configs.plugins import problem
from roll.configs.roles import DataArguments
from roll.data.encoding import ContentEncoder, ControlTokensRefused, tokenise
from roll.data.pictures import PLACE, NoPicture, PictureProcessor, read_picture
from roll.data.records import Prompt, derive_seed
from roll.data.sources import (
    SHOWN_OFFENDERS,
    BadRow,
    Message,
    PromptRow,
    check_lengths,
    check_shares,
    conversation,
    named,
    require_unspelled,
    required_text,
    usable_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    path: str,
    seed: int,
    refuse_control_tokens: bool = False,
    processor: PictureProcessor | None = None,
) -> list[Prompt]:
    """Read, render, check and select the prompts of one `data_args`.

    ``path``: configuration path of ``data_args``, a prefix of the path of each problem. ``prompt_length``: tokens.
    ``max_samples`` limits the rows that are used: a random choice by ``seed`` or, if ``shuffle`` is off, the first
    rows; their order is kept. With ``refuse_control_tokens`` (template `chat` only) a message whose text contains a
    control token is a problem. ``processor`` is that of the model, for rows with pictures; None refuses them. Raises
    `ConfigError`.
    """
    problems = Problems()
    rows = usable_rows(data_args, tokenizer, path, problems, seed)
    refuse = refuse_control_tokens and data_args.template == "chat"
    prompts = _render(rows, data_args, tokenizer, path, problems, refuse)
    prompts = _with_pictures(prompts, rows, processor, path, problems)
    lengths = {prompt.prompt_id: len(prompt.token_ids) for prompt in prompts}
    words, may_drop = ("prompts", "prompt_length"), data_args.overlong_prompts == "drop"
    overlong = check_lengths(lengths, prompt_length, words, may_drop, path, problems)
    prompts = [prompt for prompt in prompts if prompt.prompt_id not in overlong]
    problems.raise_any()
    domains = {prompt.domain for prompt in prompts}
    check_shares(data_args.domain_interleave_probs, domains, f"{path}.domain_interleave_probs", problems)
    problems.raise_any()
    return prompts


def _render(
    rows: Sequence[PromptRow],
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    problems: Problems,
    refuse_control_tokens: bool,
) -> list[Prompt]:
    rendered: list[tuple[PromptRow, list[Message], str]] = []
    spelled: dict[int, np.ndarray] = {}
    contents, bad = ContentEncoder(tokenizer), 0
    for row in rows:
        messages = conversation(row, data_args.system_prompt)
        try:
            if refuse_control_tokens:
                require_unspelled(contents, messages)
            text = _text(row, _template_messages(row, messages, contents), data_args, tokenizer)
            if data_args.template == "chat" and contents.is_shielded(text):
                spelled[len(rendered)] = contents.encode(text)
                text = contents.restored(text)
            rendered.append((row, messages, text))
        except (BadRow, ControlTokensRefused) as cause:
            remedy = "correct the row, or choose the other `template`"
            problems.add(f"{path}.template", f"{row.origin}: {cause}", remedy)
            bad += 1
            if bad == SHOWN_OFFENDERS:
                break
    token_ids = tokenise([text for _, _, text in rendered], tokenizer)
    prompts = [
        Prompt(row.prompt_id, row.domain, spelled.get(number, ids), text, row.ground_truth, row.metadata, messages)
        for number, ((row, messages, text), ids) in enumerate(zip(rendered, token_ids, strict=True))
    ]
    empty = [prompt.prompt_id for prompt in prompts if len(prompt.token_ids) == 0]
    if empty:
        remedy = "correct these prompts, or use the tokenizer they were made for"
        problems.add(path, f"no token is left of {named(empty)}", remedy)
    return prompts


def _template_messages(row: PromptRow, messages: list[Message], contents: ContentEncoder) -> list[Any]:
    """Return shielded messages for a chat template; with pictures, contents are lists of parts."""
    if not row.pictures:
        return contents.shielded(messages)
    return [{**message, "content": _parts(message["content"], contents)} for message in messages]


def _parts(content: str, contents: ContentEncoder) -> list[dict[str, str]]:
    texts = [[{"type": "text", "text": contents.shielded(text)}] if text else [] for text in content.split(PLACE)]
    parts = list(texts[0])
    for text in texts[1:]:
        parts += [{"type": "image"}, *text]
    return parts


def _with_pictures(
    prompts: list[Prompt],
    rows: Sequence[PromptRow],
    processor: PictureProcessor | None,
    path: str,
    problems: Problems,
) -> list[Prompt]:
    """Return the prompts with the pictures of their rows, whose placeholders are expanded in the token ids."""
    sources = {row.prompt_id: row for row in rows if row.pictures}
    if not sources or problems.found:
        return prompts
    try:
        if processor is None:
            raise NoPicture("pictures are not supported here")
        processor.require()
    except NoPicture as cause:
        remedy = "take pictures out of the data, or train a vision-language model with `pipeline: rlvr`"
        problems.add(path, f"{len(sources)} prompts have pictures: {cause}", remedy)
        return prompts
    found, bad = [], 0
    for prompt in prompts:
        row = sources.get(prompt.prompt_id)
        if row is None:
            found.append(prompt)
            continue
        try:
            found.append(_seeing(prompt, row, processor))
        except NoPicture as cause:
            problems.add(path, f"{row.origin}: {cause}", "correct the row or its picture")
            bad += 1
            if bad == SHOWN_OFFENDERS:
                break
    return found


def _seeing(prompt: Prompt, row: PromptRow, processor: PictureProcessor) -> Prompt:
    pictures = [read_picture(source, row.folder) for source in row.pictures]
    return replace(prompt, pictures=pictures, token_ids=processor.expanded(prompt.token_ids, pictures))


def rewritten_prompts(
    prompts: Sequence[Prompt],
    text: str,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    refuse_control_tokens: bool = False,
) -> dict[str, np.ndarray]:
    """Return prompt id -> token ids (int32 ``[length]``) of each prompt rewritten by ``text``, a text with fields.

    The field ``{prompt}`` is the prompt's text, or with ``template: chat`` the content of its last user message, which
    is replaced; ``{ground_truth}``, ``{domain}`` and other names are fields of its row. ``{{`` and ``}}`` are braces.
    ``path`` is the key of ``text``. Raises `ConfigError` that names the prompts that lack a field, and with
    ``refuse_control_tokens`` those whose messages spell a control token.
    """
    problems, contents = Problems(), ContentEncoder(tokenizer)
    if not any(field[1] for field in _FIELD.finditer(text)):
        raise problem(path, "no field stands in it, so every prompt would be the same", "write `{prompt}` into it")
    found: dict[str, np.ndarray] = {}
    for prompt in prompts:
        try:
            if data_args.template == "raw":
                (found[prompt.prompt_id],) = tokenise([_with_fields(text, prompt, prompt.text)], tokenizer)
            else:
                messages = _rewritten(prompt, text)
                if refuse_control_tokens:
                    require_unspelled(contents, messages)
                messages = contents.shielded(messages)
                found[prompt.prompt_id] = contents.encode(_from_template(messages, data_args, tokenizer))
        except (BadRow, ControlTokensRefused) as cause:
            problems.add(
                path, f"{prompt.prompt_id}: {cause}", "correct the text or the row; double the braces of others"
            )
            if len(problems.found) == SHOWN_OFFENDERS:
                break
    problems.raise_any()
    empty = [prompt_id for prompt_id, ids in found.items() if len(ids) == 0]
    if empty:
        raise problem(path, f"no token is left of {named(empty)}", "write a text")
    return found


_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def _rewritten(prompt: Prompt, text: str) -> list[Message]:
    """Return a prompt's messages with the last user message replaced by ``text``. Raises `BadRow`."""
    asked = [index for index, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not asked:
        raise BadRow("there is no user message to replace")
    messages = list(prompt.messages)
    last = messages[asked[-1]]
    messages[asked[-1]] = {**last, "content": _with_fields(text, prompt, last["content"])}
    return messages


def _with_fields(text: str, prompt: Prompt, own: str) -> str:
    """Return a text with its fields filled in from a prompt's row; ``own`` is the field ``prompt``. Raises `BadRow`."""
    values = {
        "answer": prompt.ground_truth,  # a column of either name takes precedence
        "tag": prompt.domain,
        **prompt.metadata,
        "prompt": own,
        "ground_truth": prompt.ground_truth,
        "domain": prompt.domain,
    }

    def written(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if found[1] is None:
            raise BadRow(f"a single `{found[0]}`; double the braces that are text")
        value: Any = values
        for part in [found[1]] if found[1] in values else found[1].split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise BadRow(f"the row has no `{found[1]}`")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return required_text(_FIELD.sub(written, text), "the text with its fields")


def _text(row: PromptRow, messages: list[Message], data_args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a prompt: the row's own, or the messages rendered by the tokenizer's chat template."""
    if data_args.template == "raw":
        if row.text is None:
            raise BadRow("the row has `messages` but no `prompt`, and `template: raw` needs text")
        if row.pictures:
            raise BadRow("only the chat template can place pictures: use `template: chat`")
        return row.text
    return _from_template(messages, data_args, tokenizer)


def _from_template(messages: list[Message], data_args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **data_args.chat_template_kwargs
        )
    except Exception as cause:  # a template is a program and may raise anything
        raise BadRow(f"the chat template refuses the messages ({type(cause).__name__}: {cause})") from cause


class DomainSchedule:
    """A deterministic order of domains that keeps to given shares.

    After ``n`` turns a domain with share ``p`` has had ``p * n`` turns to within less than one, for any shares. The
    rule is that of Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): among the domains far
    enough behind their share, take the one whose deadline comes first. (Serving the largest deficit can fall behind by
    more than one turn when there are many domains.)
    """

    def __init__(self, shares: Mapping[str, float | int]) -> None:
        """Set the ``shares``, which need not add up to 1.

        Raises `ValueError` if one is negative or not finite, or all are 0.
        """
        if not all(math.isfinite(share) and share >= 0 for share in shares.values()) or sum(shares.values()) <= 0:
            raise ValueError(f"shares must be finite, at least 0, and not all 0: {dict(shares)}")
        exact = {domain: Fraction(str(share)) for domain, share in shares.items() if share > 0}
        denominator = math.lcm(*(share.denominator for share in exact.values()))
        self._weights = {domain: int(share * denominator) for domain, share in exact.items()}
        self._total_weight = sum(self._weights.values())
        self.turns = dict.fromkeys(self._weights, 0)
        """Number of turns that each domain has had."""

    def next(self) -> str:
        """Return the domain of the next turn, and count the turn."""
        # Integer arithmetic: with surplus(d) = (share * n - turns) * total_weight nothing is ever rounded.
        turn = sum(self.turns.values()) + 1
        surplus = {
            domain: weight * turn - self.turns[domain] * self._total_weight for domain, weight in self._weights.items()
        }
        slack = max(2 * len(self._weights) - 2, 1)
        due = [domain for domain in surplus if surplus[domain] * slack >= self._total_weight]
        latest_surplus = Fraction(self._total_weight * (slack - 1), slack)
        chosen = min(due, key=lambda domain: (latest_surplus - surplus[domain]) / self._weights[domain])
        self.turns[chosen] += 1
        return chosen


class HasDomain(Protocol):
    """A prompt, or an example."""

    @property
    def domain(self) -> str:
        """Its domain tag."""


Item = TypeVar("Item", bound=HasDomain)


class PromptStream(Generic[Item]):
    """An endless iterator of prompts or examples by domain shares; each domain has epochs of its own."""

    def __init__(
        self,
        prompts: Sequence[Item],
        *,
        seed: int,
        shuffle: bool = True,
        domain_interleave_probs: Mapping[str, float] | None = None,
    ) -> None:
        """Set up the stream; by default each domain's share is its part of the prompts.

        ``shuffle`` reorders each domain's prompts at each epoch, from ``(seed, domain, epoch)`` alone. Raises
        `ValueError` if there are no prompts, or a domain with a share has none.
        """
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._by_domain: dict[str, list[Item]] = {}
        for prompt in prompts:
            self._by_domain.setdefault(prompt.domain, []).append(prompt)
        if domain_interleave_probs is None:
            domain_interleave_probs = {domain: len(members) for domain, members in self._by_domain.items()}
        self._schedule = DomainSchedule(domain_interleave_probs)
        missing = set(self._schedule.turns) - set(self._by_domain)
        if missing:
            raise ValueError(f"no prompts of domain {', '.join(sorted(missing))}, which has a share of the stream")
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        domain = self._schedule.next()
        members = self._by_domain[domain]
        epoch, position = divmod(self._schedule.turns[domain] - 1, len(members))
        return members[self._order(domain, epoch)[position]]

    def _order(self, domain: str, epoch: int) -> np.ndarray:
        """Return the order of the domain's prompts in an epoch; it is cached until another epoch is requested."""
        known_epoch, order = self._orders.get(domain, (-1, np.arange(0)))
        if known_epoch != epoch:
            size = len(self._by_domain[domain])
            if self._shuffle:
                order = np.random.default_rng(derive_seed(self._seed, "epoch", domain, epoch)).permutation(size)
            else:
                order = np.arange(size)
            self._orders[domain] = (epoch, order)
        return order
