import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from roll.tracking.status import task_place, thread_place, working_place


def test_a_thread_is_found_in_the_line_of_ones_own_that_waits_and_a_pool_that_has_nothing_to_do_is_not():
    release, entered = threading.Event(), threading.Event()

    def works_for_long():
        entered.set()
        release.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="role/0") as pool:
        work = pool.submit(works_for_long)
        entered.wait()
        place = working_place("role/0")
        release.set()
        work.result()
    assert "test_stacks.py" in place and "works_for_long" in place
    assert working_place("role/0") is None
    assert thread_place(-1) is None


def test_a_task_is_found_in_the_innermost_line_of_ones_own():
    async def inner():
        await asyncio.Event().wait()

    async def outer():
        await inner()

    async def scenario():
        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        place = task_place(task)
        task.cancel()
        return place

    assert "test_stacks.py" in (place := asyncio.run(scenario())) and "inner > wait" in place
