"""What an engine's record of a response is compared with: the same tokens under plain transformers models."""

from __future__ import annotations

import itertools

import numpy as np
import torch


@torch.no_grad()
def logits_of(model, tokens) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def full_scores(model, prompt, completion) -> np.ndarray:
    """Log-probability of each response token, the whole sequence under one model."""
    tokens = [*prompt, *completion.token_ids.tolist()]
    logprobs = torch.log_softmax(logits_of(model, tokens)[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0].numpy()


@torch.no_grad()
def scores_over_caches(models_by_version, prompt, completion) -> np.ndarray:
    """Log-probability of each response token where a token's keys and values stay those of the weights that computed
    them: position p was computed by the weights that predicted token p + 1."""
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    computed_by = np.concatenate([np.full(len(prompt) - 1, completion.versions[0]), completion.versions])
    bounds = [0, *(np.flatnonzero(np.diff(computed_by)) + 1).tolist(), len(computed_by)]
    cache, rows = None, []
    for start, end in itertools.pairwise(bounds):
        output = models_by_version[computed_by[start]](tokens[:, start:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        rows.append(output.logits[0])
    logprobs = torch.log_softmax(torch.cat(rows)[len(prompt) - 1 :].float(), -1)
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
