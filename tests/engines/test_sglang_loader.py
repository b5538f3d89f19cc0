"""What SGLang's loader does is found out in few readings, and kept in mind, on one GPU or several."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager

import pytest

from roll.engines.sglang.loader import LoaderCheck
from roll.engines.sglang.strategy import SGLangInferStrategy
from roll.weights.buckets import HeldWeights, WeightMismatch

LAYERS, EXPERTS, RANKS = 24, 4, 2


def published() -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(LAYERS):
        names += [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for expert in range(EXPERTS)
            for part in ("gate", "up", "down")
        ]
    return names


def home(name: str) -> tuple[list[int], str]:
    """Ranks and parameter that a tensor goes into; experts are divided."""
    expert = re.search(r"experts\.(\d)\.(\w+)_proj", name)
    if expert:
        fused = "w2_weight" if expert[2] == "down" else "w13_weight"
        return [int(expert[1]) % RANKS], re.sub(r"\d\.\w+_proj\.weight", fused, name)
    return list(range(RANKS)), re.sub(r"\.[qkv]_proj", ".qkv_proj", name)


def held(contents: dict[str, int], skipped: str = "nothing") -> dict[tuple[int, str], str]:
    """Checksums of a server that holds these tensors."""
    parameters: dict[tuple[int, str], list[int]] = {}
    for name, content in contents.items():
        ranks, parameter = home(name)
        for rank in ranks:
            parameters.setdefault((rank, parameter), []).append(0 if re.search(skipped, name) else content)
    return {key: str(values) for key, values in parameters.items()}


def learned(contents: dict[str, int], skipped: str = "nothing") -> tuple[LoaderCheck, int]:
    check = LoaderCheck(contents, held(contents, skipped))
    rounds = check.rounds()
    for names in rounds:
        check.learn(1, names, held(contents | {name: -1 for name in names}, skipped))
    return check, len(rounds)


CONTENTS = {name: number + 1 for number, name in enumerate(published())}


def test_a_deep_model_is_read_twice_more_however_many_tensors_it_has():
    check, rounds = learned(CONTENTS)
    assert rounds == 2
    check.require_filled(1, held(CONTENTS))


@pytest.mark.parametrize("skipped", ["k_proj", "experts.*up_proj", r"model\.norm", "embed_tokens"])
def test_a_kind_of_tensor_that_is_passed_over_is_told_by_a_name(skipped):
    with pytest.raises(WeightMismatch, match=f"does not load tensor '[^']*{skipped}"):
        learned(CONTENTS, skipped)


def test_a_parameter_that_is_not_what_it_was_is_told_by_its_name():
    check, _ = learned(CONTENTS)
    with pytest.raises(WeightMismatch, match=r"'model\.layers\.7\.mlp\.experts\.w13_weight' is not filled .*\(1 such"):
        check.require_filled(1, held(CONTENTS | {"model.layers.7.mlp.experts.3.up_proj.weight": -1}))


def test_an_update_must_change_the_parameter_of_each_tensor_that_is_new():
    check, _ = learned(CONTENTS)
    second = {name: content + 1000 if "layers.5." in name else content for name, content in CONTENTS.items()}
    check.compare(2, second, held(second))
    check.compare(3, second, held(second))
    lost = "model.layers.9.mlp.experts.2.down_proj.weight"
    third = second | {lost: -5, "model.norm.weight": -6}
    with pytest.raises(WeightMismatch, match=f"version 4 brought a new tensor '{lost}'"):
        check.compare(4, third, held(third | {lost: second[lost]}))


def test_a_buffer_that_sglang_computes_itself_may_be_passed_over():
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    files = CONTENTS | {bias: 1}

    class Checkpoint:
        @contextmanager
        def altered(self, names):
            before = dict(files)
            files.update({name: -1 for name in names})
            yield
            files.update(before)

    class Strategy(SGLangInferStrategy):
        def __init__(self, buffers):
            self._buffers = frozenset(buffers)

        async def _read_checkpoint(self, checkpoint, version):
            self.read = dict(files)

        async def _order(self, path, body):
            assert body["action"] == "reset_tensors"

        async def _parameter_checksums(self):
            return held(self.read, skipped="bias")

    def update(strategy, version):
        async def run():
            await strategy._read_checkpoint(Checkpoint(), version)
            await strategy._check_loader(Checkpoint(), HeldWeights(version, 0, dict(files)))

        asyncio.run(run())

    strategy = Strategy([bias])
    update(strategy, 1)
    files[bias] = 2
    update(strategy, 2)
    with pytest.raises(WeightMismatch, match=f"does not load tensor '{bias}'"):
        update(Strategy([]), 1)
