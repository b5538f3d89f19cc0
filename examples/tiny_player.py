"""Shared parts of the tiny players of grid games: a character tokenizer, a small Qwen2 model, its warm-up, and play.

A player reads a board, one character per cell, and writes its move as one letter. The warm-up imitates a pupil whose
move probabilities on each board are known; learning these takes far fewer boards than learning from drawn moves. This
module does not import `roll`, and needs numpy, torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
MARKER = "made_by_tiny_player.json"
"""Written last, so a folder that holds it is complete."""


@dataclass(frozen=True)
class Lessons:
    """Boards, all of one length, and the pupil's moves on each."""

    boards: Sequence[str]
    moves: np.ndarray
    """Probabilities ``[boards, moves]``."""


DrawLessons = Callable[[int, np.random.Generator], Lessons]
"""Draws the given number of lessons at random."""


class Game(Protocol):
    """One game being played."""

    def board(self) -> str: ...

    def play(self, move: str) -> None: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def is_won(self) -> bool: ...


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised steps."""

    steps: int
    learning_rate: float = 3e-3
    """Rises over the first steps, and falls linearly over the second half."""
    first_steps: int = 30
    boards: int = 256
    """Boards of one step."""


@dataclass(frozen=True)
class WarmedModel:
    """Contents of the marker file about the model next to it."""

    seed: int
    steps: int
    parameters: int
    greedy_success: float
    sampled_success: float


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per ASCII character.

    The line break is spelled as in every byte-level vocabulary. `AutoTokenizer` reads the tokenizer of a Qwen2 model as
    Qwen2's own, whatever the files say, and Qwen2's own knows line breaks only by this name.
    """
    spelled = [character.replace("\n", "Ċ") for character in characters]
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *spelled])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int, **changes: Any) -> Qwen2ForCausalLM:
    """Make a new float32 model with about 80,000 parameters, or with ``changes`` of its configuration."""
    torch.manual_seed(seed)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 1,  # `AutoTokenizer` adds a token
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # vLLM on a CPU wants heads of 32 at least
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,  # 0.02 suits wide models, this one would learn slowly
    }
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **special, **changes}))
    model.generation_config = GenerationConfig(**special)
    return model


def token_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def written(tokenizer: PreTrainedTokenizerFast, boards: Sequence[str]) -> torch.Tensor:
    """Return token ids ``[boards, length]`` of each board and the line break that precedes the move."""
    return torch.tensor([token_ids(tokenizer, f"{board}\n") for board in boards])


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    moves: str,
    draw: DrawLessons,
    options: WarmUp,
    seed: int,
) -> None:
    """Bring the model's probabilities of moves close to the pupil's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    chance = np.random.default_rng(seed)
    letters = torch.tensor(token_ids(tokenizer, moves))
    for step in range(options.steps):
        lessons = draw(options.boards, chance)
        targets = torch.tensor(lessons.moves, dtype=torch.float32)
        logits = model(written(tokenizer, lessons.boards), logits_to_keep=1).logits[:, -1]
        loss = -(targets * logits.log_softmax(-1)[:, letters]).sum(-1).mean()
        for group in optimizer.param_groups:
            share = min(1.0, (step + 1) / options.first_steps, 2 - 2 * step / options.steps)
            group["lr"] = options.learning_rate * share
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def next_tokens(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return one token for each row of ``[rows, vocabulary]``."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.distributions.Categorical(logits=logits / temperature).sample()


@torch.no_grad()
def play_games(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    games: Sequence[Game],
    max_turns: int,
    temperature: float,
    seed: int = 0,
) -> float:
    """Return the share of games won within ``max_turns`` turns. Temperature 0 is greedy."""
    torch.manual_seed(seed)
    for _ in range(max_turns):
        going = [game for game in games if not game.is_over]
        if not going:
            break
        logits = model(written(tokenizer, [game.board() for game in going]), logits_to_keep=1).logits[:, -1]
        for game, token in zip(going, next_tokens(logits, temperature).tolist(), strict=True):
            game.play(tokenizer.decode([token]))
    return sum(game.is_won for game in games) / len(games)


def make_player(
    folder: Path,
    *,
    seed: int,
    steps: int,
    characters: str,
    moves: str,
    draw: DrawLessons,
    unseen: Callable[[], Sequence[Game]],
    max_turns: int,
) -> WarmedModel:
    """Warm up a model, measure it on games outside the lessons (each ``unseen()`` makes them anew), and write it."""
    tokenizer = make_tokenizer(characters)
    model = new_model(tokenizer, seed)
    warm_up(model, tokenizer, moves, draw, WarmUp(steps), seed)
    greedy, sampled = (play_games(model, tokenizer, unseen(), max_turns, temperature) for temperature in (0.0, 1.0))
    warmed = WarmedModel(seed, steps, model.num_parameters(), greedy, sampled)
    keep(model, tokenizer, warmed, folder)
    return warmed


def existing(folder: Path, seed: int) -> WarmedModel | None:
    """Return the record of a model finished by an earlier call with the same seed, or None."""
    marker = folder / MARKER
    if not marker.exists():
        return None
    found = WarmedModel(**json.loads(marker.read_text()))
    return found if found.seed == seed else None


def keep(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, warmed: WarmedModel, folder: Path) -> None:
    """Write the folder. An interrupted call leaves no folder that looks complete."""
    partial = folder.with_name(f".partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / MARKER).write_text(json.dumps(asdict(warmed), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def run(description: str, here: Path, steps: int, make: Callable[[Path, int, int], WarmedModel]) -> None:
    """Run the command line of a `make_model.py`; ``make`` gets the folder, the seed and the steps."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=here / "model", help="folder of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the boards")
    parser.add_argument("--threads", type=int, default=1, help="computing threads; for matrices this small one is best")
    parser.add_argument("--steps", type=int, default=steps, help="supervised steps of the warm-up")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    warmed = existing(arguments.out, arguments.seed)
    if warmed is None:
        warmed = make(arguments.out, arguments.seed, arguments.steps)
        print(f"made {arguments.out} in {time.monotonic() - started:.0f} s and {warmed.steps} steps")
    else:
        print(f"{arguments.out} is complete already")
    print(
        f"{warmed.parameters:,} parameters; success on what it has not seen: greedy {warmed.greedy_success:.1%}, "
        f"sampled {warmed.sampled_success:.1%}"
    )
