"""Which tokens of a row are learned, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.configs.errors import ConfigError
from roll.configs.roles import ExampleArguments, ExampleColumns
from roll.data.examples import Example, Examples, load_examples
from roll.data.sources import MAX_PROBLEMS_PER_FILE
from tests.data.chat_templates import FORMATS, make_tokenizer
from tests.data.test_control_tokens import LETTERS, unigram

PATH = "actor_train.data_args"


def load(folder: Path, tokenizer: PreTrainedTokenizerFast, *rows: dict, length: int = 500, **options) -> Examples:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ExampleArguments(file_name=str(file), **options)
    return load_examples(arguments, tokenizer, sequence_length=length, path=PATH, seed=0)


def stretches(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, bool]]:
    """The text of the example in stretches of what is read and what is learned."""
    changes = np.flatnonzero(np.diff(example.response_mask)) + 1
    parts = zip(np.split(example.token_ids, changes), np.split(example.response_mask, changes), strict=True)
    return [(tokenizer.decode(ids), bool(mask[0])) for ids, mask in parts]


def refusal(folder: Path, tokenizer: PreTrainedTokenizerFast, *rows: dict, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        load(folder, tokenizer, *rows, **options)
    return str(refused.value)


def test_of_prompt_and_response_the_response_and_its_end_are_learned(tmp_path, tokenizer):
    (example,) = load(tmp_path, tokenizer, {"prompt": "1+1=", "response": "2", "domain": "sums"}).examples
    assert stretches(example, tokenizer) == [("1+1=", False), ("2<eos>", True)]
    assert (example.example_id, example.domain) == ("rows.jsonl:1", "sums")
    assert example.token_ids.dtype == np.int32


def test_columns_may_have_other_names(tmp_path, tokenizer):
    columns = ExampleColumns(prompt="question", response="extra.answer")
    row = {"question": "1=", "extra": {"answer": "one"}}
    (example,) = load(tmp_path, tokenizer, row, columns=columns).examples
    assert stretches(example, tokenizer) == [("1=", False), ("one<eos>", True)]


def test_a_template_without_an_end_mark_gets_the_end_token(tmp_path, chat_tokenizer):
    row = {"prompt": "hi", "response": "yes"}
    (example,) = load(tmp_path, chat_tokenizer, row, template="chat", system_prompt="be kind").examples
    head = "<system>be kind\n<user>hi\n<assistant>"
    assert stretches(example, chat_tokenizer) == [(head, False), ("yes<eos>", True)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_assistant_turn_is_learned_as_its_template_writes_it(tmp_path, name):
    form, tokenizer = FORMATS[name], make_tokenizer(name)
    said = [("user", "look"), ("assistant", "a wall"), ("user", "go left"), ("assistant", "done it")]
    messages = [{"role": role, "content": content} for role, content in said]
    ignored = {"role": "user", "content": "after the last turn"}
    (example,) = load(tmp_path, tokenizer, {"messages": [*messages, ignored]}, template="chat").examples
    parts = stretches(example, tokenizer)
    assert [learned for _, learned in parts] == [False, True, False, True]
    assert [text for text, learned in parts if learned] == [form.written("a wall"), form.written("done it")]
    # Qwen3 shows an empty thought before the last answer, which is neither in the row nor in a rollout's prompt.
    whole = tokenizer.apply_chat_template(messages, tokenize=False).replace("<think>\n\n</think>\n\n", "")
    assert whole.startswith("".join(text for text, _ in parts)), "the template's own text, up to the last end mark"


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_with_a_response_earlier_turns_are_only_read(tmp_path, name):
    tokenizer = make_tokenizer(name)
    said = [("user", "look"), ("assistant", "a wall"), ("user", "go left")]
    row = {"messages": [{"role": role, "content": text} for role, text in said], "response": "done it"}
    (example,) = load(tmp_path, tokenizer, row, template="chat").examples
    (_, read), (answer, learned) = stretches(example, tokenizer)
    assert (read, learned, answer) == (False, True, FORMATS[name].written("done it"))


ASKED = {"role": "user", "content": "hi"}
WRONG = {
    "no response": ({"prompt": "1="}, {}, "rows.jsonl:2: no `response`; it has `prompt`"),
    "an empty response": ({"prompt": "1=", "response": ""}, {}, "rows.jsonl:2: `response` is empty"),
    "a number": ({"prompt": "1=", "response": 2}, {}, "rows.jsonl:2: `response` must be text, not a int"),
    "no prompt": ({"response": "2"}, {}, "rows.jsonl:2: neither `prompt` nor `messages`"),
    "messages for raw": ({"messages": [ASKED]}, {}, "rows.jsonl:2: the row has `messages` but no `prompt`"),
    "nobody answers": (
        {"messages": [ASKED]},
        {"template": "chat"},
        "rows.jsonl:2: no `response`, and no turn of `assistant` in `messages`",
    ),
    "nobody asks": (
        {"messages": [{"role": "assistant", "content": "2"}]},
        {"template": "chat"},
        "rows.jsonl:2: `messages` begins with `assistant`",
    ),
    "a call": (
        {"messages": [ASKED, {"role": "assistant", "content": "2", "tool_calls": [{"name": "f"}]}]},
        {"template": "chat"},
        "`tool_calls` of message 1 (`assistant`) would not be learned",
    ),
    "an empty turn": (
        {"messages": [ASKED, {"role": "assistant", "content": ""}]},
        {"template": "chat"},
        "message 1 (`assistant`) has no `content`",
    ),
    "too long": (
        {"prompt": "1" * 20, "response": "2"},
        {"length": 12},
        "1 of 2 examples are longer than `sequence_length: 12`: rows.jsonl:2 (22 tokens)",
    ),
    "a column that is not there": (
        {"prompt": "1=", "response": "2"},
        {"columns": ExampleColumns(response="answer")},
        "no column `answer`, which `columns.response` names",
    ),
    "a domain without a share": (
        {"prompt": "1=", "response": "2", "domain": "other"},
        {"domain_interleave_probs": {"default": 1.0}},
        "the prompts of domain `other` get no share",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused_with_its_place(tmp_path, chat_tokenizer, case):
    row, options, words = WRONG[case]
    said = refusal(tmp_path, chat_tokenizer, {"prompt": "1=", "response": "1"}, row, **options)
    assert words in said
    assert PATH in said


@pytest.mark.parametrize("rows", [[{"prompt": "1=", "response": ""}] * 20, [{"prompt": "1="}] * 20])
def test_many_wrong_rows_are_counted(tmp_path, tokenizer, rows):
    said = refusal(tmp_path, tokenizer, *rows)
    assert said.count("rows.jsonl:") == MAX_PROBLEMS_PER_FILE
    assert f"{20 - MAX_PROBLEMS_PER_FILE} more rows are wrong" in said


def test_a_template_that_rewrites_earlier_turns_says_what_to_do(tmp_path, tokenizer):
    """It shows the length of the whole conversation first."""
    tokenizer.chat_template = (
        "{{ messages | length }}:{% for message in messages %}{{ message.content }}|{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    said = [("user", "look"), ("assistant", "a wall"), ("user", "go left"), ("assistant", "done it")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    words = refusal(tmp_path, tokenizer, row, template="chat")
    assert "rows.jsonl:1: the chat template is not append-only" in words
    assert "give the last one as `response`" in words and "step-wise" not in words


def test_a_template_that_refuses_every_answer_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    row = {"prompt": "1=", "response": "1"}
    assert f"{PATH}.template: the chat template refuses messages" in refusal(tmp_path, tokenizer, row, template="chat")


def test_long_rows_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1" * number, "response": "2"} for number in (3, 30, 4)]
    found = load(tmp_path, tokenizer, *rows, length=6, overlong_prompts="drop")
    assert [example.example_id for example in found.examples] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert found.overlong == 1
    said = refusal(tmp_path, tokenizer, rows[1], length=6, overlong_prompts="drop")
    assert "all 1 examples are longer than 6" in said


def test_what_is_learned_decides_the_fingerprint(tmp_path, tokenizer):
    arguments = ExampleArguments()

    def fingerprint(*rows: dict) -> str:
        return load(tmp_path, tokenizer, *rows).fingerprint(arguments)

    one, other = {"prompt": "1=", "response": "1"}, {"prompt": "1", "response": "=1"}
    assert len({fingerprint(one), fingerprint(other), fingerprint(one, other), fingerprint(other, one)}) == 4
    assert fingerprint(one) == fingerprint(one)


@pytest.mark.parametrize("learned", ["response", "messages"])
def test_what_messages_spell_is_learned_as_text(tmp_path, learned):
    tokenizer, said = make_tokenizer("llama3"), "I write <|eot_id|> here."
    asked = [{"role": "user", "content": "Say <|eot_id|> please."}]
    row = {"messages": asked, "response": said}
    if learned == "messages":
        row = {"messages": [*asked, {"role": "assistant", "content": said}]}
    clean = {"messages": [{"role": "user", "content": "Say it."}], "response": "I do."}
    example, other = load(tmp_path, tokenizer, row, clean, template="chat").examples

    def controls(each: Example) -> list[int]:
        return [token_id for token_id in each.token_ids.tolist() if token_id in tokenizer.added_tokens_decoder]

    assert controls(example) == controls(other)
    assert "Say <|eot_id|> please." in tokenizer.decode(example.token_ids)
    assert stretches(example, tokenizer)[-1] == (f"{said}<|eot_id|>", True)


def test_a_turn_that_its_row_says_not_to_learn_is_only_read(tmp_path):
    tokenizer = make_tokenizer("llama3")
    said = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "five", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "four", "weight": 1, "train": True},
    ]
    (example,) = load(tmp_path, tokenizer, {"messages": said}, template="chat").examples
    assert [text for text, learned in stretches(example, tokenizer) if learned] == ["four<|eot_id|>"]
    assert "five<|eot_id|>" in tokenizer.decode(example.token_ids[~example.response_mask])
    unlearned = [*said[:1], {"role": "assistant", "content": "five", "train": False}]
    assert "no turn of `assistant` is learned" in refusal(tmp_path, tokenizer, {"messages": unlearned}, template="chat")
    odd = [*said[:1], {"role": "assistant", "content": "five", "weight": 0.5}]
    assert "`weight` of message 1 is 0.5" in refusal(tmp_path, tokenizer, {"messages": odd}, template="chat")


def test_a_response_after_the_answer_would_teach_to_copy(tmp_path):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    text = refusal(tmp_path, make_tokenizer("llama3"), {"messages": said, "response": "four"}, template="chat")
    assert "ends with `assistant` already" in text


THINKS = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_what_the_template_begins_of_an_answer_is_not_learned_twice(tmp_path, tokenizer):
    tokenizer.chat_template = THINKS
    row = {"prompt": "hi", "response": "<think>hm yes"}
    (example,) = load(tmp_path, tokenizer, row, template="chat").examples
    assert stretches(example, tokenizer) == [("<user>hi<eos><assistant><think>", False), ("hm yes<eos>", True)]
    sampled = {"prompt": "hi", "response": "hm </think>yes"}
    (example,) = load(tmp_path, make_thinking("<think>\n"), sampled, template="chat").examples
    assert example.response_mask.any(), "as a policy writes it after this prompt"
    text = refusal(tmp_path, tokenizer, {"prompt": "hi", "response": "yes"}, template="chat")
    assert "opens '<think>' before each answer, and this one has no thought" in text
    (example,) = load(
        tmp_path, make_thinking("<think>\n\n</think>\n\n"), sampled | {"response": "yes"}, template="chat"
    ).examples
    assert example.response_mask.any(), "the thought is closed"


def make_thinking(opening: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer("chatml")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    made.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opening + "{% endif %}"
    )
    return made


@pytest.mark.parametrize("prepends", ["normalizer", "pre_tokenizer"])
def test_a_response_gets_no_space_that_its_text_does_not_have(tmp_path, prepends):
    pieces = ["\u2581", *"0123456789+= yeshi"]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in dict.fromkeys(pieces))], unk_id=0))
    if prepends == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    (example,) = load(tmp_path, tokenizer, {"prompt": "1+1=", "response": "2"}).examples
    whole = tokenizer("1+1=2", add_special_tokens=False)["input_ids"]
    assert example.token_ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert example.response_mask.tolist() == [False] * (len(whole) - 1) + [True, True]


def test_variables_of_the_template_and_tools_of_the_row_are_read(tmp_path):
    tokenizer = make_tokenizer("qwen3")
    row = {"prompt": "hi", "response": "yes"}
    (plain,) = load(tmp_path, tokenizer, row, template="chat").examples
    quiet = {"enable_thinking": False}
    (example,) = load(tmp_path, tokenizer, row, template="chat", chat_template_kwargs=quiet).examples
    assert (
        tokenizer.decode(example.token_ids).count("<think>") == tokenizer.decode(plain.token_ids).count("<think>") + 1
    )
    tokenizer = make_tokenizer("chatml")
    tool = {"type": "function", "function": {"name": "calculator"}}
    (example,) = load(tmp_path, tokenizer, row | {"tools": [tool]}, template="chat").examples
    assert "calculator" in stretches(example, tokenizer)[0][0]
    (same,) = load(tmp_path, tokenizer, row | {"tools": json.dumps([tool])}, template="chat").examples
    assert same.token_ids.tolist() == example.token_ids.tolist()
    assert "`tools` is text, but" in refusal(tmp_path, tokenizer, row | {"tools": "calculator"}, template="chat")
    assert "`tools` must be" in refusal(tmp_path, tokenizer, row | {"tools": [1]}, template="chat")


@pytest.mark.parametrize("where", ["prompt", "response"])
def test_a_text_that_cannot_be_written_is_refused_with_its_place(tmp_path, where):
    row = {"prompt": "hi", "response": "yes"}
    odd = row | {where: f"{row[where]}</s>"}
    text = refusal(tmp_path, unigram([*LETTERS, "</s>"]), row, odd, template="chat")
    assert "rows.jsonl:2" in text and "'</s>'" in text


def test_the_token_that_ends_a_response_is_known(tmp_path, tokenizer):
    assert load(tmp_path, tokenizer, {"prompt": "1", "response": "2"}).end == tokenizer.eos_token_id
    chat = make_tokenizer("chatml")
    found = load(tmp_path, chat, {"prompt": "1", "response": "2"}, template="chat")
    assert found.end == chat.convert_tokens_to_ids("<|im_end|>") != chat.eos_token_id
