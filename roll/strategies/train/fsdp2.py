"""`fsdp2_train`: the default trainer, PyTorch's `fully_shard` on each decoder layer and on the whole.

The same code runs from one rank up (measured on CPU with a 0.8 M parameter model: sharding over one rank costs 1 to 4 %
of a step of 128 samples or more). Weights, gradients and optimizer state are float32; computing is in the precision
asked for. An update whose gradient is not finite is skipped and reported, so weights never become NaN. Dropout is off,
so that training sees the distribution that generation sampled from. On a CPU with the same ranks and threads, equal
calls give equal bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from roll.algorithms.aggregation import LossNormalizers
from roll.algorithms.logprobs import (
    LINEAR_CHUNK_ELEMENTS,
    linear_logprobs,
    linear_logprobs_and_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from roll.algorithms.metrics import LossMetrics, combine
from roll.algorithms.objective import PolicyObjective
from roll.configs.schema import ModelArguments, TrainingArguments
from roll.data.records import SampleBatch
from roll.strategies.train.checkpoint import export_model, load_model
from roll.strategies.train.fsdp2_options import parse_options
from roll.strategies.train.head import gives_back_head_results, install_output_head
from roll.strategies.train.microbatches import (
    MicroBatch,
    MicroBatchPlan,
    build_micro_batch,
    plan_micro_batches,
    predicted_tokens,
    scatter_to_tokens,
)
from roll.strategies.train.optimizer import build_optimizer, clip_gradients, learning_rate_factor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Fsdp2TrainStrategy:
    """One rank of the trainer; see `TrainStrategy` for the contract of each method."""

    def __init__(
        self,
        model_path: str,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        device: Literal["cpu", "cuda"],
        model_args: ModelArguments,
        training_args: TrainingArguments,
        total_optimizer_steps: int,
        max_tokens_per_micro_batch_train: int | None,
        micro_batch_size_train: int,
        max_tokens_per_micro_batch_infer: int | None,
        micro_batch_size_infer: int,
        forward_only: bool,
        seed: int,
        strategy_config: dict[str, Any],
    ) -> None:
        self.options = parse_options(strategy_config)
        self.model_path = model_path
        self.rank = rank
        self.world_size = world_size
        self.master = f"tcp://{master_address}:{master_port}"
        self.device_type = device
        self.model_args = model_args
        self.training_args = training_args
        self.total_optimizer_steps = total_optimizer_steps
        self.train_limits = (max_tokens_per_micro_batch_train, micro_batch_size_train)
        self.infer_limits = (max_tokens_per_micro_batch_infer, micro_batch_size_infer)
        self.forward_only = forward_only
        self.seed = seed
        self.chunk_elements = LINEAR_CHUNK_ELEMENTS

    def initialize(self) -> None:
        """Join the process group, load and shard the model, build optimizer and schedule. Collective."""
        torch.manual_seed(self.seed)
        self.device = self._pick_device()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device_type == "cuda" else "gloo",
            init_method=self.master,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.options.process_group_timeout_seconds),
        )
        model = load_model(self.model_path, self.model_args, self._stored_dtype())
        head = install_output_head(model)
        self.model = self._shard(model)
        self.keeps_positions = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        fused = head is not None and gives_back_head_results(self.model, head, self.device)
        self.head = head if fused else None
        self._reshard()
        if self.forward_only:
            return
        self.optimizer = build_optimizer(self.model.parameters(), self.training_args)
        self.learning_rate_factor = learning_rate_factor(self.training_args, self.total_optimizer_steps)
        self.optimizer_steps = 0

    def log_probs(self, batch: SampleBatch, temperature: float) -> np.ndarray:
        """Log-probability of each token given those before it: float32 ``[total_tokens]``, on every rank."""
        wanted = predicted_tokens(batch)
        values = np.zeros(len(wanted), dtype=np.float32)
        for rows in self._plan(batch, self.infer_limits)[self.rank]:
            micro_batch = build_micro_batch(batch, rows, wanted, (), self.device)
            with torch.no_grad():
                logprobs = self._logprobs(micro_batch, temperature)
            scatter_to_tokens(logprobs.cpu().numpy(), micro_batch.mask.cpu().numpy(), batch, rows, values)
        self._reshard()
        # Each token is non-zero on one rank only, so this sum changes no bit of it.
        shared = torch.from_numpy(values)
        dist.all_reduce(shared)
        return shared.numpy()

    def train_step(self, batch: SampleBatch, objective: PolicyObjective, temperature: float) -> dict[str, float]:
        """One optimizer step; the loss is normalised over all samples of the batch, whichever rank has them.

        Only tokens of the ``loss_mask`` are trained on (without that field: of the response mask). Metrics: those of
        the objective, ``grad_norm`` (before clipping), ``learning_rate`` and ``skipped_updates`` (1 if the gradient was
        not finite, or no token was left to train on). ``ValueError`` if the batch lacks a field, ``RuntimeError`` on a
        forward-only role.
        """
        if self.forward_only:
            raise RuntimeError("this role is forward-only; it has no optimizer")
        fields = _training_fields(batch, objective)
        wanted = batch.tokens["response_mask"].astype(bool) & predicted_tokens(batch)
        trained = wanted & batch.tokens["loss_mask"] if "loss_mask" in fields else wanted
        owner = np.repeat(np.arange(len(batch)), batch.lengths)
        normalizers = objective.normalizers(np.bincount(owner[trained], minlength=len(batch)))
        parts = [
            self._accumulate(
                build_micro_batch(batch, rows, wanted, fields, self.device, objective.sample_fields),
                objective,
                normalizers,
                temperature,
            )
            for rows in self._plan(batch, self.train_limits)[self.rank]
        ]
        return {**self._combined(parts), **self._update(nothing_to_learn=normalizers.tokens == 0)}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full float32 tensors in the names of the Hugging Face model, tied ones once (the first name). Collective.

        One rank has them whole and hands out its own memory: it is to be read, not kept.
        """
        self._reshard()
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            yield name, (weight.to_local() if self.world_size == 1 else weight.full_tensor()).float()

    def save(self, path: str) -> None:
        """Export the float32 weights, configuration and tokenizer; rank 0 writes. Collective."""
        state = {}
        for name, weight in self.named_weights():
            if self.rank == 0:
                state[name] = weight.cpu().clone()
        if self.rank == 0:
            export_model(self.model, state, self.model_path, path, self.model_args.trust_remote_code)
        dist.barrier()

    def load(self, path: str) -> None:
        """Load the weights of an export; optimizer state and schedule stay. Collective.

        Raises ``ValueError`` naming the tensor if the export does not fit the model.
        """
        self._reshard()
        source = dict(load_model(path, self.model_args, self._stored_dtype()).named_parameters())
        own = dict(self.model.named_parameters())
        if source.keys() != own.keys():
            raise ValueError(f"the weights in {path} do not fit the model: {sorted(source.keys() ^ own.keys())}")
        with torch.no_grad():
            for name, parameter in own.items():
                full = source[name].detach()
                if full.shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(full.shape)} in {path}, {tuple(parameter.shape)} in the model")
                # Every rank has read the file, so each cuts its own shard out, with no communication.
                shard = distribute_tensor(
                    full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(shard.to_local())

    def offload_states(self) -> None:
        """Move weights and optimizer state to the CPU (gradients do not outlive a step). Nothing to do on a CPU."""
        if self.device_type == "cuda":
            self._move_states(torch.device("cpu"))
            torch.cuda.empty_cache()

    def load_states(self) -> None:
        """Undo `offload_states`."""
        if self.device_type == "cuda":
            self._move_states(self.device)

    def shutdown(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _pick_device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def _stored_dtype(self) -> torch.dtype:
        """A frozen model is never updated, and so needs no float32 master."""
        return getattr(torch, self.model_args.dtype) if self.forward_only else torch.float32

    def _shard(self, model: PreTrainedModel) -> PreTrainedModel:
        model.eval()
        model.requires_grad_(not self.forward_only)
        layers = _decoder_layers(model)
        if self.options.gradient_checkpointing and not self.forward_only:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in layers:
                # Checkpointing asks the layer itself whether it trains; its children, dropout among them, stay in eval.
                layer.training = True
        settings = {
            "mesh": init_device_mesh(self.device_type, (self.world_size,)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, self.model_args.dtype), reduce_dtype=torch.float32
            ),
        }
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.options.reshard_after_forward, **settings)
        # The backward pass starts with the head, so what the root holds stays gathered until then.
        return fully_shard(model, reshard_after_forward=False, **settings)

    def _reshard(self) -> None:
        """Drop gathered weights that a forward pass without a backward pass left behind.

        They take memory, and stand in for the shards in the module until they are dropped.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _plan(self, batch: SampleBatch, limits: tuple[int | None, int]) -> MicroBatchPlan:
        max_tokens, max_samples = limits
        return plan_micro_batches(batch.lengths, self.world_size, max_tokens, max_samples)

    def _logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """``[rows, kept]``."""
        targets = micro_batch.targets
        if self.head is None:
            return token_logprobs(self._logits(micro_batch), targets, temperature)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            return linear_logprobs(kept, weight, bias, targets, temperature, self.chunk_elements).unsqueeze(-1)

        with self.head.computing(compute):
            return self.model(input_ids=micro_batch.input_ids, use_cache=False).logits.squeeze(-1)

    def _logprobs_and_entropy(
        self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """``[rows, kept]`` each, the entropy without a gradient unless asked for."""
        targets = micro_batch.targets
        if self.head is None:
            return token_logprobs_and_entropy(self._logits(micro_batch), targets, temperature, entropy_gradient)

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            results = linear_logprobs_and_entropy(
                kept, weight, bias, targets, temperature, entropy_gradient, self.chunk_elements
            )
            return torch.stack(results, dim=-1)

        with self.head.computing(compute):
            output = self.model(input_ids=micro_batch.input_ids, use_cache=False)
        logprobs, entropy = output.logits.unbind(-1)
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        """``[rows, kept, vocabulary]``. The model's default positions and causal mask fit right padding."""
        if self.keeps_positions:
            output = self.model(input_ids=micro_batch.input_ids, use_cache=False, logits_to_keep=micro_batch.positions)
            return output.logits
        return self.model(input_ids=micro_batch.input_ids, use_cache=False).logits[:, micro_batch.positions]

    def _accumulate(
        self, micro_batch: MicroBatch, objective: PolicyObjective, normalizers: LossNormalizers, temperature: float
    ) -> LossMetrics:
        """Add one micro-batch's gradient to those of the optimizer step."""
        logprobs, entropy = self._logprobs_and_entropy(micro_batch, temperature, objective.needs_entropy_gradient)
        fields = micro_batch.fields
        loss, metrics = objective(logprobs, entropy, micro_batch.mask, normalizers, fields, fields.get("loss_mask"))
        # Sharding averages gradients over ranks; the contributions of ranks are to be summed.
        (loss * self.world_size).backward()
        return metrics

    def _combined(self, parts: list[LossMetrics]) -> dict[str, float]:
        sums, maxima = (vector.cpu() for vector in combine(parts))
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return parts[0].from_vectors(sums.tolist(), maxima.tolist())

    def _update(self, nothing_to_learn: bool) -> dict[str, float]:
        """Clip, step unless the gradient is not finite or no token was trained on, advance the schedule in any case."""
        learning_rate = self.training_args.learning_rate * self.learning_rate_factor(self.optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        grad_norm = float(clip_gradients(self.model.parameters(), self.training_args.max_grad_norm))
        skipped = nothing_to_learn or not np.isfinite(grad_norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return {"grad_norm": grad_norm, "learning_rate": learning_rate, "skipped_updates": float(skipped)}

    def _move_states(self, device: torch.device) -> None:
        self.model.to(device)
        if self.forward_only:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                # Step counters are scalars that AdamW keeps on the CPU.
                if isinstance(value, Tensor) and value.ndim > 0:
                    state[name] = value.to(device)


def _training_fields(batch: SampleBatch, objective: PolicyObjective) -> list[str]:
    """Names of the per-token fields that the objective reads, all of them there."""
    fields = list(objective.token_fields)
    missing = [name for name in ["token_ids", "response_mask", *fields] if name not in batch.tokens]
    missing += [name for name in objective.sample_fields if name not in batch.per_sample]
    if missing:
        there = ", ".join(sorted([*batch.tokens, *batch.per_sample]))
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {there}")
    return [*fields, "loss_mask"] if "loss_mask" in batch.tokens else fields


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model itself declares them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
