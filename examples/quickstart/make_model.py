"""Make the quick start's world: a tiny Qwen2 model, a character tokenizer, and two-digit additions.

Supervised steps warm up the model on the work of a careless pupil, who adds digit by digit and forgets six carries in
ten. The model learns to do the same: its greedy answers are right if nothing is carried, in about a third of the
problems. Reinforcement learning (`rlvr.yaml`) then has to teach it to carry more often than its teacher. The same seed
and thread count on the same machine make the same files. This script does not import `roll`, and needs torch,
transformers and about a minute on a laptop CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import string
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'system' %}{{ '\\n' }}{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
VALIDATION_PROBLEMS = 256
RESPONSE_TOKENS = 4
"""Up to three digits and the end of the sequence."""
MARKER = "made_by_quickstart.json"
"""Written last, so a folder that holds it is complete."""


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised steps."""

    learning_rate: float = 1e-3
    """Constant for the first half of the steps, then falling linearly."""
    batch_size: int = 64
    steps: int = 1000
    forgotten_carries: float = 0.6
    """Share of the carries that the pupil forgets."""


@dataclass(frozen=True)
class WarmedModel:
    """Contents of the marker file about the model next to it."""

    seed: int
    steps: int
    greedy_accuracy: float
    parameters: int


Problem = tuple[int, int]


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return all additions of two two-digit numbers as (training, validation), shuffled.

    A validation problem is absent from training in both orders: training has neither ``a+b`` nor ``b+a``.
    """
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(problems)
    validation = problems[:VALIDATION_PROBLEMS]
    held_out = set(validation) | {(b, a) for a, b in validation}
    return [problem for problem in problems if problem not in held_out], validation


def as_record(problem: Problem) -> dict[str, str]:
    """Return one line of the data files."""
    a, b = problem
    return {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "domain": "addition"}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per printable ASCII character.

    A chat of one user message renders to that message alone.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Make a new float32 model with about 0.8 million parameters."""
    torch.manual_seed(seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size); 0.02 suits wide models, this one would learn slowly
        **special,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def careless_answer(problem: Problem, forgotten_carries: float, chance: random.Random) -> str:
    """Return the pupil's answer: he forgets each carry, also into the hundreds, with this probability."""
    a, b = problem
    units = a % 10 + b % 10
    carry = units >= 10 and chance.random() >= forgotten_carries
    tens = a // 10 + b // 10 + carry
    hundreds = tens >= 10 and chance.random() >= forgotten_carries
    return ("1" if hundreds else "") + f"{tens % 10}{units % 10}"


def encode(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem], answers: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets, both ``[problems, 6 + RESPONSE_TOKENS]``; target -100 marks tokens without a loss."""
    inputs, targets = [], []
    for problem, answer in zip(problems, answers, strict=True):
        prompt = tokenizer(as_record(problem)["prompt"])["input_ids"]
        response = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
        padding = RESPONSE_TOKENS - len(response)
        inputs.append(prompt + response + [tokenizer.pad_token_id] * padding)
        targets.append([-100] * len(prompt) + response + [-100] * padding)
    return torch.tensor(inputs), torch.tensor(targets)


@torch.no_grad()
def greedy_accuracy(model: Qwen2ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the share of problems that greedy decoding solves.

    One forward pass is enough: greedy decoding writes the true response exactly when every true token is the most
    likely one after the true tokens before it.
    """
    predicted = model(inputs[:, :-1]).logits.argmax(-1)
    right = (predicted == targets[:, 1:]) | (targets[:, 1:] == -100)
    return right.all(dim=1).float().mean().item()


def shuffled_batches(rows: int, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield row indices ``[batch_size]``, epoch after epoch, without end."""
    while True:
        order = torch.randperm(rows, generator=generator)
        yield from order[: rows - rows % batch_size].split(batch_size)


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, training: list[Problem], options: WarmUp, seed: int
) -> None:
    """Train the model to imitate the careless pupil, whose answer to a problem is drawn anew each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    batches = shuffled_batches(len(training), options.batch_size, torch.Generator().manual_seed(seed))
    chance = random.Random(seed)
    for step in range(options.steps):
        problems = [training[row] for row in next(batches).tolist()]
        answers = [careless_answer(problem, options.forgotten_carries, chance) for problem in problems]
        inputs, targets = encode(tokenizer, problems, answers)
        loss = cross_entropy(model(inputs[:, :-1]).logits.flatten(0, 1), targets[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, 2 - 2 * step / options.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def write_data(folder: Path, training: list[Problem], validation: list[Problem]) -> None:
    """Write ``train.jsonl`` and ``val.jsonl``."""
    folder.mkdir(parents=True)
    for name, problems in (("train", training), ("val", validation)):
        lines = [json.dumps(as_record(problem)) + "\n" for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def existing(out: Path, seed: int) -> WarmedModel | None:
    """Return the record of a model finished by an earlier call with the same seed, or None."""
    marker = out / "model" / MARKER
    if not marker.exists():
        return None
    found = WarmedModel(**json.loads(marker.read_text()))
    return found if found.seed == seed else None


def make(out: Path, seed: int, options: WarmUp) -> WarmedModel:
    """Write ``out/data`` and ``out/model``. An interrupted call leaves no folder that looks complete."""
    training, validation = split_problems(seed)
    tokenizer = make_tokenizer()
    model = new_model(tokenizer, seed)
    warm_up(model, tokenizer, training, options, seed)
    accuracy = greedy_accuracy(model, *encode(tokenizer, validation, [str(a + b) for a, b in validation]))
    warmed = WarmedModel(seed=seed, steps=options.steps, greedy_accuracy=accuracy, parameters=model.num_parameters())

    partial = out / f".partial-{os.getpid()}"
    write_data(partial / "data", training, validation)
    model.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    (partial / "model" / MARKER).write_text(json.dumps(asdict(warmed), indent=2) + "\n")
    for name in ("data", "model"):  # the model last: its marker vouches for both
        shutil.rmtree(out / name, ignore_errors=True)
        (partial / name).rename(out / name)
    partial.rmdir()
    return warmed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets model/ and data/")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems' split, the weights and the batches")
    parser.add_argument("--threads", type=int, default=1, help="computing threads; for matrices this small one is best")
    parser.add_argument("--steps", type=int, default=WarmUp.steps, help="supervised steps of the warm-up")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    warmed = existing(arguments.out, arguments.seed)
    if warmed is None:
        print("making a model that adds badly, by supervised steps; about two minutes", flush=True)
        warmed = make(arguments.out, arguments.seed, WarmUp(steps=arguments.steps))
        print(f"made {arguments.out / 'model'} in {time.monotonic() - started:.0f} s and {warmed.steps} steps")
    else:
        print(f"{arguments.out / 'model'} is complete already")
    print(f"{warmed.parameters:,} parameters, greedy validation accuracy {warmed.greedy_accuracy:.1%}")


if __name__ == "__main__":
    main()
