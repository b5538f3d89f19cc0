"""Building blocks of the memory estimate: sizes of models, activations, and the parts of a process.

Sizes come from the `config.json` of a folder, or from a table of published models whose files need not be present.
Only sizes that decide memory are kept, such as those of matrices. Activations are the bytes that a layer keeps for its
backward pass, tensor by tensor, per token of a micro-batch. The counts follow what autograd saves. Attention scores are
counted for `eager` only: `sdpa` and `flash_attention_2` never hold them. For layers of transformers the counts are
exact to a percent, and a test compares them with what torch saves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.configs.errors import count

MIB, GIB = 2**20, 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""`model_args.dtype` -> bytes per element."""
LIBRARIES = 0.5 * GIB
"""Memory of a process on a CPU: Python, torch, transformers, Ray."""
CONTEXT = 0.6 * GIB
"""Memory of a process on a GPU: CUDA's context and cuBLAS's workspace."""
COMMUNICATION = 0.5 * GIB
"""NCCL's buffers in a process that communicates with others."""


@dataclass(frozen=True)
class Part:
    """One line of the estimate."""

    name: str
    size: float
    """Size in bytes."""
    how: str
    """Arithmetic in words."""


def gib(size: float) -> str:
    """Format a number of bytes."""
    return f"{size / GIB:.1f} GiB"


def billions(parameters: float) -> str:
    """Format a number of parameters in words."""
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"


def states(name: str, parameters: int, shares: int, size: float, what: str, holder: str = "rank") -> Part:
    """Return a part of ``size`` bytes per parameter, split evenly over ``shares`` holders."""
    share = f" / {count(shares, holder)}" if shares > 1 else ""
    return Part(name, parameters * size / shares, f"{billions(parameters)} x {size} bytes ({what}){share}")


def overhead(on_gpu: bool, ranks: int) -> Part:
    """Return the memory of a process besides its model; on GPUs with several ``ranks`` it includes NCCL's buffers."""
    if not on_gpu:
        return Part("libraries", LIBRARIES, "Python, torch, transformers, Ray")
    talks = COMMUNICATION if ranks > 1 else 0.0
    return Part("driver", CONTEXT + talks, "CUDA's context" + (", NCCL's buffers" if talks else ""))


@dataclass(frozen=True)
class Phase:
    """A phase of a training step, with the memory that exists only then."""

    name: str
    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> float:
        """Size in bytes."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one process of a role, at the maximum lengths that the configuration allows."""

    always: tuple[Part, ...]
    """Parts that exist as long as the role has its devices."""
    phases: tuple[Phase, ...] = ()
    host: tuple[Part, ...] = ()
    """Host memory of each process."""
    host_of_first: tuple[Part, ...] = ()
    """Additional host memory of the first process."""
    start: Part | None = None
    """Host memory while the process loads its model."""
    state: float = 0.0
    """Bytes that the process contributes to the training state in a checkpoint."""
    stays: float = 0.0
    """Bytes that stay on a shared device while another role uses it."""
    notes: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    """Reasons why the role's engine cannot start with its share of the device."""
    role: str = ""
    title: str = ""
    """Engine, model and number of parameters."""
    devices: Sequence[int] = ()
    processes: int = 1
    """Number of ranks, or of engine replicas."""

    @property
    def largest(self) -> Phase:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.size, default=Phase(""))

    @property
    def peak(self) -> float:
        """Largest number of bytes on a device."""
        return sum(part.size for part in self.always) + self.largest.size

    @property
    def host_bytes(self) -> float:
        """Host bytes during the run of the process that needs most."""
        return sum(part.size for part in (*self.host, *self.host_of_first))


class ShapeUnknown(ValueError):
    """Raised if the sizes of a model are unknown. The message names the remedy."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes, in elements, of a decoder with gated feed-forward layers and grouped-query attention (Qwen, Llama)."""

    vocabulary: int
    hidden: int
    intermediate: int
    """Width of the feed-forward part of a dense layer."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool
    """True if the output layer shares the embedding's weight."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Number of experts; 0: every layer is dense."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    value_head: bool = False
    """True for a critic: a number per token replaces the output layer."""
    stored: str = "bfloat16"
    """Precision of the model's files."""

    @property
    def queries(self) -> int:
        """Number of elements in the queries of one token in one layer."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Number of elements in the keys of one token in one layer. Its values have as many."""
        return self.kv_heads * self.head_size

    @property
    def width(self) -> int:
        """Feed-forward width that one token uses in one layer: with experts, of its chosen experts together."""
        return self.experts_per_token * self.expert_intermediate if self.experts else self.intermediate

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: queries, keys, values and output, with their biases and norms."""
        biases = self.queries + 2 * self.keys if self.qkv_bias else 0
        norms = 2 * self.head_size if self.qk_norm else 0
        return 2 * self.hidden * (self.queries + self.keys) + biases + norms

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def dense_parameters(self) -> int:
        """Parameters of one layer's feed-forward part, or of the router that chooses experts."""
        return self.hidden * self.experts if self.experts else 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, with its two norms."""
        return self.attention_parameters + self.expert_parameters + self.dense_parameters + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding: a row for each token of the vocabulary."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm, and the output layer if it is separate."""
        if self.value_head:
            return self.embedding_parameters + 2 * self.hidden + 1
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> float:
        """Number of parameters that compute with each token: of the experts, only the chosen ones. The embedding counts
        only if it is also the output layer."""
        share = 1 - self.experts_per_token / self.experts if self.experts else 0.0
        return self.parameters - self.layers * self.expert_parameters * share - self._looked_up

    @property
    def _looked_up(self) -> int:
        return 0 if self.tied and not self.value_head else self.embedding_parameters

    def forward_operations(self, tokens: float, squares: float) -> float:
        """Return the floating-point operations of a forward pass over sequences.

        They are 2 for each active parameter and token, and 4 for each layer, query element and pair of tokens, halved
        by the causal mask (arXiv 2001.08361, 2104.04473). ``squares``: sum of the squared sequence lengths.
        """
        return 2 * self.active_parameters * tokens + 2 * self.layers * self.queries * squares

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest parameter."""
        experts = self.expert_parameters * 2 // 3  # gate and up projections of all experts are one tensor
        return max(self.embedding_parameters, self.hidden * self.intermediate, experts)

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.keys * element_bytes


def _qwen25(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool) -> ModelShape:
    vocabulary = 151_936 if tied else 152_064
    size = hidden // heads
    return ModelShape(vocabulary, hidden, intermediate, layers, heads, kv_heads, size, tied, qkv_bias=True)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(151_936, hidden, intermediate, layers, heads, 8, 128, tied, qk_norm=True)


def _qwen3_moe(hidden: int, layers: int, heads: int, experts: int, expert_intermediate: int) -> ModelShape:
    return ModelShape(
        151_936, hidden, 3 * hidden, layers, heads, 4, 128, False,
        qk_norm=True, experts=experts, experts_per_token=8, expert_intermediate=expert_intermediate,
    )  # fmt: skip


def _llama3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(128_256, hidden, intermediate, layers, heads, 8, hidden // heads, tied)


KNOWN: dict[str, ModelShape] = {
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen25(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen25(3584, 18944, 28, 28, 4, tied=False),
    "qwen2.5-14b": _qwen25(5120, 13824, 48, 40, 8, tied=False),
    "qwen2.5-32b": _qwen25(5120, 27648, 64, 40, 8, tied=False),
    "qwen2.5-72b": _qwen25(8192, 29568, 80, 64, 8, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 128, 768),
    "qwen3-16b-a3b": _qwen3_moe(2048, 48, 32, 64, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 128, 1536),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, tied=False),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, tied=True),
}  # fmt: skip
"""Published sizes: the `config.json` of the repositories Qwen/Qwen2.5-*, Qwen/Qwen3-*, kalomaze/Qwen3-16B-A3B and
meta-llama/Llama-3.*."""

_VARIANT = re.compile(r"-(instruct|base|it|chat|thinking|\d{4})$")
_BIASED_FAMILIES = ("qwen2", "qwen2_moe")
_NORMED_FAMILIES = ("qwen3", "qwen3_moe")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")
_EXPERT_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
"""Keys of `config.json` that hold the number of experts, of those of a token, and their width. They differ by model
family; the first one that is there counts."""


def find_shape(model: str) -> ModelShape:
    """Return the sizes of a model by its folder or hub name. Raises `ShapeUnknown`."""
    file = Path(model) / "config.json"
    if file.is_file():
        try:
            return _from_facts(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShapeUnknown(f"{file} does not tell the sizes of a decoder: {error!r}") from error
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while _VARIANT.search(name):
        name = _VARIANT.sub("", name)
    if name not in KNOWN:
        raise ShapeUnknown(
            f"the sizes of {model} are not known: give a folder with its config.json, or a hub name of Qwen2.5, Qwen3 "
            "or Llama 3"
        )
    return KNOWN[name]


def has_experts(model: str) -> bool:
    """Return True if a model is known to have experts; False if it has none or its sizes are unknown."""
    try:
        return find_shape(model).experts > 0
    except ShapeUnknown:
        return False


def is_dense(model: str) -> bool:
    """Return True if a model is known to have no experts; False if it has some or its sizes are unknown."""
    try:
        return find_shape(model).experts == 0
    except ShapeUnknown:
        return False


def _from_facts(facts: Mapping[str, Any]) -> ModelShape:
    family, heads, hidden = facts["model_type"], int(facts["num_attention_heads"]), int(facts["hidden_size"])
    experts, per_token, width = (
        int(next(filter(None, map(facts.get, keys)), 0))
        for keys in (_EXPERTS, _EXPERTS_PER_TOKEN, _EXPERT_INTERMEDIATE)
    )
    return ModelShape(
        vocabulary=int(facts["vocab_size"]),
        hidden=hidden,
        intermediate=int(facts["intermediate_size"]),
        layers=int(facts["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_size=int(facts.get("head_dim") or hidden // heads),
        tied=bool(facts.get("tie_word_embeddings", family in _BIASED_FAMILIES)),
        qkv_bias=bool(facts.get("attention_bias", False)) or family in _BIASED_FAMILIES,
        qk_norm=family in _NORMED_FAMILIES,
        experts=experts,
        experts_per_token=per_token if experts else 0,
        expert_intermediate=width if experts else 0,
        stored=str(facts.get("dtype") or facts.get("torch_dtype") or "float32"),
    )


HEAD_CHUNK = 2**25
"""Number of logits that the output layer computes at a time: `roll.algorithms.logprobs.LINEAR_CHUNK_ELEMENTS`."""
MEGATRON_HEAD_CHUNK = 2**26
"""Number of logits that `megatron_train` computes at a time, for a rank's share of the vocabulary."""
HEAD_COPIES = 3
"""Number of float32 tensors of a chunk at a time: logits, their gradient or exponentials, and a temporary."""


def norm_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes per token of one norm: float32 input, normalised values, and the result the next layer keeps."""
    return shape.hidden * (4 + 2 * element)


def layer_bytes(shape: ModelShape, element: int, *, eager_width: int = 0) -> float:
    """Return the bytes of one layer of transformers, per token.

    ``eager_width``: the sample length if attention scores are held (`eager`), else 0.
    """
    attention = element * 2 * (shape.queries + shape.keys) + 4 * shape.heads
    if eager_width:
        scores = 4 if element == 4 else 4 + element  # float32 softmax, and its copy that multiplies the values
        attention += shape.heads * eager_width * scores + element * (shape.queries - shape.keys) * 2
    if shape.qk_norm:
        attention += (4 + element) * (shape.queries + shape.keys)
    # Gate, activation, up and their product; for each chosen expert also its input and output.
    feed_forward = 4 * shape.width * element + 2 * shape.experts_per_token * shape.hidden * element + 4 * shape.experts
    return 2 * norm_bytes(shape, element) + attention + feed_forward


def adapter_bytes(shape: ModelShape, adapted: int, rank: int, element: int) -> int:
    """Return the change in a layer's bytes per token if only adapters on ``adapted`` of its linear layers learn.

    The ``rank`` values between the two matrices of an adapter are added; inputs of frozen norms and experts are not
    kept.
    """
    frozen = 2 * shape.hidden + (shape.queries + shape.keys if shape.qk_norm else 0)
    if shape.experts:
        frozen += shape.experts_per_token * (shape.hidden + shape.expert_intermediate) + shape.hidden
    return element * (adapted * rank - frozen)


def backward_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of the gradients that exist within one layer at a time, per token.

    These are the gradients of the product, the activation, up and the residual stream.
    """
    return (3 * shape.width + 2 * shape.hidden) * element + 4 * shape.hidden


def forward_only_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of one layer per token if nothing is kept: gate, activation, up, and a norm in float32."""
    return (3 * shape.width + 2 * shape.hidden) * element + 8 * shape.hidden


def one_layer(shape: ModelShape, element: int, tokens: int, shares: int = 1) -> Part:
    """Return the activations of a forward pass that keeps nothing, its matrices split into ``shares``."""
    one = forward_only_bytes(shape, element) / shares
    return Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer")


def head_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of the output layer besides its weight and gradient: `HEAD_COPIES` float32 chunks of logits."""
    return 0 if shape.value_head else HEAD_COPIES * 4 * min(tokens * shape.vocabulary, HEAD_CHUNK)
