"""Rows that the ranks of `megatron_train` split by position.

Transformer Engine's attention needs a GPU, so its place is taken by one that gathers keys and values.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from roll.configs.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.trainers.megatron.facts import _context_problems, _packing_problems, layout_problems
from roll.trainers.options import MegatronOptions
from roll.trainers.step import MicroBatch, Packing
from tests.trainers import ranks
from tests.trainers.megatron_models import write_models
from tests.trainers.megatron_runs import Run
from tests.trainers.nursery import on_ranks


class Gather(torch.autograd.Function):
    """The ranks' tensors in a row. A rank's gradient is the sum of what all ranks found for its part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty(part.shape, dtype=part.dtype) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheringAttention(nn.Module):
    """Causal attention of this rank's two chunks, of the row or of each sample, over the keys and values of all
    ranks."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, *_: Any, packed_seq_params=None, **__: Any):
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        if packed_seq_params is None:
            return self.attend(query, key, value, group)
        boundaries = packed_seq_params.cu_seqlens_q
        assert boundaries is packed_seq_params.cu_seqlens_kv_padded
        lengths = (boundaries.diff() // group.size()).tolist()
        samples = zip(*(tensor[:, None].split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([self.attend(*sample, group)[:, 0] for sample in samples])

    def attend(self, query, key, value, group):
        chunk = query.shape[0] // 2

        def places(rank):
            starts = rank * chunk, (2 * group.size() - 1 - rank) * chunk
            return torch.cat([torch.arange(start, start + chunk) for start in starts])

        mask = torch.cat([places(rank) for rank in range(group.size())])[None] <= places(group.rank())[:, None]
        whole = (Gather.apply(part, group) for part in (key, value))
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, *whole))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


def train(rank: int, port: int, job: ranks.Job) -> Any:
    from roll.trainers.megatron import model

    with (
        mock.patch.object(model, "CausalAttention", GatheringAttention),
        mock.patch.object(model, "uses_transformer_engine", lambda *_: False),
    ):
        return ranks._train(rank, port, job)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def whole(models):
    return {name: ranks.run_job(Run(f"{name}-whole", name).job(models))[0] for name in ("qwen3", "qwen3_moe")}


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("model", "count", "options"),
    [
        ("qwen3", 2, {"context_parallel_size": 2}),
        ("qwen3", 4, {"context_parallel_size": 2}),
        ("qwen3_moe", 2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
        ("qwen3", 4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("qwen3", 4, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
)
def test_split_rows_train_like_whole_ones(models, whole, model, count, options):
    name = "-".join(map(str, (model, count, *options)))
    for found in on_ranks(train, Run(name, model, count, options).job(models), ranks=count, engine="megatron"):
        assert found.keys() == whole[model].keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, whole[model][key], rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.tier("all")
def test_a_critic_learns_the_same_from_split_rows(models):
    from tests.trainers import test_megatron_critic as critic  # it is skipped where megatron-core is not installed

    setup = {"kind": "value", "training_args": critic.TRAINING, "max_tokens": 25}
    split = setup | {"strategy_config": {"context_parallel_size": 2}}
    model = str(models / "qwen3")
    (whole,) = ranks.run_job(ranks.Job(critic.learn, "megatron_train", model, None, setup, ranks=1))
    job = ranks.Job(critic.learn, "megatron_train", model, None, split, ranks=2)
    for found in on_ranks(train, job, ranks=2, engine="megatron"):
        assert found.keys() == whole.keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, whole[key], rtol=1e-5, atol=1e-5, err_msg=key)
    assert np.abs(whole["values/trained"]).max() > 0.01


@pytest.mark.parametrize(
    ("installed", "options", "dtype", "reason"),
    [
        ({"megatron"}, {}, "bfloat16", "not installed"),
        (set(), {}, "bfloat16", None),
        (set(), {}, "float32", "`model_args.dtype` is float32"),
        ({"megatron", "transformer_engine"}, {"transformer_impl": "local"}, "bfloat16", "transformer_impl"),
        ({"megatron", "transformer_engine"}, {}, "float32", "`model_args.dtype` is float32"),
        ({"megatron", "transformer_engine"}, {}, "bfloat16", None),
    ],
)
def test_split_rows_need_transformer_engine_and_its_precision(monkeypatch, installed, options, dtype, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    found = _context_problems(MegatronOptions(context_parallel_size=2, **options), dtype, "p")
    assert [(each.path, reason in each.message) for each in found] == [("p.context_parallel_size", True)] * bool(reason)


@pytest.mark.tier("all")
@pytest.mark.parametrize("ranks_of_group", [2, 4])
def test_positions_are_those_of_megatron_core(ranks_of_group):
    core = pytest.importorskip("megatron.core.utils")
    context = pytest.importorskip("roll.trainers.megatron.context")
    row = MicroBatch(torch.arange(24)[None], *[torch.zeros(0)] * 3, {})
    for rank in range(ranks_of_group):
        group = SimpleNamespace(size=lambda: ranks_of_group, rank=lambda rank=rank: rank)
        with mock.patch.object(core, "get_pg_size", lambda group: group.size()):
            with mock.patch.object(core, "get_pg_rank", lambda group: group.rank()):
                expected = core.get_batch_on_this_cp_rank({"ids": torch.arange(24)[None]}, cp_group=group)["ids"]
        assert torch.equal(context.own_input(row, group), expected)


@pytest.mark.tier("all")
@pytest.mark.parametrize("ranks_of_group", [2, 4])
def test_positions_in_packed_rows_are_those_that_megatron_core_rotates(ranks_of_group):
    rotary = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    context = pytest.importorskip("roll.trainers.megatron.context")
    lengths = [16, 8, 24, 8]
    packing = Packing.of(lengths, torch.device("cpu"))
    row = MicroBatch(torch.arange(56)[None], *[torch.zeros(0)] * 3, {}, packing)
    for rank, found in enumerate(context.shared_positions(row, ranks_of_group)):
        parts = found.split([length // ranks_of_group for length in lengths])
        for part, start, length in zip(parts, packing.boundaries.tolist(), lengths, strict=False):
            own = rotary._get_thd_freqs_on_this_cp_rank(rank, ranks_of_group, part, torch.arange(24))
            assert torch.equal(part, start + own) and (own < length).all()


@pytest.mark.parametrize(
    ("installed", "impl", "dtype", "packs", "device", "refused"),
    [
        ({"transformer_engine"}, "auto", "float32", True, "cuda", True),
        ({"transformer_engine"}, "transformer_engine", "float32", True, "cpu", True),
        ({"transformer_engine"}, "auto", "float32", True, "cpu", False),
        ({"transformer_engine"}, "auto", "float32", False, "cuda", False),
        ({"transformer_engine"}, "auto", "bfloat16", True, "cuda", False),
        ({"transformer_engine"}, "local", "float32", True, "cuda", False),
        (set(), "auto", "float32", True, "cuda", False),
    ],
)
def test_transformer_engine_takes_packed_rows_in_its_precision(
    monkeypatch, installed, impl, dtype, packs, device, refused
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    role = WorkerConfig(model_args=ModelArguments(dtype=dtype), use_sequence_packing=packs)
    found = _packing_problems(MegatronOptions(transformer_impl=impl), role, "p", device)
    assert [(each.path, "in bfloat16" in each.message) for each in found] == [("p.transformer_impl", True)] * refused


@pytest.mark.tier("all")
def test_a_layout_with_packed_rows_in_another_precision_is_refused(models):
    for packs in (False, True):
        role = WorkerConfig(
            device_mapping=[0],
            strategy_args=StrategyArguments(strategy_config={"transformer_impl": "transformer_engine"}),
            use_sequence_packing=packs,
        )
        found = layout_problems(role, str(models / "qwen3"), "p", kind="policy", forward_only=False, device="cpu")
        assert [each.path for each in found] == ["p.transformer_impl"] * packs


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_transformer_engine_attention_joins_the_context_group_of_its_process_and_is_told_boundaries():
    (folder,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    tree = ast.parse((Path(folder) / "extensions" / "transformer_engine.py").read_text())
    (attention,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    )
    text = ast.unparse(attention)
    assert "extra_kwargs['cp_group'] = pg_collection.cp" in text and "extra_kwargs['cp_comm_type'] = 'p2p'" in text
    assert "(field.name for field in dataclasses.fields(PackedSeqParams))" in text
    assert "{key: getattr(packed_seq_params, key) for key in self.kept_packed_seq_params}" in text
    assert "attn_mask_type = AttnMaskType.padding_causal" in text
