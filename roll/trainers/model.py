"""A Hugging Face model as trainers use it: loaded, prepared, run for two numbers per wanted token, exported.

Weights are read from safetensors only, never from pickles. An export is complete: weights (safetensors), configuration,
generation settings and the tokenizer's files. It can be loaded from its folder alone. It is copied while training
pauses, and written while training continues.

Logits of a large vocabulary are the largest tensor of training. The loss needs only two numbers per position from them,
and those can be computed inside the head. They must be computed there: sharded weights are gathered only inside the
forward pass of the whole model, and gradients flow back only from what that pass returns. The head keeps its
parameters, so names, tying, sharding and exports do not change. Some models change logits after the head (a cap, a
scale, a bias). They would also change the two numbers, so each model is first tested: does it return what its head
returned? If not, full logits are used.
"""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from roll.algorithms.logprobs import (
    LINEAR_CHUNK_ELEMENTS,
    linear_logprobs,
    linear_logprobs_and_entropy,
    token_logprobs,
    token_logprobs_and_entropy,
)
from roll.configs.roles import ModelArguments
from roll.runtime.process import keep_blocks_of
from roll.trainers.base import ModelKind, TrainerSetup
from roll.trainers.packing import install_packed_attention
from roll.trainers.state import CheckpointFiles, checkpoint_folder
from roll.trainers.step import MicroBatch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from roll.trainers.pictures import PictureExport, PictureForward
    from roll.trainers.trainer import TrainStrategy

logger = logging.getLogger(__name__)

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states ``[rows, width, size]``, weight, bias) -> ``[rows, positions, results]``, in place of the logits."""


class OutputHead(nn.Linear):
    """A linear output head that shares another head's parameters. Returns logits, or within `computing` its results."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight = head.weight
        self.bias = head.bias
        self._function: HeadFunction | None = None

    @contextmanager
    def computing(self, function: HeadFunction) -> Iterator[None]:
        """Let the model return the results of ``function`` instead of logits within the block."""
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., vocabulary]``, or the results of the function set with `computing`."""
        if self._function is None:
            return super().forward(hidden)
        return self._function(hidden, self.weight, self.bias)


def install_output_head(model: PreTrainedModel) -> OutputHead | None:
    """Replace the model's head by an `OutputHead`. Return ``None`` if the head is not a plain linear layer.

    Call this before sharding, which remembers the modules that hold a parameter.
    """
    plain = model.get_output_embeddings()
    if type(plain) is not nn.Linear:
        return None
    head = OutputHead(plain).train(plain.training)
    model.set_output_embeddings(head)
    return head if model.get_output_embeddings() is head else None


def gives_back_head_results(model: PreTrainedModel, head: OutputHead, device: torch.device) -> bool:
    """Return True if the model returns its head's results unchanged: logits, and results of another size. Collective.

    The test puts known numbers in place of the results, so no weight and no rounding can hide a change. It runs the
    model three times on three tokens, without gradients.
    """
    # Full size last: a pass that succeeds cleans up whatever a failed attempt left open in the sharding.
    sizes = (1, 2, head.out_features)
    unchanged = [_comes_back(model, head, size, device) for size in sizes]
    if not all(unchanged):
        logger.info("%s changes its logits after the head: log-probabilities need all of them", type(model).__name__)
    return all(unchanged)


def _comes_back(model: PreTrainedModel, head: OutputHead, size: int, device: torch.device) -> bool:
    tokens = torch.zeros((1, 3), dtype=torch.int64, device=device)
    # The numbers are neither small nor exact in a lower precision. There are fewer positions than tokens.
    sent = torch.linspace(-1001.3, 1001.3, 2 * size, device=device).reshape(1, 2, size)
    asked: list[torch.Size] = []

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(hidden.shape[:-1])
        return sent.clone()

    try:
        with torch.no_grad(), head.computing(answer):
            received = model(input_ids=tokens, use_cache=False).logits
    except Exception:
        logger.info("%s cannot do without full logits", type(model).__name__, exc_info=True)
        return False
    return asked == [tokens.shape] and received.shape == sent.shape and torch.equal(received.to(sent.dtype), sent)


class HfForward:
    """Forward pass of a model, which a trainer may have wrapped. ``head`` is the result of `install_output_head`."""

    def __init__(
        self,
        kind: ModelKind,
        model: nn.Module,
        head: OutputHead | None,
        device: torch.device,
        signature_of: nn.Module | None = None,
    ) -> None:
        """Test the model's head on a few tokens. Collective.

        ``signature_of``: the model itself, if a wrapper hides which arguments it takes.
        """
        self.kind = kind
        self.model = model
        arguments = inspect.signature((signature_of or model).forward).parameters
        self.keeps_positions = "logits_to_keep" in arguments
        self.head = head if head is not None and gives_back_head_results(model, head, device) else None
        self.chunk_elements = LINEAR_CHUNK_ELEMENTS
        """Number of logits that the head computes at a time."""

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, ...]:
        """Return what the loss is computed from: log-probabilities and entropies of the targets, or their values.

        They are ``[rows, kept]``. Entropies have a gradient only if asked for.
        """
        if self.kind == "value":
            return (self.values(micro_batch),)
        targets = micro_batch.targets
        if self.head is None:
            results = token_logprobs_and_entropy(self._logits(micro_batch), targets, temperature, entropy_gradient)
            return micro_batch.by_sample(results[0]), micro_batch.by_sample(results[1])

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return linear_logprobs_and_entropy(
                hidden, weight, bias, targets, temperature, entropy_gradient, self.chunk_elements
            )

        logprobs, entropy = self._in_head(self.head, micro_batch, compute)
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the targets, ``[rows, kept]``."""
        if self.kind == "value":
            raise RuntimeError("this role has a value model, which gives no log-probabilities")
        targets = micro_batch.targets
        if self.head is None:
            return micro_batch.by_sample(token_logprobs(self._logits(micro_batch), targets, temperature))

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            return (linear_logprobs(hidden, weight, bias, targets, temperature, self.chunk_elements),)

        return self._in_head(self.head, micro_batch, compute)[0]

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return float32 ``[rows, kept]``: the value of the state before each target."""
        if self.kind == "policy":
            raise RuntimeError("this role has a policy, which gives no values")
        return micro_batch.by_sample(self._logits(micro_batch)[..., 0].float())

    def move(self, device: torch.device) -> None:
        """Do nothing: there is no model beside the one that learns."""

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits that predict the targets: ``[*targets, vocabulary]``."""
        arguments = micro_batch.model_arguments()
        if self.keeps_positions:
            return self.model(**arguments, logits_to_keep=micro_batch.positions).logits
        return self.model(**arguments).logits[:, micro_batch.positions]

    def _in_head(
        self, head: OutputHead, micro_batch: MicroBatch, compute: Callable[..., tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """Return what ``compute`` makes of the hidden states that predict the targets, inside the model's head."""

        def compute_kept(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.stack(compute(hidden[:, micro_batch.positions], weight, bias), dim=-1)

        with head.computing(compute_kept):
            results = self.model(**micro_batch.model_arguments()).logits
        return [micro_batch.by_sample(values) for values in results.unbind(-1)]


def model_class(kind: ModelKind) -> Any:
    """Return transformers' class for models of this kind: a causal language model, or a number for each token."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification


def load_model(path: str, arguments: ModelArguments, dtype: torch.dtype, kind: ModelKind = "policy") -> PreTrainedModel:
    """Load the model at ``path`` (folder or hub name) on the CPU.

    A value model made from another kind of model gets a new head that gives 0 everywhere, the best guess before the
    first return is known. If part of a head exists (a reward model's has no bias), only the rest is new. Raises
    ``ValueError`` naming any other missing tensor, because transformers would invent its values.
    """
    options = {} if kind == "policy" else {"num_labels": 1}
    model, found = model_class(kind).from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    body = f"{model.base_model_prefix}."
    missing = sorted(found["missing_keys"])
    lost = missing if kind == "policy" else [name for name in missing if name.startswith(body)]
    if lost:
        raise ValueError(f"{path} lacks {lost[0]}" + (f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""))
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model


def load_weights(path: str, setup: TrainerSetup, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the weights of an export by name, tied ones once, for a model whose parameters have these ``shapes``.

    Raises ``ValueError`` naming the tensor if the export does not fit the model.
    """
    if setup.pictures is not None:
        model = _pictures().load_transformer(path, stored_dtype(setup))
    else:
        model = load_model(path, setup.model_args, stored_dtype(setup), setup.kind)
    source = {name: weight.detach() for name, weight in model.named_parameters()}
    if source.keys() != shapes.keys():
        raise ValueError(f"the weights in {path} do not fit the model: {sorted(source.keys() ^ shapes.keys())}")
    for name, shape in shapes.items():
        if source[name].shape != shape:
            raise ValueError(f"{name} is {tuple(source[name].shape)} in {path}, {tuple(shape)} in the model")
    return source


TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)


@dataclass(frozen=True)
class ModelExport:
    """A model in memory of its own, which any thread may write."""

    model: PreTrainedModel
    source: str
    """Folder or hub name that the model was loaded from; it holds the tokenizer."""
    trust_remote_code: bool
    beside: Callable[[str], None] | None = None
    """Function that writes further files into the folder."""

    def write(self, path: str) -> None:
        """Write the export into the folder ``path``. Raises `OSError` naming the folder."""
        try:
            if self.beside is not None:
                self.beside(path)
            self.model.save_pretrained(path)
        except SafetensorError as cause:
            raise OSError(f"cannot write the model into {path}: {cause}") from cause
        self._write_tokenizer(Path(path))

    def _write_tokenizer(self, path: Path) -> None:
        if Path(self.source).is_dir():
            for file in (file for pattern in TOKENIZER_FILES for file in Path(self.source).glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, path / file.name)
            return
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(self.source, trust_remote_code=self.trust_remote_code).save_pretrained(path)


def save(trainer: TrainStrategy, path: str) -> None:
    """Export the model and write it into the folder ``path``; return when it is there. Collective."""
    export = trainer.export()
    if export is not None:
        export.write(path)
    dist.barrier()


def build_export(
    like: PreTrainedModel, weights: Mapping[str, Tensor], setup: TrainerSetup
) -> ModelExport | PictureExport:
    """Return ``weights`` (full tensors by name, tied ones once) as an export of a model like ``like``.

    Raises ``RuntimeError`` if weights are missing.
    """
    if setup.pictures is not None:
        return _pictures().build_picture_export(like, weights, setup.model_path)
    trusted, kind = setup.model_args.trust_remote_code, setup.kind
    with torch.device("meta"):
        skeleton = model_class(kind).from_config(like.config, trust_remote_code=trusted)
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in like.named_buffers() if not buffer.is_meta}
    skeleton.load_state_dict({**weights, **buffers}, strict=False, assign=True)
    skeleton.tie_weights()
    missing = [name for name, parameter in skeleton.named_parameters() if parameter.is_meta]
    if missing:
        raise RuntimeError(f"the export lacks the weights {', '.join(missing)}")
    if kind == "policy":
        skeleton.generation_config = _ended_by(like, setup.end_tokens)
    return ModelExport(skeleton, setup.model_path, trusted)


def _ended_by(model: PreTrainedModel, end_tokens: Sequence[int]) -> GenerationConfig | None:
    """Return a model's generation settings, with these end tokens beside its own."""
    from transformers import GenerationConfig

    settings = model.generation_config
    if not end_tokens:
        return settings
    settings = GenerationConfig() if settings is None else copy.deepcopy(settings)
    known = settings.eos_token_id
    if known is None:
        known = model.config.get_text_config(decoder=True).eos_token_id
    own = [] if known is None else [known] if isinstance(known, int) else list(known)
    settings.eos_token_id = [*own, *(token_id for token_id in end_tokens if token_id not in own)]
    return settings


def stored_dtype(setup: TrainerSetup) -> torch.dtype:
    """Return the precision in which weights are stored: float32 masters, unless the weights are never updated."""
    frozen = setup.forward_only or setup.trains_adapters
    return getattr(torch, setup.model_args.dtype) if frozen else torch.float32


SHORT = {"BF16": torch.bfloat16, "F16": torch.float16}


def mapped_dtype(setup: TrainerSetup) -> torch.dtype:
    """Return `stored_dtype`, or a shorter one that all tensors of the model's files have.

    Tensors that are not converted are the mapped pages of the files: all ranks of a node share them, and none needs
    memory of its own for more than it keeps.
    """
    dtype = stored_dtype(setup)
    if dtype != torch.float32:
        return dtype
    try:
        (found,) = CheckpointFiles(checkpoint_folder(setup.model_path)).precisions()
    except (ValueError, OSError, SafetensorError):  # several, or files that `load_model` will say what is wrong with
        return dtype
    return SHORT.get(found, dtype)


def _has_constants(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return True if a model made in this precision has rounded constants, which are in no file (Gemma's scale)."""
    stored = model.state_dict().keys()
    return any(name not in stored and buffer.dtype == dtype for name, buffer in model.named_buffers())


def prepare_model(
    setup: TrainerSetup, gradient_checkpointing: bool, mapped: bool = False
) -> tuple[PreTrainedModel, OutputHead | None]:
    """Return a rank's model, whole, on the CPU and without dropout, and the result of `install_output_head` for it.

    With ``mapped`` its precision is `mapped_dtype` if no constant suffers, and the caller converts what it keeps; else
    it is `stored_dtype`. Raises ``UnpackableModel`` if rows are to be packed and the model would mix their samples.
    """
    if setup.pictures is not None:
        return _pictures().prepare_pictures(setup, gradient_checkpointing, stored_dtype(setup)), None
    dtype = mapped_dtype(setup) if mapped else stored_dtype(setup)
    model = load_model(setup.model_path, setup.model_args, dtype, setup.kind)
    if dtype != stored_dtype(setup) and _has_constants(model, dtype):
        model = load_model(setup.model_path, setup.model_args, stored_dtype(setup), setup.kind)
    if setup.device == "cpu":
        keep_blocks_of(model.num_parameters())
    head = install_output_head(model) if setup.kind == "policy" else None
    model.eval()
    if setup.config.use_sequence_packing:
        install_packed_attention(model, setup.model_args.attn_implementation)
    model.requires_grad_(not setup.forward_only)
    if gradient_checkpointing and not setup.forward_only:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(model):
            # Checkpointing looks at the layer's own training flag. Its children, dropout among them, stay in eval mode.
            layer.training = True
    return model, head


def forward_pass(
    setup: TrainerSetup, model: PreTrainedModel, head: OutputHead | None, device: torch.device
) -> HfForward | PictureForward:
    """Return the forward pass of a rank's model, which may be sharded. Collective."""
    if setup.pictures is None:
        return HfForward(setup.kind, model, head, device)
    return _pictures().PictureForward(setup, model, device)


def _pictures() -> Any:
    """Return the module for models of pictures, whose library need not be installed."""
    from roll.trainers import pictures

    return pictures


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, as the model itself declares them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
