"""What is a death and what is not, however Ray says it."""

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)

from roll.runtime.actors import ACTOR_GONE, is_gone_for_good, memory_death

MEMORY_TEXT = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 07f0) was 15.28GB used / 16.00GB limit (0.955), which exceeds the threshold.
Ray killed 1 worker(s) based on the killing policy
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. To disable worker killing,
set the environment variable `RAY_memory_monitor_refresh_ms` to zero."""


@pytest.mark.parametrize(
    "error", [ActorDiedError(), OutOfMemoryError(MEMORY_TEXT), NodeDiedError("its node died"), WorkerCrashedError()]
)
def test_deaths_are_known_whatever_their_class(error):
    assert isinstance(error, ACTOR_GONE) and is_gone_for_good(error)


def test_what_passes_and_what_a_living_actor_raises_are_no_deaths():
    raised = RayTaskError("score", "traceback", OutOfMemoryError("of a task of its own")).as_instanceof_cause()
    assert isinstance(raised, OutOfMemoryError), "Ray makes it one"
    for error in (ActorUnavailableError("the network is gone", None), raised, ObjectLostError("00", None, "f")):
        assert not is_gone_for_good(error)


def test_a_death_for_want_of_memory_is_said_in_a_few_words_with_the_figures():
    cause = memory_death(OutOfMemoryError(MEMORY_TEXT))
    assert cause == "it was killed because its node ran low on memory (15.28GB used / 16.00GB)"
    assert memory_death(OutOfMemoryError("")) == "it was killed because its node ran low on memory"
    assert memory_death(ActorDiedError()) is None
