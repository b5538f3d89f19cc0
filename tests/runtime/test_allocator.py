"""Freed memory goes back to the system from a large model's process, and stays for the next step of a small one's."""

import os
import subprocess
import sys

import pytest

from roll.runtime.process import _SETTINGS
from tests.trainers.tiny_models import write_model

HELD_AFTER_FREEING = """
import re, sys, threading
from roll.runtime.process import return_large_blocks

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def work():
    import ctypes
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    take = lambda size: ctypes.memset(libc.malloc(size), 1, size)
    libc.free(take(24 * 2**20))               # from which glibc learns to keep blocks of this size
    before, blocks = resident(), []
    for _ in range(40):
        blocks += [take(8 * 2**20), take(2**10)]  # the small one stays, and holds the large one before it
    for block in blocks[::2]:
        libc.free(block)
    print(resident() - before)

if sys.argv[1] == "returned":
    print(return_large_blocks())
thread = threading.Thread(target=work)  # as a worker computes: not in the first thread
thread.start()
thread.join()
"""


def held_after_freeing(how, **environment):
    command = [sys.executable, "-c", HELD_AFTER_FREEING, how]
    env = {**{name: value for name, value in os.environ.items() if name not in _SETTINGS}, **environment}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()
    return said[:-1], int(said[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and glibc are of Linux")
def test_freed_tensors_do_not_stay_with_the_process():
    _, kept = held_after_freeing("kept")
    said, returned = held_after_freeing("returned")
    assert said == ["True"]
    assert kept > 200 * 2**20, "glibc gives it back by itself: the setting is not needed any more"
    assert returned < 20 * 2**20


def test_what_the_environment_says_stays():
    said, _ = held_after_freeing("returned", MALLOC_MMAP_THRESHOLD_=str(2**30))
    assert said == ["False"]


STEPS = """
import ctypes, resource, sys, threading
import torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of 4 KiB, whatever the system is set to
from roll.runtime.process import SMALL_MODEL, keep_blocks_of, return_large_blocks

return_large_blocks()  # as every worker begins
if sys.argv[1] in ("small", "large"):
    print(keep_blocks_of(SMALL_MODEL - (sys.argv[1] == "small")))
else:
    from roll.engines.base import ModelSpec
    from roll.engines.hf.model import load_model
    load_model(ModelSpec(sys.argv[1], "cpu", "float32", "sdpa", 32))
    print("loaded")

def work():
    def step():
        kept = [torch.full((megabytes, 2**18), 1.0) for megabytes in (9, 27, 9, 9, 27, 9, 9, 27)]
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


TAKEN = (5 * 9 + 3 * 27) * 2**20 // 4096
"""Pages (4 KiB) of a step's tensors."""


def pages_of_a_step(model):
    """What was said, and the pages that the fourth of equal steps fetched from the system. ``model``: small, large, or
    a folder from which an engine loads one."""
    env = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    command = [sys.executable, "-c", STEPS, model]
    said, pages = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()
    return said, int(pages)


@pytest.mark.tier("all")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted as glibc and Linux have them")
def test_a_small_model_fetches_no_memory_anew_in_each_step():
    said, pages = pages_of_a_step("small")
    assert said == "True" and pages < TAKEN / 3
    said, pages = pages_of_a_step("large")
    assert said == "False" and pages > TAKEN / 2


@pytest.mark.tier("all")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted as glibc and Linux have them")
def test_the_engine_of_a_small_model_fetches_no_memory_anew_in_each_step(tmp_path):
    said, pages = pages_of_a_step(write_model(tmp_path))
    assert said == "loaded" and pages < TAKEN / 3
