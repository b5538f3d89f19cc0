"""The counting example's world: pictures have as many shapes as is said, and its folder is a model that learns."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText, AutoTokenizer

from roll.cli.main import main
from roll.configs.roles import DataArguments
from roll.data.pictures import PictureProcessor
from roll.data.prompts import load_prompts
from roll.data.tokenizer import load_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "count-shapes-cpu"
spec = importlib.util.spec_from_file_location("count_shapes_make_model", EXAMPLE / "make_model.py")
world = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = world
spec.loader.exec_module(world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("shapes")
    return out, world.make(out, 3, world.WarmUp(steps=2, batch_size=8))


def test_a_picture_has_as_many_shapes_of_the_colour_as_the_answer_says():
    rng = np.random.default_rng(0)
    questions = [world.draw(rng) for _ in range(200)]
    for question in questions:
        painted = (np.asarray(question.image) == world.COLOURS[question.colour]).all(-1)
        cells = painted.reshape(world.CELLS, world.CELL, world.CELLS, world.CELL).any((1, 3))
        assert cells.sum() == question.count
    assert {question.count for question in questions} == {1, 2, 3, 4}
    assert {question.colour for question in questions} == world.COLOURS.keys()


def test_every_word_is_a_token_and_a_prompt_is_as_long_as_the_configuration_says(folder):
    out, _ = folder
    model = str(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    for word in world.WORDS:
        (token_id,) = tokenizer(word)["input_ids"]
        assert token_id != tokenizer.unk_token_id and tokenizer.decode([token_id]) == word
    data = DataArguments(file_name=str(out / "data" / "train.jsonl"), template="chat")
    prompts = load_prompts(
        data, load_tokenizer(model), prompt_length=16, path="data", seed=0, processor=PictureProcessor(model)
    )
    assert {len(prompt.token_ids) for prompt in prompts} == {15}
    asker = world.Asker(tokenizer)
    question = world.draw(np.random.default_rng(3))  # the first training picture
    (prompt,) = (prompt for prompt in prompts if prompt.prompt_id.endswith(":1"))
    (ids,) = asker.inputs([question], [question.count])["input_ids"].tolist()
    assert prompt.token_ids.tolist() == ids[:-2], "the warm-up and the run ask in the same way"


def test_held_out_pictures_are_not_trained_on(folder):
    out, made = folder
    kinds = {name: [*(out / "data" / "pictures").glob(f"{name}-*.png")] for name in ("train", "val")}
    assert [len(files) for files in kinds.values()] == [world.TRAINING_PICTURES, world.VALIDATION_PICTURES]
    trained, held_out = ({path.read_bytes() for path in files} for files in kinds.values())
    assert not trained & held_out
    rows = [json.loads(line) for line in (out / "data" / "val.jsonl").read_text().splitlines()]
    assert len(rows) == world.VALIDATION_PICTURES and all((out / "data" / row["images"][0]).is_file() for row in rows)
    model = AutoModelForImageTextToText.from_pretrained(out / "model")
    assert model.num_parameters() == made.parameters < 500_000
    assert world.existing(out, 3, 2) == made and world.existing(out, 3, 3) is world.existing(out, 4, 2) is None


def test_the_same_seed_makes_the_same_files(folder, tmp_path):
    out, made = folder
    assert world.make(tmp_path, 3, world.WarmUp(steps=2, batch_size=8)) == made
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert len(files) > 900 and all((out / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


@pytest.mark.tier("soak")
def test_the_example_learns_to_count(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = world.make(tmp_path, 0, world.WarmUp())
    assert 0.25 <= made.greedy_accuracy <= 0.5
    arguments = [
        "--config", str(EXAMPLE / "rlvr.yaml"),
        f"pretrain={tmp_path / 'model'}",
        f"actor_train.data_args.file_name={tmp_path / 'data' / 'train.jsonl'}",
        f"validation.data_args.file_name={tmp_path / 'data' / 'val.jsonl'}",
        f"output_dir={tmp_path / 'run'}",
        f"cluster.address={ray_cluster}",
    ]  # fmt: skip
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val/first"]["count"] == pytest.approx(made.greedy_accuracy, abs=0.02)
    assert summary["val/last"]["count"] >= 0.8
