"""What people read about the end of a process."""

from __future__ import annotations

import pytest

from roll.agentic.env_worker.process import death_cause

HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: EnvWorker\n\tpid: 7\n"
EXIT = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            f"{HEAD}{EXIT}Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
            "include: (1) the process was killed by the OOM killer, (2) ray stop --force was called.",
            "its process ended without a word, by a signal or an exit",
        ),
        (
            f"{HEAD}{EXIT}Worker exits unexpectedly. Worker exits with an exit code 4.",
            "its process ended with exit code 4",
        ),
        (
            f"{HEAD}The actor is dead because it was killed by `ray.kill`.",
            "The actor is dead because it was killed by `ray.kill`",
        ),
        (
            f"{HEAD}The actor is dead because its node has died. Node Id: 0123. More about nodes.",
            "The actor is dead because its node has died",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::EnvWorker.__init__()\n"
            "  File x, line 1\nOSError: no licence. Ask for one.\n",
            "OSError: no licence. Ask for one.",
        ),
        ("", "no cause given"),
    ],
)
def test_the_cause_of_a_death_is_short(text, cause):
    assert death_cause(text) == cause
