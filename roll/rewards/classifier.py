"""A transformers sequence classifier as reward model.

Conversations are formatted by the chat template of the *reward model's* tokenizer. Those of similar length share a
forward pass, padded on the right. The model itself ignores the padding when it chooses the token for the score, so a
batch gives the same scores as one conversation at a time. A checkpoint without a classification head is rejected,
because transformers would use a random one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from roll.data.encoding import ContentEncoder
from roll.data.tokenizer import load_tokenizer
from roll.rewards.model import Conversation, Scored, ScorerSetup, position_limit


class HFClassifier:
    """A sequence classifier; implements `ScoreStrategy`."""

    def __init__(self, setup: ScorerSetup) -> None:
        """Load tokenizer and model.

        Raises ``ValueError`` if the files have no classification head, or if `label` or `max_length` do not fit the
        model; ``OSError`` if there are no safetensors files.
        """
        self._setup = setup
        self._tokenizer = load_tokenizer(
            setup.model_path, trust_remote_code=setup.model_args.trust_remote_code, config_path="model_args"
        )
        self._contents = ContentEncoder(self._tokenizer)
        self._model = load_classifier(setup)
        self._text_config = self._model.config.get_text_config()
        self._max_length = allowed_length(setup, self._model)

    def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Score conversations; see `ScoreStrategy`."""
        results: list[Scored] = [Scored() for _ in conversations]
        rows: list[tuple[int, list[int], int]] = []
        for index, conversation in enumerate(conversations):
            try:
                tokens = self._tokens(conversation)
            except Exception as cause:  # a template is a program and may raise anything
                results[index] = Scored(problem=f"the chat template refuses it ({type(cause).__name__}: {cause})")
                continue
            cut = max(0, len(tokens) - (self._max_length or len(tokens)))
            if not tokens:
                results[index] = Scored(problem="no token is left of it")
            elif cut and self._setup.config.overlong == "refuse":
                results[index] = Scored(problem=f"it has {len(tokens)} tokens, and {self._max_length} are allowed")
            else:
                rows.append((index, tokens[cut:], cut))
        rows.sort(key=lambda row: (len(row[1]), row[0]))
        for start in range(0, len(rows), self._setup.batch_size):
            batch = rows[start : start + self._setup.batch_size]
            for (index, tokens, cut), value in zip(batch, self._forward([row[1] for row in batch]), strict=True):
                problem = "" if math.isfinite(value) else f"the model scored {value}"
                results[index] = Scored(value, len(tokens), cut, problem)
        return results

    def offload_states(self) -> None:
        """Move the weights off the device. Nothing to do on a CPU."""
        if self._setup.device == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        """Undo `offload_states`."""
        self._model.to(self._setup.device)

    def _tokens(self, conversation: Conversation) -> list[int]:
        text = self._tokenizer.apply_chat_template(self._contents.shielded(conversation), tokenize=False)
        return self._contents.encode(text).tolist()

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Return the scores of one batch of token sequences."""
        own_pad = self._text_config.pad_token_id
        pad = own_pad
        if own_pad is None and len(rows) > 1:
            pad = unused_id(rows, self._text_config.vocab_size)
            if pad is None:
                return [value for row in rows for value in self._forward([row])]
        width = max(len(row) for row in rows)
        token_ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        attention_mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        # Models find the last token by the padding id. A model without one would read the very last position; with an
        # id that occurs nowhere in the rows, it finds the last token.
        self._text_config.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits = self._model(
                    input_ids=token_ids.to(self._setup.device), attention_mask=attention_mask.to(self._setup.device)
                ).logits
        finally:
            self._text_config.pad_token_id = own_pad
        return logits[:, self._setup.config.label or 0].float().tolist()


def allowed_length(setup: ScorerSetup, model: PreTrainedModel) -> int | None:
    """Return the longest accepted input in tokens; None if there is no limit.

    Raises ``ValueError`` if the model cannot take the configured length.
    """
    limits = [limit for limit in (position_limit(model.config), *_position_tables(model)) if limit is not None]
    wanted, least = setup.config.max_length, min(limits, default=None)
    if wanted is not None and least is not None and wanted > least:
        raise ValueError(f"{setup.model_path} has positions for {least} tokens, and `max_length` is {wanted}")
    return wanted or least


def _position_tables(model: PreTrainedModel) -> Iterator[int]:
    """Yield the number of usable positions of each position embedding. Rows up to a padding row are not usable."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, torch.nn.Embedding):
            yield module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)


def unused_id(rows: Sequence[Sequence[int]], vocabulary: int) -> int | None:
    """Return a token id that is in none of the rows; None if all are used."""
    used = {token for row in rows for token in row}
    return next((token for token in range(vocabulary) if token not in used), None)


def load_classifier(setup: ScorerSetup) -> PreTrainedModel:
    """Return the model in evaluation mode on its device.

    Raises ``ValueError`` if weights are missing in the files, or if `label` is not one of the model's labels.
    """
    model, found = AutoModelForSequenceClassification.from_pretrained(
        setup.model_path,
        dtype=getattr(torch, setup.model_args.dtype),
        attn_implementation=setup.model_args.attn_implementation,
        trust_remote_code=setup.model_args.trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"{setup.model_path} is no trained sequence classifier: it lacks {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more weights" if len(missing) > 5 else "")
        )
    labels = model.config.num_labels
    if (setup.config.label or 0) >= labels or (setup.config.label is None and labels != 1):
        raise ValueError(f"{setup.model_path} has {labels} labels, and `label` is {setup.config.label}")
    return model.to(setup.device).eval().requires_grad_(False)
