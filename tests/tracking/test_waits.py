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
