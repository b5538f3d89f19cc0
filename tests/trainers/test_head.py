"""The output head inside real models and a real trainer: the same training, whatever the chunks and the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import ModelArguments
from roll.data.records import SampleBatch
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.model import gives_back_head_results, install_output_head
from tests.trainers.nursery import on_ranks
from tests.trainers.trainers import ALMOST_SGD, trainer_setup

VOCABULARY = 61

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class BiasedConfig(Qwen2Config):
    model_type = "biased_for_test"


class BiasedForCausalLM(Qwen2ForCausalLM):
    """Adds a bias of the size of the vocabulary, which is zero and yet needs full logits; a forward pass of its own."""

    config_class = BiasedConfig

    def forward(self, input_ids=None, use_cache=None, **rest):
        output = super().forward(input_ids=input_ids, use_cache=use_cache, **rest)
        output.logits = output.logits + torch.zeros(self.config.vocab_size, device=output.logits.device)
        return output


class PlainSignatureConfig(Qwen2Config):
    model_type = "plain_signature_for_test"


class PlainSignatureForCausalLM(Qwen2ForCausalLM):
    """A forward pass that always gives all positions."""

    config_class = PlainSignatureConfig

    def forward(self, input_ids=None, use_cache=None):
        return super().forward(input_ids=input_ids, use_cache=use_cache)


class PaddedConfig(Qwen2Config):
    model_type = "padded_for_test"


class PaddedForCausalLM(Qwen2ForCausalLM):
    """Rules out tokens at the end of the vocabulary: nothing to notice in results of another size."""

    config_class = PaddedConfig

    def forward(self, input_ids=None, use_cache=None, logits_to_keep=0):
        output = super().forward(input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)
        output.logits[..., VOCABULARY - 3 :] = -1e4
        return output


for config_class, model_class in [
    (BiasedConfig, BiasedForCausalLM),
    (PlainSignatureConfig, PlainSignatureForCausalLM),
    (PaddedConfig, PaddedForCausalLM),
]:
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)

MODELS = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "biased_head": lambda: PhiForCausalLM(PhiConfig(**SIZES, partial_rotary_factor=0.5)),
    "plain_signature": lambda: PlainSignatureForCausalLM(PlainSignatureConfig(**SIZES, tie_word_embeddings=True)),
    "unscaled_granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES)),
    "uncapped_gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=None)),
    "capped_gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "padded": lambda: PaddedForCausalLM(PaddedConfig(**SIZES)),
    "zero_bias": lambda: BiasedForCausalLM(BiasedConfig(**SIZES, tie_word_embeddings=True)),
}
FUSED = ["tied", "untied", "biased_head", "plain_signature", "unscaled_granite", "uncapped_gemma"]
FULL_LOGITS = ["capped_gemma", "cohere", "granite", "padded", "zero_bias"]


def make_model(kind: str):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model


def build(path: str, *, rank=0, world_size=1, port=None, dtype="float32", max_tokens=10_000, chunk_elements=None):
    # Gemma 2 caps its attention scores, which `sdpa` cannot.
    model_args = ModelArguments(dtype=dtype, attn_implementation="eager" if "gemma" in path else "sdpa")
    trainer = Fsdp2TrainStrategy(
        trainer_setup(
            path, rank=rank, world_size=world_size, port=port, model_args=model_args, training_args=ALMOST_SGD,
            max_tokens=max_tokens,
        )
    )  # fmt: skip
    trainer.initialize()
    if chunk_elements is not None:
        trainer.forward.chunk_elements = chunk_elements
    return trainer


@pytest.fixture
def start(leave_process_group):
    """Build trainers of one rank, one after the other."""

    def build_one(path, **changes):
        leave_process_group()
        return build(path, **changes)

    return build_one


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a saved model, by kind."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(kind: str) -> str:
        if not (folder / kind).exists():
            make_model(kind).save_pretrained(folder / kind)
        return str(folder / kind)

    return path_of


def make_batch(lengths=(9, 5, 12, 3, 7)) -> SampleBatch:
    generator = np.random.default_rng(0)
    total = sum(lengths)
    place = np.concatenate([np.arange(length) for length in lengths])
    mask = (generator.random(total) < 0.6) & (place > 1)  # Prompts of two tokens, so positions kept do not start at 0.
    values = {name: generator.normal(size=total).astype(np.float32) for name in ("behaviour_logprobs", "advantages")}
    values["behaviour_logprobs"] -= 4
    ids = generator.integers(0, VOCABULARY, total).astype(np.int32)
    tokens = {"token_ids": ids, "response_mask": mask, **values, "versions": np.zeros(total, dtype=np.int32)}
    return SampleBatch(np.array(lengths, dtype=np.int64), tokens)


TRAINS_ENTROPY = PolicyObjective(8, "tis", {"upper": 5.0}, "seq-mean-token-mean", entropy_loss_coef=0.05)
METRIC_ONLY = PolicyObjective(8, "tis", {"upper": 5.0}, "seq-mean-token-mean")


def everything(trainer, objective=TRAINS_ENTROPY) -> dict[str, np.ndarray]:
    """Log-probabilities, the metrics of two steps, and the weights after them."""
    results = {"logprobs": trainer.log_probs(make_batch(), 0.7)}
    for step in range(2):
        metrics = trainer.train_step(make_batch(), objective, 0.9)
        results |= {f"metric/{step}/{name}": np.array(value) for name, value in metrics.items()}
    return results | {f"weight/{name}": weight.clone().numpy() for name, weight in trainer.named_weights()}


def assert_same_bits(results, expected):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(results[name], value), name


def assert_close(results, expected, atol=1e-6):
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", ["tied", "untied", "biased_head"])
def test_the_head_holds_the_parameters_under_their_names_and_gives_the_same_logits(kind):
    model, ids = make_model(kind), torch.arange(10).reshape(2, 5)
    before, logits = dict(model.named_parameters(remove_duplicate=False)), model(input_ids=ids).logits
    head = install_output_head(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == list(make_model(kind).state_dict())
    assert model.get_output_embeddings() is head and not head.training
    assert (head.weight is model.get_input_embeddings().weight) == (kind == "tied")
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_the_head_computes_something_else_only_inside_the_block():
    model, ids = make_model("tied"), torch.arange(10).reshape(2, 5)
    head, logits = install_output_head(model), model(input_ids=ids).logits
    with head.computing(lambda hidden, weight, bias: hidden @ weight.T):
        assert torch.equal(model(input_ids=ids).logits, logits)
    with pytest.raises(KeyError), head.computing(lambda hidden, weight, bias: hidden.sum(-1, keepdim=True)):
        assert model(input_ids=ids).logits.shape == (2, 5, 1)
        raise KeyError
    assert torch.equal(model(input_ids=ids).logits, logits)


@pytest.mark.parametrize("kind", FUSED + FULL_LOGITS)
def test_a_model_that_changes_logits_after_the_head_is_found_out_whatever_its_weights(kind):
    for weights in ("random", "zero"):
        model = make_model(kind)
        if weights == "zero":
            nn.init.zeros_(model.get_output_embeddings().weight)
        head = install_output_head(model)
        assert gives_back_head_results(model, head, torch.device("cpu")) == (kind in FUSED)


def test_a_head_that_is_no_plain_linear_layer_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model = make_model("untied")
    scaled = Scaled(16, VOCABULARY, bias=False)
    model.set_output_embeddings(scaled)
    assert install_output_head(model) is None and model.get_output_embeddings() is scaled


@pytest.mark.parametrize("objective", [TRAINS_ENTROPY, METRIC_ONLY])
@pytest.mark.parametrize("kind", ["tied", "untied", "biased_head", "plain_signature"])
def test_chunks_train_the_same_and_one_chunk_has_the_bits_of_full_logits(start, saved, kind, objective):
    trainer = start(saved(kind))
    assert trainer.forward.head is not None
    fused = everything(trainer, objective)
    assert_close(everything(start(saved(kind), chunk_elements=5 * VOCABULARY + 7), objective), fused)
    trainer = start(saved(kind))
    trainer.forward.head = None
    full = everything(trainer, objective)
    # A model that cannot leave positions out multiplies matrices of another shape.
    (assert_close if kind == "plain_signature" else assert_same_bits)(fused, full)


@pytest.mark.parametrize("kind", FULL_LOGITS)
def test_models_that_change_their_logits_are_trained_on_what_they_give(start, saved, kind):
    trainer = start(saved(kind), chunk_elements=100)
    assert trainer.forward.head is None
    results = everything(trainer)
    model = AutoModelForCausalLM.from_pretrained(saved(kind)).eval()
    batch = make_batch()
    ids = torch.from_numpy(batch.tokens["token_ids"].astype(np.int64))
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        table = (model(input_ids=ids[None, begin:end]).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = table.gather(-1, ids[begin + 1 : end, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(results["logprobs"][begin + 1 : end], expected, rtol=1e-5, atol=1e-5)
    # The trial at the start left nothing behind: the second trainer of the same weights does the same.
    assert_same_bits(everything(start(saved(kind), chunk_elements=100)), results)


def test_low_precision_compute_trains_alike_in_chunks_and_in_one(start, saved):
    fused = everything(start(saved("tied"), dtype="bfloat16"))
    trainer = start(saved("tied"), dtype="bfloat16")
    trainer.forward.head = None
    assert_same_bits(fused, everything(trainer))
    chunked = everything(start(saved("tied"), dtype="bfloat16", chunk_elements=5 * VOCABULARY))
    exact = everything(start(saved("tied")))
    assert_close({"logprobs": chunked["logprobs"]}, {"logprobs": fused["logprobs"]})
    assert chunked["metric/0/grad_norm"] == pytest.approx(fused["metric/0/grad_norm"], rel=0.01)

    def distance(results, others) -> float:
        names = [name for name in exact if name.startswith("weight/")]
        return sum(float(np.square(results[name] - others[name]).sum()) for name in names) ** 0.5

    # Chunks round differently, by little beside what computing in bfloat16 does.
    assert 0 < distance(chunked, fused) < 0.25 * distance(fused, exact)


class LargestTensor(TorchDispatchMode):
    """The most elements that one operation inside the block has made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_no_tensor_of_the_trainer_has_the_size_of_the_logits(start, saved):
    trainer = start(saved("tied"))
    batch = make_batch(lengths=(60, 60, 60, 60))
    logits = 200 * VOCABULARY

    def largest() -> int:
        with LargestTensor() as seen:
            trainer.log_probs(batch, 1.0)
            trainer.train_step(batch, TRAINS_ENTROPY, 1.0)
        return seen.elements

    assert largest() > logits
    trainer.forward.chunk_elements = 1000
    # What the layers need: 4 x 60 tokens of size 24.
    assert largest() < logits / 2


def run_rank(rank: int, port: int, path: str) -> dict[str, np.ndarray]:
    trainer = build(path, rank=rank, world_size=2, port=port, max_tokens=25, chunk_elements=3 * VOCABULARY)
    results = everything(trainer)
    trainer.shutdown()
    return results


@pytest.mark.tier("all")
def test_two_ranks_in_chunks_train_like_one_rank_in_one(start, saved):
    expected = everything(start(saved("tied")))
    for results in on_ranks(run_rank, saved("tied"), ranks=2):
        assert_close(results, expected, atol=1e-5)  # Gradients are summed in another order.
