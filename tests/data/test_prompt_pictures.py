"""Pictures in prompts: the ways to write them, their placeholders, and what keeps them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from roll.configs.errors import ConfigError
from roll.configs.rewards import RewardConfig
from roll.configs.roles import DataArguments, ExampleArguments
from roll.data.examples import load_examples
from roll.data.pictures import PictureProcessor, decoded, digest, read_picture
from roll.data.prompts import load_prompts
from roll.data.records import Group, Prompt, decode_group, encode_group
from roll.rewards.base import RewardInput
from roll.rewards.registry import resolve_verifier
from tests.tiny_vision import draw, make_model, make_tokenizer

ONE, TWO = np.array([[1, 0], [0, 0]], bool), np.array([[1, 0], [0, 1]], bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    make_model(folder / "model")
    draw(ONE).save(folder / "one.png")
    draw(np.repeat(TWO, 2, axis=1)).resize((32, 16)).save(folder / "two.png")
    return folder


def prompt_of(folder: Path, row: dict) -> Prompt:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompts(
        DataArguments(file_name=str(file), template="chat"),
        make_tokenizer(),
        prompt_length=60,
        path="data",
        seed=0,
        processor=PictureProcessor(str(folder / "model")),
    )
    return prompt


def written(*content) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def test_all_ways_to_write_a_picture_give_the_same_prompt(folder):
    data = base64.b64encode((folder / "one.png").read_bytes()).decode()
    rows = [
        written({"type": "image_url", "image_url": {"url": "one.png"}}, text("#?")),
        written({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}, text("#?")),
        written({"type": "image", "image": str(folder / "one.png")}, text("#?")),
        written({"type": "image", "path": "one.png"}, text("#?")),
        written({"type": "image"}, text("#?")) | {"images": ["one.png"]},
        {"messages": [{"role": "user", "content": "<image>#?"}], "images": ["one.png"]},
        {"messages": [{"role": "user", "content": "#?"}], "images": [{"path": "one.png", "bytes": None}]},
        {"prompt": "#?", "images": "one.png"},
    ]
    prompts = [prompt_of(folder, row) for row in rows]
    for prompt in prompts:
        assert prompt.token_ids.tolist() == [2, 3, 5, 5, 5, 5, 4, 18, 17, 19]
        assert prompt.messages == [{"role": "user", "content": "<image>#?"}]
        assert digest(prompt.pictures) == digest(prompts[0].pictures)
        assert not prompt.metadata


def test_a_decoded_picture_of_a_data_set_becomes_a_file_again(folder):
    picture = read_picture(draw(ONE), folder)
    assert np.array_equal(np.asarray(decoded(picture)), np.asarray(draw(ONE)))


def test_pictures_stand_where_they_are_written_and_placeholders_fit_their_size(folder):
    prompt = prompt_of(folder, {"prompt": "1<image>2<image>3", "images": ["two.png", "one.png"]})
    assert prompt.text == "<|im_start|>1<|vision_start|><|image_pad|><|vision_end|>2" + (
        "<|vision_start|><|image_pad|><|vision_end|>3>"
    )
    assert np.flatnonzero(prompt.token_ids == 5).tolist() == [*range(3, 11), *range(14, 18)]
    processor = PictureProcessor(str(folder / "model"))
    response = np.array([9, 5], np.int32)
    collapsed = processor.collapsed(np.concatenate([prompt.token_ids, response]), prompt.pictures)
    assert collapsed.tolist() == [*make_tokenizer()(prompt.text, add_special_tokens=False)["input_ids"], 9, 5]
    arguments = processor.model_arguments(torch.tensor([[*prompt.token_ids.tolist(), 9, 5]]), [prompt.pictures])
    assert arguments["input_ids"][0, -2:].tolist() == [9, 0], "the placeholder that ended the response"
    assert arguments["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]]
    assert len(arguments["pixel_values"]) == 48


def test_without_pictures_the_marker_is_plain_text(folder):
    prompt = prompt_of(folder, {"messages": [{"role": "user", "content": "<image>#"}]})
    assert not prompt.pictures and 5 not in prompt.token_ids


def test_a_message_cannot_spell_a_placeholder(folder):
    prompt = prompt_of(folder, {"prompt": "#<image>", "images": ["one.png"]})
    spelled = prompt_of(folder, {"prompt": "#<image><|image_pad|>", "images": ["one.png"]})
    assert (spelled.token_ids == 5).sum() == (prompt.token_ids == 5).sum() == 4


def test_a_journaled_group_keeps_the_pictures_of_its_prompt(folder):
    prompt = prompt_of(folder, {"prompt": "<image>#<image>", "images": ["one.png", "two.png"]})
    kept = decode_group(encode_group(Group(3, prompt, []))).prompt
    assert digest(kept.pictures) == digest(prompt.pictures) and len(kept.pictures) == 2


def sees(pictures, response) -> float:
    return float(np.asarray(pictures[0]).mean()) + len(response)


def test_a_reward_gets_the_pictures_of_the_prompt(folder):
    prompt = prompt_of(folder, {"prompt": "#", "images": ["one.png"]})
    verifier = resolve_verifier(RewardConfig(verifier=f"{__name__}:sees"), "rewards.count")
    record = RewardInput("1", "#", "12", pictures=prompt.pictures)
    assert verifier(record) == np.asarray(decoded(prompt.pictures[0])).mean() + 2


def test_examples_with_pictures_are_refused(folder):
    (folder / "sft.jsonl").write_text(json.dumps({"prompt": "#", "response": "1", "images": ["one.png"]}) + "\n")
    data = ExampleArguments(file_name=str(folder / "sft.jsonl"))
    with pytest.raises(ConfigError, match="examples with pictures are not supported"):
        load_examples(data, make_tokenizer(), sequence_length=60, path="data", seed=0)
