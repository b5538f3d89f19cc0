"""Real episodes: the engine samples turn by turn, the trainer reads whole episodes, and both mean the same tokens.

A tiny random model writes nonsense, which is what makes the test sharp: almost none of its responses would come back
the same from decoding and encoding.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.agentic.endpoint.dialects import Chat
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.episode import SampledTurn
from roll.data.chat import ChatTurns
from roll.data.records import SampleBatch
from roll.engines.base import GenerateRequest, InferStrategy, SamplingParams
from roll.engines.hf.strategy import HFInferStrategy
from roll.trainers.base import build_trainer
from tests.agentic.episodes import ScriptedSession, limits, make_manager, observe, user
from tests.data.chat_templates import FORMATS, make_tokenizer
from tests.trainers.trainers import trainer_setup

EPISODES = 12
TURNS = 4
SEQUENCE_LENGTH = 256
LIMITS = limits(max_steps=TURNS, sequence_length=SEQUENCE_LENGTH, max_tokens_per_step=10)
VOCABULARY = 384
"""More than any of the tokenizers has, as in many published models."""


@dataclass(frozen=True)
class EnginePolicy:
    """The engine as the policy of one episode."""

    engine: InferStrategy
    name: str
    seed: int

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        sampling = SamplingParams(max_new_tokens, seed=1000 * self.seed + turn, stop_strings=stop_strings)
        done = await self.engine.generate(GenerateRequest(f"{self.name}-{turn}", prompt_token_ids, sampling))
        return SampledTurn(done.token_ids, done.logprobs, done.versions, done.finish_reason)


def make_model(stop: int) -> Qwen2ForCausalLM:
    """A random model that is decided about its stop token, one way or the other, more than about others."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[stop] *= 3
    return model


def play_with_engine(path: str, name: str, manager: str, stop: int):
    """Many episodes at once; gives their samples."""
    tokenizer = make_tokenizer(name)
    made = make_manager(manager, LIMITS, ChatTurns(tokenizer), tokenizer)

    async def one(engine, number):
        words = ["You see a wall.", f"Room {number}: go left\n", "\n\nWhere now?", "<answer>", "done"]
        session = ScriptedSession(observe(words[(number + turn) % len(words)]) for turn in range(TURNS + 1))
        policy = EnginePolicy(engine, f"{name}-{number}", number)
        return await made.run_episode(session, policy, tag=name, seed=number)

    episodes = with_engine(path, stop, one)
    return [sample for episode in episodes for sample in episode.samples], episodes


def with_engine(path: str, stop: int, one) -> list:
    """The results of ``one`` (a function of the engine and a number), many of them at once."""

    async def main():
        engine = HFInferStrategy(
            path,
            device="cpu",
            dtype="float32",
            attn_implementation="sdpa",
            max_length=SEQUENCE_LENGTH,
            eos_token_ids=(stop,),
            strategy_config={},
        )
        await engine.start()
        try:
            return await asyncio.gather(*(one(engine, number) for number in range(EPISODES)))
        finally:
            await engine.shutdown()

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture
def log_probs():
    """What the trainer makes of samples, as one flat array."""

    def compute(path: str, samples) -> np.ndarray:
        trainer = build_trainer("fsdp2_train", trainer_setup(path))
        trainer.initialize()
        return trainer.log_probs(SampleBatch.from_samples(samples), 1.0)

    yield compute
    if dist.is_initialized():
        dist.destroy_process_group()


FORMATS_IN_QUICK_TESTS = ("chatml", "llama2")


in_formats = pytest.mark.parametrize(
    "name",
    [
        name if name in FORMATS_IN_QUICK_TESTS else pytest.param(name, marks=pytest.mark.tier("all"))
        for name in ("chatml", "qwen3", "llama2", "llama3", "mistral", "gemma", "phi3", "deepseek")
    ],
)


@in_formats
@pytest.mark.parametrize("manager", ["trajectory", "step"])
def test_the_trainer_finds_the_engines_log_probabilities_at_each_sampled_token(name, manager, log_probs, tmp_path):
    tokenizer = make_tokenizer(name)
    stop = tokenizer.convert_tokens_to_ids(FORMATS[name].stop)
    make_model(stop).save_pretrained(tmp_path)
    samples, episodes = play_with_engine(str(tmp_path), name, manager, stop)
    assert all(len(episode.turns) == TURNS for episode in episodes)

    mask = np.concatenate([sample.response_mask for sample in samples])
    recorded = np.concatenate([sample.behaviour_logprobs for sample in samples])
    difference = np.abs(log_probs(str(tmp_path), samples) - recorded)[mask]
    assert difference.max() < 1e-4
    assert not recorded[~mask].any() and (recorded[mask] < 0).all()
    assert_the_test_is_sharp(samples, tokenizer, stop)


@in_formats
def test_so_it_does_for_an_agent_that_branches_and_stops_at_strings(name, log_probs, tmp_path):
    """Each episode is several samples, which share turns as context."""
    tokenizer = make_tokenizer(name)
    stop = tokenizer.convert_tokens_to_ids(FORMATS[name].stop)
    make_model(stop).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    dialect = Chat(tokenizer.decode)

    async def one(engine, number):
        policy = EnginePolicy(engine, f"{name}-{number}", number)
        settings = SessionSettings(LIMITS, PARSERS["hermes"])
        session = EpisodeSession(ChatTurns(tokenizer), tokenizer, policy, settings)

        async def ask(*messages, **fields):
            request = dialect.read({"messages": list(messages), **fields})
            return dialect.answer(request, await session.respond(request))["choices"][0]["message"]

        first = user(f"Room {number}: go left")
        answer = await ask(first, stop=["e", "a", "o"])
        await asyncio.gather(*(ask(first, answer, user(words)) for words in ("Where now?", "done", "<answer>")))
        return session.samples(1.0, 1.0), session.metrics()

    played = with_engine(str(tmp_path), stop, one)
    samples = [sample for own, _ in played for sample in own]
    mask = np.concatenate([sample.response_mask for sample in samples])
    recorded = np.concatenate([sample.behaviour_logprobs for sample in samples])
    difference = np.abs(log_probs(str(tmp_path), samples) - recorded)[mask]
    assert difference.max() < 1e-4
    assert mask.sum() == sum(metrics["tokens"] for _, metrics in played)
    assert all(metrics["conversations"] == 1 and len(own) == 3 for own, metrics in played)
    assert_the_test_is_sharp(samples, tokenizer, stop)


def assert_the_test_is_sharp(samples, tokenizer, stop) -> None:
    """Some turns end with the stop token and some are cut, and encoding again would give other tokens."""
    last = {int(sample.token_ids[sample.turns == turn][-1]) for sample in samples for turn in set(sample.turns) - {-1}}
    assert stop in last and len(last) > 1
    again = [tokenizer(tokenizer.decode(sample.token_ids), add_special_tokens=False)["input_ids"] for sample in samples]
    assert any(ids != sample.token_ids.tolist() for ids, sample in zip(again, samples, strict=True))
