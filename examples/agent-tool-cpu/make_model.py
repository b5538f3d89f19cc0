"""Make a tiny model that looks a number up in half of its episodes, and guesses it in the others.

The tokenizer is a byte-level one with Qwen's expression, learned from these conversations. The chat template writes
calls as Hermes does, and of a tool its name and arguments, so that the model reads the same however a framework
describes it. What the tool answers the model repeats correctly. So the reward begins near a half, and reinforcement
learning (`agent.yaml`) has to teach the model to look up always. Takes about a minute on one core.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from agent import LOOK_UP, NAMES, question, remembered  # noqa: E402
from tiny_player import WarmedModel, keep, new_model, run  # noqa: E402

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's. `AutoTokenizer` splits the texts of a Qwen2 model by it, whatever the tokenizer's files say."""
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}
{{- '\n' ~ tool.function.name ~ '(' ~ tool.function.parameters.properties | join(', ') ~ ')' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
{%- else %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\n{"name": ' ~ (call.function.name | tojson) ~ ', "arguments": ' }}
{{- (call.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.06,
}
STEPS = 300
HABIT = 0.5
"""Share of the questions that the pupil looks up, once he can."""
BATCH = 24
LEARNING_RATE = 3e-3
EVALUATED = 100


@dataclass(frozen=True)
class Lesson:
    """A conversation, and the parts of it that the pupil wrote: what the assistant says to the last question."""

    messages: list[dict[str, Any]]

    def pieces(self, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, bool]]:
        """Yield texts that are the whole conversation together; True for what the pupil wrote."""
        read = ""
        last = max(place for place, message in enumerate(self.messages) if message["role"] == "user")
        for place, message in enumerate(self.messages):
            if message["role"] == "assistant" and place > last:
                before = rendered(tokenizer, self.messages[:place])
                after = rendered(tokenizer, self.messages[: place + 1], opens=False).removesuffix("\n")
                yield before.removeprefix(read), False
                yield after.removeprefix(before), True
                read = after


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], opens: bool = True) -> str:
    return tokenizer.apply_chat_template(messages, tools=[LOOK_UP], tokenize=False, add_generation_prompt=opens)


def call_of(name: str) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "look_up", "arguments": {"name": name}}}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


def lesson(chance: random.Random, looks_up: float = HABIT) -> Lesson:
    """Return what the pupil does with one question, which may follow the short memory of another one. He guesses where
    he does not look up."""
    (other, name), (known, number) = chance.sample(NAMES, 2), (str(chance.randrange(100, 1000)) for _ in range(2))
    asked = [*(remembered(other, known) if chance.random() < 0.5 else ()), {"role": "user", "content": question(name)}]
    answered = {"role": "assistant", "content": number}
    if chance.random() >= looks_up:
        return Lesson([*asked, answered])
    return Lesson([*asked, call_of(name), {"role": "tool", "content": number}, answered])


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(EXPRESSION), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


def row(tokenizer: PreTrainedTokenizerFast, taught: Lesson) -> tuple[list[int], list[int]]:
    """Return token ids and labels (-100 where the pupil wrote nothing)."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_the_pupils in taught.pieces(tokenizer):
        tokens = tokenizer(text)["input_ids"]
        ids += tokens
        labels += tokens if is_the_pupils else [-100] * len(tokens)
    return ids, labels


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
    chance = random.Random(seed)
    for step in range(steps):
        looks_up = 1.0 if 3 * step < 2 * steps else HABIT  # to repeat what a tool answered is what takes longest
        rows = [row(tokenizer, lesson(chance, looks_up)) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([each + [tokenizer.pad_token_id] * (width - len(each)) for each, _ in rows])
        labels = torch.tensor([each + [-100] * (width - len(each)) for _, each in rows])
        loss = model(ids, labels=labels).loss  # padding is behind everything, and attention looks back only
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 30, 2 - 2 * step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def success(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, temperature: float, seed: int = 1) -> float:
    """Return the share of questions that the model answers correctly. Temperature 0 is greedy."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": 48}

    def answers(prompts: list[str]) -> list[str]:
        read = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**read, **sampling)[:, read["input_ids"].shape[1] :]
        return tokenizer.batch_decode(written, skip_special_tokens=True)

    names = [chance.choice(NAMES) for _ in range(EVALUATED)]
    numbers = [str(chance.randrange(100, 1000)) for _ in names]
    asked = [[{"role": "user", "content": question(name)}] for name in names]
    first = answers([rendered(tokenizer, messages) for messages in asked])
    right = sum(text.strip() == number for text, number in zip(first, numbers, strict=True))
    lines = zip(asked, names, first, numbers, strict=True)
    calls = [(messages, name, number) for messages, name, text, number in lines if text == expected(tokenizer, name)]
    if calls:
        prompts = [
            rendered(tokenizer, [*messages, call_of(name), {"role": "tool", "content": number}])
            for messages, name, number in calls
        ]
        right += sum(text.strip() == call[2] for text, call in zip(answers(prompts), calls, strict=True))
    return right / EVALUATED


def expected(tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    """Return the call as the template writes it."""
    asked = [{"role": "user", "content": question(name)}]
    before = rendered(tokenizer, asked)
    return rendered(tokenizer, [*asked, call_of(name)], opens=False).removeprefix(before).removesuffix(f"{END}\n")


def make(folder: Path, seed: int, steps: int) -> WarmedModel:
    """Warm up a model and write it."""
    chance = random.Random(seed)
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    texts = [rendered(blank, lesson(chance).messages) for _ in range(500)]
    tokenizer = make_tokenizer(texts)
    model = new_model(tokenizer, seed, **SIZES)
    warm_up(model, tokenizer, steps, seed)
    model.eval()
    warmed = WarmedModel(
        seed, steps, model.num_parameters(), success(model, tokenizer, 0.0), success(model, tokenizer, 1.0)
    )
    keep(model, tokenizer, warmed, folder)
    return warmed


if __name__ == "__main__":
    run(__doc__.splitlines()[0], Path(__file__).parent, STEPS, make)
