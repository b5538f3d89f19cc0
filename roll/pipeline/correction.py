"""Off-policy correction of a batch, before its first update.

Weights and rejection come from the distance between two policies: the trainer's at that moment (proximal) and the one
that sampled (behaviour).
"""

from __future__ import annotations

import numpy as np
import torch

from roll.algorithms.correction import Correction, correct
from roll.pipeline.batch import TrainingBatch


def add_correction(
    batch: TrainingBatch, correction: Correction, *, max_lag: int | None, lags_capped: bool
) -> dict[str, float]:
    """Fill ``correction_weights`` (float32 ``[total_tokens]``) into the batch. Rejected tokens leave the loss.

    The batch must have ``proximal_logprobs``. Returns the metrics of the correction, also per lag up to ``max_lag``,
    which includes older tokens if ``lags_capped``.
    """
    data = batch.data
    mask = torch.from_numpy(data.padded("response_mask", fill=False))
    result = correct(
        torch.from_numpy(data.padded("proximal_logprobs")),
        torch.from_numpy(data.padded("behaviour_logprobs")),
        mask,
        correction,
        trained=torch.from_numpy(data.padded("loss_mask", fill=False)) if "loss_mask" in data.tokens else None,
        lags=torch.from_numpy(data.padded("lags")),
        max_lag=max_lag,
        capped=lags_capped,
    )
    inside = np.arange(mask.shape[1])[None, :] < data.lengths[:, None]
    if correction.weight is not None:
        data.tokens["correction_weights"] = result.weights.float().numpy()[inside]
    if correction.reject:
        batch.leave_out(result.kept.numpy()[inside])
    return result.metrics
