"""`deepspeed_train`: DeepSpeed ZeRO stages 0 to 3, with the semantics of `fsdp2_train`.

DeepSpeed shards the model, communicates and applies optimizer steps. Master weights, gradient accumulation, gradient
reduction and optimizer states are float32; forward and backward passes use the configured precision. DeepSpeed reads
its device type and local rank from environment variables only; this module sets them, for the whole process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.algorithms.metrics import PartMetrics
from roll.check.rules import obstacle_to_moving
from roll.configs.strategies import Options
from roll.trainers.base import TrainerSetup
from roll.trainers.compiling import compile_layers
from roll.trainers.model import HfForward, decoder_layers, load_weights
from roll.trainers.options import engine_config, parse_deepspeed_options
from roll.trainers.state import MOMENTS, SavedState, StateSnapshot, common_updates, own_share, whole
from roll.trainers.step import TrainingStep
from roll.trainers.trainer import TrainStrategy, build_optimizer, clip_gradients, divide_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DeepSpeedTrainStrategy(TrainStrategy):
    """One rank of the DeepSpeed trainer; see `TrainStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        self.options = parse_deepspeed_options(setup.strategy_config)
        self.trains = not setup.forward_only
        self.splits_weights = self.options.zero_stage == 3
        """True if weights are sharded over the ranks (ZeRO stage 3)."""
        self.has_engine = self.trains or self.splits_weights
        """True if a DeepSpeed engine is used. A forward-only role needs one only for sharded weights."""
        self.is_whole = self.options.zero_stage == 0 or not self.has_engine
        """True if nothing is sharded: model and optimizer are plain torch objects."""
        self.bfloat16 = setup.model_args.dtype == "bfloat16"
        if self.trains and self.bfloat16 and self.options.zero_stage == 0:
            raise ValueError(
                "ZeRO stage 0 adds bfloat16 gradients up in bfloat16, which loses small ones; "
                "write `zero_optimization: {stage: 1}` (the same steps in less memory) or `model_args.dtype: float32`"
            )

    def initialize(self) -> None:
        setup = self.setup
        self.join_ranks(self.options.process_group_timeout_seconds)
        self.model, head = self.load_model(self.options.gradient_checkpointing)
        if self.options.compile:
            compile_layers(decoder_layers(self.model), self.device)
        self.shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        rounds = self.trains and self.bfloat16
        # DeepSpeed casts weights to bfloat16 before it makes the float32 masters; these references keep the originals.
        masters = {name: parameter.detach() for name, parameter in self.model.named_parameters() if rounds}
        if self.trains:
            self.optimizer = build_optimizer(self.model.parameters(), setup.training_args)
            self.start_schedule()
            self.updates = 0
            self._pending = False
            """True if gradients are accumulated that no update has used yet."""
        if self.has_engine:
            self._start_engine()
        else:
            self.model.to(self.device)
        if rounds:
            self._set_weights(masters.__getitem__)
        computing = self.engine if self.has_engine else self.model
        replays = setup.replays_routing
        self.forward = HfForward(setup.kind, computing, head, self.device, signature_of=self.model, replays=replays)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if self.trains and (self.bfloat16 or self.splits_weights):
                yield name, self.deepspeed.utils.safe_get_full_fp32_param(parameter).detach()
            else:
                with self._whole(parameter):
                    yield name, parameter.detach().float()

    def load(self, path: str) -> None:
        self._set_weights(load_weights(path, self.setup, self.shapes).__getitem__)

    def snapshot(self) -> StateSnapshot:
        parts = []
        for name, parameter in self.model.named_parameters():
            for kind in ("weight", *(MOMENTS if self.updates else ())):
                part = whole(f"{kind}/{name}", self._full_state(parameter, kind))
                parts.append(own_share(part, self.setup.rank, self.setup.world_size))
        updates = dict.fromkeys(self.shapes, self.updates) if self.updates else {}
        facts = {"optimizer_steps": self.optimizer_steps, "updates": updates}
        return StateSnapshot(parts, facts, self.setup.world_size)

    def restore(self, state: SavedState) -> None:
        state.require_weights(self.shapes)
        for name, shape in self.shapes.items():
            state.require_shape(f"weight/{name}", shape)
        self.updates = common_updates(state)
        if self.updates:
            self._make_moments()
            for (name, parameter), moment in product(self.model.named_parameters(), MOMENTS):
                value = state.read_whole(f"{moment}/{name}", self.shapes[name]).to(self.device)
                if self.is_whole:
                    self.optimizer.state[parameter][moment].copy_(value)
                else:
                    self._set_state(parameter, moment, value)
        self._set_weights(lambda name: state.read_whole(f"weight/{name}", self.shapes[name]))
        self.optimizer_steps = state.facts["optimizer_steps"]

    def shutdown(self) -> None:
        """Destroy the DeepSpeed engine and leave all process groups."""
        if self.has_engine:
            self.engine.destroy()
            self.deepspeed.comm.destroy_process_group()
        super().shutdown()

    def _start_engine(self) -> None:
        """Wrap the model in a DeepSpeed engine, which changes it in place. Collective."""
        self.deepspeed = import_deepspeed(self.device)
        config = engine_config(
            self.options,
            bfloat16=self.bfloat16,
            # Without ZeRO, DeepSpeed clips but does not report the norm.
            max_grad_norm=0.0 if self.options.zero_stage == 0 else self.setup.training_args.max_grad_norm,
        )
        if self.splits_weights:
            self._split_weights(config)
        optimizer = self.optimizer if self.trains else None
        engine, *_ = self.deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self.engine: DeepSpeedEngine = engine
        if self.trains and self.options.zero_stage in (1, 2):
            self._allocate_moments()

    def _split_weights(self, config: dict[str, Any]) -> None:
        """Shard the weights one at a time, so that no device ever holds all of them."""
        if self.bfloat16:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.deepspeed.init_distributed(dist_init_required=None)
        self.deepspeed.zero.Init(module=self.model, config_dict_or_path=config)
        # The engine does not move an already sharded model to the device, so its buffers are moved here.
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)

    def _allocate_moments(self) -> None:
        """Create the optimizer moments, as AdamW does at its first step.

        DeepSpeed needs them earlier: it links the moments of all parameter groups after the first group has stepped.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32), **moments}

    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> list[PartMetrics]:
        parts: list[PartMetrics] = []
        # The last part needs a backward pass even if empty: it makes DeepSpeed reduce the gradients of earlier parts.
        learns = not step.is_empty or (step.is_last and self._pending)
        for micro_batch in step.micro_batches(rows, self.device, self.setup.train_limits.packed):
            self.engine.set_gradient_accumulation_boundary(step.is_last and len(parts) + 1 == len(rows))
            with torch.set_grad_enabled(learns):
                outputs = self.forward.outputs(micro_batch, temperature, step.needs_entropy_gradient)
                loss, metrics = step.loss(micro_batch, *outputs)
            parts.append(metrics)
            if learns:
                # DeepSpeed averages gradients over ranks, but the ranks' contributions must be summed.
                self.engine.backward(loss * self.setup.world_size)
        self._pending = self._pending or learns
        return parts

    def _divide_gradients(self, divisor: float) -> None:
        if self.options.zero_stage == 1 and self.bfloat16:
            # In this case DeepSpeed uses an optimizer without a loss scale.
            for gradients in self.engine.optimizer.fp32_groups_gradients_flat:
                gradients.div_(divisor)
        elif self.options.zero_stage > 0:
            # The next step divides gradients by this loss scale, so it serves as the divisor.
            self.engine.optimizer.loss_scale = divisor
        else:
            divide_gradients(self.model.parameters(), divisor)

    def _update(self, nothing_to_learn: bool) -> tuple[float, bool]:
        pending, self._pending = self._pending, False
        if nothing_to_learn:
            if pending:
                # The correction rejected all tokens. DeepSpeed clears gradients (here 0) only in a step, so take one
                # at learning rate 0, which leaves the weights unchanged.
                self._set_learning_rate(0.0)
                self.engine.step()
                self.updates += 1
            return 0.0, False
        if self.options.zero_stage > 0:
            self.engine.step()
            self.engine.optimizer.loss_scale = 1.0
            grad_norm, updated = float(self.engine.get_global_grad_norm()), self.engine.was_step_applied()
        else:
            grad_norm = float(clip_gradients(self.model.parameters(), self.setup.training_args.max_grad_norm))
            updated = math.isfinite(grad_norm)
            if updated:
                self.engine.step()
            else:
                self.engine.zero_grad()
        self.updates += updated
        return grad_norm, updated

    @torch.no_grad()
    def _set_weights(self, weight_of: Callable[[str], Tensor]) -> None:
        """Write full tensors into the float32 master weights and the model's weights. Collective."""
        for name, parameter in self.model.named_parameters():
            weight = weight_of(name).to(self.device)
            if self.trains and not self.is_whole:
                self._set_state(parameter, "weight", weight.float())
            with self._whole(parameter, written_by=0):
                parameter.data.copy_(weight)

    def _set_state(self, parameter: nn.Parameter, kind: str, full: Tensor) -> None:
        """Write this rank's shard of a full tensor into the float32 master weight or a moment."""
        utils = self.deepspeed.utils
        if not self.splits_weights:
            if kind == "weight":
                utils.safe_set_full_fp32_param(parameter, full)
            else:
                utils.safe_set_full_optimizer_state(parameter, full, kind)
            return
        # All shards have the same length, the last ones with padding, which DeepSpeed's own setter for full tensors
        # does not support.
        length = utils.safe_get_local_fp32_param(parameter).numel()
        padded = nn.functional.pad(full.flatten(), (0, length * self.setup.world_size - full.numel()))
        share = padded.narrow(0, length * self.setup.rank, length)
        if kind == "weight":
            utils.safe_set_local_fp32_param(parameter, share)
        else:
            utils.safe_set_local_optimizer_state(parameter, share, kind)

    def _full_state(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return a full float32 weight or moment, valid until the next call. Collective."""
        if self.is_whole:
            return parameter.detach() if kind == "weight" else self.optimizer.state[parameter][kind]
        if kind == "weight":
            return self.deepspeed.utils.safe_get_full_fp32_param(parameter)
        return self.deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)

    def _make_moments(self) -> None:
        """Make DeepSpeed create the optimizer moments and link them to their weights.

        DeepSpeed does so at the first update, so this takes one with zero gradients. Its effect on the weights does not
        matter, because the caller overwrites them.
        """
        self.engine.set_gradient_accumulation_boundary(True)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        self.engine.backward(self.engine(input_ids=ids, use_cache=False).logits.float().sum() * 0.0)
        self.engine.step()
        for state in self.optimizer.state.values():
            state["step"].fill_(self.updates)

    def _whole(self, parameter: nn.Parameter, written_by: int | None = None) -> AbstractContextManager[object]:
        """Gather a sharded parameter within the block. Changes made by rank ``written_by`` are kept, others are not."""
        if not self.splits_weights:
            return nullcontext()
        return self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=written_by)

    def _move_states(self, device: torch.device) -> None:
        """Move weights and optimizer state. Raises ``RuntimeError`` if DeepSpeed cannot move them."""
        if self.is_whole:
            super()._move_states(device)
        elif device.type != "cpu":
            self.engine.reload_states()
        else:
            options = Options("deepspeed_train", self.setup.strategy_config)
            obstacle = obstacle_to_moving(options, bfloat16=self.bfloat16, learns=self.trains)
            if obstacle is not None:
                raise RuntimeError(f"{obstacle.message}; {obstacle.remedy}, or give the role devices of its own")
            self.engine.offload_states()


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import deepspeed after setting the environment variables that select its device."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # Otherwise it compiles an extension at its first start (a minute on two cores) that only its inference uses.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    return deepspeed
