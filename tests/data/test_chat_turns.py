"""What a template writes between turns: exact over many formats, once, and refused where it would be rewritten."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.chat import ChatTurns, RawTurns, TemplateRefused, require_append_only
from tests.data.chat_templates import FORMATS, make_tokenizer
from tests.tiers import examples

SYSTEM = {"role": "system", "content": "You play a game."}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}

CONTROLS = {token for form in FORMATS.values() for token in form.special_tokens}
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: not any(token in text for token in CONTROLS)
)
"""Without control tokens: an answer that spells the end of a turn has ended it."""
content = plain_text.filter(lambda text: text and text.strip() == text)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encode(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def continued(template, first, exchanges) -> list[int]:
    """All token ids of a conversation that is continued through (sampled, messages) pairs."""
    conversation = template.begin(first)
    parts = [conversation.prompt_token_ids]
    for sampled, messages in exchanges:
        parts += [sampled, conversation.glue(sampled, messages)]
    return np.concatenate(parts).tolist()


def after(name: str, sampled_text: str, observation: str = "a wall", **options) -> str:
    """The glue after one response, as text."""
    return after_in(make_tokenizer(name), sampled_text, observation, **options)


def after_in(tokenizer, sampled_text: str, observation: str = "a wall", **options) -> str:
    conversation = ChatTurns(tokenizer, options).begin([user("look")])
    return tokenizer.decode(conversation.glue(encode(tokenizer, sampled_text), [user(observation)]))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(60))
@given(
    has_system=st.booleans(),
    first=plain_text,
    exchanges=st.lists(st.tuples(content, st.booleans(), plain_text), min_size=1, max_size=4),
)
def test_a_continued_conversation_has_the_tokens_of_the_whole_conversation(name, has_system, first, exchanges):
    """Where the policy writes what the tokenizer would, and whether it ended its turns itself or was cut short."""
    form, tokenizer = FORMATS[name], make_tokenizer(name)
    messages = [SYSTEM, user(first)] if has_system and form.has_system else [user(first)]
    played = [
        (encode(tokenizer, form.written(said) if stopped else form.before_content + said), [user(answer)])
        for said, stopped, answer in exchanges
    ]
    whole = [*messages]
    for said, _, answer in exchanges:
        whole += [assistant(said), user(answer)]
    expected = tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert continued(ChatTurns(tokenizer), messages, played) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_the_end_of_a_turn_stands_there_once(name):
    form = FORMATS[name]
    for text in (form.before_content + "go", form.written("go")):
        assert (text + after(name, text)).split("a wall")[0].count(form.stop) == 1


def test_only_the_missing_part_of_the_end_of_a_turn_is_given():
    assert after("chatml", "go<|im_end|>") == "\n<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n"
    assert after("chatml", "go") == "<|im_end|>\n<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n"
    assert after("llama2", " go </s>") == "<s>[INST] a wall [/INST]"
    assert after("llama2", " go") == " </s><s>[INST] a wall [/INST]"


def test_a_stop_token_ends_the_turn_although_the_space_before_it_was_not_written():
    assert after("llama2", " go</s>") == "<s>[INST] a wall [/INST]"


def test_another_stop_token_is_followed_by_the_end_that_the_template_writes():
    assert after("chatml", "go<|endoftext|>").startswith("<|im_end|>\n<|im_start|>user")
    assert after("llama3", "go<|eom_id|>").startswith("<|eot_id|><|start_header_id|>user")


def test_an_end_that_only_the_last_turn_of_a_conversation_has_is_not_taken_for_that_of_every_turn():
    template = "{% for m in messages %}{{ m.role + ':' + m.content }}{{ ' ' if not loop.last }}{% endfor %}"
    template += "{{ ' assistant:' if add_generation_prompt else '<|endoftext|>' }}"
    assert after_in(with_template(template), "go<|endoftext|>") == " user:a wall assistant:"


def test_an_end_of_ordinary_tokens_counts_if_all_of_it_was_written():
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '#|#' }}{% endfor %}"
    tokenizer = with_template(template + "{{ 'assistant:' if add_generation_prompt }}")
    assert after_in(tokenizer, "go#|#") == "user:a wall#|#assistant:"
    assert after_in(tokenizer, "go#|") == "#|#user:a wall#|#assistant:"


def test_an_end_inside_a_response_is_not_its_end():
    assert after("chatml", "go<|im_end|>on").startswith("<|im_end|>\n")


def test_an_empty_response_is_ended_by_the_template():
    assert after("chatml", "").startswith("<|im_end|>\n<|im_start|>user")


def test_an_observation_may_spell_special_tokens():
    """The end of the assistant's turn is searched in what the template writes, not in what the environment says."""
    assert after("chatml", "go<|im_end|>", "a<|im_end|>") == (
        "\n<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["chatml", "llama2", "deepseek"])
def test_special_tokens_of_the_tokenizers_own_are_not_added(name):
    tokenizer = make_tokenizer(name)
    ids = continued(ChatTurns(tokenizer), [user("look")], [(encode(tokenizer, "go"), [user("a wall")])])
    assert ids.count(tokenizer.bos_token_id) == {"chatml": 0, "llama2": 2, "deepseek": 1}[name]


def test_earlier_thoughts_stay_in_the_context_of_a_template_that_strips_them():
    tokenizer = make_tokenizer("qwen3")
    thoughts = ["<think>\nleft?\n</think>\n\nleft<|im_end|>", "<think>\nup?\n</think>\n\nup<|im_end|>"]
    played = [(encode(tokenizer, text), [user("a wall")]) for text in thoughts]
    text = tokenizer.decode(continued(ChatTurns(tokenizer), [user("look")], played))
    assert text == (
        "<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n<think>\nleft?\n</think>\n\nleft<|im_end|>\n"
        "<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n<think>\nup?\n</think>\n\nup<|im_end|>\n"
        "<|im_start|>user\na wall<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_generation_prompt_may_end_inside_the_assistants_turn():
    tokenizer = make_tokenizer("deepseek")
    played = [(encode(tokenizer, "left?</think>left<|finish|>"), [user("a wall")])]
    template = ChatTurns(tokenizer, {"thinking": True})
    assert tokenizer.decode(continued(template, [user("look")], played)) == (
        "<|begin|><|User|>look<|Assistant|><think>\nleft?</think>left<|finish|><|User|>a wall<|Assistant|><think>\n"
    )
    no_thinking = after("qwen3", "go<|im_end|>", enable_thinking=False)
    assert no_thinking.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tool_answers_and_tool_schemas_go_through_the_template():
    tokenizer = make_tokenizer("chatml")
    conversation = ChatTurns(tokenizer).begin([user("6 * 7?")], [TOOL])
    assert '"name": "calculator"' in tokenizer.decode(conversation.prompt_token_ids)
    answers = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
    assert tokenizer.decode(conversation.glue(encode(tokenizer, "<|im_end|>"), answers)) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


AS_JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else m.content }}{% endfor %}"


def test_tool_answers_that_the_template_writes_as_json_are_written():
    """As in Llama 3.1's template; the answers of many tools are JSON themselves."""
    template = ChatTurns(with_template(AS_JSON + ASK))
    asked, answers = [user("look")], [{"role": "tool", "content": '{"where": "left"}'}]
    glue = template.begin(asked).glue(np.zeros(0, dtype=np.int32), answers)
    assert r'"{\"where\": \"left\"}"' in template.tokenizer.decode(glue)
    prompt = template.prompt([*asked, {"role": "assistant", "content": "<think>I</think>"}, *answers])
    assert r'"{\"where\": \"left\"}"' in template.tokenizer.decode(prompt)


def test_messages_that_the_template_leaves_out_are_refused_wherever_they_stand():
    template = ChatTurns(make_tokenizer("deepseek"))  # writes a first system message, and words of user and assistant
    answer = {"role": "tool", "content": "42"}
    called = [user("6 * 7?"), {"role": "assistant", "content": "<think>I ask</think>six times seven"}]
    assert "I ask" not in template.tokenizer.decode(template.prompt([SYSTEM, *called, user("well?")]))
    for messages in ([*called, answer], [*called, answer, user("42?")], [*called, SYSTEM, user("well?")]):
        with pytest.raises(TemplateRefused, match=f"leaves out messages of the role '{messages[2]['role']}'"):
            template.prompt(messages)
        with pytest.raises(TemplateRefused, match="leaves out"):
            template.begin(messages)


@pytest.mark.parametrize("told", ["42", "a", "assistant"])
def test_a_message_left_out_is_missed_although_its_words_stand_elsewhere(told):
    template = ChatTurns(with_template("{% for m in messages if m.role != 'tool' %}" + WRITE + "{% endfor %}" + ASK))
    answer = {"role": "tool", "content": told}
    with pytest.raises(TemplateRefused, match="leaves out messages of the role 'tool'"):
        template.prompt([user("6 * 7?"), assistant("6 * 7"), answer, assistant("It is 42."), user("thanks")])
    with pytest.raises(TemplateRefused, match="leaves out messages of the role 'tool'"):
        template.begin([user("look")]).glue(np.zeros(0, dtype=np.int32), [answer])


def test_contents_in_parts_are_written_by_templates_that_read_nothing_else():
    """As SmolVLM's; a picture alone says no word."""
    parts = "{% for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    template = ChatTurns(with_template("{% for m in messages %}<{{ m.role }}>" + parts + "{% endfor %}"))
    picture, text = {"type": "image"}, {"type": "text", "text": "look"}
    for content, written in (([picture, text], "<image>look"), ([picture], "<image>")):
        prompt = template.prompt([{"role": "user", "content": content}])
        assert template.tokenizer.decode(prompt) == f"<user>{written}"
    with pytest.raises(TemplateRefused, match="leaves out messages of the role 'user'"):
        template.prompt([user("look")])


@pytest.mark.parametrize("told", ["a wall", "a", "assistant"])
def test_what_tools_answer_before_a_content_beside_calls_is_read(told):
    inside = "{{ '[' + messages[loop.index].content + ']' if not loop.last and messages[loop.index].role == 'tool' }}"
    write = "<{{ m.role }}>{{ '(call)' if m.tool_calls }}" + inside + "{{ m.content }}<|im_end|>"
    written = "{% for m in messages %}{% if m.role != 'tool' %}" + write + "{% endif %}{% endfor %}"
    template = ChatTurns(with_template(written + ASK))
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    answer = {"role": "tool", "content": told}
    glue = template.begin([user("look")]).glue(np.zeros(0, dtype=np.int32), [answer], [call])
    assert f"[{told}]" in template.tokenizer.decode(glue)


def test_what_a_template_writes_before_the_assistants_words_is_not_behind_them():
    """As Gemma 4's: the policy would read a tool's answer before its own call."""
    inside = "{{ messages[loop.index].content if not loop.last and messages[loop.index].role == 'tool' }}"
    write = "{% if m.role != 'tool' %}" + inside + WRITE + "{% endif %}"
    template = ChatTurns(with_template("{% for m in messages %}" + write + "{% endfor %}"))
    with pytest.raises(TemplateRefused, match="leaves out messages of the role 'tool'"):
        template.begin([user("look")]).glue(np.zeros(0, dtype=np.int32), [{"role": "tool", "content": "a wall"}])


def test_a_first_system_message_may_move_but_must_be_in_a_first_prompt():
    template = ChatTurns(make_tokenizer("mistral"))
    going_on = [SYSTEM, user("look"), {"role": "assistant", "content": "I do"}, {"role": "tool", "content": "a wall"}]
    assert "You play" not in template.tokenizer.decode(template.prompt(going_on))
    with pytest.raises(TemplateRefused, match="leaves out messages of the role 'system'"):
        template.prompt([SYSTEM, {"role": "tool", "content": "a wall"}])


def test_a_system_message_that_moves_is_refused():
    template = ChatTurns(make_tokenizer("mistral"))
    conversation = template.begin([SYSTEM, user("look")])
    with pytest.raises(TemplateRefused, match=r"not append-only.*You play.*env_manager_cls: step"):
        conversation.glue(np.zeros(0, dtype=np.int32), [user("a wall")])
    with pytest.raises(TemplateRefused, match="append-only"):
        require_append_only(template, [SYSTEM, user("look")])
    require_append_only(template, [user("look")])


WRITE = "<{{ m.role }}>{{ m.content }}"
ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
REWRITING = {
    "shows the last two messages only": "{% for m in messages[-2:] %}" + WRITE + "{% endfor %}" + ASK,
    "counts messages at the top": "{{ messages | length }}{% for m in messages %}" + WRITE + "{% endfor %}" + ASK,
    "cuts old observations": "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last or m.role == 'assistant' else m.content[:3] }}{% endfor %}" + ASK,
    "cuts old observations but the first": "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last or loop.first or m.role == 'assistant' else m.content[:3] }}{% endfor %}" + ASK,
    "forgets all that was before": "{% if messages | length > 1 %}{{ messages[-2].content }}{% endif %}"
    "<user>{{ messages[-1].content }}" + ASK,
    "marks the last message": "{% for m in messages %}" + WRITE + "{{ '!' if loop.last }}{% endfor %}" + ASK,
}


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_a_template_that_rewrites_is_refused(template):
    with pytest.raises(TemplateRefused, match="append-only"):
        require_append_only(ChatTurns(with_template(template)), [user("look around")])


@pytest.mark.parametrize("written", ["", "{{ m.content }}{{ m.content }}"])
def test_a_template_that_does_not_write_the_assistants_content_once_is_refused(written):
    template = "{% for m in messages %}{% if m.role == 'assistant' %}" + written + "{% else %}{{ m.content }}"
    template += "{% endif %}{% endfor %}"
    with pytest.raises(TemplateRefused, match=f"{2 if written else 0} times instead of once"):
        require_append_only(ChatTurns(with_template(template)), [user("look")])


def test_what_a_template_raises_is_shown_with_the_roles():
    template = ChatTurns(make_tokenizer("gemma"))
    with pytest.raises(TemplateRefused, match=r"\[system, user\].*there is no system role"):
        template.begin([SYSTEM, user("look")])
    with pytest.raises(TemplateRefused, match="template: raw"):
        ChatTurns(with_template(None)).prompt([user("look")])


def test_an_observation_without_messages_is_refused():
    for template in (ChatTurns(make_tokenizer("chatml")), RawTurns(make_tokenizer("chatml"))):
        conversation = template.begin([user("look")])
        with pytest.raises(TemplateRefused, match="without messages"):
            conversation.glue(np.zeros(0, dtype=np.int32), [])


def with_template(template: str | None):
    tokenizer = deepcopy(make_tokenizer("chatml"))
    tokenizer.chat_template = template
    return tokenizer


def raw_text(template: RawTurns, first, exchanges) -> str:
    encoded = [(encode(template.tokenizer, text), messages) for text, messages in exchanges]
    return template.tokenizer.decode(continued(template, first, encoded))


def test_raw_turns_join_contents_and_write_no_roles():
    template = RawTurns(make_tokenizer("chatml"), message_separator="|", prompt_end=">", response_end=";")
    exchanges = [("L", [user("b"), user("c")]), ("R;", [user("d")])]
    assert raw_text(template, [SYSTEM, user("a")], exchanges) == "You play a game.|a>L;b|c>R;d>"


def test_a_raw_response_ends_once_with_a_special_token():
    template = RawTurns(make_tokenizer("chatml"), response_end="<|endoftext|>")
    exchanges = [("L<|endoftext|>", [user("b")]), ("R", [user("c")])]
    assert raw_text(template, [user("a")], exchanges) == "a\nL<|endoftext|>b\nR<|endoftext|>c\n"


def test_a_raw_prompt_of_a_history_is_what_the_continued_text_would_be():
    template = RawTurns(make_tokenizer("chatml"), prompt_end=">", response_end=";")
    history = [user("a"), assistant("L"), user("b"), assistant("R"), user("c")]
    exchanges = [("L;", [user("b")]), ("R", [user("c")])]
    assert template.tokenizer.decode(template.prompt(history)) == raw_text(template, [user("a")], exchanges)


def test_raw_turns_refuse_what_they_cannot_write():
    template = RawTurns(make_tokenizer("chatml"))
    with pytest.raises(TemplateRefused, match="no place for tool schemas"):
        template.begin([user("look")], [TOOL])
    with pytest.raises(TemplateRefused, match="content of a message is a list"):
        template.prompt([{"role": "user", "content": [{"type": "image"}]}])
