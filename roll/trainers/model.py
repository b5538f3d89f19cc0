"""Hugging Face models in trainers: loading, preparation, the forward pass and exports.

Weights are read from safetensors only, never from pickles. An export is complete and can be loaded from its folder
alone: weights (safetensors), configuration, generation settings and tokenizer files. It is copied while training
pauses, and written while training continues.

With a large vocabulary, the logits are the largest tensor of training. The loss needs only two numbers per position
from them, log-probability and entropy, so these are computed inside the LM head and returned in place of the logits. It
has to be there: sharded weights are gathered only inside the forward pass of the whole model, and gradients flow back
only from what that pass returns. The head keeps its parameters, so names, tying, sharding and exports do not change.
Some models change logits after the head (a cap, a scale, a bias), and would change the two numbers as well. Each model
is therefore tested first: does it return its head's output unchanged? If not, full logits are used.
"""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from roll.algorithms.logprobs import LINEAR_CHUNK_ELEMENTS, EntropyUse, linear_results, token_results
from roll.algorithms.routing import RouterReplay
from roll.configs.roles import ModelArguments
from roll.data.pictures import PictureProcessor, policy_class
from roll.runtime.process import keep_blocks_of
from roll.trainers.base import ModelKind, TrainerSetup
from roll.trainers.packing import packs_samples
from roll.trainers.state import CheckpointFiles, checkpoint_folder
from roll.trainers.step import MicroBatch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from roll.trainers.pictures import PictureExport, PictureForward
    from roll.trainers.trainer import TrainStrategy

logger = logging.getLogger(__name__)

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(hidden states ``[rows, width, size]``, weight, bias) -> ``[rows, positions, results]``, replacing the logits."""


class OutputHead(nn.Linear):
    """LM head that returns logits or, within `computing`, other results. Shares the parameters of the original head."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight = head.weight
        self.bias = head.bias
        self._function: HeadFunction | None = None

    @contextmanager
    def computing(self, function: HeadFunction) -> Iterator[None]:
        """Within the block, let the head (and thus the model) return the results of ``function`` instead of logits."""
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
    """Replace the model's LM head by an `OutputHead` and return it. Return None if the head is not a plain ``Linear``.

    Call this before sharding, which records the modules that hold each parameter.
    """
    plain = model.get_output_embeddings()
    if type(plain) is not nn.Linear:
        return None
    head = OutputHead(plain).train(plain.training)
    model.set_output_embeddings(head)
    return head if model.get_output_embeddings() is head else None


def gives_back_head_results(model: PreTrainedModel, head: OutputHead, device: torch.device) -> bool:
    """Return True if the model returns its head's output unchanged, for outputs of any size. Collective.

    The head is made to return known numbers, so neither weights nor rounding can hide a change. Runs the model three
    times on three tokens, without gradients.
    """
    # Full size last: a successful pass resets the sharding hooks that a failed one left half-way.
    sizes = (1, 2, head.out_features)
    unchanged = [_comes_back(model, head, size, device) for size in sizes]
    if not all(unchanged):
        logger.info("%s changes its logits after the head: log-probabilities need all of them", type(model).__name__)
    return all(unchanged)


def _comes_back(model: PreTrainedModel, head: OutputHead, size: int, device: torch.device) -> bool:
    tokens = torch.zeros((1, 3), dtype=torch.int64, device=device)
    # The values are large and not representable in lower precision. There are fewer positions than tokens.
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
    """Forward pass of a Hugging Face model: log-probabilities and entropies, or values, of the wanted targets."""

    def __init__(
        self,
        kind: ModelKind,
        model: nn.Module,
        head: OutputHead | None,
        device: torch.device,
        signature_of: nn.Module | None = None,
        replays: bool = False,
    ) -> None:
        """Test on a few tokens whether the head can compute results itself. Collective.

        ``head`` is the result of `install_output_head`. ``signature_of`` is the unwrapped model, if ``model`` is a
        wrapper that hides its forward arguments. ``replays``: use recorded experts where a micro-batch has some; raises
        `UnroutableModel` if the model's cannot be replaced.
        """
        self.kind = kind
        self.model = model
        plain: Any = signature_of or model
        arguments = inspect.signature(plain.forward).parameters
        self.replay = RouterReplay(plain, model, device) if replays else None
        self.keeps_positions = "logits_to_keep" in arguments
        self.head = head if head is not None and gives_back_head_results(model, head, device) else None
        self.chunk_elements = LINEAR_CHUNK_ELEMENTS
        """Number of logits (positions x vocabulary) that the head computes at a time."""

    def outputs(self, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, ...]:
        """Return the inputs of the loss, each ``[rows, kept]``: (log-probabilities, entropies), or (values,).

        Entropies carry a gradient only with ``entropy_gradient``.
        """
        if self.kind == "value":
            return (self.values(micro_batch),)
        logprobs, entropy = self._results(micro_batch, temperature, "loss" if entropy_gradient else "metric")
        return logprobs, entropy if entropy_gradient else entropy.detach()

    def logprobs(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the targets, ``[rows, kept]``."""
        if self.kind == "value":
            raise RuntimeError("this role has a value model, which gives no log-probabilities")
        return self._results(micro_batch, temperature, "none")[0]

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Return the value of the state before each target, float32 ``[rows, kept]``."""
        if self.kind == "policy":
            raise RuntimeError("this role has a policy, which gives no values")
        return micro_batch.by_sample(self._logits(micro_batch)[..., 0].float())

    def means(self, micro_batch: MicroBatch) -> Tensor:
        """Raise ``RuntimeError``: text models have no denoising steps."""
        raise RuntimeError("only the steps of pictures have means")

    def routing_counts(self) -> np.ndarray:
        """Return `RouterReplay.take_counts` over the ranks that share a micro-batch; zeros without router replay."""
        return np.zeros(2) if self.replay is None else self.replay.take_counts()

    def move(self, device: torch.device) -> None:
        """Do nothing. Only image models have auxiliary models to move (`PictureForward.move`)."""

    @cached_property
    def _processor(self) -> PictureProcessor:
        return PictureProcessor(str(self.model.name_or_path))

    def _arguments(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the arguments for the model, and set the experts of its tokens until the next micro-batch."""
        if self.replay is not None:
            self.replay.use(micro_batch.routing)
        arguments, pictures = micro_batch.model_arguments(), micro_batch.prompt_pictures
        if pictures is not None:
            arguments |= self._processor.model_arguments(micro_batch.input_ids, pictures)
        return arguments

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits that predict the targets: ``[*targets, vocabulary]``."""
        arguments = self._arguments(micro_batch)
        if self.keeps_positions:
            return self.model(**arguments, logits_to_keep=micro_batch.positions).logits
        return self.model(**arguments).logits[:, micro_batch.positions]

    def _results(self, micro_batch: MicroBatch, temperature: float, entropy_use: EntropyUse) -> list[Tensor]:
        """Return log-probabilities of the targets, and entropies if they are used, ``[rows, kept]`` each.

        They are computed inside the model's head if that is possible."""
        targets, chunk = micro_batch.targets, self.chunk_elements

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            kept = hidden[:, micro_batch.positions]
            return torch.stack(linear_results(kept, weight, bias, targets, temperature, entropy_use, chunk), dim=-1)

        results: Iterable[Tensor]
        if self.head is None:
            results = token_results(self._logits(micro_batch), targets, temperature, entropy_use)
        else:
            with self.head.computing(compute):
                results = self.model(**self._arguments(micro_batch)).logits.unbind(-1)
        return [micro_batch.by_sample(values) for values in results]


def model_class(kind: ModelKind, config: PretrainedConfig) -> Any:
    """Return transformers' auto class: `policy_class` for a policy, token classification for a value model."""
    from transformers import AutoModelForTokenClassification

    return policy_class(config) if kind == "policy" else AutoModelForTokenClassification


def load_model(path: str, arguments: ModelArguments, dtype: torch.dtype, kind: ModelKind = "policy") -> PreTrainedModel:
    """Load the model at ``path`` (folder or hub name) on the CPU.

    Missing tensors of a value model's head are set to 0, so a new head predicts 0 everywhere; a reward model's head,
    which has no bias, is kept. Raises ``ValueError`` naming any other missing tensor, because transformers would
    initialise it randomly.
    """
    from transformers import AutoConfig

    options = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(path, trust_remote_code=arguments.trust_remote_code)
    model, found = model_class(kind, config).from_pretrained(
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
    """Return an exported model's weights by name, tied ones once. ``shapes`` are those of the trainer's parameters.

    Raises ``ValueError`` naming the tensor if names or shapes differ.
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
    "*processor_config.json",
    "spiece.model",
    "sentencepiece*.model",
)


@dataclass(frozen=True)
class ModelExport:
    """A copy of the model that any thread may write to disk."""

    model: PreTrainedModel
    source: str
    """Folder or hub name that the model was loaded from; the tokenizer is copied from there."""
    trust_remote_code: bool
    beside: Callable[[str], None] | None = None
    """Optional function that writes additional files into the folder."""

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
    """Export the model, write it into the folder ``path`` and wait until it is written. Collective."""
    export = trainer.export()
    if export is not None:
        export.write(path)
    dist.barrier()


def build_export(
    like: PreTrainedModel, weights: Mapping[str, Tensor], setup: TrainerSetup
) -> ModelExport | PictureExport:
    """Return an export with ``weights`` (full tensors by name, tied ones once) and the configuration of ``like``.

    Raises ``RuntimeError`` if weights are missing.
    """
    draws, trusted = setup.pictures is not None, setup.model_args.trust_remote_code
    with torch.device("meta"):
        if draws:
            skeleton = type(like).from_config(like.config)
        else:
            skeleton = model_class(setup.kind, like.config).from_config(like.config, trust_remote_code=trusted)
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in like.named_buffers() if not buffer.is_meta}
    skeleton.load_state_dict({**weights, **buffers}, strict=False, assign=True)
    if not draws:
        skeleton.tie_weights()
    missing = [name for name, parameter in skeleton.named_parameters() if parameter.is_meta]
    if missing:
        raise RuntimeError(f"the export lacks the weights {', '.join(missing)}")
    if draws:
        return _pictures().PictureExport(skeleton, setup.model_path)
    if setup.kind == "policy":
        skeleton.generation_config = _ended_by(like, setup.end_tokens)
    return ModelExport(skeleton, setup.model_path, trusted)


def _ended_by(model: PreTrainedModel, end_tokens: Sequence[int]) -> GenerationConfig | None:
    """Return the model's generation settings with ``end_tokens`` added to its end-of-sequence tokens."""
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
    """Return the dtype in which weights are stored: float32, or the configured dtype if they are never updated."""
    frozen = setup.forward_only or setup.trains_adapters
    return getattr(torch, setup.model_args.dtype) if frozen else torch.float32


SHORT = {"BF16": torch.bfloat16, "F16": torch.float16}


def mapped_dtype(setup: TrainerSetup) -> torch.dtype:
    """Return the dtype to load weights in: that of the files if all their tensors are 16-bit, else `stored_dtype`.

    Tensors that need no conversion are memory-mapped: the ranks of a node share the pages, and a rank needs memory only
    for what it keeps.
    """
    dtype = stored_dtype(setup)
    if dtype != torch.float32:
        return dtype
    try:
        (found,) = CheckpointFiles(checkpoint_folder(setup.model_path)).precisions()
    except (ValueError, OSError, SafetensorError):  # several dtypes, or damaged files, which `load_model` reports
        return dtype
    return SHORT.get(found, dtype)


def _has_constants(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return True if the model has constants in this dtype that are in no file (Gemma's embedding scale).

    Loading in a lower precision would have rounded them."""
    stored = model.state_dict().keys()
    return any(name not in stored and buffer.dtype == dtype for name, buffer in model.named_buffers())


class PreparedModel(NamedTuple):
    """A rank's model: unsharded, on the CPU, without dropout."""

    model: PreTrainedModel
    head: OutputHead | None
    """Result of `install_output_head`."""
    packed: bool
    """True if samples are packed into rows."""


def prepare_model(setup: TrainerSetup, gradient_checkpointing: bool, mapped: bool = False) -> PreparedModel:
    """Load a rank's model and make it ready for training, or for forward passes only.

    Weights have `stored_dtype`. With ``mapped``, they have `mapped_dtype` if that rounds no constant, and the caller
    converts what it keeps. Raises ``UnpackableModel`` if samples must be packed and the model would mix them.
    """
    if setup.pictures is not None:
        model = _pictures().prepare_pictures(setup, gradient_checkpointing, stored_dtype(setup))
        return PreparedModel(model, head=None, packed=False)
    dtype = mapped_dtype(setup) if mapped else stored_dtype(setup)
    model = load_model(setup.model_path, setup.model_args, dtype, setup.kind)
    if dtype != stored_dtype(setup) and _has_constants(model, dtype):
        model = load_model(setup.model_path, setup.model_args, stored_dtype(setup), setup.kind)
    if setup.device == "cpu":
        keep_blocks_of(model.num_parameters())
    head = install_output_head(model) if setup.kind == "policy" else None
    model.eval()
    packed = packs_samples(model, setup)
    model.requires_grad_(not setup.forward_only)
    if gradient_checkpointing and not setup.forward_only:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(model):
            # Checkpointing checks the layer's own training flag. Its children, dropout among them, stay in eval mode.
            layer.training = True
    return PreparedModel(model, head, packed)


def forward_pass(
    setup: TrainerSetup, model: PreTrainedModel, head: OutputHead | None, device: torch.device
) -> HfForward | PictureForward:
    """Return the `HfForward` or `PictureForward` of a rank's model, which may be sharded. Collective."""
    if setup.pictures is None:
        return HfForward(setup.kind, model, head, device, replays=setup.replays_routing)
    return _pictures().PictureForward(setup, model, device)


def _pictures() -> Any:
    """Import the module for image models lazily, because diffusers need not be installed."""
    from roll.trainers import pictures

    return pictures


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's decoder layers: the modules that it declares as not to be split across devices."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
