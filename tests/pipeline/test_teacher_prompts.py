"""A teacher that sees another prompt than the policy: what it is shown, what it says, and what is refused."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from test_agentic_runs import agentic_config
from test_distillation import found_problems
from tiny import make_tokenizer, tiny_config
from transformers import AutoModelForCausalLM

from roll.check.config import check_config
from roll.check.plan import plan_rows
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.configs.roles import DataArguments
from roll.data.prompts import rewritten_prompts
from roll.data.records import Group, Prompt
from roll.pipeline.algorithm import TrainingBatch
from roll.pipeline.distillation import with_prompts
from roll.pipeline.stages import teacher
from tests.pipeline.test_advantage_stage import PROMPT, batch_of, sample

HINT = "{ground_truth}={prompt}"
LOOK = {"look": {"after": "teacher", "use": "custom_parts:kept"}}


def test_responses_stand_behind_other_prompts_and_their_values_come_back_to_their_places():
    batch = batch_of(([sample(1.0, tokens=3), sample(0.0, tokens=0)], None), ([sample(1.0, tokens=2)], None))
    batch.groups[1].prompt = Prompt("q", "sums", PROMPT.token_ids, "q")
    seen = []

    async def log_probs(data, temperature):
        seen.append(data)
        return np.where(data.tokens["response_mask"], -data.tokens["token_ids"] - temperature, 99.0).astype(np.float32)

    run = SimpleNamespace(
        compared={"teacher": SimpleNamespace(log_probs=log_probs)},
        teacher_prompts={"p": np.array([50, 51, 52], dtype=np.int32), "q": np.array([60], dtype=np.int32)},
        recorder=SimpleNamespace(busy=lambda role: nullcontext(), count_tokens=lambda role, tokens: None),
        train_temperature=0.5,
    )
    asyncio.run(teacher(run, batch))
    (shown,) = seen
    assert shown.lengths.tolist() == [6, 3, 3]
    assert shown.tokens["token_ids"].tolist() == [50, 51, 52, 2, 3, 4, 50, 51, 52, 60, 2, 3]
    assert shown.tokens["response_mask"].tolist() == [False] * 3 + [True] * 3 + [False] * 4 + [True] * 2
    expected = [0, 0, -2.5, -3.5, -4.5, 0, 0, 0, 0, -2.5, -3.5]
    assert batch.data.tokens["teacher_logprobs"].tolist() == expected
    run.teacher_prompts = {}
    asyncio.run(teacher(run, batch))
    assert seen[1] is batch.data


def test_behind_its_own_prompt_a_batch_is_what_it_was():
    batch = TrainingBatch.from_groups(4, [Group(0, PROMPT, [sample(1.0, tokens=tokens) for tokens in (1, 4, 0)])])
    prompts = [batch.data.tokens["token_ids"][start : start + 2] for start in batch.data.offsets[:-1]]
    again = with_prompts(batch.data, prompts)
    assert again.lengths.tolist() == batch.data.lengths.tolist()
    assert all((values == batch.data.tokens[name]).all() for name, values in again.tokens.items())


def by_hand(folder, prompt, response):
    """Log-probabilities of the tokens of a response behind a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    return [float(logprobs[place - 1, ids[0, place]]) for place in range(len(prompt), ids.shape[1])]


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": {"device_mapping": [0]}},
        pytest.param({"teacher": {"weights": "policy"}, "async_generation_ratio": 1}, marks=pytest.mark.tier("all")),
        pytest.param(
            {"teacher": {}, "actor_train__model_args": {"lora_target": "q_proj"}}, marks=pytest.mark.tier("all")
        ),
    ],
)
def test_the_log_probabilities_are_those_of_the_response_behind_the_prompt_of_the_teacher(task, changes):
    changes = {**changes, "teacher": {**changes["teacher"], "prompt": HINT}, "distillation": {"use": "loss"}}
    tree = tiny_config(task, max_steps=3, save_steps=1, max_ckpt_to_keep=0, rollout_batch_size=4, **changes)
    tree["stages"] = LOOK
    tree["actor_train"]["training_args"]["learning_rate"] = 1e-2
    run = run_pipeline(task, IN_THIS_PROCESS, tree)
    tokenizer = make_tokenizer()
    rows = {row["prompt"]: row for row in map(json.loads, (task / "train.jsonl").read_text().splitlines())}
    for step in range(3):
        of_policy = changes["teacher"].get("weights") == "policy" and step > 0
        model = run.folder / "checkpoints" / f"step-{step}" if of_policy else task / "model"
        with np.load(run.folder / f"batch-{step}.npz") as batch:
            found = {name: np.split(batch[name], np.cumsum(batch["lengths"])[:-1]) for name in batch.files}
        assert any(np.abs(values).max() > 0 for values in found["teacher_logprobs"])
        for ids, mask, values in zip(
            found["token_ids"], found["response_mask"], found["teacher_logprobs"], strict=True
        ):
            row = rows[tokenizer.decode(ids[~mask])]
            prompt = tokenizer(f"{row['ground_truth']}={row['prompt']}")["input_ids"]
            assert values[mask] == pytest.approx(by_hand(model, prompt, ids[mask]), abs=1e-5)
            assert not values[~mask].any()


@pytest.mark.tier("all")
def test_a_policy_that_teaches_itself_streams_as_well(task):
    changes = {"teacher": {"weights": "policy", "prompt": HINT}, "distillation": {}, "max_steps": 2}
    changes |= {"actor_train__training_args__adam_epsilon": 1e-4, "num_logged_samples": 0}
    plain = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **changes))
    streamed = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **changes, actor_train__stream_groups=True))
    for one, other in zip(plain.metrics, streamed.metrics, strict=True):
        for name in ("distillation/reverse_kl", "actor/loss", "actor/grad_norm", "advantage/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6)
    assert plain.metrics[0]["distillation/reverse_kl"] != 0


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


class Characters:
    """A tokenizer of characters with a chat template."""

    chat_template = TEMPLATE
    added_tokens_decoder: dict[int, object] = {}
    all_special_ids: list[int] = []
    all_special_tokens: list[str] = []

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(each) for each in text] for text in texts]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"{each['role'][0]}{each['content']};" for each in messages) + "a" * add_generation_prompt


def asked(text, template="raw", messages=None, **row):
    prompt = Prompt(
        "x:1",
        "sums",
        np.zeros(1, np.int32),
        "1+2=",
        row.pop("ground_truth", None),
        row,
        messages or [{"role": "user", "content": "1+2="}],
    )
    (ids,) = rewritten_prompts(
        [prompt], text, DataArguments(template=template), Characters(), "teacher.prompt"
    ).values()
    return "".join(map(chr, ids))


def test_fields_of_the_row_stand_in_the_text_and_what_they_hold_is_not_read_again():
    assert asked("{ground_truth}|{prompt}|{level}", ground_truth="{prompt}", level=3) == "{prompt}|1+2=|3"
    assert asked("{{prompt}} \\boxed{{{ground_truth}}} {{", ground_truth=["a", 1]) == '{prompt} \\boxed{["a", 1]} {'
    assert asked("{domain}{tag}{extra.answer}{answer}", extra={"answer": 4}, ground_truth="5") == "sumssums45"


def test_a_column_of_the_row_comes_before_another_name_of_the_answer():
    assert asked("{answer}", answer="a long way to 5", ground_truth="5") == "a long way to 5"


def test_of_a_chat_the_last_user_message_is_replaced():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "1+2="},
    ]
    text = asked("{prompt} Hint: {ground_truth}", "chat", messages, ground_truth="3")
    assert text == "sbe brief;ufirst;ayes;u1+2= Hint: 3;a"
    assert messages[-1]["content"] == "1+2="


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": "{hint}"}, "x:1: the row has no `hint`"),
        ({"text": "{ground_truth}"}, "x:1: the row has no `ground_truth`"),
        ({"text": "{prompt}", "template": "chat", "messages": [{"role": "system", "content": "x"}]}, "no user message"),
        ({"text": "{prompt.x}"}, "x:1: the row has no `prompt.x`"),
        ({"text": "{ prompt }"}, "x:1: the row has no ` prompt `"),
        ({"text": "{prompt} {"}, "x:1: a single `{`"),
        ({"text": "{hint}", "hint": "\ud800"}, "x:1: the text with its fields has half of a surrogate pair"),
        ({"text": "a hint"}, "no field stands in it"),
    ],
)
def test_rows_that_cannot_be_told_to_the_teacher_are_named(arguments, words):
    with pytest.raises(ConfigError) as refusal:
        asked(**arguments)
    (problem,) = refusal.value.problems
    assert problem.path == "teacher.prompt" and words in problem.message


@pytest.mark.parametrize(
    ("teacher", "path", "words"),
    [
        ({"weights": "policy"}, "teacher.weights", "sees the same prompt"),
        ({"weights": "policy", "prompt": HINT, "device_mapping": [0]}, "teacher.device_mapping", "actor_train itself"),
        (
            {"weights": "policy", "prompt": HINT, "infer_batch_size": 2},
            "teacher.infer_batch_size",
            "actor_train itself",
        ),
        ({"device_mapping": [0], "prompt": "{truth}"}, "teacher.prompt", "no `truth`"),
        ({"device_mapping": [0], "prompt": "{prompt}" + "1" * 61}, "teacher.prompt", "the teacher has 64 positions"),
    ],
)
def test_what_such_a_teacher_cannot_be_is_refused(task, teacher, path, words):
    found = found_problems(tiny_config(task, teacher=teacher, distillation={}), look=True)
    assert any(where == path and words in message for where, message in found), found


def test_it_is_said_who_teaches_and_episodes_have_no_other_prompt(task):
    tree = tiny_config(task, teacher={"weights": "policy", "prompt": HINT}, distillation={})
    rows = dict(plan_rows(check_config(config_from_tree(tree))))
    assert rows["teacher"] == "actor_train itself, with another prompt"
    found = found_problems(agentic_config(task, teacher={"device_mapping": [0], "prompt": HINT}, distillation={}))
    assert ("teacher.prompt", "an episode begins with what its environment says") in found
