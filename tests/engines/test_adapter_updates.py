"""Weight updates that bring adapters alone: what the engine then computes, and what it refuses.

Each engine of a kind that takes them is held against peft's own model with the same matrices.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, GPTJConfig, GPTJForCausalLM

from roll.engines.base import InferStrategy
from roll.engines.hf.strategy import HFInferStrategy
from roll.engines.vllm.strategy import VLLMInferStrategy
from roll.engines.worker import EngineSpec, InferWorker
from roll.runtime.placement import WorkerPlace
from roll.runtime.workers import WorkerIdentity
from roll.weights.adapters import base_checksums, file_checksums, matrix_names
from roll.weights.buckets import WeightMismatch, manifest, pack_buckets, tensor_checksum
from roll.weights.checkpoint_names import CheckpointNames
from roll.weights.publisher import Publication, WeightsDiffer
from roll.weights.transports import TRANSPORTS, TransportSpec
from tests.engines.engines import begun
from tests.engines.vllm_helpers import MAX_LENGTH, PLACES, RunningEngine, make_model, make_tokenizer, request

RANK = 3
TARGETS = ["q_proj", "o_proj", "down_proj"]
"""A fused projection of which only a part has an adapter, and two of which the whole has one."""


def make_adapted(seed: int) -> torch.nn.Module:
    """The base model with an adapter that changes what it computes."""
    adapted = get_peft_model(make_model(), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


def matrices(adapted: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a trainer publishes of it."""
    tensors = {}
    for name, module in adapted.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            down, up = matrix_names(name)
            tensors[down] = module.lora_A["default"].weight.detach()
            tensors[up] = module.lora_B["default"].weight.detach() * module.scaling["default"]
    return tensors


def buckets_of(adapted: torch.nn.Module, bucket_bytes: int = 4096):
    return list(pack_buckets(matrices(adapted).items(), bucket_bytes))


def expected_logprobs(model: torch.nn.Module, completion, prompt=(5, 6, 7)) -> np.ndarray:
    token_ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        table = model(input_ids=token_ids).logits[0].log_softmax(-1)
    first = len(prompt)
    return table[first - 1 : -1].gather(1, token_ids[0, first:, None])[:, 0].numpy()


def assert_computed_by(model: torch.nn.Module, completion, begin: int = 0, end: int | None = None) -> None:
    difference = np.abs(expected_logprobs(model, completion) - completion.logprobs)[begin:end]
    assert len(difference) and difference.max() < 1e-3 and difference.mean() < 1e-5


@pytest.fixture(scope="module")
def base_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("base")
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def strategy_of(kind: type[InferStrategy], path: str, dtype: str = "float32", **strategy_config) -> InferStrategy:
    return kind(
        path,
        device="cpu",
        dtype=dtype,
        attn_implementation="sdpa",
        max_length=MAX_LENGTH,
        adapter_rank=RANK,
        strategy_config=strategy_config,
    )


VLLM_MARKS = [pytest.mark.tier("all"), pytest.mark.needs("vllm"), pytest.mark.timeout(300)]
VLLM = pytest.param("vllm", marks=VLLM_MARKS)


def vllm_only(test):
    """The marks of a test that starts a vLLM of its own."""
    for mark in VLLM_MARKS:
        test = mark(test)
    return test


def base_of(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    named = CheckpointNames.like(model).of(model.named_parameters())
    return {name: tensor_checksum(tensor.to(dtype)) for name, tensor in named}


@pytest.fixture(scope="module", params=["hf_infer", VLLM])
def engine(request, base_path):
    options = {"max_num_seqs": PLACES + 1} if request.param == "vllm" else {}
    kind = VLLMInferStrategy if request.param == "vllm" else HFInferStrategy
    running = RunningEngine(base_path, strategy=strategy_of(kind, base_path, **options))
    yield running
    running.close()


async def load(strategy: InferStrategy, adapted, version: int, mode: str = "keep"):
    buckets = adapted if isinstance(adapted, list) else buckets_of(adapted)
    held = await strategy.prepare_weights(buckets, version)
    await strategy.pause(mode)
    receipt = await strategy.load_weights(version)
    await strategy.resume()
    assert held.parameter_count == receipt.parameter_count
    return receipt


def publish(engine: RunningEngine, adapted, mode: str = "keep"):
    engine.version += 1
    return engine.run(load, engine.strategy, adapted, engine.version, mode)


def test_each_adapter_is_added_to_the_same_base_and_read_back_from_the_engine(engine):
    sampled = []
    for seed in (1, 2, 3):
        adapted = make_adapted(seed)
        receipt = publish(engine, adapted)
        assert receipt.version == engine.version
        assert receipt.checksums == {name: tensor_checksum(tensor) for name, tensor in matrices(adapted).items()}
        assert receipt.parameter_count == sum(tensor.numel() for tensor in matrices(adapted).values())
        completion = engine.run(engine.strategy.generate, request(f"after-{seed}", 24, seed=3, ignore_eos=True))
        assert set(completion.versions) == {engine.version}
        assert_computed_by(adapted, completion)
        assert np.abs(expected_logprobs(make_model(), completion) - completion.logprobs).max() > 0.1
        (scores,) = engine.run(engine.strategy.score, [np.array([5, 6, 7, *completion.token_ids], dtype=np.int32)])
        np.testing.assert_allclose(scores[3:], completion.logprobs, atol=1e-3)
        sampled.append(completion.token_ids.tolist())
    assert len(set(map(tuple, sampled))) == 3, "no cached prompt or adapter of the version before is used"


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_a_running_request_goes_on_with_the_new_adapter_and_each_token_names_its_own(engine, mode):
    before, after = make_adapted(4), make_adapted(5)
    publish(engine, before)
    old = engine.version
    strategy = engine.strategy

    async def scenario():
        running = asyncio.create_task(strategy.generate(request(f"long-{mode}", 150, seed=1, ignore_eos=True)))
        await begun(strategy, [running], 8)
        await load(strategy, after, old + 1, mode)
        return await running

    engine.version += 1
    completion = engine.run(scenario)
    switch = int((completion.versions == old).sum())
    assert 8 <= switch < 150 and (np.diff(completion.versions) >= 0).all()
    assert_computed_by(before, completion, end=switch)
    # The first new token attends to what the old adapter has cached, if the cache is kept.
    difference = np.abs(expected_logprobs(after, completion) - completion.logprobs)[switch:]
    if mode == "resume":
        assert difference.max() < 1e-3
    else:
        assert difference.max() > 1e-3


def test_what_does_not_fit_is_refused_by_name_and_the_adapter_stays(engine):
    kept = make_adapted(6)
    publish(engine, kept)
    tensors = matrices(make_adapted(7))
    first, last = next(iter(tensors)), list(tensors)[-1]
    layer = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    wrong = {
        "is missing": {name: tensor for name, tensor in tensors.items() if name != last},
        "has shape": {**tensors, first: torch.zeros(RANK + 1, 128)},
        "is not in": {**tensors, layer: torch.zeros(RANK, 128)},
    }
    for message, content in wrong.items():
        with pytest.raises(WeightMismatch, match=message):
            engine.run(engine.strategy.prepare_weights, list(pack_buckets(content.items(), 4096)), engine.version + 1)
    completion = engine.run(engine.strategy.generate, request("kept", 16, seed=2, ignore_eos=True))
    assert_computed_by(kept, completion)


def test_the_base_is_what_the_engine_has_loaded(engine, base_path):
    """Asked of an engine of its own, because it is asked before the first adapter comes."""
    expected = base_of(make_model())
    if isinstance(engine.strategy, VLLMInferStrategy):
        assert engine.run(engine.strategy.base_checksums) == expected
        return
    fresh = RunningEngine(base_path, strategy=strategy_of(HFInferStrategy, base_path))
    assert fresh.run(fresh.strategy.base_checksums) == expected
    fresh.close()


@pytest.mark.tier("soak")
@vllm_only
def test_vllm_in_bfloat16(base_path, tmp_path, monkeypatch):
    """It has the base of a trainer in float32, and leaves no folder. The name is short because paths of sockets are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    strategy = strategy_of(VLLMInferStrategy, base_path, "bfloat16", max_num_seqs=PLACES + 1)
    running = RunningEngine(base_path, strategy=strategy)
    first = running.run(strategy.generate, request("before the first adapter", 8, seed=1, ignore_eos=True))
    assert np.abs(expected_logprobs(make_model(), first) - first.logprobs).max() < 0.1
    assert running.run(strategy.base_checksums) == base_of(make_model(), torch.bfloat16)
    adapted = make_adapted(1)
    as_sent = {name: tensor_checksum(tensor.bfloat16()) for name, tensor in matrices(adapted).items()}
    assert (
        publish(running, list(pack_buckets(matrices(adapted).items(), 4096, float_dtype=torch.bfloat16))).checksums
        == as_sent
    )
    completion = running.run(strategy.generate, request("after", 24, seed=3, ignore_eos=True))
    assert np.abs(expected_logprobs(adapted, completion) - completion.logprobs).max() < 0.1
    assert np.abs(expected_logprobs(make_model(), completion) - completion.logprobs).max() > 0.3
    sent = {name: tensor_checksum(tensor) for name, tensor in matrices(adapted).items()}
    assert publish(running, adapted).checksums == as_sent != sent, "rounding in the engine is no part that is missing"
    assert not list(tmp_path.glob("roll-adapter-*"))
    running.close()


@vllm_only
@pytest.mark.parametrize("start", ["one that fails", pytest.param("vLLM's own", marks=pytest.mark.tier("soak"))])
def test_a_model_that_vllm_has_no_adapters_for_is_refused_with_the_key_to_write(tmp_path, monkeypatch, start):
    """vLLM itself says, after half a minute, only that one of its processes ended."""
    if start == "one that fails":
        failing = Mock(side_effect=RuntimeError("Engine core initialization failed"))
        monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", failing)
    sizes = dict(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=MAX_LENGTH, rotary_dim=16)
    GPTJForCausalLM(GPTJConfig(**sizes)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no adapters for GPTJForCausalLM: write `weight_update.content: full`"):
        asyncio.run(strategy_of(VLLMInferStrategy, str(tmp_path), max_num_seqs=4).start())


def test_a_request_has_the_same_bits_whatever_runs_beside_it(base_path):
    running = RunningEngine(base_path, strategy=strategy_of(HFInferStrategy, base_path))
    publish(running, make_adapted(8))
    strategy = running.strategy

    async def together():
        others = [request(f"other-{index}", 10 + 3 * index, (9,) * (1 + index), seed=index) for index in range(9)]
        done = await asyncio.gather(*map(strategy.generate, [request("one", 60, seed=5, ignore_eos=True), *others]))
        return done[0]

    alone = running.run(strategy.generate, request("one", 60, seed=5, ignore_eos=True))
    beside = running.run(together)
    assert alone.token_ids.tolist() == beside.token_ids.tolist()
    assert alone.logprobs.tobytes() == beside.logprobs.tobytes()
    running.close()


# The base is compared with the files


def test_a_buffer_that_files_keep_in_another_precision_is_the_same_base(tmp_path):
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, n_routed_experts=4, num_experts_per_tok=2)
    made = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads, first_k_dense_replace=1, n_group=1, topk_group=1))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    made.get_buffer(bias).normal_()
    made.bfloat16().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")[bias].dtype == torch.bfloat16
    trained = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    names = CheckpointNames.like(trained)
    assert names.uncast == {bias} and trained.get_buffer(bias).dtype == torch.float32
    held = [*trained.named_parameters(), (bias, trained.get_buffer(bias))]
    expected = base_checksums(names.of(held), names, torch.bfloat16)
    assert file_checksums(str(tmp_path), names, torch.bfloat16) == expected
    trained.get_buffer(bias)[0] += 1
    assert base_checksums(names.of(held), names, torch.bfloat16)[bias] != expected[bias]


def test_a_base_in_several_files_is_read_and_a_tensor_that_they_lack_is_named(tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    names = CheckpointNames.like(make_model())
    assert file_checksums(str(tmp_path), names, torch.float32) == base_of(make_model())
    index = tmp_path / "model.safetensors.index.json"
    lost = "model.layers.1.mlp.up_proj.weight"
    shard = tmp_path / json.loads(index.read_text())["weight_map"][lost]
    tensors = load_file(shard)
    save_file({name.replace(lost, "renamed"): tensor for name, tensor in tensors.items()}, shard, {"format": "pt"})
    with pytest.raises(WeightMismatch, match=rf"'{lost}' is not in the files of .*`weight_update.content: full`"):
        file_checksums(str(tmp_path), names, torch.float32)


# A worker compares the base before it takes the first adapter


def publication_of(adapted, version: int, base: dict[str, int], tmp_path) -> Publication:
    buckets = buckets_of(adapted)
    sender = TRANSPORTS["checkpoint"].sender(TransportSpec("checkpoint", 2, tmp_path / "published"))
    handles = sender.send(0, version, buckets)
    return Publication(version, handles, *manifest(buckets), total_bytes=9, base=base)


def test_an_adapter_with_other_bytes_or_of_another_base_is_refused_with_the_tensor_that_differs(base_path, tmp_path):
    other = tmp_path / "other"
    make_model().save_pretrained(other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 1e-3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    base = base_of(make_model())

    async def main(path: str):
        worker = InferWorker(WorkerIdentity("actor_infer", 0, 1, WorkerPlace(0, "cpu", (0,), 1), None))
        await worker.start(
            EngineSpec("hf_infer", {}, path, "float32", "sdpa", False, 128, transport="checkpoint", adapter_rank=RANK)
        )
        try:
            for version in range(3):
                publication = publication_of(make_adapted(version), version, base, tmp_path)
                receipt, _ = await worker.load_weights(publication, 2**20, "keep")
                assert receipt.checksums == publication.checksums
            spoiled = publication_of(make_adapted(9), 3, base, tmp_path)
            with open(spoiled.handles[-1], "r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x00")
            with pytest.raises(WeightsDiffer, match="layers.2.mlp.down_proj.lora_B.weight' differs from"):
                await worker.load_weights(spoiled, 2**20, "keep")
            assert worker._strategy.stats()["version"] == 2
        finally:
            await worker._strategy.shutdown()

    asyncio.run(main(base_path))
    with pytest.raises(
        WeightsDiffer, match=r"base model of actor_infer/0.*'model.layers.1.mlp.up_proj.weight' differs"
    ):
        asyncio.run(main(str(other)))


# What a class from outside is asked for


def test_an_engine_from_outside_that_knows_no_adapters_is_built_as_ever(monkeypatch):
    class Outside:
        def __init__(
            self,
            model_path,
            *,
            device,
            dtype,
            attn_implementation,
            max_length,
            trust_remote_code,
            devices_per_engine,
            shares_devices,
            transport,
            strategy_config,
        ):
            self.model_path = model_path

    monkeypatch.setattr("roll.engines.worker.strategy_class", lambda kind, name, own: Outside)
    spec = EngineSpec("outside", {}, "model", "float32", "sdpa", False, 128)
    assert spec.build("cpu").model_path == "model"
    with pytest.raises(TypeError, match="adapter_rank"):
        replace(spec, adapter_rank=RANK).build("cpu")
