"""Frameworks of others, each in the lines that the documentation shows, play with a real engine through the endpoint.

A tiny model that has learned to call the tool answers them. It cannot follow the long prompts of smolagents: there,
what the policy says is given, and the engine says how likely it is. With one of the frameworks the example learns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.agentic.agents import agent_endpoint
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.episode import ManagerSettings, SampledTurn
from roll.agentic.library.agent import AgentEnv
from roll.data.chat import ChatTurns
from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.hf.strategy import HFInferStrategy
from roll.runtime.placement import free_port
from roll.tracking.trackers import read_metrics
from tests.docs.pages import ROOT, page

sys.path.append(str(ROOT / "examples" / "agent-tool-cpu"))
import make_model

pytestmark = [
    pytest.mark.needs("aiohttp"),
    pytest.mark.needs("openai"),
    pytest.mark.tier("soak"),
    pytest.mark.timeout(1800),
]

PACKAGES = (
    "openai-agents==0.24.0",
    "pydantic-ai==2.62.0",
    "langgraph==1.2.22",
    "langchain==1.5.2",
    "langchain-openai==1.7.3",
    "smolagents==1.26.0",
)
APART = ("mini-swe-agent==2.4.6", "claude-agent-sdk==0.2.187")
"""Packages that do not fit those of the run."""
LENGTH = 131072
WARM_UP_STEPS = 250
TASK = {"question": make_model.question("Ada"), "numbers": {"Ada": "815", "Ben": "123"}, "answer": "815"}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call><|im_end|>'
TOOL_CALLS = (CALL.format("look_up", "name", "Ada"), CALL.format("final_answer", "answer", "815"))
COMMANDS = (
    CALL.format("bash", "command", "echo $Ada"),
    CALL.format("bash", "command", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo $Ada"),
)
BASH = (CALL.format("Bash", "command", "echo $Ada"), "815<|im_end|>")
CODE = ('Thought: I ask.\n<code>\nprint(look_up("Ada"))\n</code>', '<code>\nfinal_answer("815")\n</code>')


@dataclass(frozen=True)
class Framework:
    """A framework in the documentation's lines, and how it goes on from its history."""

    package: str
    """What its lines import."""
    change: tuple[str, str] = ("", "")
    """A change of the lines that the documentation mentions."""
    says: tuple[str, ...] = ()
    """What the policy says; else the model chooses."""
    continues: bool = True
    """False if each of its turns begins a new history."""
    looks_up: str = "look_up"
    """A part of the policy's first answer."""
    apart: bool = False
    """Whether its packages do not fit those of the run."""


FRAMEWORKS = {
    "openai-agents, responses": Framework("agents"),
    "openai-agents, chat": Framework(
        "agents",
        ("set_tracing_disabled(True)", 'set_tracing_disabled(True)\nset_default_openai_api("chat_completions")'),
    ),
    "pydantic-ai, responses": Framework("pydantic_ai"),
    "pydantic-ai, chat": Framework("pydantic_ai", ("openai:policy", "openai-chat:policy")),
    "langgraph": Framework("langchain.agents"),
    "smolagents, calls": Framework("smolagents", says=TOOL_CALLS, continues=False),
    "smolagents, code": Framework("smolagents", ("ToolCallingAgent([", "CodeAgent(["), says=CODE, continues=False),
    "mini-swe-agent": Framework("minisweagent.agents.default", says=COMMANDS, looks_up="echo $Ada", apart=True),
    "claude code": Framework("claude_agent_sdk", says=BASH, looks_up="echo $Ada", apart=True),
}


def lines_of(framework: Framework) -> str:
    """The program of a framework in the documentation."""
    blocks = [block.text for block in page("docs/agents.md").blocks if "ROLL_TASK" in block.text]
    (text,) = [text for text in blocks if f"\nfrom {framework.package} import" in text]
    before, after = framework.change
    assert before in text
    return text.replace(before, after, 1)


@cache
def interpreter(*, apart: bool) -> str:
    """An interpreter with frameworks, on top of the run's packages if they fit. It is kept for the next time."""
    packages = APART if apart else PACKAGES
    mark = hashlib.sha256("\n".join([sys.executable, *packages]).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"roll-frameworks-{mark}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (own,) = folder.glob("lib/python*/site-packages")
        if not apart:
            (own / "run.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return str(python)


@pytest.fixture(scope="module")
def clerks(tmp_path_factory) -> Callable[[bool], Path]:
    """Makes a model that always looks up, or one that need not know what to say."""

    @cache
    def make(speaks: bool) -> Path:
        folder = tmp_path_factory.mktemp("clerk") / "model"
        sizes = {**make_model.SIZES, "max_position_embeddings": LENGTH}
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(make_model, "HABIT", 1.0)
            patches.setattr(make_model, "SIZES", sizes)
            make_model.make(folder, seed=0, steps=WARM_UP_STEPS if speaks else 1)
        return folder

    return make


@dataclass
class Policy:
    """A real engine."""

    engine: HFInferStrategy
    tokenizer: Any
    says: tuple[str, ...]
    prompts: dict[int, list[int]] = field(default_factory=dict)
    sampled: dict[int, SampledTurn] = field(default_factory=dict)

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        self.prompts[turn] = prompt_token_ids.tolist()
        if self.says:
            tokens = np.array(self.tokenizer(self.says[turn])["input_ids"], dtype=np.int32)
            (logprobs,) = await self.engine.score([np.concatenate([prompt_token_ids, tokens])])
            logprobs, reason = logprobs[len(prompt_token_ids) :], "stop"
        else:
            params = SamplingParams(max_new_tokens=min(max_new_tokens, 64), seed=turn, stop_strings=stop_strings)
            done = await self.engine.generate(GenerateRequest(f"turn {turn}", prompt_token_ids, params))
            tokens, logprobs, reason = done.token_ids, done.logprobs, done.finish_reason
        self.sampled[turn] = SampledTurn(tokens, logprobs, np.zeros(len(tokens), dtype=np.int32), reason)
        return self.sampled[turn]


@dataclass
class Played:
    result: Any
    policy: Policy
    samples: list[Any]
    metrics: dict[str, float]


def play(folder: Path, command: list[str], tasks: Path, says: tuple[str, ...]) -> Played:
    async def main() -> Played:
        engine = HFInferStrategy(
            str(folder), device="cpu", dtype="float32", attn_implementation="sdpa", max_length=LENGTH,
            strategy_config={},
        )  # fmt: skip
        tokenizer = make_model.PreTrainedTokenizerFast.from_pretrained(folder)
        await engine.start()
        endpoint = agent_endpoint(tokenizer, "127.0.0.1")
        endpoint.start()
        try:
            policy = Policy(engine, tokenizer, says)
            limits = ManagerSettings(max_steps=6, prompt_length=LENGTH // 2, sequence_length=LENGTH)
            settings = SessionSettings(limits, PARSERS["hermes"])
            session = EpisodeSession(ChatTurns(tokenizer), tokenizer, policy, settings)
            base_url, api_key = endpoint.open(session)
            env = AgentEnv(command=command, tasks=str(tasks))
            env.reset(seed=0)
            where = json.dumps({"base_url": base_url, "api_key": api_key})
            result = await asyncio.to_thread(env.step, where)
            await endpoint.close(session)
            return Played(result, policy, session.samples(1.0, 1.0), session.metrics())
        finally:
            endpoint.stop()
            await engine.shutdown()

    return asyncio.run(main())


@torch.no_grad()
def trainers_logprobs(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of each token but the first, as a trainer computes them."""
    model = make_model.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, tokens[1:, None])[:, 0].numpy()


def sampled_runs(mask: np.ndarray) -> Iterator[slice]:
    """The places of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from (slice(*pair) for pair in edges.reshape(-1, 2).tolist())


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_plays_as_the_documentation_shows(name, clerks, tmp_path):
    framework = FRAMEWORKS[name]
    model = clerks(not framework.says)
    program, tasks = tmp_path / "clerk.py", tmp_path / "tasks.jsonl"
    program.write_text(lines_of(framework))
    tasks.write_text(json.dumps(TASK))
    played = play(model, [interpreter(apart=framework.apart), str(program)], tasks, framework.says)
    policy, samples = played.policy, played.samples
    assert played.result[1] == 1.0, "its answer is right"
    assert len(policy.sampled) == 2, "it has looked up"
    assert framework.looks_up in policy.tokenizer.decode(policy.sampled[0].token_ids)
    assert "815" in policy.tokenizer.decode(policy.prompts[1]), "what the tool answered is read"
    assert len(samples) == (1 if framework.continues else 2)
    assert played.metrics["new_samples/history"] == (0 if framework.continues else 1)
    assert played.metrics["new_samples/template"] == played.metrics["new_samples/tools"] == 0
    turns = 0
    for sample in samples:
        found = trainers_logprobs(model, sample.token_ids)
        for places in sampled_runs(sample.response_mask):
            turn = int(sample.turns[places.start])
            assert sample.token_ids[: places.start].tolist() == policy.prompts[turn]
            assert sample.token_ids[places].tolist() == policy.sampled[turn].token_ids.tolist()
            differences = np.abs(found[places.start - 1 : places.stop - 1] - sample.behaviour_logprobs[places])
            assert differences.mean() < 1e-5
            turns += 1
    assert turns == len(policy.sampled), "each turn is trained on once"


@pytest.fixture(scope="module")
def pupil(tmp_path_factory) -> Path:
    """The example's model, which looks up in half of the cases."""
    folder = tmp_path_factory.mktemp("pupil") / "model"
    make_model.make(folder, seed=0, steps=make_model.STEPS)
    return folder


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize(("agent", "tasks"), [("run", 8), ("run_forgetful", 4)])
def test_the_example_learns_with_an_unchanged_agent(agent, tasks, ratio, pupil, tmp_path):
    """Also with one that forgets: each of its episodes has a history that could not be continued, and two samples."""
    settings = {
        "pretrain": pupil,
        "output_dir": tmp_path / "run",
        "async_generation_ratio": ratio,
        "rollout_batch_size": tasks,
        "custom_envs.directory.env_config.run": f"examples.agent-tool-cpu.openai_agents:{agent}",
    }
    example = ["-m", "roll.cli.main", "train", "examples/agent-tool-cpu/agent.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run([interpreter(apart=False), *example, *overrides], cwd=ROOT, env=environment, check=True)
    steps = [step for step in read_metrics(tmp_path / "run" / "metrics.jsonl") if step["step"] > 0]
    rewards = [step["reward/mean"] for step in steps]
    assert 0.3 < rewards[0] < 0.7 and statistics.mean(rewards[-5:]) >= 0.95
    assert {step["env/directory/new_samples/history"] for step in steps} == {float(agent == "run_forgetful")}


LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a number.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


@contextmanager
def server(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The address of a server of OpenAI's API, once it answers."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--port", str(port)],
        env={**os.environ, **environment}, start_new_session=True, stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            while process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"{base_url}/models", timeout=10):
                    break
                time.sleep(0.5)
            yield base_url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def told(base_url: str, messages: list[dict[str, Any]], *, stream: bool, **options: Any) -> dict[str, Any]:
    """What a server says: text, calls, why it ended and how many tokens there were."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    asked = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": 40, "seed": 0, **options}
    if not stream:
        answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        said, ended, usage = choice.message.content, choice.finish_reason, answer.usage
    else:
        said, parts, ended, usage = "", {}, None, None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ended = choice.finish_reason or ended
                said += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    name, arguments = parts.get(call.index, ("", ""))
                    more = call.function.arguments or ""
                    parts[call.index] = (name + (call.function.name or ""), arguments + more)
        calls = [parts[index] for index in sorted(parts)]
    return {
        "text": said or "",
        "calls": [(name, json.loads(arguments)) for name, arguments in calls],
        "ended": ended,
        "tokens": (usage.prompt_tokens, usage.completion_tokens),
    }


@pytest.mark.needs("vllm")
def test_answers_are_those_of_vllms_own_server(clerks):
    """Greedy, whole and as a stream: a call, what follows its result, answers without tools, one of them cut short.

    A call that is cut short is no call to either; of its text vLLM's stream, unlike its whole answer, leaves out all.
    """
    model, length = str(clerks(True)), "512"
    called = {"name": "look_up", "arguments": json.dumps({"name": "Ada"})}
    question = [{"role": "user", "content": TASK["question"]}]
    conversations = [
        (question, {"tools": [LOOK_UP]}),
        (
            [
                *question,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "1", "type": "function", "function": called}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "815"},
            ],
            {"tools": [LOOK_UP]},
        ),
        (question, {}),
        (question, {"max_tokens": 3}),
    ]
    theirs = ["vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32", "--max-model-len", length]
    theirs += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--gpu-memory-utilization", "0.1"]
    ours = ["roll.cli.main", "serve", model, "--sequence-length", length]
    found = []
    for command in (theirs, ours):
        with server(command, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as base_url:
            found.append(
                [
                    told(base_url, messages, stream=stream, **options)
                    for messages, options in conversations
                    for stream in (False, True)
                ]
            )
    assert found[0] == found[1]
    assert found[1][::2] == found[1][1::2], "a stream is the whole answer"
    first, second, third, fourth = found[1][::2]
    assert first["calls"] == [("look_up", {"name": "Ada"})] and first["ended"] == "tool_calls"
    assert "815" in second["text"] and not third["calls"] and fourth["ended"] == "length"
