"""A classifier scores conversations as it would one by one, and a wrong one is refused before it scores anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from roll.configs.errors import ConfigError
from roll.configs.rewards import RewardConfig, RewardModelConfig
from roll.configs.roles import ModelArguments
from roll.rewards.classifier import allowed_length, unused_id
from roll.rewards.model import ScorerSetup, check_reward_model
from tests.rewards.tiny_classifiers import END, said, scorer, write_classifier, write_tokenizer

RESPONSES = ["3", "12345", "", "3", "99999999", "0", "3+3", "1"]
LIMIT = 1e-5
"""Rounding of float32 between batches of other shapes, on scores around 1."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_classifier(tmp_path_factory.mktemp("classifier"))


def by_transformers(path: str, text: str, label: int = 0) -> float:
    """What the model's card would tell a user to compute."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        return model(tokens["input_ids"]).logits[0, label].item()


@pytest.mark.parametrize(
    "changes",
    [{}, {"pad": None}, {"pad": END}, {"encoder": "bert"}],
    ids=["padding id", "no padding id", "padding is the end", "encoder"],
)
def test_a_batch_scores_as_one_by_one(tmp_path, changes):
    path = write_classifier(tmp_path, **changes)
    conversations = [said(response) for response in RESPONSES]
    together = [each.score for each in scorer(path).score(conversations)]
    alone = [by_transformers(path, f"1+2=?{response}<end>") for response in RESPONSES]
    assert together == pytest.approx(alone, abs=LIMIT)
    assert len({round(score, 3) for score in together}) == len(set(RESPONSES))


def test_padding_is_an_id_that_occurs_nowhere():
    assert unused_id([[0, 1], [3]], 5) == 2
    assert unused_id([[0, 1], [2]], 3) is None


def test_where_all_ids_are_used_conversations_go_one_by_one(tmp_path):
    path = write_classifier(tmp_path, pad=None)
    everything = "0123456789+="  # with the prompt's and the template's characters all ids but the padding's
    unknown = "x"  # which is the padding's
    conversations = [said(everything + unknown), said("3")]
    together = [each.score for each in scorer(path).score(conversations)]
    assert together == [scorer(path).score([each])[0].score for each in conversations]


def test_the_label_is_chosen(tmp_path):
    path = write_classifier(tmp_path, labels=3)
    scores = [scorer(path, label=label).score([said("3")])[0].score for label in range(3)]
    assert scores == pytest.approx([by_transformers(path, "1+2=?3<end>", label) for label in range(3)], abs=LIMIT)
    with pytest.raises(ValueError, match="3 labels"):
        scorer(path)
    with pytest.raises(ValueError, match="3 labels"):
        scorer(path, label=3)


def test_a_long_conversation_loses_its_beginning_and_says_so(path):
    long, fitting = scorer(path, max_length=10).score([said("0123456789"), said("0123")])
    assert (long.tokens, long.cut_tokens, fitting.tokens, fitting.cut_tokens) == (10, 6, 10, 0)
    assert long.score == pytest.approx(by_transformers(path, "123456789<end>"), abs=LIMIT)


def test_the_models_own_positions_are_the_limit(path):
    (scored,) = scorer(path).score([said("0" * 30)])
    assert (scored.tokens, scored.cut_tokens) == (24, 12)


@pytest.mark.parametrize(("encoder", "pad", "most"), [("bert", 0, 24), ("roberta", 0, 23), ("roberta", 1, 22)])
def test_positions_that_begin_after_the_padding_are_fewer_than_rows_of_their_table(tmp_path, encoder, pad, most):
    path = write_classifier(tmp_path, encoder=encoder, pad=pad)
    (scored,) = scorer(path).score([said("1" * 40)])
    assert (scored.tokens, scored.problem) == (most, "")
    reward = RewardConfig(verifier="reward_model", reward_model=RewardModelConfig(max_length=most + 1))
    with pytest.raises(ConfigError, match=f"{most} positions"):
        check_reward_model(path, reward, "rewards.chat")
    with pytest.raises(ValueError, match=f"positions for {most} tokens"):
        scorer(path, max_length=most + 1)


def test_a_model_of_another_name_is_limited_by_the_table_that_it_has():
    class OwnConfig(RobertaConfig):
        model_type = "own-encoder"

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    model = RobertaForSequenceClassification(OwnConfig(**sizes, max_position_embeddings=24, pad_token_id=1))
    setup = ScorerSetup("own", ModelArguments(), RewardModelConfig(), 4, "cpu")
    assert allowed_length(setup, model) == 22


def test_a_long_conversation_may_be_refused_and_takes_no_other_along(path):
    long, fitting = scorer(path, max_length=10, overlong="refuse").score([said("0123456789"), said("0123")])
    assert "16 tokens" in long.problem and "10 are allowed" in long.problem
    assert fitting.problem == ""


def test_a_response_cannot_end_the_conversation_that_is_scored(path):
    tokens = scorer(path)._tokens(said("3<end>?9"))
    assert tokens[-1] == END and END not in tokens[:-1]


def test_what_the_template_refuses_is_a_problem_of_that_conversation(path):
    bad, good = scorer(path).score([[{"role": "tool", "content": "1"}], said("3")])
    assert "no tools" in bad.problem
    assert good.score == pytest.approx(by_transformers(path, "1+2=?3<end>"), abs=LIMIT)


def test_a_score_that_is_no_number_is_a_problem(tmp_path):
    path = write_classifier(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(path)
    assert "nan" in scorer(path).score([said("3")])[0].problem


def test_bfloat16_is_near(path):
    conversations = [said(response) for response in RESPONSES]
    near = [each.score for each in scorer(path, dtype="bfloat16").score(conversations)]
    assert near == pytest.approx([each.score for each in scorer(path).score(conversations)], abs=0.15)
    assert near != [each.score for each in scorer(path).score(conversations)]


def without_head(path: str, folder: Path) -> str:
    """A language model in a classifier's folder: what transformers would give a random head."""
    shutil.copytree(path, folder, dirs_exist_ok=True)
    config = Qwen2Config.from_pretrained(path)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_without_a_head_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="score.weight"):
        scorer(without_head(path, tmp_path))


def pickled(path: str, folder: Path) -> str:
    shutil.copytree(path, folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


def test_pickled_weights_are_not_read(path, tmp_path):
    with pytest.raises(OSError, match="safetensors"):
        scorer(pickled(path, tmp_path))


def problems_of(path: str, **settings) -> dict[str, str]:
    reward = RewardConfig(
        verifier="reward_model",
        model_args=ModelArguments(model_name_or_path=path),
        reward_model=RewardModelConfig(**settings),
    )
    with pytest.raises(ConfigError) as caught:
        check_reward_model(path, reward, "rewards.x")
    return {problem.path: f"{problem.message} {problem.remedy}" for problem in caught.value.problems}


def test_what_can_be_no_reward_model_is_refused_before_it_loads(path, tmp_path):
    model = "rewards.x.model_args.model_name_or_path"
    assert "no head" in problems_of(without_head(path, tmp_path / "headless"))[model]
    assert "safetensors" in problems_of(pickled(path, tmp_path / "pickled"))[model]
    bare = write_classifier(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    write_tokenizer(tmp_path / "bare", template=None)
    assert "no chat template" in problems_of(bare)[model]
    assert "reward_model.label" in next(iter(problems_of(write_classifier(tmp_path / "three", labels=3))))
    assert "3 labels" in problems_of(str(tmp_path / "three"), label=3)["rewards.x.reward_model.label"]
    assert "24 positions" in problems_of(path, max_length=25)["rewards.x.reward_model.max_length"]


def test_a_good_one_passes(path):
    reward = RewardConfig(verifier="reward_model", model_args=ModelArguments(model_name_or_path=path))
    check_reward_model(path, reward, "rewards.x")
    reward.strategy_args.strategy_config["max_num_seqs"] = 3
    with pytest.raises(ConfigError, match="no such option"):
        check_reward_model(path, reward, "rewards.x")
