"""All ranks get the calls in which they meet in the same order, whoever makes them; others need not wait."""

import asyncio

from roll.trainers.worker import TrainerGroup


class Ranks:
    """Answers when it is told to, and remembers what is being computed."""

    def __init__(self):
        self.running: list[str] = []
        self.go_on = asyncio.Event()

    async def call_all(self, method, *args, timeout=None):
        self.running.append(method)
        await self.go_on.wait()
        self.running.remove(method)
        return [None]


def test_calls_in_which_ranks_meet_go_out_one_after_the_other_and_what_is_beside_training_does_not_wait():
    async def scenario():
        ranks = Ranks()
        group = TrainerGroup(ranks, start_timeout_seconds=1, call_timeout_seconds=1)
        async with asyncio.TaskGroup() as tasks:
            for call in (group.export("here"), group.gather(1, 0, "float32", 8), group.written()):
                tasks.create_task(call)
            tasks.create_task(group.push(1, None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert ranks.running == ["export", "written", "push"]
            ranks.go_on.set()
        assert ranks.running == []

    asyncio.run(scenario())
