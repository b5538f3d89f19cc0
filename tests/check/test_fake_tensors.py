"""What FSDP2 allocates for a model of real width on one of four ranks, counted by torch on tensors without memory, is
what `roll check` estimates. The ranks' group and the tensors are torch's own fakes; the sharding is the trainer's.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.trainers import fsdp2
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from tests.check.test_memory import of_gpus, role_of

pytestmark = [pytest.mark.tier("soak"), pytest.mark.timeout(1200)]

RANKS, TOKENS, LAYERS = 4, 4096, 4
WIDTHS = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SEVEN = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    **WIDTHS,
)
SPARSE = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, **WIDTHS,
)  # fmt: skip
FAMILIES = {"qwen2": (Qwen2ForCausalLM, SEVEN), "qwen3_moe": (Qwen3MoeForCausalLM, SPARSE)}


@pytest.fixture
def last_rank():
    """This process as the last of four ranks whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS - 1, world_size=RANKS)
    yield
    dist.destroy_process_group()


def sharded(family: str, monkeypatch, **options) -> torch.nn.Module:
    """The model as the trainer wraps it, with tensors that have no memory. Call it in a `FakeTensorMode`."""
    create, real = FAMILIES[family], fsdp2.init_device_mesh

    def mesh(*arguments):
        with unset_fake_temporarily():  # it looks at its own numbers
            return real(*arguments)

    monkeypatch.setattr(fsdp2, "init_device_mesh", mesh)
    with unset_fake_temporarily(), torch.device("meta"):
        model = create[0](create[1])
    model = model.to_empty(device="cpu")
    model.gradient_checkpointing_enable()
    setup = SimpleNamespace(device="cpu", world_size=RANKS, model_args=SimpleNamespace(dtype="bfloat16"))
    own = SimpleNamespace(setup=setup, options=SimpleNamespace(reshard_after_forward=True, offload="none"))
    return Fsdp2TrainStrategy._shard(own, model.train())


def estimated(family: str, folder):
    FAMILIES[family][1].save_pretrained(folder)
    return role_of(
        of_gpus(
            pretrain=str(folder),
            actor_train__max_tokens_per_microbatch_in_train=TOKENS,
            actor_train__strategy_args={"strategy_config": {"gradient_checkpointing": True}},
        )
    )


def counted(tracker: FSDPMemTracker, kind: str) -> dict[str, float]:
    """Bytes by kind."""
    snapshot = tracker.get_tracker_snapshot(kind)[torch.device("cpu")]
    return {str(name).rpartition(".")[2]: size for name, size in snapshot.items()}


def part(role, name: str) -> float:
    return next(
        part.size for part in (*role.always, *(p for phase in role.phases for p in phase.parts)) if part.name == name
    )


def test_states_activations_and_gathered_weights_of_a_dense_model(last_rank, monkeypatch, tmp_path):
    role = estimated("qwen2", tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sharded("qwen2", monkeypatch)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker, ids = FSDPMemTracker(model, optimizer), torch.zeros((1, TOKENS), dtype=torch.int64)
        with tracker:
            loss = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float().sum()
            forward = counted(tracker, "peak")
            loss.backward()
            backward = counted(tracker, "peak")
            # Moments in the step are not looked at: DTensor finds out shapes with tensors that the tracker counts, too.
            optimizer.step()
        after = counted(tracker, "current")
    assert after["SHARDED_PARAM"] == pytest.approx(part(role, "weights"), rel=1e-3)
    assert after["SHARDED_GRAD"] == pytest.approx(part(role, "gradients"), rel=1e-3)
    assert after["OPT"] == pytest.approx(part(role, "optimizer"), rel=1e-3)
    # The estimate has the gradients of earlier micro-batches as well, and embedding and head still gathered.
    counts = max(forward["Total"], backward["Total"]) - after["SHARDED_PARAM"]
    passes = [sum(p.size for p in phase.parts) for phase in role.phases if phase.name.startswith("the backward pass")]
    assert counts <= max(passes) <= 1.6 * counts


def test_states_of_a_mixture_of_experts(last_rank, monkeypatch, tmp_path):
    role = estimated("qwen3_moe", tmp_path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sharded("qwen3_moe", monkeypatch)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with FSDPMemTracker(model, optimizer) as tracker:
            optimizer.step()
            after = counted(tracker, "current")
    assert after["SHARDED_PARAM"] == pytest.approx(part(role, "weights"), rel=1e-3)
    assert after["OPT"] == pytest.approx(part(role, "optimizer"), rel=1e-3)
