"""samples.jsonl holds readable text, whatever a model says."""

import math

from roll.tracking.files import read_json_lines
from roll.tracking.summary import ReadableSample, ReadableTokens, SampleLog


def sample(**changes):
    values = {
        "step": 3, "group_id": 17, "prompt": "12+34=", "response": "46", "score": 1.0, "advantage": 0.7,
        "versions": (1, 2), "finish_reason": "stop", "domain": "addition", "split": "train",
    }  # fmt: skip
    return ReadableSample(**{**values, **changes})


def test_a_sample_is_read_back_with_all_it_says(tmp_path):
    log = SampleLog(tmp_path / "samples.jsonl")
    log.write([sample(), sample(split="val", advantage=None)])
    train, val = read_json_lines(tmp_path / "samples.jsonl")
    assert train == {
        "step": 3, "split": "train", "domain": "addition", "group_id": 17, "prompt": "12+34=", "response": "46",
        "score": 1.0, "advantage": 0.7, "versions": [1, 2], "finish_reason": "stop",
    }  # fmt: skip
    assert (val["split"], val["advantage"]) == ("val", None)


def test_a_sample_names_the_pictures_in_its_prompt(tmp_path):
    SampleLog(tmp_path / "s").write([sample(pictures=["prompt-1.png", "prompt-2.jpeg"])])
    (told,) = read_json_lines(tmp_path / "s")
    assert told["pictures"] == ["prompt-1.png", "prompt-2.jpeg"]


def test_text_stays_readable_and_newlines_stay_inside_the_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleLog(path).write([sample(response="größer\n第二行\u2028")])
    assert "größer" in path.read_text(encoding="utf-8")
    assert path.read_bytes().count(b"\n") == 1
    assert read_json_lines(path)[0]["response"] == "größer\n第二行\u2028"


def test_half_a_character_from_a_byte_level_tokenizer_survives(tmp_path):
    SampleLog(tmp_path / "s").write([sample(response="broken \ud83d and \x00")])
    assert read_json_lines(tmp_path / "s")[0]["response"] == "broken \ud83d and \x00"


def test_scores_that_json_lacks_become_null(tmp_path):
    SampleLog(tmp_path / "s").write([sample(score=math.nan)])
    assert read_json_lines(tmp_path / "s")[0]["score"] is None


def test_single_tokens_are_written_with_what_neighbours_share_once(tmp_path):
    tokens = ReadableTokens(["4", "6", "\n", "7"], [1, 1, None, 2], [0.5, 0.5, None, math.nan], [0, 0, None, 1], 3, 2)
    SampleLog(tmp_path / "s").write([sample(tokens=tokens)])
    assert read_json_lines(tmp_path / "s")[0]["tokens"] == {
        "texts": ["4", "6", "\n", "7"],
        "versions": [[2, 1], [1, None], [1, 2]],
        "advantages": [[2, 0.5], [2, None]],
        "turns": [[2, 0], [1, None], [1, 1]],
        "left_out": 3,
        "left_out_after": 2,
    }
