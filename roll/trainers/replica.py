"""`hf_infer` for the reference: the plain transformers model, whole on each rank, for forward passes only.

Ranks share nothing but the samples of a batch. There are no shards to gather, so a pass waits for no other rank until
the results are joined, and the role needs no engine beside its model. Log-probabilities equal those of a forward-only
`fsdp2_train` within float32 rounding. The price is memory: every device holds all weights.
"""

from __future__ import annotations

from roll.configs.plugins import made
from roll.data.records import SampleBatch
from roll.trainers.base import HfReplicaOptions, MicroBatchLimits, TrainerSetup
from roll.trainers.model import HfForward, prepare_model
from roll.trainers.trainer import ForwardRank


class HfReplicaStrategy(ForwardRank):
    """One rank of the role; see `ForwardStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Raise ``ValueError`` for a role that trains, or one that is not a policy."""
        super().__init__(setup)
        if not setup.forward_only or setup.kind != "policy":
            raise ValueError("hf_infer only computes log-probabilities; a role that learns needs a trainer")
        self.options = made("hf_infer", HfReplicaOptions, setup.strategy_config, "strategy_config")

    def initialize(self) -> None:
        self.join_ranks(self.options.process_group_timeout_seconds)
        model, head = prepare_model(self.setup, gradient_checkpointing=False)
        self.model = model.to(self.device)
        self.forward = HfForward("policy", self.model, head, self.device)

    def _rows(self, batch: SampleBatch, limits: MicroBatchLimits) -> list[list[int]]:
        # No rank waits for another in the middle of a pass, so a rank short of work needs no stand-ins.
        return [samples for samples in super()._rows(batch, limits) if samples]
