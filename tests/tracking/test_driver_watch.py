from roll.tracking.status import DEAF_SECONDS, Attention, DriverWatch


def looks(watch, phase, count, *, seconds=1.0, came_round=False):
    return [watch.look(phase, seconds, came_round) for _ in range(count)]


def test_a_pause_of_the_whole_process_counts_as_one_look():
    now = [100.0]
    attention = Attention(2.0, lambda: now[0])
    seconds = []
    for pause in (1.0, 3600.0, 1.5):
        now[0] += pause
        seconds.append(attention.look())
    assert seconds == [1.0, 2.0, 1.5]


def test_an_event_loop_that_is_stuck_is_interrupted_twice_and_ended_if_it_is_deaf():
    watch = DriverWatch(10.0)
    assert looks(watch, "running", 10) == ["go on"] * 10
    assert looks(watch, "running", 2) == ["interrupt"] * 2
    assert set(looks(watch, "running", int(DEAF_SECONDS) - 2)) == {"go on"}
    assert looks(watch, "running", 1) == ["end"]


def test_one_that_comes_round_now_and_then_is_left_alone():
    watch = DriverWatch(10.0)
    for _ in range(5):
        assert looks(watch, "running", 9) == ["go on"] * 9
        assert looks(watch, "running", 1, came_round=True) == ["go on"]


def test_before_the_event_loop_runs_nothing_is_stuck():
    assert set(looks(DriverWatch(10.0), "preparing", 100)) == {"go on"}


def test_an_end_that_takes_too_long_is_made_short_and_any_other_is_not_interrupted():
    watch = DriverWatch(10.0, ending_seconds=30.0)
    looks(watch, "running", 9)
    assert looks(watch, "ending", 30) == ["go on"] * 30
    assert looks(watch, "ending", 1) == ["end"]
