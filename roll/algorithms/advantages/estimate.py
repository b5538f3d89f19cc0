"""Turn the rewards of samples into the advantages of tokens."""

from __future__ import annotations

from torch import Tensor

from roll.algorithms.advantages.estimator import AdvantageEstimator
from roll.algorithms.advantages.moments import Groups
from roll.algorithms.advantages.whitening import clip_advantages, whiten
from roll.algorithms.aggregation import keep
from roll.algorithms.kl import kl_penalised_token_rewards, sequence_token_rewards


def estimate_advantages(
    estimator: AdvantageEstimator,
    rewards: Tensor,
    response_mask: Tensor,
    groups: Groups,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    whitened: bool = False,
    clip: float | None = None,
    values: Tensor | None = None,
    baseline_rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turns: Tensor | None = None,
    states: Tensor | None = None,
) -> Tensor:
    """Turn the rewards of samples ``[batch]`` into the advantages of tokens ``[batch, seq]``, for a whole batch.

    Return float64 if the rewards are float64, else float32. With ``logprobs`` and ``reference_logprobs`` the token
    rewards include the KL penalty; give both or neither, else ``ValueError``. ``turn_rewards`` ``[batch, seq]`` are
    added to the token rewards. Whitening comes after the estimator, clipping to [-clip, clip] last. The other arguments
    are the fields of `AdvantageInputs`; ``ValueError`` names one that the estimator needs and lacks.
    """
    if logprobs is not None and reference_logprobs is not None:
        token_rewards = kl_penalised_token_rewards(
            rewards, logprobs, reference_logprobs, response_mask, kl_coef, kl_estimator
        )
    elif logprobs is None and reference_logprobs is None:
        token_rewards = sequence_token_rewards(rewards, response_mask)
    else:
        raise ValueError("a KL penalty needs the log-probabilities of both the policy and the reference")
    if turn_rewards is not None:
        token_rewards = token_rewards + keep(turn_rewards, response_mask).to(token_rewards.dtype)
    advantages = estimator(
        token_rewards,
        response_mask,
        groups,
        values=values,
        baseline_rewards=baseline_rewards,
        turns=turns,
        states=states,
    )
    return shape_advantages(advantages, response_mask, whitened, clip)


def shape_advantages(advantages: Tensor, response_mask: Tensor, whitened: bool, clip: float | None) -> Tensor:
    """Whiten advantages over the batch if ``whitened``, then clip them to [-clip, clip]; all ``[batch, seq]``."""
    if whitened:
        advantages = whiten(advantages, response_mask)
    return advantages if clip is None else clip_advantages(advantages, clip)
