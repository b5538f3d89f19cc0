"""Work is remembered as spans in order that do not overlap."""

from roll.tracking.timeline import BusySpans


def test_work_that_follows_at_once_is_one_span():
    spans = BusySpans()
    for start, end in [(1.0, 2.0), (2.001, 3.0), (3.1, 4.0)]:
        spans.add(start, end)
    assert spans.recent() == [(1.0, 3.0), (3.1, 4.0)]


def test_a_clock_that_is_set_back_makes_no_span_overlap():
    spans = BusySpans()
    for start, end in [(10.0, 12.0), (8.0, 9.0), (11.0, 13.0)]:
        spans.add(start, end)
    assert spans.recent() == [(8.0, 9.0), (10.0, 13.0)]


def test_the_oldest_spans_are_forgotten():
    spans = BusySpans(kept=2)
    for start in (1.0, 2.0, 3.0):
        spans.add(start, start + 0.5)
    assert spans.recent() == [(2.0, 2.5), (3.0, 3.5)]


def test_calls_at_the_same_time_count_once_and_an_open_one_up_to_now():
    now = 0.0
    spans = BusySpans(clock=lambda: now)
    with spans.working():
        now = 1.0
        with spans.working():
            now = 2.0
            assert spans.recent() == [(0.0, 2.0)]
        now = 3.0
    now = 4.0
    assert spans.recent() == [(0.0, 3.0)]


def test_work_that_fails_ends_too():
    now = 0.0
    spans = BusySpans(clock=lambda: now)
    try:
        with spans.working():
            now = 1.0
            raise ValueError
    except ValueError:
        now = 5.0
    assert spans.recent() == [(0.0, 1.0)]
