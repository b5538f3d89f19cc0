import asyncio
import errno
import json
import signal
import subprocess
import sys

from roll.configs.run import ChaosConfig, ChaosEvent
from roll.pipeline.chaos import Chaos
from roll.pipeline.stage import StepCounter
from roll.rollout.clock import run_virtual
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import PUBLISHER, WaitBoard, acting

KILL = ChaosEvent("kill", at_step=2, role="actor_infer", rank=1)
DELAY = ChaosEvent("delay_publication", at_step=1, seconds=5.0)
SPOIL = ChaosEvent("corrupt_bucket", at_step=3)


class Handle:
    """A worker that takes note of what is done to it."""

    def __init__(self, name, pid=1):
        self.name = name
        self.pid = pid
        self.harmed = []

    def inject(self, *fault):
        self.harmed.append(fault)


def chaos_of(*events, folder):
    return Chaos(ChaosConfig(True, list(events)), RunDirectory(folder), lambda text: None)


def test_a_process_is_harmed_once_its_step_is_over_and_no_other_one(tmp_path):
    async def scenario():
        steps, handles = StepCounter(), [Handle("actor_infer/0"), Handle("actor_infer/1")]
        task = asyncio.create_task(chaos_of(KILL, SPOIL, folder=tmp_path).run(steps, lambda: handles))
        steps.advance(1)
        await asyncio.sleep(1)
        assert [handle.harmed for handle in handles] == [[], []]
        steps.advance(2)
        await task
        assert [handle.harmed for handle in handles] == [[], [("kill", None)]]

    run_virtual(scenario())


def test_a_process_that_is_being_replaced_is_harmed_when_it_is_there(tmp_path):
    async def scenario():
        steps, handles, run = StepCounter(2), [Handle("actor_infer/1", pid=None)], RunDirectory(tmp_path)
        task = asyncio.create_task(chaos_of(KILL, folder=tmp_path).run(steps, lambda: handles))
        await asyncio.sleep(60)
        assert not run.chaos.exists() and handles[0].harmed == [], "what did not happen is not on record"
        handles[0] = Handle("actor_infer/1")
        await task
        assert handles[0].harmed == [("kill", None)] and run.chaos.exists()

    run_virtual(scenario())


def test_a_publication_that_is_held_back_is_no_deadlock_with_what_chaos_waits_for(tmp_path):
    """The publisher waits for time to pass, and whoever harms processes for a step that needs the publication."""
    board = WaitBoard()

    async def scenario():
        chaos = chaos_of(DELAY, KILL, folder=tmp_path)
        tasks = []
        for actor, work in (("chaos", chaos.run(StepCounter(), list)), (PUBLISHER, chaos.publication(1))):
            with acting(actor, board):
                tasks.append(asyncio.create_task(work))
        await asyncio.sleep(1)
        waits = board.waits()
        for task in tasks:
            task.cancel()
        return waits

    (held_back,) = run_virtual(scenario())
    assert held_back.who == PUBLISHER and held_back.on != "chaos"


def test_a_publication_is_held_back_for_its_seconds_and_no_other_one(tmp_path):
    async def scenario():
        clock = asyncio.get_running_loop().time
        chaos = chaos_of(DELAY, folder=tmp_path)
        for version, seconds in ((0, 0.0), (1, 5.0), (2, 0.0)):
            began = clock()
            await chaos.publication(version)
            assert clock() - began == seconds

    run_virtual(scenario())


def test_what_has_happened_does_not_happen_again_in_a_run_that_goes_on(tmp_path):
    run = RunDirectory(tmp_path)
    chaos = chaos_of(KILL, DELAY, SPOIL, folder=tmp_path)
    assert chaos.events == [DELAY, KILL, SPOIL], "in the order of their steps"
    assert chaos.corrupted_versions() == {3}
    run_virtual(chaos.publication(3))
    assert json.loads(run.chaos.read_text())["kind"] == "corrupt_bucket"
    later = chaos_of(KILL, DELAY, SPOIL, folder=tmp_path)
    assert later.events == [DELAY, KILL] and later.corrupted_versions() == frozenset()


IN_CHILDREN = """
import os, tempfile, time
from roll.runtime.process import inject_fault

def in_a_child(what):
    child = os.fork()
    if not child:
        what()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fill():
    file = tempfile.TemporaryFile()
    inject_fault("fill_disk", None)
    try:
        file.write(b"x" * 2**15)
        file.flush()
    except OSError as error:
        os._exit(error.errno)

def freeze():
    before = time.time()
    inject_fault("freeze", 0.5)
    os._exit(0 if time.time() - before >= 0.5 else 1)

print(in_a_child(lambda: inject_fault("kill", None)), in_a_child(fill), in_a_child(freeze))
"""


def test_a_process_kills_itself_finds_its_disk_full_or_goes_on_after_its_time():
    done = subprocess.run([sys.executable, "-c", IN_CHILDREN], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(-signal.SIGKILL), str(errno.EFBIG), "0"], done.stderr


def test_nothing_happens_unless_harm_is_enabled(tmp_path):
    disabled = Chaos(ChaosConfig(enabled=False, events=[KILL]), RunDirectory(tmp_path), print)
    assert disabled.events == [] and chaos_of(KILL, folder=tmp_path).events == [KILL]


def test_what_has_happened_does_not_happen_again_when_the_steps_come_by_again(tmp_path):
    async def scenario():
        handles, again = [Handle("actor_infer/1")], StepCounter(1)
        chaos = chaos_of(KILL, DELAY, SPOIL, folder=tmp_path)
        await chaos.run(StepCounter(2), lambda: handles)
        for _ in range(2):
            await chaos.publication(1)
        await chaos.publication(3)
        assert chaos.corrupted_versions() == frozenset() and chaos.events == []
        await asyncio.wait_for(chaos.run(again, lambda: handles), 1)
        assert handles[0].harmed == [("kill", None)]
        assert asyncio.get_running_loop().time() == 5.0, "one delay"

    run_virtual(scenario())
