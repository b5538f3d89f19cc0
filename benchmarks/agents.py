"""Measure what it costs to train an agent that asks by HTTP, and whether 200 of them hold up the run.

Rates: runs whose episodes an agent plays, against the same run with the same game as an environment: the same model,
seeds, turns and numbers of forced tokens. `plain` asks with Python's own client, so that what it costs is the
endpoint's; `openai` with OpenAI's client. Sides alternate; medians of the steps' seconds without training. What a
request costs more is independent of the length of a turn, so it is also told how long a turn of the game, and how many
tokens at this speed, make it a tenth of the time.

Gaps: an endpoint in this process, a policy that waits, and sessions of an openai client in another process. At the end
all sessions become samples, as those of episodes do. A probe in the driver's event loop and one in the endpoint's tell
the longest time for which each was not free: by the clock, and the processor time that its thread spent meanwhile,
which other programs on the machine do not lengthen; for the longest by the clock also that of the whole process.

Cost: the same without probes, by a plain client: processor time of a request in the endpoint's thread, the driver's and
the client, which is the user's own. Turn: that of one session whose policy answers at once, and how long the client
waits for an answer. Prints one JSON line.

    python benchmarks/agents.py [--steps 8] [--tokens 64 256] [--sessions 200]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _pipeline import ROOT, make_task, run_file
from _talking_agent import CERTIFICATES, plain
from agentic_overlap import configuration

from roll.agentic.agents import LONG_EPISODE, agent_endpoint
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.episode import ManagerSettings, SampledTurn
from roll.data.chat import ChatTurns
from roll.runtime.process import collect_rarely

sys.path.append(str(ROOT / "examples" / "agent-tool-cpu"))
import make_model

PROBE_SECONDS = 0.002
A_TENTH = 0.1
"""Goal: what an agent may take more than the game."""
LONG_MESSAGE = 100_000
"""Characters. So long ones are sent by a tenth of the sessions."""
WORDS = "the quick brown fox jumps over 17 lazy dogs and 25 cats near Ada's house, "


def rates(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return samples a second of all sides and the share of the time that agents cost. ``folder`` has the task."""
    (folder / "tasks.jsonl").write_text(json.dumps({"turns": arguments.turns, "seed": 0}) + "\n")
    sides: dict[str, dict[str, Any]] = {"game": {"env_config": {"median_seconds": 0.0, "turns": arguments.turns}}}
    for name in arguments.agents:
        agent = {"run": f"_talking_agent:{name}", "tasks": str(folder / "tasks.jsonl")}
        sides[name] = {"env_type": "agent", "env_manager_cls": "agent", "env_config": agent}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.repeats):
        for name, env in sides.items():
            written = configuration(folder, arguments)
            written["custom_envs"]["game"] |= env
            config = folder / f"{name}.yaml"
            config.write_text(yaml.safe_dump(written))
            out = folder / f"{name}-{arguments.tokens}-{turn}"
            run = run_file(config, out, {"output_dir": out, "async_generation_ratio": 0})
            steps, training = (run.column(key, arguments.warm_up) for key in ("time/step", "time/train"))
            seconds[name] += [step - train for step, train in zip(steps, training, strict=True)]
    samples = arguments.groups * arguments.group_size
    game = statistics.median(seconds.pop("game"))
    requests = samples * arguments.turns
    found = {"game_samples_per_second": samples / game, "game_ms_per_request": 1000 * game / requests}
    for name, each in seconds.items():
        taken = statistics.median(each)
        added = 1000 * (taken - game) / requests
        found[f"{name}_samples_per_second"] = samples / taken
        found[f"{name}_overhead"] = taken / game - 1
        found[f"{name}_ms_per_request"] = added
        found[f"{name}_a_tenth_from_ms"] = added / A_TENTH
        found[f"{name}_a_tenth_from_tokens"] = arguments.tokens * added / A_TENTH / found["game_ms_per_request"]
    return found


def lengthen(path: Path) -> None:
    """Let the quick start's model, whose positions are rotary, read more than it was made for."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))


class WaitingPolicy:
    """A policy that answers after a while."""

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        self._tokens = np.array(tokenizer("815<|im_end|>")["input_ids"], dtype=np.int32)
        self._seconds = seconds

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        await asyncio.sleep(self._seconds)
        count = len(self._tokens)
        return SampledTurn(self._tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), "stop")


class Probe:
    """A coroutine that is to run every two milliseconds, and remembers when it did not."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.process = 0.0

    async def run(self) -> None:
        while True:
            wall, cpu, process = time.perf_counter(), time.thread_time(), time.process_time()
            await asyncio.sleep(PROBE_SECONDS)
            self.cpu = max(self.cpu, time.thread_time() - cpu)
            gap = time.perf_counter() - wall - PROBE_SECONDS
            if gap > self.wall:
                self.wall, self.process = gap, time.process_time() - process

    def gaps(self, name: str) -> dict[str, float]:
        """Return the longest gaps in milliseconds."""
        found = {"gap": self.wall, "gap_process_cpu": self.process, "gap_cpu": self.cpu}
        return {f"{name}_{key}_ms": 1000 * seconds for key, seconds in found.items()}


def talk(addresses: list[tuple[str, str]], turns: int, characters: int, spent: Any) -> None:
    """Be all clients, each with its session, and tell the processor time that they spent."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def one(base_url: str, api_key: str) -> None:
        text = WORDS * (characters // len(WORDS) + 1)
        messages: list[Any] = []
        settings: Any = {"max_retries": 0, "timeout": 600, "http_client": DefaultAsyncHttpxClient(verify=CERTIFICATES)}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, **settings) as client:
            for _ in range(turns):
                messages.append({"role": "user", "content": text})
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    async def all_of_them() -> None:
        await asyncio.gather(*(one(*address) for address in addresses))

    began = time.process_time()
    asyncio.run(all_of_them())
    spent.put((time.process_time() - began, 0.0))


def play(addresses: list[tuple[str, str]], turns: int, characters: int, spent: Any) -> None:
    """Be all clients, each a thread with a plain one, and tell the processor time that they spent, and the whole."""
    began, started = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(len(addresses)) as threads:
        list(threads.map(lambda address: plain({"turns": turns, "seed": 0}, *address), addresses))
    spent.put((time.process_time() - began, time.perf_counter() - started))


async def thread_time() -> float:
    """Return the processor time of the thread of the loop that runs this."""
    return time.thread_time()


def gaps(
    arguments: argparse.Namespace, characters: int, *, probed: bool = True, sampling_seconds: float = 0.05
) -> dict[str, float]:
    """Return the longest gaps of both loops in milliseconds; if they are not probed, the processor time of a request in
    each thread, and its whole time."""

    async def main() -> dict[str, float]:
        chance = make_model.random.Random(0)
        blank = make_model.PreTrainedTokenizerFast(
            tokenizer_object=make_model.Tokenizer(make_model.models.BPE()), chat_template=make_model.TEMPLATE
        )
        texts = [make_model.rendered(blank, make_model.lesson(chance).messages) for _ in range(200)]
        tokenizer = make_model.make_tokenizer([*texts, WORDS])
        template = ChatTurns(tokenizer)
        endpoint = agent_endpoint(tokenizer, "127.0.0.1")
        endpoint.start()
        policy, limits = WaitingPolicy(tokenizer, sampling_seconds), ManagerSettings(100, 10**7, 10**8)
        settings = SessionSettings(limits, PARSERS["hermes"])
        sessions = [EpisodeSession(template, tokenizer, policy, settings) for _ in range(arguments.sessions)]
        addresses = [endpoint.open(session) for session in sessions]
        processes = multiprocessing.get_context("spawn")
        spent = processes.Queue()
        parts = (addresses, arguments.turns, characters, spent)
        clients = processes.Process(target=talk if probed else play, args=parts)
        driver, inside = Probe(), Probe()
        probes: list[Any] = [asyncio.create_task(collect_rarely())]  # as every run does
        first = endpoint.open(EpisodeSession(template, tokenizer, policy, settings))
        await asyncio.to_thread(plain, {"turns": 2, "seed": 0}, *first)  # what is made once
        assert endpoint._loop is not None

        async def spent_by_threads() -> tuple[float, float]:
            inside = asyncio.run_coroutine_threadsafe(thread_time(), endpoint._loop)
            return await asyncio.wrap_future(inside), time.thread_time()

        if probed:
            probes.append(asyncio.create_task(driver.run()))
            probes.append(asyncio.run_coroutine_threadsafe(inside.run(), endpoint._loop))
        clients.start()
        began, before = time.perf_counter(), await spent_by_threads()
        theirs, whole = await asyncio.to_thread(spent.get)
        seconds, after = time.perf_counter() - began, await spent_by_threads()
        await asyncio.to_thread(clients.join)
        for session in sessions:
            await endpoint.close(session)
            made = (session.samples, 1.0, 1.0)
            samples = await asyncio.to_thread(*made) if session.tokens > LONG_EPISODE else session.samples(*made[1:])
            assert len(samples) == 1, "each session is one conversation"
            await asyncio.sleep(0)
        for probe in probes:
            probe.cancel()
        endpoint.stop()
        requests = arguments.sessions * arguments.turns
        if probed:
            return {"requests_per_second": requests / seconds, **driver.gaps("driver"), **inside.gaps("endpoint")}
        return {
            "endpoint_cpu_ms_per_request": 1000 * (after[0] - before[0]) / requests,
            "driver_cpu_ms_per_request": 1000 * (after[1] - before[1]) / requests,
            "client_cpu_ms_per_request": 1000 * theirs / requests,
            "ms_per_request": 1000 * whole / arguments.turns,
        }

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each run")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per group")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="tokens of every turn")
    agents = ["plain", "openai", "openai_alone"]
    parser.add_argument("--agents", choices=agents, nargs="+", default=agents[:2], help="what is compared")
    parser.add_argument("--sessions", type=int, default=200, help="sessions at once for the gaps")
    parser.add_argument("--characters", type=int, nargs="+", default=[200, 20_000, 400_000], help="of each message")
    parser.add_argument("--only", choices=["rates", "gaps", "cost"], help="one part")
    arguments = parser.parse_args()
    arguments.median_seconds, arguments.epochs = 0.0, 1
    found: dict[str, Any] = {"benchmark": "agents", **vars(arguments)}
    if arguments.only in ("cost", None):
        found["cost"] = gaps(argparse.Namespace(sessions=20, turns=20), 0, probed=False)
        short = argparse.Namespace(sessions=1, turns=40)
        found["turn"] = gaps(short, 0, probed=False, sampling_seconds=0.0)
    if arguments.only in ("gaps", None):
        for characters in arguments.characters:
            few = argparse.Namespace(**vars(arguments))
            few.sessions = arguments.sessions if characters < LONG_MESSAGE else max(1, arguments.sessions // 10)
            found[f"gaps_at_{characters}"] = {"sessions": few.sessions, **gaps(few, characters)}
    if arguments.only in ("rates", None):
        with tempfile.TemporaryDirectory() as name:
            make_task(Path(name))
            lengthen(Path(name) / "model" / "config.json")
            for tokens in arguments.tokens:
                each = argparse.Namespace(**vars(arguments) | {"tokens": tokens})
                found[f"rates_at_{tokens}"] = rates(Path(name), each)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
