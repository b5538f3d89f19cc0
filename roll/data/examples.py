"""The examples of supervised fine-tuning: token ids, and which of them are learned.

In a row with a `response`, only the response and its end mark are learned. In a row of `messages` alone, every
assistant turn is learned with its end mark. Texts are tokenised as in a rollout: the prompt up to the assistant's
content, then the content, then the template's text up to its next turn (`roll.data.chat`), so reinforcement learning
continues with exactly the tokens that were learned here. The end mark is the text that the chat template writes after
an assistant's content, up to its first special token. If it writes none, or without a template, the end mark is the
tokenizer's end token. All problems of the data are raised at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from roll.configs.errors import Problems
from roll.configs.plugins import problem
from roll.configs.roles import ExampleArguments
from roll.data.chat import ChatTurns, TemplateRefused
from roll.data.encoding import ContentEncoder, ControlTokensRefused, tokenise
from roll.data.records import SampleBatch
from roll.data.sources import (
    MAX_PROBLEMS_PER_FILE,
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

ASSISTANT = "assistant"
Part = tuple[str | np.ndarray, bool]
"""A text to tokenise (in chats rendered from shielded contents) or token ids (int32), and True if it is learned."""


@dataclass(frozen=True)
class Example:
    """One sequence that is learned from."""

    example_id: str
    """Unique and stable in its data set, for example ``train.jsonl:17``."""
    domain: str
    token_ids: np.ndarray
    """int32 ``[length]``."""
    response_mask: np.ndarray
    """bool ``[length]``: True for tokens that are learned."""


@dataclass(frozen=True)
class Examples:
    """The usable examples of a data section."""

    examples: list[Example]
    overlong: int
    """Number of rows that were left out because they are too long."""
    end: int
    """Id of the token that ends a response."""

    def fingerprint(self, data_args: ExampleArguments) -> str:
        """Return the fingerprint of the examples and of the settings that decide their order."""
        digest = xxhash.xxh3_128(json.dumps([data_args.shuffle, data_args.domain_interleave_probs]).encode())
        for example in self.examples:
            digest.update(f"{example.example_id}\0{example.domain}\0".encode("utf-8", "surrogatepass"))
            digest.update(example.token_ids.tobytes())
            digest.update(example.response_mask.tobytes())
        return digest.hexdigest()


def batch_of(examples: Sequence[Example]) -> SampleBatch:
    """Return the examples, in their order, as a batch for a trainer."""
    return SampleBatch(
        lengths=np.array([len(example.token_ids) for example in examples], dtype=np.int64),
        tokens={
            "token_ids": np.concatenate([example.token_ids for example in examples]),
            "response_mask": np.concatenate([example.response_mask for example in examples]),
        },
    )


def load_examples(
    data_args: ExampleArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    path: str,
    seed: int,
    refuse_control_tokens: bool = False,
) -> Examples:
    """Read, tokenise, check and select the examples of one `data_args`.

    ``path`` is the configuration path of ``data_args`` and begins the path of each problem. ``sequence_length`` counts
    tokens. For ``max_samples`` and ``refuse_control_tokens`` see `roll.data.prompts.load_prompts`. Raises
    `ConfigError`.
    """
    problems = Problems()
    rows = usable_rows(data_args, tokenizer, path, problems, seed)
    contents = ContentEncoder(tokenizer)
    is_chat = data_args.template == "chat"
    end, make = _chat_parts(data_args, contents, tokenizer, path) if is_chat else _raw_parts(tokenizer, path)
    found: list[tuple[PromptRow, list[Part]]] = []
    bad = 0
    for row in rows:
        try:
            if row.pictures:
                raise BadRow("examples with pictures are not supported")
            if refuse_control_tokens and is_chat:
                require_unspelled(contents, [*conversation(row, data_args.system_prompt), _response(row), _tools(row)])
            found.append((row, list(make(row))))
        except (BadRow, TemplateRefused) as cause:
            bad += 1
            if bad <= MAX_PROBLEMS_PER_FILE:
                problems.add(path, f"{row.origin}: {_reason(cause)}", _remedy(cause))
    _raise_bad(bad, path, problems)
    examples = list[Example]()
    for (row, _), example in zip(found, _tokenised(found, contents, tokenizer), strict=True):
        if isinstance(example, Example):
            examples.append(example)
            continue
        bad += 1
        if bad <= MAX_PROBLEMS_PER_FILE:
            problems.add(path, f"{row.origin}: {example}", "take these characters out of the row")
    _raise_bad(bad, path, problems)
    empty = [example.example_id for example in examples if example.response_mask[0]]
    if empty:
        message = f"no token is left of the prompts of {named(empty)}, and nothing predicts a first token"
        problems.add(path, message, "correct these rows, or use the tokenizer they were made for")
    lengths = {example.example_id: len(example.token_ids) for example in examples}
    words = ("examples", "sequence_length")
    may_drop = data_args.overlong_prompts == "drop"
    overlong = check_lengths(lengths, sequence_length, words, may_drop, path, problems)
    kept = [example for example in examples if example.example_id not in overlong]
    domains = {example.domain for example in kept}
    check_shares(data_args.domain_interleave_probs, domains, f"{path}.domain_interleave_probs", problems)
    problems.raise_any()
    return Examples(kept, len(overlong), int(end[-1]))


def _raise_bad(bad: int, path: str, problems: Problems) -> None:
    """Raise `ConfigError` if there are problems, with the number of wrong rows that are not among them."""
    if bad > MAX_PROBLEMS_PER_FILE:
        message = f"{bad - MAX_PROBLEMS_PER_FILE} more rows are wrong"
        problems.add(path, message, "check the format of all of them")
    problems.raise_any()


def _reason(cause: BadRow | TemplateRefused) -> str:
    """Return the reason why a row is refused, without the advice for environments in a template's message."""
    return re.split(r"; |\. Take ", str(cause))[0] if isinstance(cause, TemplateRefused) else str(cause)


def _remedy(cause: BadRow | TemplateRefused) -> str:
    if isinstance(cause, TemplateRefused):
        return "write messages that the template takes; if it rewrites earlier turns, give the last one as `response`"
    return "correct or delete the row, name its columns under `columns`, or choose the other `template`"


def _tokenised(
    found: Sequence[tuple[PromptRow, Sequence[Part]]], contents: ContentEncoder, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Example | ControlTokensRefused]:
    """Yield the example of each row, or the error if it cannot be encoded. Each part continues the one before it."""

    # Tokenising all texts at once is several times faster, and equivalent unless a text depends on the one before it.
    def is_plain(part: str | np.ndarray) -> bool:
        return isinstance(part, str) and not contents.writes_prefix and not contents.is_shielded(part)

    ids = iter(tokenise([str(part) for _, parts in found for part, _ in parts if is_plain(part)], tokenizer))
    for row, parts in found:
        pieces = [next(ids) if is_plain(part) else part for part, _ in parts]
        before: np.ndarray | None = None
        try:
            for place, piece in enumerate(pieces):
                if isinstance(piece, str):
                    pieces[place] = piece = contents.encode(piece, before)
                before = piece if before is None or len(piece) else before
        except ControlTokensRefused as cause:
            yield cause
            continue
        encoded = [np.asarray(piece, dtype=np.int32) for piece in pieces]
        mask = np.concatenate([np.full(len(piece), part[1]) for piece, part in zip(encoded, parts, strict=True)])
        yield Example(row.prompt_id, row.domain, np.concatenate(encoded), mask)


def _response(row: PromptRow) -> str | None:
    """Return the response of a row; None if it has none. Raises `BadRow` if it is empty or not text."""
    response = row.metadata.get("response")
    if response is not None and not isinstance(response, str):
        raise BadRow(f"`response` must be text, not a {type(response).__name__}")
    if response == "":
        raise BadRow("`response` is empty")
    return response if response is None else required_text(response, "`response`")


def _end_token(tokenizer: PreTrainedTokenizerBase, path: str) -> np.ndarray:
    if tokenizer.eos_token_id is None:
        message = "the tokenizer has no end token, so no response could learn to end"
        raise problem(f"{path}.template", message, "use a tokenizer with `eos_token`, or a chat template that has one")
    return np.array([tokenizer.eos_token_id], dtype=np.int32)


def _raw_parts(
    tokenizer: PreTrainedTokenizerBase, path: str
) -> tuple[np.ndarray, Callable[[PromptRow], Iterator[Part]]]:
    """Return the end mark (int32), and the function that splits a row into parts."""
    end = _end_token(tokenizer, path)

    def parts(row: PromptRow) -> Iterator[Part]:
        response = _response(row)
        if row.text is None:
            raise BadRow("the row has `messages` but no `prompt`, and `template: raw` needs text")
        if response is None:
            raise BadRow(f"no `response`; it has {', '.join(f'`{name}`' for name in ['prompt', *row.metadata])}")
        yield row.text, False
        yield response, True
        yield end, True

    return end, parts


def _chat_parts(
    data_args: ExampleArguments, contents: ContentEncoder, tokenizer: PreTrainedTokenizerBase, path: str
) -> tuple[np.ndarray, Callable[[PromptRow], Iterator[Part]]]:
    """Return the end mark (int32), and the function that splits a row into parts."""
    turns = ChatTurns(tokenizer, data_args.chat_template_kwargs)
    try:
        leading, opening, closing = turns.leading, turns.opening, turns.closing
    except TemplateRefused as refused:
        remedy = "use `template: raw`, or a model with another chat template"
        raise problem(f"{path}.template", _reason(refused), remedy) from refused
    special = [place for place, token_id in enumerate(closing) if int(token_id) in turns.special_ids]
    end = closing[: special[0] + 1] if special else _end_token(tokenizer, path)

    def answer(text: str, is_learned: bool = True) -> str:
        """Return the policy's part of a turn: without the thought tag that the template itself opens.

        Raises `BadRow` if the template opens a thought and a learned text has none.
        """
        tag = opening.strip()
        if tag and text.startswith(tag):
            text = text.removeprefix(opening) if text.startswith(opening) else text.removeprefix(tag).lstrip()
        elif tag and is_learned and f"</{tag[1:]}" not in text:
            raise BadRow(f"the template opens {tag!r} before each answer, and this one has no thought: {text[:40]!r}")
        return leading + contents.shielded(text)

    def parts(row: PromptRow) -> Iterator[Part]:
        messages, response = conversation(row, data_args.system_prompt), _response(row)
        tools = _tools(row)
        if response is not None:
            if messages[-1]["role"] == ASSISTANT:
                raise BadRow("`messages` ends with `assistant` already, and there is a `response`")
            yield turns.render(contents.shielded(messages), contents.shielded(tools)), False
            yield answer(response), True
            yield end, True
            return
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        learned = [_is_learned(messages[place], place) for place in places]
        _require_turns(messages, places)
        if not any(learned):
            raise BadRow("no turn of `assistant` is learned: each has `weight: 0` or `train: false`")
        begun = turns.begin(messages[: places[0]], tools)
        yield begun.prompt_token_ids, False
        for place, is_learned, following in zip(places, learned, [*places[1:], None], strict=True):
            yield answer(messages[place]["content"], is_learned), is_learned
            yield end, is_learned
            if following is not None:
                yield begun.glue(end, messages[place + 1 : following]), False

    return end, parts


def _tools(row: PromptRow) -> list[dict[str, object]]:
    """Return the schemas of a row's tools, which may be JSON text. Raises `BadRow` for anything else."""
    tools = row.metadata.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as cause:
            raise BadRow(f"`tools` is text, but not JSON ({cause.msg})") from cause
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("`tools` must be a list of schemas")
    return tools


LEARNED_KEYS = ("weight", "train")
"""Keys that mark a message as learned or not in the files of other systems."""


def _is_learned(message: Mapping[str, object], place: int) -> bool:
    """Return True unless a turn is marked as not learned. Raises `BadRow` for values other than 0, 1 and booleans."""
    for key in LEARNED_KEYS:
        value = message.get(key)
        if value is not None and value not in (0, 1):
            raise BadRow(f"`{key}` of message {place} is {value!r}; write true, false, 0 or 1")
    return all(message.get(key) in (None, 1) for key in LEARNED_KEYS)


def _require_turns(messages: Sequence[Message], places: Sequence[int]) -> None:
    """Raise `BadRow` unless there are assistant turns (at ``places``), none comes first, and each is only text."""
    if not places:
        raise BadRow("no `response`, and no turn of `assistant` in `messages`")
    if places[0] == 0:
        raise BadRow("`messages` begins with `assistant`, which nothing asked")
    for place in places:
        known = ("role", "content", *LEARNED_KEYS)
        more = [key for key, value in messages[place].items() if key not in known and value]
        if more:
            raise BadRow(f"`{more[0]}` of message {place} (`assistant`) would not be learned: only `content` is")
        if not messages[place]["content"]:
            raise BadRow(f"message {place} (`assistant`) has no `content`")
