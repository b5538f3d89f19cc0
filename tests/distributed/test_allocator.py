"""Freed memory goes back to the system, also where glibc by itself would have kept it."""

import os
import subprocess
import sys

import pytest

from roll.distributed.allocator import _SETTINGS

HELD_AFTER_FREEING = """
import re, sys, threading
from roll.distributed.allocator import return_large_blocks

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
