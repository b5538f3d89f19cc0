"""State of any number of ranks is read by any number of ranks, and what does not fit is refused by name."""

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from roll.trainers.state import (
    INDEX,
    SINGLE,
    CheckpointFiles,
    Part,
    SavedState,
    StateSnapshot,
    UnfitState,
    common_updates,
    own_share,
    whole,
    write_state,
)
from tests.tiers import examples


def write_in_rows(folder, tensors, ranks, facts=()):
    """Each rank writes some rows, as `torch.chunk` deals them out; the last ranks may have none."""
    for rank in range(ranks):
        parts = []
        for name, tensor in tensors.items():
            rows = -(-tensor.shape[0] // ranks)
            first = min(rank * rows, tensor.shape[0])
            offsets = (first, *[0] * (tensor.ndim - 1))
            parts.append(Part(name, tensor[first : first + rows], tuple(tensor.shape), offsets))
        write_state(folder, rank, StateSnapshot(parts, dict(facts), ranks))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_is_read_whoever_wrote_it(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("state")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    write_in_rows(folder, {"weight/a": tensor}, data.draw(st.integers(1, 4)))
    begin = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - first)) for first, size in zip(begin, shape, strict=True)]
    box = tuple(slice(first, first + size) for first, size in zip(begin, sizes, strict=True))
    assert torch.equal(SavedState(folder).read("weight/a", begin, sizes), tensor[box])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_keep_dtype_and_bits(tmp_path, dtype):
    tensor = torch.randn(5, 3).mul(100).to(dtype)
    write_state(tmp_path, 0, StateSnapshot([whole("a", tensor), whole("scalar", tensor[0, 0].clone())], {"steps": 7}))
    state = SavedState(tmp_path)
    assert torch.equal(state.read("a", (0, 0), (5, 3)), tensor) and state.read("a", (0, 0), (5, 3)).dtype == dtype
    assert torch.equal(state.read("scalar", (), ()), tensor[0, 0])
    assert state.facts == {"steps": 7} and state.names() == ["a", "scalar"] and state.shape("a") == (5, 3)


def test_the_file_of_a_rank_that_is_missing_is_noticed(tmp_path):
    write_in_rows(tmp_path, {"weight/a": torch.ones(4, 2)}, 2)
    (tmp_path / "rank-00001.safetensors").unlink()
    with pytest.raises(UnfitState, match="rank-00001.safetensors is damaged"):
        SavedState(tmp_path)


def test_a_part_that_nobody_wrote_is_noticed(tmp_path):
    part = Part("weight/a", torch.ones(2, 2), (4, 2), (0, 0))
    write_state(tmp_path, 0, StateSnapshot([part], {}))
    with pytest.raises(UnfitState, match=r"weight/a: 4 of 8 values"):
        SavedState(tmp_path).read("weight/a", (0, 0), (4, 2))


def test_files_of_ranks_that_are_no_more_are_not_read(tmp_path):
    write_in_rows(tmp_path, {"weight/a": torch.zeros(4, 2)}, 2)
    write_in_rows(tmp_path, {"weight/a": torch.ones(4, 2)}, 1)
    assert torch.equal(SavedState(tmp_path).read("weight/a", (0, 0), (4, 2)), torch.ones(4, 2))


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path, size):
    write_in_rows(tmp_path, {"weight/a": torch.ones(40, 2)}, 1)
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnfitState, match="rank-00000.safetensors is damaged"):
        SavedState(tmp_path)


def test_an_empty_folder_and_an_unknown_tensor_are_refused(tmp_path):
    with pytest.raises(UnfitState, match="holds no training state"):
        SavedState(tmp_path)
    write_in_rows(tmp_path, {"weight/a": torch.ones(4, 2)}, 1)
    with pytest.raises(UnfitState, match="no tensor weight/b: it is the state of another model"):
        SavedState(tmp_path).read("weight/b", (0,), (1,))


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    code = (
        "import resource, torch; from pathlib import Path\n"
        "from roll.trainers.state import StateSnapshot, whole, write_state\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"write_state(Path({str(tmp_path)!r}), 3, StateSnapshot([whole('a', torch.zeros(4000))], {{}}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "OSError: cannot write" in result.stderr and "rank-00003.safetensors" in result.stderr
    assert "too large" in result.stderr.lower()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_several_boxes_of_a_tensor_lie_in_one_file_and_are_shared_out(tmp_path, ranks):
    """As with experts: each is a box of its own, and those who have the same one write some rows each."""
    tensor = torch.arange(24.0).reshape(2, 4, 3)
    boxes = [Part("weight/a", tensor[i : i + 1, j : j + 2], (2, 4, 3), (i, j, 0)) for i in (0, 1) for j in (0, 2)]
    scalar = whole("weight/scale", torch.tensor(3.0))
    for rank in range(ranks):
        parts = [own_share(part, rank, ranks) for part in (*boxes, scalar)]
        write_state(tmp_path, rank, StateSnapshot(parts, {}, ranks))
    state = SavedState(tmp_path)
    assert torch.equal(state.read_whole("weight/a", (2, 4, 3)), tensor) and state.weights() == {"a", "scale"}
    assert torch.equal(state.read("weight/a", (1, 1, 0), (1, 2, 3)), tensor[1:2, 1:3])
    assert state.read_whole("weight/scale", ()) == 3.0


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 9), first_row=st.integers(0, 3), ranks=st.integers(1, 5))
def test_the_rows_of_a_box_are_shared_out_evenly_and_read_where_they_belong(tmp_path_factory, rows, first_row, ranks):
    folder = tmp_path_factory.mktemp("state")
    tensor = torch.arange(12.0 * 2).reshape(12, 2)
    box = Part("weight/a", tensor[first_row : first_row + rows], (12, 2), (first_row, 0))
    shares = [own_share(box, rank, ranks) for rank in range(ranks)]
    assert sum(len(share.tensor) for share in shares) == rows
    assert all(len(share.tensor) <= math.ceil(rows / ranks) for share in shares)
    for rank, share in enumerate(shares):
        write_state(folder, rank, StateSnapshot([share], {}, ranks))
    assert torch.equal(SavedState(folder).read("weight/a", (first_row, 0), (rows, 2)), box.tensor)


def test_training_goes_on_while_a_share_is_written():
    weights = [torch.ones(4, 2), torch.tensor(1.0)]
    shares = [own_share(whole("weight/a", weight), 0, 1) for weight in weights]
    for weight in weights:
        weight.zero_()
    assert all((share.tensor == 1).all() for share in shares)


def test_tensors_have_their_own_names_in_the_files_and_several_boxes_are_told_apart(tmp_path):
    boxes = [Part("weight/b", torch.ones(1, 2), (2, 2), (row, 0)) for row in (0, 1)]
    path = write_state(tmp_path / "not" / "there", 0, StateSnapshot([whole("weight/a", torch.ones(3)), *boxes], {}))
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
    assert names[:2] == ["weight/a", "weight/b"] and len(names) == 3 and names[2].startswith("weight/b")
    assert SavedState(path.parent).names() == ["weight/a", "weight/b"]


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (8,)])
def test_a_tensor_of_another_shape_is_of_another_model(tmp_path, shape):
    write_state(tmp_path, 0, StateSnapshot([whole("weight/a", torch.ones(4, 2))], {}))
    with pytest.raises(UnfitState, match=r"weight/a is .* in the model and \[4, 2\] in .* another model"):
        SavedState(tmp_path).read_whole("weight/a", shape)


@pytest.mark.parametrize("own", [{"a"}, {"a", "b", "c"}, {"a", "c"}, set()])
def test_a_state_is_of_a_model_with_exactly_its_weights(tmp_path, own):
    parts = [whole(f"{kind}/{name}", torch.ones(2)) for kind in ("weight", "exp_avg") for name in "ab"]
    write_state(tmp_path, 0, StateSnapshot(parts, {}))
    state = SavedState(tmp_path)
    assert state.weights() == {"a", "b"}
    state.require_weights(["b", "a"])
    odd = sorted(own ^ {"a", "b"})
    with pytest.raises(UnfitState, match=rf"{odd[0]} is in one of them only \({len(odd)} such names\)"):
        state.require_weights(own)


def test_updates_that_differ_between_weights_are_refused_where_one_count_is_kept(tmp_path):
    parts = [whole(f"weight/{name}", torch.ones(2)) for name in "ab"]
    for updates, count in (({}, 0), ({"a": 3, "b": 3}, 3), ({"a": 3, "b": 2}, None), ({"a": 3}, None)):
        write_state(tmp_path, 0, StateSnapshot(parts, {"updates": updates}))
        if count is not None:
            assert common_updates(SavedState(tmp_path)) == count
            continue
        with pytest.raises(UnfitState, match="updated more often than others"):
            common_updates(SavedState(tmp_path))


def test_a_model_is_read_by_its_index_and_each_file_once_it_is_needed(tmp_path):
    save_file({"a": torch.arange(6.0).reshape(2, 3), "unlisted": torch.zeros(1)}, tmp_path / "1.safetensors")
    files = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors", "d": "1.safetensors"}
    (tmp_path / "3.safetensors").write_bytes(b"no tensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    model = CheckpointFiles(tmp_path)
    assert model.names() == list("abcd") and model.missing(["a", "unlisted"]) == ["unlisted"]
    assert model.shape("a") == (2, 3) and model.read("a", (1, 0), (1, 3)).tolist() == [[3.0, 4.0, 5.0]]
    for name, words in (("b", "2.safetensors is missing"), ("c", "3.safetensors is .*damaged"), ("d", "1.safetensors")):
        with pytest.raises(UnfitState, match=words):
            model.read(name)


def test_a_model_in_one_damaged_file_is_refused_by_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=SINGLE):
        CheckpointFiles(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"no tensors")
    with pytest.raises(UnfitState, match=f"{SINGLE} is missing or damaged"):
        CheckpointFiles(tmp_path)
