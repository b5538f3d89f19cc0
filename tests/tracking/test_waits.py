import asyncio

from roll.tracking.waits import Wait, WaitBoard, acting, apart, holding, part, unobserved, waiting


def test_waits_and_holdings_are_listed_while_they_last_under_the_name_of_whoever_acts():
    now = [5.0]
    board = WaitBoard(lambda: now[0])
    with acting("stage/train", board), holding("devices/a", "as x"):
        now[0] = 7.0
        with waiting("worker/b", "train"):
            assert board.waits() == [Wait("stage/train", "worker/b", "train", 7.0)]
        assert board.waits() == []
        assert board.holdings() == [Wait("stage/train", "devices/a", "as x", 5.0)]
    assert board.holdings() == []


def test_tasks_belong_to_whoever_began_them_and_a_failure_ends_the_wait():
    board = WaitBoard()

    async def works():
        with waiting("worker/b", "train"):
            await asyncio.sleep(0)
            assert [wait.who for wait in board.waits()] == ["stage/train"]
            raise ValueError

    async def scenario():
        with acting("stage/train", board):
            task = asyncio.create_task(works())
        await asyncio.wait([task])
        assert isinstance(task.exception(), ValueError)

    asyncio.run(scenario())
    assert board.waits() == []


def test_a_part_is_an_actor_of_its_own_that_the_whole_waits_for():
    board = WaitBoard()
    with acting("start", board), part("trainer"), waiting("devices/a", "the devices"):
        assert [(wait.who, wait.on) for wait in board.waits()] == [
            ("start", "start/trainer"),
            ("start/trainer", "devices/a"),
        ]


def test_what_goes_on_apart_is_an_actor_of_its_own_that_nobody_waits_for():
    board = WaitBoard()
    with acting("start", board), apart("rewards.chat/0"), waiting("devices/a", "the devices"):
        assert [(wait.who, wait.on) for wait in board.waits()] == [("rewards.chat/0", "devices/a")]


def test_without_an_actor_nothing_is_listed():
    board = WaitBoard()
    with waiting("a", "b"), holding("a", "b"), part("c"), apart("d"), waiting("e", "f"):
        assert board.waits() == board.holdings() == []
    with acting("engine", board), unobserved(), waiting("worker/a", "collect"):
        assert board.waits() == []


def test_waits_of_groups_are_listed_once_and_counted_while_any_of_them_lasts():
    now = [1.0]
    board = WaitBoard(lambda: now[0])
    waits = []
    for group, on in (("group/1", "b"), ("group/2", "b"), ("group/1", "a"), ("group/1", "b"), ("stage/train", "b")):
        with acting(group, board):
            waits.append(waiting(on, "the response"))
    for wait in waits:
        wait.__enter__()
        now[0] += 1
    listed = [("stage/train", "b", 5.0), ("group/1", "b", 1.0), ("group/2", "b", 2.0), ("group/1", "a", 3.0)]
    assert [(wait.who, wait.on, wait.since) for wait in board.waits()] == listed
    assert [(wait.who, wait.on, wait.since) for wait in board.waits(groups=2)] == listed[:3]
    assert board.groups_by_wait() == {"b": 2, "a": 1}
    waits[0].__exit__(None, None, None)
    assert [(wait.who, wait.on, wait.since) for wait in board.waits()][-1] == ("group/1", "b", 4.0)
    assert board.groups_by_wait() == {"b": 2, "a": 1}
    waits[3].__exit__(None, None, None)
    assert board.groups_by_wait() == {"b": 1, "a": 1}
    for place in (1, 2, 4):
        waits[place].__exit__(None, None, None)
    assert board.waits() == [] and board.groups_by_wait() == {}
