"""The quick start's world: an exact tokenizer, honest held-out problems, a small loadable model, a readable YAML."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


def load(name: str) -> ModuleType:
    """A module of the quick start, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_model = load("make_model")
TOKENIZER = make_model.make_tokenizer()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a shortened warm-up leaves."""
    out = tmp_path_factory.mktemp("quickstart")
    make_model.make(out, 3, make_model.WarmUp(steps=4))
    return out


def problems_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SPECIAL = (make_model.PAD, make_model.EOS, make_model.UNKNOWN)
"""A text that spells one of these is that token."""


@given(st.text(alphabet=make_model.CHARACTERS).filter(lambda text: not any(name in text for name in SPECIAL)))
def test_tokenizer_gives_one_token_per_character_and_the_exact_text_back(text: str) -> None:
    token_ids = TOKENIZER(text)["input_ids"]
    assert len(token_ids) == len(text)
    assert TOKENIZER.decode(token_ids) == text


def test_tokenizer_skips_its_special_tokens_when_asked() -> None:
    token_ids = TOKENIZER("46")["input_ids"] + [TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == "46"


def test_tokenizer_marks_characters_outside_its_alphabet() -> None:
    assert TOKENIZER("1é2")["input_ids"][1] == TOKENIZER.unk_token_id


def test_chat_of_one_user_message_renders_to_the_raw_prompt() -> None:
    user = {"role": "user", "content": "12+34="}
    assert TOKENIZER.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == "12+34="
    chat = [{"role": "system", "content": "Add."}, user, {"role": "assistant", "content": "46"}]
    assert TOKENIZER.apply_chat_template(chat, tokenize=False) == "Add.\n12+34=46<eos>"


@given(st.integers(min_value=0, max_value=2**32))
def test_no_validation_problem_is_in_training_in_either_order(seed: int) -> None:
    training, validation = make_model.split_problems(seed)
    assert len(set(validation)) == len(validation) == make_model.VALIDATION_PROBLEMS
    assert not set(training) & ({(a, b) for a, b in validation} | {(b, a) for a, b in validation})


def test_targets_are_the_response_and_the_end_of_the_sequence() -> None:
    inputs, targets = make_model.encode(TOKENIZER, [(12, 34), (55, 99)], ["46", "154"])
    assert [TOKENIZER.decode(row) for row in inputs] == ["12+34=46<eos><pad>", "55+99=154<eos>"]
    assert [TOKENIZER.decode(row[row != -100]) for row in targets] == ["46<eos>", "154<eos>"]


def test_one_pass_accuracy_is_that_of_greedy_generation(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    inputs, _ = make_model.encode(TOKENIZER, [(a, 17) for a in range(20, 40)], ["0"] * 20)
    generated = model.generate(inputs[:, :6], do_sample=False, max_new_tokens=make_model.RESPONSE_TOKENS)
    responses = torch.nn.functional.pad(generated[:, 6:], (0, 10 - generated.shape[1]))
    unjudged_padding = responses.masked_fill(responses == TOKENIZER.pad_token_id, -100)
    targets = torch.cat([torch.full((20, 6), -100), unjudged_padding], 1)
    assert make_model.greedy_accuracy(model, torch.cat([inputs[:, :6], responses], 1), targets) == 1.0
    targets[:5, 6] += 1
    assert make_model.greedy_accuracy(model, torch.cat([inputs[:, :6], responses], 1), targets) == 0.75


def test_the_pupil_forgets_carries_and_nothing_else() -> None:
    chance = random.Random(0)
    assert {make_model.careless_answer((12, 34), 0.6, chance) for _ in range(50)} == {"46"}
    assert {make_model.careless_answer((17, 34), 0.6, chance) for _ in range(50)} == {"41", "51"}
    assert {make_model.careless_answer((55, 99), 0.6, chance) for _ in range(200)} == {"44", "144", "54", "154"}
    assert make_model.careless_answer((55, 99), 0.0, chance) == "154"
    forgotten = sum(make_model.careless_answer((17, 34), 0.6, chance) == "41" for _ in range(2000))
    assert 1100 < forgotten < 1300


def test_the_warm_up_teaches_the_pupils_answers() -> None:
    problems = [(10 + index, 10 + index) for index in range(5)]
    inputs, targets = make_model.encode(TOKENIZER, problems, [str(2 * a) for a, _ in problems])
    model = make_model.new_model(TOKENIZER, seed=0)
    assert make_model.greedy_accuracy(model, inputs, targets) < 0.5
    options = make_model.WarmUp(learning_rate=3e-3, batch_size=5, steps=60, forgotten_carries=0.0)
    make_model.warm_up(model, TOKENIZER, problems, options, seed=0)
    assert make_model.greedy_accuracy(model, inputs, targets) == 1.0


def test_made_model_is_small_loadable_and_float32(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert model.config.model_type == "qwen2"
    assert 0.5e6 < model.num_parameters() < 1.2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert [path.name for path in (made / "model").glob("*.safetensors")] == ["model.safetensors"]
    assert tokenizer.decode(tokenizer("12+34=46")["input_ids"]) == "12+34=46"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_made_data_are_additions_that_hold(made: Path) -> None:
    training, validation = (problems_of(made / "data" / name) for name in ("train.jsonl", "val.jsonl"))
    assert len(validation) >= 256
    assert not {problem["prompt"] for problem in training} & {problem["prompt"] for problem in validation}
    for problem in training + validation:
        a, b = problem["prompt"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(problem["ground_truth"])
        assert problem["domain"] == "addition"


def test_complete_model_is_left_alone_and_an_incomplete_one_is_made_again(made: Path, tmp_path: Path) -> None:
    options = make_model.WarmUp(steps=1)
    assert make_model.existing(made, seed=3) is not None
    assert make_model.existing(made, seed=4) is None
    make_model.make(tmp_path, 3, options)
    (tmp_path / "model" / make_model.MARKER).unlink()
    assert make_model.existing(tmp_path, seed=3) is None
    make_model.make(tmp_path, 3, options)
    assert make_model.existing(tmp_path, seed=3) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]


def test_same_seed_makes_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        make_model.make(tmp_path / name, 5, make_model.WarmUp(steps=2))
        weights.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_yaml_uses_what_the_script_makes() -> None:
    config = yaml.safe_load((QUICKSTART / "rlvr.yaml").read_text())
    assert config["pretrain"] == "examples/quickstart/model"
    assert config["actor_train"]["data_args"]["file_name"] == "examples/quickstart/data/train.jsonl"
    assert config["validation"]["data_args"]["file_name"] == "examples/quickstart/data/val.jsonl"
    assert set(config["rewards"]) == {make_model.as_record((12, 34))["domain"]}
    assert config["response_length"] >= make_model.RESPONSE_TOKENS
    assert config["async_generation_ratio"] == 1
    assert not set(config["actor_train"]["device_mapping"]) & set(config["actor_infer"]["device_mapping"])


def test_report_tells_a_success_from_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = load("report")
    summary = {
        "status": "success",
        "steps": 7,
        "seconds": 12.3,
        "val/first": {"addition": 0.35},
        "val/last": {"addition": 0.945},
        "lag/max": 1,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert report.main(tmp_path) == 0
    assert "addition: accuracy 35.0% -> 94.5%" in capsys.readouterr().out
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    assert report.main(tmp_path) == 1
