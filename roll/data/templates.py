"""Rendering: from a row of a data set to the text and the token ids that a policy starts from.

The text that is tokenised is exactly the text in the logs. No special token is added to the data: a raw prompt that
needs a leading token contains it, and a chat template writes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


@dataclass(frozen=True)
class PromptRow:
    """One prompt as its source has it: as text, as chat messages, or as both."""

    prompt_id: str
    origin: str
    """Place it was read from, for error messages: ``data/train.jsonl:17``."""
    text: str | None
    messages: list[Message] | None
    ground_truth: Any = None
    domain: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)


class RenderError(ValueError):
    """Raised for a row that the template cannot render; the message is the reason."""


def conversation(row: PromptRow, system_prompt: str | None = None) -> list[Message]:
    """Return a prompt as messages; a text becomes one user message.

    ``system_prompt`` comes first unless the row has a system message of its own.
    """
    messages = row.messages or [{"role": "user", "content": row.text or ""}]
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def render_text(
    row: PromptRow,
    template: Literal["raw", "chat"],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
) -> str:
    """Return the text of a prompt.

    ``raw`` returns the row's text unchanged. ``chat`` passes the row's messages (or its text, as one user message) to
    the tokenizer's chat template with a generation prompt; ``system_prompt`` comes first unless the row has a system
    message of its own. Raises `RenderError`.
    """
    if template == "raw":
        if row.text is None:
            raise RenderError("the row has `messages` but no `prompt`, and `template: raw` needs text")
        return row.text
    messages = conversation(row, system_prompt)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as cause:  # a template is a program and may raise anything
        raise RenderError(f"the chat template refuses the messages ({type(cause).__name__}: {cause})") from cause


def tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return token ids of each text, int32 ``[length]``, without added special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [np.asarray(token_ids, dtype=np.int32) for token_ids in encoded["input_ids"]]
