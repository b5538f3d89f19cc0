"""Model functions of `hf_infer`: loading, KV cache, attention of decoding steps, sampling.

Models that the engine does not support are rejected before anything is generated. It requires that a cache row is a
plain sequence of keys and values: no sliding windows, no state-space layers, no position encodings that depend on the
longest sequence.

Decoding attention (one query token per row) uses grouped key-value heads without copying them; everything else is left
to transformers' SDPA function. Guarantee: a row's output has the same bits for any other rows and any padded length (a
multiple of 16), with a given number of threads. For this, decoding attention runs on one thread: the CPU kernel's
results depend on the alignment of a scratch buffer, which differs between threads. In a mixture of experts, each expert
gets a padded number of rows.

Sampling uses one random number per token, a hash of (seed, token index), so a request is sampled identically whatever
else is in the batch, and on whichever replica it is continued. The recorded log-probability is that of the distribution
actually sampled from, after temperature, top-k and top-p. A token of probability zero is never chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from roll.configs.plugins import problem
from roll.data.pictures import policy_class
from roll.engines.base import ModelSpec
from roll.runtime.process import keep_blocks_of
from roll.weights.adapters import adapter_config, matrix_names

SLOT_SDPA, PADDED_EXPERTS = "roll_slot_sdpa", "roll_padded_experts"
"""Names under which `slot_sdpa_forward` and `padded_experts_forward` are registered with transformers."""


def slot_sdpa_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention with an additive mask, as an attention function for transformers.

    ``query`` is ``[rows, heads, tokens, head_dim]``, ``key`` and ``value`` are ``[rows, kv_heads, length, head_dim]``.
    Values may have another size than keys (DeepSeek). Returns ``[rows, tokens, heads, size of values]`` and None."""
    size, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    if query.shape[-1] != size:
        # Only with equal sizes torch uses the kernel whose results do not depend on other rows. Zeros change no bit.
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = (pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value))
    output = _slot_sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return output[..., :size], None


def _slot_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: object,
) -> torch.Tensor:
    """Compute attention with queries, keys and values of one size. Returns ``[rows, tokens, heads, size]``."""
    if query.shape[2] != 1 or attention_mask is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        # Query heads of a group are passed as query tokens of one head, so the kernel reads their keys only once.
        rows, heads, _, head_dim = query.shape
        output = scaled_dot_product_attention(
            query.reshape(rows, key.shape[1], heads // key.shape[1], head_dim),
            key,
            value,
            attn_mask=attention_mask.expand(rows, 1, heads // key.shape[1], -1),
            dropout_p=dropout,
            scale=scaling,
        )
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
    return output.reshape(rows, 1, heads, head_dim)


ROW_MULTIPLE = 8
"""Rows are padded to a multiple of this, and to at least this many per thread. A CPU's matrix products give a row the
same bits if each thread gets at least 4 rows; this is twice that, to be safe."""


def padded_experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a layer with a padded number of rows for each, as an experts function for transformers.

    ``hidden_states`` and the result are ``[tokens, hidden size]``, experts and their weights ``[tokens, experts of a
    token]``. The padding is of tokens that are zero.
    """
    tokens, of_token = top_k_index.shape
    multiple = math.lcm(ROW_MULTIPLE * torch.get_num_threads(), of_token)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=module.num_experts)
    missing = torch.repeat_interleave(torch.arange(module.num_experts), -counts % multiple).reshape(-1, of_token)
    padded: torch.Tensor = grouped_mm_experts_forward(
        module,
        torch.cat([hidden_states, hidden_states.new_zeros(len(missing), hidden_states.shape[1])]),
        torch.cat([top_k_index, missing.to(top_k_index.dtype)]),
        torch.cat([top_k_weights, top_k_weights.new_zeros(missing.shape)]),
    )
    return padded[:tokens]


_ADAPTER = "policy"
"""Name of the only adapter in peft."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """Load the model on its device, in evaluation mode. Raises ``ConfigError`` for an unsupported model, ``OSError`` if
    there are no safetensors files."""
    if spec.dtype not in _DTYPES:
        raise problem("model_args.dtype", f"{spec.dtype!r} is no known precision", f"one of {', '.join(_DTYPES)}")
    if spec.attn_implementation not in ("sdpa", "eager"):
        raise problem(
            "model_args.attn_implementation",
            f"hf_infer cannot use {spec.attn_implementation!r}: its rows have different lengths",
            "`sdpa` (or `eager`)",
        )
    implementation, experts = spec.attn_implementation, None
    if implementation == "sdpa" and torch.device(spec.device).type == "cpu":
        AttentionInterface.register(SLOT_SDPA, slot_sdpa_forward)
        AttentionMaskInterface.register(SLOT_SDPA, sdpa_mask)
        ExpertsInterface.register(PADDED_EXPERTS, padded_experts_forward)
        implementation, experts = SLOT_SDPA, PADDED_EXPERTS
    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code)
    model = policy_class(config).from_pretrained(
        spec.model_path,
        dtype=_DTYPES[spec.dtype],
        attn_implementation=implementation,
        experts_implementation=experts,
        trust_remote_code=spec.trust_remote_code,
        use_safetensors=True,
    )
    if torch.device(spec.device).type == "cpu":
        keep_blocks_of(model.num_parameters())
    check_supported(model, spec.max_length)
    model.to(spec.device).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Weights from a file have the file's alignment; those of a weight update have torch's. Some kernels' results
        # depend on the alignment, and equal weights must give equal bits.
        parameter.data = parameter.data.clone()
    return model


def add_adapter(model: torch.nn.Module, adapted: Sequence[str], rank: int) -> dict[str, torch.nn.Parameter]:
    """Add LoRA adapters to the linear layers ``adapted``. Return name in weight updates -> matrix.

    The matrices are random; the model's outputs are meaningless until they have been loaded.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings = adapter_config(adapted, rank, base="")
    settings.pop("peft_type")
    inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=_ADAPTER)
    model.eval().requires_grad_(False)
    matrices = {}
    for layer in adapted:
        module: Any = model.get_submodule(layer)
        down, up = matrix_names(layer)
        matrices[down] = module.lora_A[_ADAPTER].weight
        matrices[up] = module.lora_B[_ADAPTER].weight
    return matrices


def check_supported(model: PreTrainedModel, max_length: int) -> None:
    """Raise ``ConfigError`` unless the engine supports the model: full attention in every layer, position encodings
    that do not depend on the sequence length, and at least ``max_length`` positions."""
    config = model.config.get_text_config(decoder=True)
    path = "model_args.model_name_or_path"
    layers = DynamicCache(config=config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others or len(layers) != config.num_hidden_layers:
        raise problem(
            path,
            f"hf_infer needs full attention in every layer; this {config.model_type} model has {', '.join(others)}",
            "a full-attention model (Qwen2, Qwen3, Llama, ...), or another engine",
        )
    rope = config.rope_parameters if "rope_parameters" in config.to_dict() else None
    rope_type = (rope or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise problem(
            path,
            f"position encoding {rope_type!r} changes with the longest running sequence",
            "a model with another rope type (default, linear, yarn, llama3)",
        )
    if max_length > config.max_position_embeddings:
        raise problem(
            "sequence_length",
            f"{max_length} tokens are more than the model's {config.max_position_embeddings} positions",
            f"at most {config.max_position_embeddings}",
        )


LENGTH_MULTIPLE = 16
"""Multiple to which KV lengths are rounded up. Vectorised kernels then have no remainder loop, whose sums are ordered
differently, so a row's result does not depend on the length of other rows."""


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple of ``multiple``."""
    return -(-value // multiple) * multiple


class SlotCache(Cache):
    """A KV cache for transformers in which every row has its own length.

    Tensors are ``[rows, kv_heads, length, head_dim]`` per layer. `begin_step` sets the rows and positions that the next
    forward pass writes, one token per row. The model then calls `update` for each layer. New memory is zeroed, because
    masked positions have weight 0, and 0 times NaN would be NaN.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Layer -> (keys, values)."""
        self._max_rows = max_rows
        self._max_length = round_up(max_length, LENGTH_MULTIPLE)
        self._rows_capacity = 0
        self._length_capacity = 0
        self._step = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0
        """(Rows, positions, KV length) of the forward pass set by `begin_step`."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes currently allocated."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._held.values())

    def reserve(self, rows: int, length: int) -> None:
        """Ensure a capacity of ``rows`` rows of ``length`` tokens, keeping stored values."""
        if rows <= self._rows_capacity and length <= self._length_capacity:
            return
        if rows > self._rows_capacity:
            self._rows_capacity = min(max(rows, 2 * self._rows_capacity), max(rows, self._max_rows))
        if length > self._length_capacity:
            grown = round_up(max(length, 2 * self._length_capacity), LENGTH_MULTIPLE)
            self._length_capacity = min(grown, self._max_length)
        for layer, (keys, values) in self._held.items():  # one layer at a time, to save memory
            self._held[layer] = self._grown(keys), self._grown(values)

    def begin_step(self, rows: torch.Tensor, positions: torch.Tensor, kv_length: int) -> None:
        """Set up a forward pass of one token per row: ``rows`` (0 to n - 1) at ``positions``, both int64 ``[n]``.

        ``kv_length``: KV length that attention sees."""
        self._step = rows, positions, kv_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values ``[n, kv_heads, 1, head_dim]``. Return views of those to attend to. Called
        by the model."""
        rows, positions, kv_length = self._step
        keys, values = self._allocate(layer_idx, key_states, value_states)
        keys[rows, :, positions] = key_states[:, :, 0]
        values[rows, :, positions] = value_states[:, :, 0]
        count = len(rows)
        return keys[:count, :, :kv_length], values[:count, :, :kv_length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the KV length before the current step, as one number for all rows."""
        return max(self._step[2] - 1, 0)

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Copy prefilled ``keys[sources]`` and ``values[sources]`` to the start of ``rows``.

        ``keys`` and ``values`` are ``[prompts, kv_heads, length, head_dim]``. A source may be copied to several rows.
        """
        held_keys, held_values = self._allocate(layer, keys, values)
        length = keys.shape[2]
        held_keys[rows, :, :length] = keys[sources]
        held_values[rows, :, :length] = values[sources]

    def move(self, sources: Sequence[int] | np.ndarray, targets: Sequence[int] | np.ndarray, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` to rows ``targets``. The two sets are disjoint."""
        for tensor in itertools.chain.from_iterable(self._held.values()):
            source = torch.as_tensor(sources, device=tensor.device)
            target = torch.as_tensor(targets, device=tensor.device)
            tensor[target, :, :length] = tensor[source, :, :length]

    def release(self) -> None:
        """Free all memory."""
        self._held.clear()
        self._rows_capacity = self._length_capacity = 0

    def _allocate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's tensors. They are created at the first use, when number and size of the heads are known."""
        if layer not in self._held:
            self._held[layer] = self._zeros_like(keys), self._zeros_like(values)
        return self._held[layer]

    def _zeros_like(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self._rows_capacity, states.shape[1], self._length_capacity, states.shape[3])

    def _grown(self, tensor: torch.Tensor) -> torch.Tensor:
        grown = self._zeros_like(tensor)
        grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
        return grown


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class NonFiniteLogits(ArithmeticError):
    """The model produced NaN or infinite logits, so there is no distribution to sample from."""


def counter_uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return uniform random numbers in [0, 1) with 53 bits, as a pure function of (seed, index).

    ``seeds`` is uint64 ``[rows]``, ``indices`` int64 ``[rows]``; returns float64 ``[rows]``. The result is output
    number ``index`` of a SplitMix64 generator whose state is the hashed seed (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        states = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
        bits = _mix(states + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, uniforms: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution function at ``uniforms``.

    ``logits`` is float ``[rows, vocabulary]``; the others are ``[rows]``: ``temperature`` float32 (0: greedy),
    ``top_k`` int64 (0: no limit), ``top_p`` float64 in (0, 1], ``uniforms`` float64 in [0, 1). Returns token ids, int64
    ``[rows]``, and their log-probabilities, float32 ``[rows]``. Greedy rows take the largest logit (the lowest id among
    equals), with log-probability 0. Raises `NonFiniteLogits`.
    """
    greedy = temperature == 0
    if greedy.all():
        tokens = logits.argmax(dim=-1)
        logprobs = torch.zeros(len(tokens), dtype=torch.float32, device=logits.device)
    else:
        distribution = processed_logprobs(logits, temperature, top_k, top_p)
        tokens = _invert_cdf(distribution, torch.from_numpy(uniforms).to(logits.device))
        logprobs = distribution.gather(1, tokens[:, None])[:, 0]
        if greedy.any():
            is_greedy = torch.from_numpy(greedy).to(logits.device)
            tokens = torch.where(is_greedy, logits.argmax(dim=-1), tokens)
            logprobs = torch.where(is_greedy, 0.0, logprobs)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    if not bool((torch.isfinite(chosen) & torch.isfinite(logprobs)).all()):
        raise NonFiniteLogits("the model produced NaN or infinite logits")
    return tokens, logprobs


def processed_logprobs(
    logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
) -> torch.Tensor:
    """Return log-probabilities after temperature, top-k and top-p (in this order), float32 ``[rows, vocabulary]``.

    Removed tokens have -inf. Top-p keeps the smallest set of most likely tokens whose total probability reaches
    ``top_p`` (Holtzman et al., "The curious case of neural text degeneration", 2020). Equal logits are ranked by token
    id. Rows with temperature 0 are treated as temperature 1; the caller handles greedy decoding.
    """
    scaled = logits.float()
    if not (temperature == 1).all():
        divisor = np.where(temperature == 0, np.float32(1), temperature).astype(np.float32)
        scaled = scaled / torch.from_numpy(divisor).to(logits.device)[:, None]
    filtered = np.flatnonzero((temperature != 0) & ((top_k > 0) | (top_p < 1)))
    if len(filtered) == 0:
        return torch.log_softmax(scaled, dim=-1)
    index = torch.from_numpy(filtered).to(logits.device)
    kept = _keep_top(
        scaled[index],
        torch.from_numpy(top_k[filtered]).to(logits.device),
        torch.from_numpy(top_p[filtered]).to(logits.device),
    )
    scaled = scaled.index_copy(0, index, kept)
    return torch.log_softmax(scaled, dim=-1)


def _keep_top(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside top-k, then those outside top-p, to -inf. ``top_k`` and ``top_p`` are ``[rows]``."""
    vocabulary = scaled.shape[-1]
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=scaled.device)
    limit = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probabilities = torch.softmax(ordered.double(), dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    outside = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _invert_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds ``uniform * total``, int64 ``[rows]``.

    ``logprobs`` is ``[rows, vocabulary]``, ``uniforms`` float64 ``[rows]``. The target stays strictly below the total,
    and tokens of probability zero never exceed it, so the result always has a positive probability.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.clamp_(max=logprobs.shape[-1] - 1)


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finaliser, a bijection of uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
