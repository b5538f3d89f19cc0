"""Single tokens of a sample: what each says, who sampled it when, and never more than a bounded number of them."""

import io

import numpy as np
import pytest
from PIL import Image

from roll.data.pictures import read_picture
from roll.data.records import Group, Prompt, Sample, SampleBatch
from roll.pipeline.recorder import (
    FIRST_TOKENS,
    LAST_TOKENS,
    readable,
    readable_tokens,
    token_texts,
    write_prompt_pictures,
)


class Letters:
    """Token 1 is ``b``."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


class Bytes:
    """A token is a byte of UTF-8."""

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(token_ids).decode(errors="replace")


class LeadingSpaces:
    """Words with a space before them, which is left out at the beginning of a text."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(f" w{token_id}" for token_id in token_ids).removeprefix(" ")


def sample_of(tokens, mask, versions, turns=None, **more):
    turns = None if turns is None else np.array(turns, dtype=np.int32)
    return Sample(
        token_ids=np.array(tokens, dtype=np.int32),
        response_mask=np.array(mask, dtype=bool),
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        finish_reason="stop",
        turns=turns,
        **more,
    )


def test_a_character_of_several_tokens_is_said_by_the_last_of_them():
    text = "aé第\U0001f600b"
    texts = token_texts(list(text.encode()), Bytes())
    assert "".join(texts) == text
    assert texts == ["a", "", "é", "", "", "第", "", "", "", "\U0001f600", "b"]


def test_what_never_becomes_a_character_is_shown_all_the_same():
    assert token_texts([255, 97], Bytes()) == ["", "\ufffda"]
    assert token_texts([97, 0xE7], Bytes()) == ["a", "\ufffd"]
    assert "".join(token_texts([255] * 9 + [97], Bytes())).endswith("a")


def test_spaces_between_words_are_kept():
    assert token_texts([1, 2, 3], LeadingSpaces()) == ["w1", " w2", " w3"]


def test_versions_advantages_and_turns_are_those_of_the_sampled_tokens():
    sample = sample_of([0, 1, 2, 3, 4], [0, 1, 1, 0, 1], [-1, 5, 6, -1, 7], turns=[-1, 0, 0, -1, 1])
    advantages = np.array([9.0, 0.5, 0.5, 9.0, -0.25], dtype=np.float32)
    tokens = readable_tokens([sample], [advantages], Letters())
    assert tokens.texts == ["b", "c", "d", "e"]
    assert tokens.versions == [5, 6, None, 7]
    assert tokens.advantages == [0.5, 0.5, None, -0.25]
    assert tokens.turns == [0, 0, None, 1]
    assert (tokens.left_out, tokens.left_out_after) == (0, 0)


def test_in_validation_there_are_no_advantages_and_outside_episodes_no_turns():
    tokens = readable_tokens([sample_of([0, 1], [0, 1], [-1, 5])], None, Letters())
    assert (tokens.versions, tokens.advantages, tokens.turns) == ([5], [None], [None])


def test_turns_that_are_samples_of_their_own_follow_one_another_with_what_they_were_given():
    first = sample_of([0, 1], [0, 1], [-1, 3], turns=[-1, 0], episode=0)
    second = sample_of([2, 3], [0, 1], [-1, 4], turns=[-1, 1], episode=0)
    tokens = readable_tokens([first, second], None, Letters())
    assert (tokens.texts, tokens.versions, tokens.turns) == (["b", "c", "d"], [3, None, 4], [0, None, 1])


def test_an_episode_of_several_samples_is_told_as_a_whole():
    prompt = Prompt("p", "d", np.zeros(1, dtype=np.int32), "a")
    turns = [(1, 3, "left", 0.5), (2, 4, "right", 2.0), (3, 6, "up", 0.5)]
    parts = [
        sample_of([0, turn], [0, 1], [-1, version], episode=0, response_text=text) for turn, version, text, _ in turns
    ]
    parts[-1].finish_reason = "length"
    empty = sample_of([0, 1], [0, 0], [-1, -1], episode=0)
    for episode, text in ((parts, "left\nright\nup"), ([empty, *parts], "\nleft\nright\nup")):
        data = SampleBatch.from_samples(episode)
        data.tokens["advantages"] = np.zeros(2 * len(episode), dtype=np.float32)
        data.tokens["advantages"][data.tokens["response_mask"]] = [advantage for *_, advantage in turns]
        (told,) = readable([Group(7, prompt, episode)], data, 9, 1, Letters())
        assert (told.versions, told.advantage, told.response) == ((3, 6), 1.0, text)
        assert told.finish_reason == "length"


def test_a_response_of_no_token_has_none():
    tokens = readable_tokens([sample_of([0, 1], [0, 0], [-1, -1])], None, Letters())
    assert (tokens.texts, tokens.versions) == ([], [])


@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_of_a_long_response_the_beginning_and_the_end_are_told(extra):
    length = FIRST_TOKENS + LAST_TOKENS + extra
    sample = sample_of(np.arange(length) % 26, [1] * length, np.arange(length))
    tokens = readable_tokens([sample], [np.zeros(length, dtype=np.float32)], Letters())
    kept = [*range(FIRST_TOKENS), *range(length - LAST_TOKENS, length)]
    assert tokens.versions == kept and len(tokens.texts) == len(tokens.advantages) == len(tokens.turns) == len(kept)
    assert tokens.texts == [chr(ord("a") + place % 26) for place in kept]
    assert (tokens.left_out, tokens.left_out_after) == (extra, FIRST_TOKENS if extra else 0)


def test_each_group_is_told_with_the_advantages_of_its_own_rows():
    prompt = Prompt("p", "d", np.zeros(1, dtype=np.int32), "a")
    groups = [
        Group(number, prompt, [sample_of([0, number * 2 + index], [0, 1], [-1, 0]) for index in range(2)])
        for number in range(3)
    ]
    data = SampleBatch.from_samples([sample for group in groups for sample in group.samples])
    data.tokens["advantages"] = np.arange(12, dtype=np.float32)
    told = readable(groups, data, 4, 2, Letters())
    assert [(each.group_id, each.advantage, each.tokens.advantages) for each in told] == [
        (0, 1.0, [1.0]), (1, 5.0, [5.0]),
    ]  # fmt: skip
    assert [each.tokens.texts for each in told] == [["a"], ["c"]]


def test_pictures_in_prompts_are_named_and_written_once_as_the_data_has_them(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (9, 5), (200, 0, 0)).save(file, "JPEG")
    red = read_picture(file.getvalue(), tmp_path)
    black = read_picture(Image.new("RGB", (4, 4)), tmp_path)
    groups = [
        Group(
            number,
            Prompt("p", "d", np.zeros(1, np.int32), "a", pictures=pictures),
            [sample_of([0, 1], [0, 1], [-1, 0])],
        )
        for number, pictures in enumerate([[red, black], [black], []])
    ]
    data = SampleBatch.from_samples([sample for group in groups for sample in group.samples])
    data.tokens["advantages"] = np.zeros(6, np.float32)
    first, second, third = (sample.pictures for sample in readable(groups, data, 4, 3, Letters()))
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / first[0]).write_bytes(b"cut off by a crash")
    write_prompt_pictures(groups, folder)
    assert first[1:] == second and third == []
    assert [name.rpartition(".")[2] for name in first] == ["jpeg", "png"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: picture.tobytes() for name, picture in zip(first, (red, black), strict=True)
    }


def test_a_picture_that_came_back_from_the_journal_is_no_text():
    drawn = sample_of([0, 2, 3], [0, 1, 1], [-1, 4, 4], latents=np.zeros((3, 1, 1, 1), np.float32))
    group = Group(0, Prompt("p", "d", np.zeros(1, dtype=np.int32), "a"), [drawn])
    data = SampleBatch.from_samples([drawn])
    data.tokens["advantages"] = np.array([0, 1, 1], np.float32)
    (told,) = readable([group], data, 4, 2, Letters())
    assert (told.tokens, told.response, told.versions) == (None, "", (4, 4))
    drawn.image = np.zeros((8, 8, 3), np.uint8)
    (told,) = readable([group], data, 4, 2, Letters())
    assert (told.tokens, told.response) == (None, "step-4-train-0.png")
