"""`hf_infer` for the reference: the plain transformers model, whole on each rank, for forward passes only.

Ranks share nothing but the samples of a batch. There are no shards to gather, so a pass waits for no other rank until
the results are joined, and the role needs no engine beside its model. Log-probabilities equal those of a forward-only
`fsdp2_train` within float32 rounding. The price is memory: every device holds all weights.
"""

from __future__ import annotations

import numpy as np
import torch

from roll.data.records import SampleBatch
from roll.trainers.base import TrainerSetup, parse_replica_options
from roll.trainers.forward import HfForward
from roll.trainers.model import prepare_model
from roll.trainers.optimizer import join_process_group, joined_over_ranks, leave_process_group, pick_device
from roll.trainers.step import plan_micro_batches


class HfReplicaStrategy:
    """One rank of the role; see `ForwardStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        """Raise ``ValueError`` for a role that trains, or one that is not a policy."""
        if not setup.forward_only or setup.kind != "policy":
            raise ValueError("hf_infer only computes log-probabilities; a role that learns needs a trainer")
        self.setup = setup
        self.options = parse_replica_options(setup.strategy_config)

    def initialize(self) -> None:
        """Join the process group and load the whole model. Collective."""
        self.device = pick_device(self.setup)
        join_process_group(self.setup, self.options.process_group_timeout_seconds)
        model, head = prepare_model(self.setup, gradient_checkpointing=False)
        self.model = model.to(self.device)
        self.forward = HfForward(self.model, head, self.device, packed=self.setup.infer_limits.packed)

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Return the log-probability of each token given those before it: float32 ``[total_tokens]``, on every rank."""
        setup = self.setup
        plan = plan_micro_batches(batch.lengths, setup.world_size, setup.infer_limits)[setup.rank]
        # No rank waits for another in the middle of a pass, so a rank short of work needs no stand-ins.
        rows = [samples for samples in plan if samples]
        return joined_over_ranks(self.forward.token_logprobs(batch, rows, temperature))

    def offload_states(self) -> None:
        """Move the weights to the CPU. Nothing to do on a CPU."""
        if self.setup.device == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        """Undo `offload_states`."""
        self.model.to(self.device)

    def shutdown(self) -> None:
        """Leave the process group."""
        leave_process_group()
