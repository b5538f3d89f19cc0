"""Routing in mixtures of experts: record the experts that each token is sent to, and compute with recorded ones.

Router replay (R3, arXiv 2510.11370): the trainer sends each token to the experts that the engine chose when it sampled.
The weights of these experts are computed from the trainer's own router, so gradients reach it. Without replay, a small
difference between trainer and engine can choose another expert, and change a log-probability by much.

transformers' models choose experts by top-k over all of them, and hand the choice to a module with the argument
``top_k_index`` (or ``router_indices``). Both are observed from outside, by hooks and torch's own override of functions,
whatever the family computes before (softmax, sigmoid, biases, groups) and after (normalisation, scale). A model in
which this does not work is refused at start.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in model configurations; they differ by family."""
_CHOSEN = {"top_k_index", "router_indices"}
"""Names of the second argument of the modules that compute experts: each token's expert numbers."""


class UnroutableModel(ValueError):
    """A model whose routing cannot be recorded or replayed."""


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of a model's routing."""

    layers: int
    """All decoder layers; those without experts have expert 0 in records."""
    experts: int
    """Experts of a layer."""
    top_k: int
    """Experts of a token in a layer."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> RoutingShape:
        """Read the sizes from a model's configuration. Raises `UnroutableModel` if it has no experts."""
        text = config.get_text_config(decoder=True)
        # Not from its dictionary: some families have other names, and these as aliases.
        experts = next(filter(None, (getattr(text, name, None) for name in _EXPERTS)), 0)
        top_k = getattr(text, "num_experts_per_tok", None) or 0
        if not experts or not top_k:
            raise UnroutableModel(f"router_replay: a {text.model_type} model has no experts that a router chooses")
        return cls(text.num_hidden_layers, int(experts), int(top_k))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of recorded expert numbers: uint8, or int16 with more than 256 experts."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)

    @property
    def of_token(self) -> tuple[int, int]:
        """Shape of the record of a token: layers, experts per token."""
        return self.layers, self.top_k

    def record(self, rows: np.ndarray) -> np.ndarray:
        """Return a record from an engine's own, ``[tokens, layers, top_k]`` or flat. Raises ``ValueError`` if it does
        not fit."""
        if rows.size % (self.layers * self.top_k) or (rows.size and not 0 <= rows.min() <= rows.max() < self.experts):
            raise ValueError(f"experts of shape {rows.shape} are not those of {self}")
        return rows.reshape(-1, self.layers, self.top_k).astype(self.dtype)

    def fault(self, experts: Any, tokens: int) -> str | None:
        """Return why these cannot be the record of a sample of ``tokens`` tokens; None if they can."""
        if not isinstance(experts, np.ndarray) or experts.dtype != self.dtype:
            kind = experts.dtype if isinstance(experts, np.ndarray) else type(experts).__name__
            return f"{kind}, not an array of {self.dtype}"
        wanted = (tokens, *self.of_token)
        if experts.shape != wanted:
            return f"of shape {experts.shape}, not {wanted} (tokens, layers, experts per token)"
        if experts.size and not 0 <= experts.min() <= experts.max() < self.experts:
            return f"from {experts.min()} to {experts.max()}, and the model's go from 0 to {self.experts - 1}"
        if tokens > 1 and self.top_k > 1 and not experts.any():
            return "all 0: nothing was recorded"
        return None


def experts_by_layer(model: PreTrainedModel) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Return layer -> (module with router and experts, its experts). Raises `UnroutableModel` if there are none."""
    found: dict[int, tuple[nn.Module, nn.Module]] = {}
    for name, module in model.named_modules():
        number = re.search(r"\.(\d+)\.", name)
        if number is not None and _CHOSEN & inspect.signature(module.forward).parameters.keys():
            found[int(number[1])] = model.get_submodule(name.rpartition(".")[0]), module
    if not found:
        raise UnroutableModel(f"router_replay: no module of {type(model).__name__} is told the experts of each token")
    return found


class RoutingRecorder:
    """Records the experts that each token of a forward pass is sent to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.shape = RoutingShape.of(model.config)
        self._chosen: dict[int, Tensor] = {}
        self._hooks = [
            experts.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer, (_, experts) in experts_by_layer(model).items()
        ]

    def take(self) -> np.ndarray:
        """Return the experts of the last forward pass, ``[tokens, layers, top_k]`` in `RoutingShape.dtype`. Tokens are
        those of its rows, one row after the other."""
        chosen, self._chosen = self._chosen, {}
        tokens = len(next(iter(chosen.values())))
        record = np.zeros((tokens, self.shape.layers, self.shape.top_k), dtype=self.shape.dtype)
        for layer, indices in chosen.items():
            record[:, layer] = indices.cpu().numpy()
        return record

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = (kwargs[name] for name in _CHOSEN & kwargs.keys())
            self._chosen[layer] = (args[1] if len(args) > 1 else next(named)).detach()

        return hook


@dataclass(frozen=True)
class Routing:
    """The recorded experts of a micro-batch."""

    experts: Tensor
    """``[tokens, layers, top_k]``: expert numbers, for all tokens of the model's input."""
    known: Tensor
    """bool ``[tokens]``: False where nothing was recorded (padding, a sample's last token). The model's own experts
    are used there."""

    def at(self, places: Tensor) -> Routing:
        """Return the routing of the tokens at ``places``, int64 ``[tokens]``."""
        return Routing(self.experts[places], self.known[places])

    def spread(self, places: Tensor, count: int) -> Routing:
        """Return the routing of ``count`` tokens: these at ``places``, and nothing recorded of the others."""
        experts, known = self.experts.new_zeros(count, *self.experts.shape[1:]), self.known.new_zeros(count)
        experts[places], known[places] = self.experts, self.known
        return Routing(experts, known)


class RouterReplay:
    """Replaces a model's choice of experts by a recorded one, in forward passes and in recomputation."""

    def __init__(self, model: PreTrainedModel, compute: nn.Module, device: torch.device) -> None:
        """Install the hooks, and test on a few tokens that the experts follow. Collective.

        ``compute`` is the model or a wrapper of it, which is called. Raises `UnroutableModel` if they do not follow.
        """
        self.shape = RoutingShape.of(model.config)
        self._routing: Routing | None = None
        self._differing: dict[int, Tensor] = {}
        """Layer -> tokens of the present micro-batch for which the model would have chosen other experts."""
        self._total = [0.0, 0.0]
        for layer, (block, _) in experts_by_layer(model).items():
            mode = _ReplacedChoice(self, layer)
            block.register_forward_pre_hook(lambda module, args, mode=mode: mode.begin())
            block.register_forward_hook(lambda module, args, output, mode=mode: mode.end(), always_call=True)
        self._test(model, compute, device)

    def use(self, routing: Routing | None) -> None:
        """Set the routing of the next forward pass and of its recomputation. None: the model's own."""
        self._count()
        self._routing = routing

    def take_counts(self) -> np.ndarray:
        """Return and reset float64 ``[2]``: tokens x layers in which the model with gradients would have chosen other
        experts than the recorded ones, and all tokens x layers that were replayed."""
        self.use(None)
        counts, self._total = np.array(self._total), [0.0, 0.0]
        return counts

    def replaced(self, layer: int, scores: Tensor, chosen: Any) -> Any:
        """Return the result of a top-k over ``scores``: the recorded experts if it is a choice of experts."""
        indices = chosen.indices
        expected = scores.ndim == 2 and scores.shape[-1] == self.shape.experts and indices.shape[-1] == self.shape.top_k
        if self._routing is None or not expected:
            return chosen
        known, recorded = self._routing.known, self._routing.experts[:, layer].long()
        if len(recorded) != len(scores):
            raise RuntimeError(f"experts of {len(recorded)} tokens are recorded; layer {layer} routes {len(scores)}")
        if torch.is_grad_enabled():
            other = (indices.sort(dim=-1).values != recorded.sort(dim=-1).values).any(dim=-1)
            self._differing[layer] = (other & known).sum()
        indices = torch.where(known[:, None], recorded, indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def _count(self) -> None:
        """Add up the present micro-batch. A recomputation has overwritten its counts by the same ones."""
        if self._routing is not None and self._differing:
            self._total[0] += float(torch.stack(list(self._differing.values())).sum())
            self._total[1] += float(self._routing.known.sum()) * len(self._differing)
        self._differing.clear()

    def _test(self, model: PreTrainedModel, compute: nn.Module, device: torch.device) -> None:
        tokens = torch.arange(4, device=device)[None]
        layers, weights = experts_by_layer(model), dict[int, Tensor]()
        recorder = RoutingRecorder(model)
        hooks = [
            experts.register_forward_pre_hook(_weights_hook(weights, layer), with_kwargs=True)
            for layer, (_, experts) in layers.items()
        ]
        try:
            with torch.no_grad():
                compute(input_ids=tokens, use_cache=False)
                # Far from the model's own, because groups of experts are neighbours.
                wanted = (recorder.take().astype(np.int64) + max(1, self.shape.experts // 2)) % self.shape.experts
                known = torch.ones(tokens.shape[1], dtype=torch.bool, device=device)
                self.use(Routing(torch.from_numpy(wanted).to(device), known))
                compute(input_ids=tokens, use_cache=False)
                found = recorder.take()
        finally:
            for hook in hooks:
                hook.remove()
            recorder.remove()
            self.use(None)
        routed = sorted(layers)
        if not np.array_equal(found[:, routed], wanted[:, routed]):
            raise UnroutableModel(f"router_replay: {type(model).__name__} does not take its experts from one top-k")
        if any(bool((values == 0).any()) for values in weights.values()):
            raise UnroutableModel(f"router_replay: {type(model).__name__} gives other groups' experts weight 0")


def _weights_hook(weights: dict[int, Tensor], layer: int) -> Any:
    """Return a hook of a layer's experts that keeps their weights for each token, ``[tokens, top_k]``. None in float16,
    where a small weight is 0."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # After the hidden states.
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][1:]
        chosen = next(value for value in others if not value.is_floating_point())
        for value in others:
            if value.is_floating_point() and value.dtype != torch.float16 and value.shape == chosen.shape:
                weights[layer] = value

    return hook


class _ReplacedChoice(TorchFunctionMode):
    """Passes the results of top-k in one layer through `RouterReplay.replaced`."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer = replay, layer

    def begin(self) -> None:
        """Begin to watch, in this thread."""
        self.__enter__()

    def end(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; see `RouterReplay.replaced`."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            return self._replay.replaced(self._layer, args[0], result)
        return result
