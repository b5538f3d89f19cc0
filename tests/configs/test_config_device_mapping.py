"""The device grammar reads what is written, and refuses everything else without evaluating it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.devices import MAX_DEVICES, DeviceMappingError, compact, parse_device_mapping
from tests.tiers import examples

DEVICES = st.lists(st.integers(0, 5000), min_size=1, max_size=40, unique=True)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ([0, 1], [0, 1]),
        ([3, 0], [3, 0]),
        (2, [2]),
        ("0", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0,2,5-7", [0, 2, 5, 6, 7]),
        (" [0, 1] ", [0, 1]),
        ("[0-2, 5]", [0, 1, 2, 5]),
        ("range(4)", [0, 1, 2, 3]),
        ("list(range(0,4))", [0, 1, 2, 3]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("list([1, 2])", [1, 2]),
        ("list(range(0,2)) + [4]", [0, 1, 4]),
        ("range(2)+range(4,6)+8-9", [0, 1, 4, 5, 8, 9]),
    ],
)
def test_each_form_is_read(text, devices):
    assert parse_device_mapping(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        None, True, 1.0, {}, [], "", "  ", "[]", "range(0)", "list(range(4,2))", "-1", [-1], "0,-1", "range(-1,2)",
        "0,0", [1, 1], "0-3,2", "range(2)+[1]", "3-1", "0-", "0,", ",0", "+", "0+", "[0", "0]", "range(", "range()",
        "range(0,4,0)", "range(0,4,1,1)", "list(list(range(2)))", "list()", "list", "lists(range(2))", "range(a)",
        "0x1", "1.5", "1e3", "0 1", "[[0]]", "(0)", "0;1", "0*2", "range(2**9)", [0, "1"], [True], "٣", "²",
        "__import__('os').system('true')", "exec('1')", "[x for x in (1,)]", "list(range(0,4)).__class__", "0\n\n;1",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(DeviceMappingError):
        parse_device_mapping(text)


def test_dangerous_text_is_not_executed(tmp_path):
    mark = tmp_path / "mark"
    texts = (f"__import__('os').mkdir('{mark}')", f"[0] + [open('{mark}', 'w') and 1]", f"list(open('{mark}','w'))")
    for text in texts:
        with pytest.raises(DeviceMappingError, match="never evaluated"):
            parse_device_mapping(text)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "range(0, 10**12)", "range(1000000000000)", "range(999999999)", "0-999999999", "9" * 5000,
        f"range({MAX_DEVICES})+{MAX_DEVICES}", "+".join(["range(999999999)"] * 1000), "list(" * 5000, "[" * 5000,
        ",".join(map(str, range(MAX_DEVICES + 1))), "0" * 50_000, list(range(MAX_DEVICES + 1)),
    ],
)  # fmt: skip
def test_sizes_are_bounded_and_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(DeviceMappingError):
        parse_device_mapping(text)
    assert time.process_time() - start < 10


def test_the_largest_mapping_is_read():
    assert len(parse_device_mapping(f"range({MAX_DEVICES})")) == MAX_DEVICES


@given(DEVICES)
def test_lists_and_their_texts_mean_the_same(devices):
    assert parse_device_mapping(devices) == devices
    assert parse_device_mapping(str(devices)) == devices
    assert parse_device_mapping(" + ".join(f"[{device}]" for device in devices)) == devices


@given(DEVICES)
def test_compact_text_is_read_back(devices):
    assert parse_device_mapping(compact(devices)) == sorted(devices)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 9))
def test_ranges_agree_with_python(start, stop, step):
    expected = list(range(start, stop, step))
    text = f"list(range({start}, {stop}, {step}))"
    if expected:
        assert parse_device_mapping(text) == expected
    else:
        with pytest.raises(DeviceMappingError):
            parse_device_mapping(text)


@settings(max_examples=examples(300))
@given(st.text("0123456789,-+[]() listrange_.*'x", max_size=24) | st.text(max_size=12))
def test_any_text_gives_distinct_devices_or_one_kind_of_error(text):
    try:
        devices = parse_device_mapping(text)
    except DeviceMappingError as error:
        assert str(error)
        return
    assert devices and len(set(devices)) == len(devices) <= MAX_DEVICES and min(devices) >= 0
