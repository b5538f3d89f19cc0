"""Commands that only print, before readers that go away and disks that are full."""

import errno
import os
import subprocess
import sys

import pytest

from roll.tracking.files import printed, say

PRINTS = """
import sys
from roll.tracking.files import printed
def command():
    for line in range(100_000):
        print("a line of the answer", line)
    return 2
sys.exit(printed(command))
"""


def test_a_reader_who_has_read_enough_is_told_nothing():
    command = [sys.executable, "-c", PRINTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "a line of the answer 0\n"
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_answer_that_does_not_arrive_is_a_failure():
    command = [sys.executable, "-c", PRINTS]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "cannot print: No space left on device\n"


def test_the_exit_code_is_the_commands(capsys):
    assert printed(lambda: print("read") or 2) == 2
    say("said")
    say("complained", error=True)
    assert capsys.readouterr() == ("read\nsaid\n", "complained\n")


@pytest.mark.parametrize("problem", [OSError(errno.ENOENT, "not there"), OSError(errno.ENOSPC, "full", "a_file")])
def test_what_is_no_fault_of_the_output_is_raised(problem):
    def command():
        raise problem

    with pytest.raises(OSError) as caught:
        printed(command)
    assert caught.value is problem
