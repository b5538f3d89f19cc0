"""An engine in a process that owns it: vLLM with little memory queues by itself, and does not outlive its owner."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.engines.engine_checks import full_scores
from tests.engines.vllm_helpers import PLACES, assert_close, make_model
from tests.engines.vllm_owner import PROMPT, TOKENS

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("vllm"), pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def owner(vllm_path, tmp_path_factory):
    """The owner, the id of its engine's process, and what it wrote down."""
    file = tmp_path_factory.mktemp("owner") / "results"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.vllm_owner", vllm_path, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        lines = (line.split() for line in process.stdout)
        engine = next(int(words[1]) for words in lines if words[:1] == ["engine"])
        yield process, engine, pickle.loads(file.read_bytes())
    finally:
        process.kill()
        process.wait()


def test_requests_that_vllm_itself_had_queued_see_nothing_that_old_weights_computed(owner):
    """Samples of one prompt share its cached blocks. Those that begin after an update must not, and those of them that
    are aborted meanwhile do not begin."""
    _, _, (aborted, completions, free_places) = owner
    assert free_places == PLACES
    ended = [each for each in completions if each.request_id in aborted]
    assert [(each.finish_reason, len(each.token_ids)) for each in ended] == [("abort", 0)] * 2
    others = [each for each in completions if each.request_id not in aborted]
    late = [each for each in others if set(each.versions) == {1}]
    assert len(late) > 3
    for completion in others:
        assert len(completion.token_ids) == TOKENS and (np.diff(completion.versions) >= 0).all()
    second = make_model(1)
    for completion in late:
        assert_close(completion.logprobs, full_scores(second, PROMPT, completion))


def test_a_dead_owner_leaves_no_engine_behind(owner):
    process, engine, _ = owner
    engine = psutil.Process(engine)
    process.kill()
    process.wait()
    engine.wait(timeout=60)
