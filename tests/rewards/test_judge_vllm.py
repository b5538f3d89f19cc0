"""The judge and its preflight against a real server: vLLM's, with a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from roll.configs.errors import ConfigError
from roll.configs.rewards import JudgeConfig
from roll.rewards.base import RewardGaveUp
from roll.rewards.judge import Judge, check_judge
from roll.runtime.placement import free_port
from tests.engines.vllm_helpers import EOS, make_model

pytestmark = [pytest.mark.tier("soak"), pytest.mark.needs("vllm"), pytest.mark.timeout(300)]
START_SECONDS = 200
CHARACTERS = [chr(code) for code in range(32, 127)]


@pytest.fixture(scope="module")
def vllm_address(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("judge")
    make_model().save_pretrained(folder)
    vocabulary = {letter: token for token, letter in enumerate([*CHARACTERS, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), Fuse()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template).save_pretrained(
        folder
    )
    assert vocabulary["<eos>"] == EOS
    port = free_port()
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
                "--served-model-name", "tiny-judge", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )  # fmt: skip
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def test_a_vllm_server_is_known_by_the_preflight_and_judges(vllm_address):
    config = JudgeConfig(
        base_url=vllm_address,
        model="tiny-judge",
        template="Grade this: {response}",
        score_pattern=r"(\d)",
        score_max=9,
        temperature=1.0,
        max_tokens=64,
        extra_body={"seed": 3, "ignore_eos": True},
    )
    check_judge(config, "rewards.x.judge")
    with pytest.raises(ConfigError, match="tiny-judge"):
        check_judge(JudgeConfig(base_url=vllm_address, model="tiny-juge"), "rewards.x.judge")
    too_long = JudgeConfig(base_url=vllm_address, model="tiny-judge", template="{response}", max_tokens=64)

    async def main() -> list:
        judge, other = Judge(config), Judge(too_long)
        try:
            outputs = [judge("2+2=", [], f"it is {number}", None) for number in range(12)]
            with pytest.raises(RewardGaveUp, match="1 attempt.*400"):
                await other("2+2=", [], "x" * 600, None)
            return await asyncio.gather(*outputs)
        finally:
            await judge.close()
            await other.close()

    outputs = asyncio.run(main())
    assert all(0 <= output.score <= 1 and output.metrics["judge_fallback"] == 0 for output in outputs)
    assert len({output.score for output in outputs}) > 2
