from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.roles import DataArguments, HubSource, PromptColumns, ReasoningGymSource
from roll.data.prompts import load_prompts, rewritten_prompts
from roll.data.records import Prompt
from roll.data.sources import MAX_PROBLEMS_PER_FILE
from roll.distribution import install_command
from tests.data.chat_templates import make_tokenizer


def write(path: Path, *rows: dict | bytes) -> str:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return str(path)


def load(tokenizer, data_args: DataArguments, prompt_length: int = 1000, seed: int = 0) -> list[Prompt]:
    return load_prompts(data_args, tokenizer, prompt_length=prompt_length, path="train.data_args", seed=seed)


def problems_of(tokenizer, data_args: DataArguments, **options) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load(tokenizer, data_args, **options)
    return caught.value.problems


def test_a_row_becomes_a_prompt(tokenizer, tmp_path):
    name = write(tmp_path / "train.jsonl", b"", {"prompt": "1+2=", "answer": "3", "tag": "sum", "level": 4}, b"  ")
    (prompt,) = load(tokenizer, DataArguments(file_name=name))
    assert (prompt.prompt_id, prompt.domain, prompt.ground_truth) == ("train.jsonl:2", "sum", "3")
    assert (prompt.text, prompt.metadata) == ("1+2=", {"level": 4})
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.decode(prompt.token_ids) == "1+2="


def test_the_first_name_of_a_field_wins_and_the_other_stays_in_the_metadata(tokenizer, tmp_path):
    row = {"prompt": "a", "ground_truth": 1, "answer": "because", "domain": "d", "tag": "t"}
    (prompt,) = load(tokenizer, DataArguments(file_name=write(tmp_path / "a.jsonl", row)))
    assert (prompt.ground_truth, prompt.domain) == (1, "d")
    assert prompt.metadata == {"answer": "because", "tag": "t"}


def test_raw_prompts_get_no_special_tokens(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    (prompt,) = load(tokenizer, DataArguments(file_name=write(tmp_path / "a.jsonl", {"prompt": "12"})))
    assert len(prompt.token_ids) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'{"question": "a"}', "neither `prompt` nor `messages`"),
        (b'{"prompt": 3}', "must be text"),
        (b'{"prompt": ""}', "is empty"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user"}]}', "`role` and `content`"),
        (b'{"messages": "[1"}', "not JSON"),
        (b'{"prompt": "a", "domain": 7}', "`domain` must be text"),
        (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
        (b"[" * 100_000, "not JSON that can be read"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tokenizer, tmp_path, line, words):
    name = write(tmp_path / "bad.jsonl", {"prompt": "a"}, line)
    (problem,) = problems_of(tokenizer, DataArguments(file_name=name))
    assert problem.path == "train.data_args.file_name"
    assert f"{name}:2: " in problem.message
    assert words in problem.message


def test_all_problems_of_all_sources_are_reported_at_once_but_not_without_end(tokenizer, tmp_path):
    args = DataArguments(
        file_name=[
            write(tmp_path / "many.jsonl", *[b"{"] * 100),
            write(tmp_path / "empty.jsonl"),
            str(tmp_path / "missing.jsonl"),
            str(tmp_path),
        ],
        reasoning_gym=[ReasoningGymSource("basic_aritmetic"), ReasoningGymSource("leg_counting", config={"x": 0})],
    )
    problems = problems_of(tokenizer, args)
    assert len(problems) == MAX_PROBLEMS_PER_FILE + 1 + 1 + 1 + 1 + 2
    text = "\n".join(map(str, problems))
    assert "92 more lines" in text
    assert "empty.jsonl` has no prompts" in text
    assert "missing.jsonl` (No such file" in text
    assert "did you mean `basic_arithmetic`?" in text
    assert "train.data_args.reasoning_gym.1.config.x" in text


def test_a_byte_order_mark_is_no_part_of_a_file(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "1"}', {"prompt": "2"})
    assert [prompt.text for prompt in load(tokenizer, DataArguments(file_name=name))] == ["1", "2"]


def test_no_source_is_a_problem(tokenizer):
    (problem,) = problems_of(tokenizer, DataArguments())
    assert "names no prompts" in problem.message


def test_a_file_named_twice_is_a_problem(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"prompt": "a"})
    (problem,) = problems_of(tokenizer, DataArguments(file_name=[name, name]))
    assert "a.jsonl:1" in problem.message


def test_chat_renders_messages_and_turns_text_into_a_user_message(chat_tokenizer, tmp_path):
    name = write(
        tmp_path / "a.jsonl",
        {"prompt": "hi"},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]},
        {"prompt": "unused", "messages": json.dumps([{"role": "user", "content": "y"}])},
    )
    prompts = load(chat_tokenizer, DataArguments(file_name=name, template="chat", system_prompt="be brief"))
    assert [prompt.text for prompt in prompts] == [
        "<system>be brief\n<user>hi\n<assistant>",
        "<system>own\n<user>x\n<assistant>",
        "<system>be brief\n<user>y\n<assistant>",
    ]
    assert chat_tokenizer.decode(prompts[0].token_ids) == prompts[0].text


def test_variables_reach_the_template_also_of_a_prompt_in_other_words(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    arguments = DataArguments(file_name=write(tmp_path / "a.jsonl", {"prompt": "yo"}), template="chat")
    quiet = replace(arguments, chat_template_kwargs={"enable_thinking": False})
    (thinking,), (prompt,) = load(tokenizer, arguments), load(tokenizer, quiet)
    assert "<think>" not in thinking.text and prompt.text == thinking.text + "<think>\n\n</think>\n\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    ((other,),) = [rewritten_prompts([prompt], "{prompt}!", quiet, tokenizer, "teacher.prompt").values()]
    assert tokenizer.decode(other) == prompt.text.replace("yo", "yo!")


def test_what_a_template_cannot_render_is_a_problem(tokenizer, chat_tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "bad"}]})
    (problem,) = problems_of(chat_tokenizer, DataArguments(file_name=name, template="chat"))
    assert f"{name}:1" in problem.message
    assert "no bad messages" in problem.message
    (problem,) = problems_of(chat_tokenizer, DataArguments(file_name=name, template="raw"))
    assert "needs text" in problem.message


def test_a_chat_template_that_is_not_there_is_a_problem(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"prompt": "a"})
    (problem,) = problems_of(tokenizer, DataArguments(file_name=name, template="chat"))
    assert "no chat template" in problem.message


def test_long_prompts_are_an_error_with_their_names_or_dropped(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "12345"}, {"prompt": "1234"})
    (problem,) = problems_of(tokenizer, DataArguments(file_name=name), prompt_length=3)
    assert "a.jsonl:2 (5 tokens), a.jsonl:3 (4 tokens)" in problem.message
    assert "overlong_prompts: drop" in problem.remedy
    assert "at least 5" in problem.remedy
    kept = load(tokenizer, DataArguments(file_name=name, overlong_prompts="drop"), prompt_length=4)
    assert [prompt.prompt_id for prompt in kept] == ["a.jsonl:1", "a.jsonl:3"]


def test_dropping_every_prompt_is_a_problem(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"prompt": "12345"})
    (problem,) = problems_of(tokenizer, DataArguments(file_name=name, overlong_prompts="drop"), prompt_length=3)
    assert "all 1 prompts" in problem.message


@pytest.mark.parametrize(
    ("shares", "path", "words"),
    [
        ({"sum": 1.0, "math": 0.5}, ".math", "no prompt has the domain `math`"),
        ({"sum": 1.0}, "", "domain `product` get no share"),
    ],
)
def test_shares_that_do_not_fit_the_prompts_are_problems(tokenizer, tmp_path, shares, path, words):
    rows = [{"prompt": "a", "domain": "sum"}, {"prompt": "b", "domain": "product"}]
    args = DataArguments(file_name=write(tmp_path / "a.jsonl", *rows), domain_interleave_probs=shares)
    problems = problems_of(tokenizer, args)
    assert any(
        problem.path == f"train.data_args.domain_interleave_probs{path}" and words in problem.message
        for problem in problems
    )


def test_max_samples_is_a_choice_by_seed(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", *[{"prompt": str(index)} for index in range(50)])

    def ids(seed: int, **options) -> list[str]:
        return [each.text for each in load(tokenizer, DataArguments(name, max_samples=5, **options), seed=seed)]

    assert ids(1) == ids(1) != ids(2)
    assert ids(1) == sorted(set(ids(1)), key=int)
    assert ids(1, shuffle=False) == ["0", "1", "2", "3", "4"]


def test_procedural_tasks_are_prompts_with_their_entry_as_ground_truth(tokenizer):
    source = ReasoningGymSource("basic_arithmetic", size=3, seed=5, config={"min_terms": 2, "max_terms": 2})
    first = load(tokenizer, DataArguments(reasoning_gym=[source]))
    again = load(tokenizer, DataArguments(reasoning_gym=[source]))
    other = load(tokenizer, DataArguments(reasoning_gym=[ReasoningGymSource("basic_arithmetic", size=3, seed=6)]))
    assert [prompt.text for prompt in first] == [prompt.text for prompt in again] != [each.text for each in other]
    assert first[0].ground_truth["question"] == first[0].text
    assert first[0].domain == "basic_arithmetic"
    assert first[0].metadata["reasoning_gym"] == {"dataset": "basic_arithmetic", "config": source.config}
    assert len({prompt.prompt_id for prompt in first}) == 3


@pytest.mark.parametrize(
    ("config", "path", "words", "remedy"),
    [
        ({"min_term": 2}, ".config.min_term", "no argument `min_term`", "`min_terms`"),
        ({"seed": 2}, ".config.seed", "two places", "use `train.data_args.reasoning_gym.0.seed`"),
        ({"size": 2}, ".config.size", "two places", "use `train.data_args.reasoning_gym.0.size`"),
        ({"min_terms": 5, "max_terms": 2}, ".config", "max_terms must be >= min_terms", "values"),
        ({"min_terms": "many"}, ".config", "refuses its arguments", "values"),
    ],
)
def test_wrong_arguments_of_procedural_tasks_are_problems(tokenizer, config, path, words, remedy):
    args = DataArguments(reasoning_gym=[ReasoningGymSource("basic_arithmetic", size=2, config=config)])
    (problem,) = problems_of(tokenizer, args)
    assert problem.path == f"train.data_args.reasoning_gym.0{path}"
    assert words in problem.message and remedy in problem.remedy


def test_columns_give_fields_other_names_also_those_of_structured_columns(tokenizer, tmp_path):
    row = {"problem": "1+2=", "reward_model": {"ground_truth": "3", "style": "rule"}, "source": "sum", "level": 4}
    columns = PromptColumns(prompt="problem", ground_truth="reward_model.ground_truth", domain="source")
    name = write(tmp_path / "a.jsonl", row)
    (prompt,) = load(tokenizer, DataArguments(file_name=name, columns=columns))
    assert (prompt.text, prompt.ground_truth, prompt.domain) == ("1+2=", "3", "sum")
    assert prompt.metadata == {"reward_model": row["reward_model"], "level": 4}


def test_a_row_without_a_named_column_is_named_with_it(tokenizer, tmp_path):
    name = write(tmp_path / "a.jsonl", {"problem": "1"}, {"question": "2"})
    found = problems_of(tokenizer, DataArguments(file_name=name, columns=PromptColumns(prompt="problem")))
    assert [problem.message for problem in found] == [
        f"{name}:2: no column `problem`, which `columns.prompt` names; it has `question`"
    ]


def write_parquet(path: Path, rows: list[dict]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.needs("datasets")
def test_a_parquet_file_is_read_as_the_same_rows_of_jsonl_are(tokenizer, tmp_path):
    rows = [
        {"problem": "1+2=", "reward_model": {"ground_truth": "3"}, "data_source": "sum"},
        {"problem": "3+4=", "reward_model": {"ground_truth": "7"}, "data_source": "sum"},
    ]
    columns = PromptColumns(prompt="problem", ground_truth="reward_model.ground_truth", domain="data_source")
    write_parquet(tmp_path / "a.parquet", rows)
    loaded = load(tokenizer, DataArguments(file_name=str(tmp_path / "a.parquet"), columns=columns))
    lines = load(tokenizer, DataArguments(file_name=write(tmp_path / "a.jsonl", *rows), columns=columns))
    assert [prompt.prompt_id for prompt in loaded] == ["a.parquet:1", "a.parquet:2"]
    for ours, same in zip(loaded, lines, strict=True):
        assert (ours.text, ours.ground_truth, ours.domain, ours.metadata) == (
            same.text,
            same.ground_truth,
            same.domain,
            same.metadata,
        )


@pytest.mark.needs("datasets")
def test_a_parquet_file_that_does_not_fit_names_row_and_column(tokenizer, tmp_path):
    rows = [
        {"prompt": "1", "picture": b"", "extra": None},
        {"prompt": ""},
        {"prompt": "1", "extra": {"files": [b"1"]}},
    ]
    name = write_parquet(tmp_path / "a.parquet", rows)
    found = problems_of(tokenizer, DataArguments(file_name=name))
    assert [problem.message for problem in found] == [
        f"{name}:1: column `picture` has bytes: remove it, or name it `images` if it holds pictures",
        f"{name}:2: `prompt` is empty",
        f"{name}:3: column `extra` has bytes: remove it, or name it `images` if it holds pictures",
    ]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    (problem,) = problems_of(tokenizer, DataArguments(file_name=str(tmp_path / "b.parquet")))
    assert "cannot be read" in problem.message


@pytest.mark.needs("datasets")
def test_a_data_set_in_the_form_of_the_hub_is_read_with_its_split(tokenizer, tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "1+2=", "answer": "3"}, {"prompt": "2", "answer": "2", "domain": "own"})
    write(tmp_path / "test.jsonl", {"prompt": "5+2=", "answer": "7"})
    source = HubSource(dataset=str(tmp_path), split="train", domain="sum")
    prompts = load(tokenizer, DataArguments(hub=[source]))
    assert [(prompt.text, prompt.domain) for prompt in prompts] == [("1+2=", "sum"), ("2", "own")]
    (problem,) = problems_of(tokenizer, DataArguments(hub=[HubSource(dataset=str(tmp_path), split="none")]))
    assert problem.path == "train.data_args.hub.0" and "cannot be read" in problem.message


def test_without_the_package_a_parquet_file_is_refused_with_the_command_that_installs_it(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    (problem,) = problems_of(tokenizer, DataArguments(file_name=str(tmp_path / "a.parquet")))
    assert "needs the module `datasets`" in problem.message and problem.remedy == install_command("datasets")
