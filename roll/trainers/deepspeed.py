"""`deepspeed_train`: DeepSpeed's ZeRO, stages 0 to 3, with the semantics of `fsdp2_train`.

DeepSpeed shards, communicates and steps. Master weights, gradients between micro-batches and ranks, and optimizer
states are float32; computing is in the configured precision. DeepSpeed takes its kind of device and its local rank from
the environment only; both are set here, in a process that trains nothing else.
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
from roll.trainers.model import HfForward, load_weights, prepare_model
from roll.trainers.options import engine_config, parse_deepspeed_options
from roll.trainers.state import MOMENTS, SavedState, StateSnapshot, common_updates, own_share, whole
from roll.trainers.step import TrainingStep
from roll.trainers.trainer import TrainStrategy, build_optimizer, clip_gradients, divide_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DeepSpeedTrainStrategy(TrainStrategy):
    """One rank of the trainer; see `TrainStrategy` for the contract of each method."""

    def __init__(self, setup: TrainerSetup) -> None:
        super().__init__(setup)
        self.options = parse_deepspeed_options(setup.strategy_config)
        self.trains = not setup.forward_only
        self.splits_weights = self.options.zero_stage == 3
        """True if each rank holds only its share of the weights."""
        self.has_engine = self.trains or self.splits_weights
        """True if DeepSpeed is used. Forward passes alone need it only if weights are split."""
        self.is_whole = self.options.zero_stage == 0 or not self.has_engine
        """True if nothing is split: model and optimizer are torch's own."""
        self.bfloat16 = setup.model_args.dtype == "bfloat16"
        if self.trains and self.bfloat16 and self.options.zero_stage == 0:
            raise ValueError(
                "ZeRO stage 0 adds bfloat16 gradients up in bfloat16, which loses small ones; "
                "write `zero_optimization: {stage: 1}` (the same steps in less memory) or `model_args.dtype: float32`"
            )

    def initialize(self) -> None:
        setup = self.setup
        self.join_ranks(self.options.process_group_timeout_seconds)
        self.model, head = prepare_model(setup, self.options.gradient_checkpointing)
        self.shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        rounds = self.trains and self.bfloat16
        # DeepSpeed rounds the weights before it copies the masters. These references keep the weights as loaded.
        masters = {name: parameter.detach() for name, parameter in self.model.named_parameters() if rounds}
        if self.trains:
            self.optimizer = build_optimizer(self.model.parameters(), setup.training_args)
            self.start_schedule()
            self.updates = 0
            self._pending = False
            """True if gradients wait for an update."""
        if self.has_engine:
            self._start_engine()
        else:
            self.model.to(self.device)
        if rounds:
            self._set_weights(masters.__getitem__)
        computing = self.engine if self.has_engine else self.model
        self.forward = HfForward(setup.kind, computing, head, self.device, signature_of=self.model)

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
        """Leave the process group, and DeepSpeed's own."""
        if self.has_engine:
            self.engine.destroy()
            self.deepspeed.comm.destroy_process_group()
        super().shutdown()

    def _start_engine(self) -> None:
        """Wrap the model, which DeepSpeed changes in place. Collective."""
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
        """Split the weights one by one, so that no device ever holds all of them."""
        if self.bfloat16:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.deepspeed.init_distributed(dist_init_required=None)
        self.deepspeed.zero.Init(module=self.model, config_dict_or_path=config)
        # An engine does not move a model that was split before it, and the model's buffers have not moved yet.
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)

    def _allocate_moments(self) -> None:
        """Create the moments, as AdamW does at its first step.

        DeepSpeed needs them earlier: it links those of all groups to their weights once the first group has stepped.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32), **moments}

    def _accumulate(self, step: TrainingStep, rows: Sequence[Sequence[int]], temperature: float) -> list[PartMetrics]:
        parts: list[PartMetrics] = []
        # The last backward pass makes DeepSpeed complete the gradients of all parts.
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
            # DeepSpeed has another optimizer for this case, which knows no scale.
            for gradients in self.engine.optimizer.fp32_groups_gradients_flat:
                gradients.div_(divisor)
        elif self.options.zero_stage > 0:
            # The next step undoes this scale, whatever the gradients were multiplied with.
            self.engine.optimizer.loss_scale = divisor
        else:
            divide_gradients(self.model.parameters(), divisor)

    def _update(self, nothing_to_learn: bool) -> tuple[float, bool]:
        pending, self._pending = self._pending, False
        if nothing_to_learn:
            if pending:
                # The correction rejected all tokens, and DeepSpeed drops gradients (here 0) in a step only: one that
                # leaves the weights as they are.
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
        """Write full tensors into the master weights and into the weights that are computed with. Collective."""
        for name, parameter in self.model.named_parameters():
            weight = weight_of(name).to(self.device)
            if self.trains and not self.is_whole:
                self._set_state(parameter, "weight", weight.float())
            with self._whole(parameter, written_by=0):
                parameter.data.copy_(weight)

    def _set_state(self, parameter: nn.Parameter, kind: str, full: Tensor) -> None:
        """Write this rank's share of a full tensor into its share of the float32 master or of a moment."""
        utils = self.deepspeed.utils
        if not self.splits_weights:
            if kind == "weight":
                utils.safe_set_full_fp32_param(parameter, full)
            else:
                utils.safe_set_full_optimizer_state(parameter, full, kind)
            return
        # All shares are equally long. The excess of the last ones is padding, which DeepSpeed's own call for full
        # tensors does not expect.
        length = utils.safe_get_local_fp32_param(parameter).numel()
        padded = nn.functional.pad(full.flatten(), (0, length * self.setup.world_size - full.numel()))
        share = padded.narrow(0, length * self.setup.rank, length)
        if kind == "weight":
            utils.safe_set_local_fp32_param(parameter, share)
        else:
            utils.safe_set_local_optimizer_state(parameter, share, kind)

    def _full_state(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return a whole float32 weight or moment. Collective. Read it before asking for the next one."""
        if self.is_whole:
            return parameter.detach() if kind == "weight" else self.optimizer.state[parameter][kind]
        if kind == "weight":
            return self.deepspeed.utils.safe_get_full_fp32_param(parameter)
        return self.deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)

    def _make_moments(self) -> None:
        """Let DeepSpeed create moments and link them to their weights.

        It does so at the first update, so this makes one with a gradient of zero. Its effect on the weights does not
        matter, because the caller sets them afterwards.
        """
        self.engine.set_gradient_accumulation_boundary(True)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        self.engine.backward(self.engine(input_ids=ids, use_cache=False).logits.float().sum() * 0.0)
        self.engine.step()
        for state in self.optimizer.state.values():
            state["step"].fill_(self.updates)

    def _whole(self, parameter: nn.Parameter, written_by: int | None = None) -> AbstractContextManager[object]:
        """Gather all elements of a split parameter for the block. Only rank ``written_by`` may change them."""
        if not self.splits_weights:
            return nullcontext()
        return self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=written_by)

    def _move_states(self, device: torch.device) -> None:
        """Move the states. Raises ``RuntimeError`` if DeepSpeed cannot move them."""
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
    """Import the package after setting the device that it is to run on."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # It would compile an extension at its first start, for a minute of two cores, which only its inference uses.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    return deepspeed
