"""Device mappings: the devices of a role, written in a small grammar that is never evaluated as code.

``[0, 1]``, ``"0-3"``, ``"0,2,5-7"``, ``list(range(0,8,2))``, ``range(4)`` and sums of these with ``+``. Anything else
is rejected before it is interpreted. Sizes are known before a list is built, so no text can ask for more than
`MAX_DEVICES` devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from roll.configs.fields import DeviceMapping

MAX_DEVICES = 4096
_LONGEST_TEXT = 32_768
_LIST, _RANGE = (re.compile(rf"{name}\s*\((.*)\)", re.DOTALL) for name in ("list", "range"))
_BRACKETS = re.compile(r"\[(.*)\]", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,9}")
_EXAMPLES = 'for example [0, 1], "0-3", "0,2,5-7" or list(range(0,4))'


class DeviceMappingError(ValueError):
    """A device mapping that names no list of distinct devices."""


def parse_device_mapping(value: DeviceMapping) -> list[int]:
    """Return device numbers in the order written.

    Raises `DeviceMappingError` for text outside the grammar, and for an empty list, negative or repeated numbers and
    more than `MAX_DEVICES` devices.
    """
    if isinstance(value, str):
        devices = _read(value)
    elif isinstance(value, (list, int)) and not isinstance(value, bool):
        devices = _plain_numbers(value if isinstance(value, list) else [value])
    else:
        raise DeviceMappingError(f"no devices are given; write them, {_EXAMPLES}")
    return _distinct(devices)


def _plain_numbers(values: Sequence[int]) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise DeviceMappingError(f"{value!r} is not a device number")
        if value < 0:
            raise DeviceMappingError(f"{value} is negative; devices are counted from 0")
    return list(values)


def _distinct(devices: list[int]) -> list[int]:
    if not devices:
        raise DeviceMappingError(f"the list of devices is empty; write at least one, {_EXAMPLES}")
    if len(devices) > MAX_DEVICES:
        raise DeviceMappingError(f"more than {MAX_DEVICES} devices")
    repeated = [device for device, times in Counter(devices).items() if times > 1]
    if repeated:
        raise DeviceMappingError(f"named more than once: device {compact(repeated)}")
    return devices


def _read(text: str) -> list[int]:
    """Return the numbers of a sum of terms, bounded while it grows."""
    if len(text) > _LONGEST_TEXT:
        raise DeviceMappingError(f"longer than {_LONGEST_TEXT} characters")
    if not text.strip():
        raise DeviceMappingError(f"the text is empty; write devices, {_EXAMPLES}")
    devices: list[int] = []
    for term in text.split("+"):
        devices += _term(term.strip())
        _bounded(devices)
    return devices


def _term(text: str) -> list[int]:
    """Return the numbers of `list(...)`, `range(...)`, `[...]`, or numbers and ranges with commas between them."""
    call = _LIST.fullmatch(text)
    inside = call[1].strip() if call else text
    arguments, brackets = _RANGE.fullmatch(inside), _BRACKETS.fullmatch(inside)
    if arguments:
        numbers = [_number(each) for each in arguments[1].split(",")]
        if len(numbers) > 3 or (len(numbers) == 3 and numbers[2] == 0):
            raise DeviceMappingError("range takes a stop, a start and a stop, or both and a step of at least 1")
        return list(_bounded(range(*numbers)))
    if call and not brackets:
        raise _unreadable(text)
    items, devices = brackets[1] if brackets else inside, list[int]()
    if brackets and not items.strip():
        return devices
    for item in items.split(","):
        first, dash, last = item.partition("-")
        if not first.strip() and dash:
            raise _negative()
        start = _number(first)
        stop = _number(last) if dash else start
        if stop < start:
            raise DeviceMappingError(f"{start}-{stop} runs backwards; write {stop}-{start}")
        devices += _bounded(range(start, stop + 1))
        _bounded(devices)
    return devices


def _number(text: str) -> int:
    if text.strip().startswith("-"):
        raise _negative()
    if not text.strip():
        raise DeviceMappingError(f"a number is missing. Write devices, {_EXAMPLES}")
    if not _NUMBER.fullmatch(text.strip()):
        raise _unreadable(text)
    return int(text)


def _negative() -> DeviceMappingError:
    return DeviceMappingError("a device number is negative; devices are counted from 0")


def _unreadable(text: str) -> DeviceMappingError:
    what = text.strip()[:20]
    return DeviceMappingError(f"cannot read `{what}`; it is never evaluated as code. Write devices, {_EXAMPLES}")


Numbers = TypeVar("Numbers", list[int], range)


def _bounded(numbers: Numbers) -> Numbers:
    if len(numbers) > MAX_DEVICES:
        raise DeviceMappingError(f"{len(numbers)} devices; at most {MAX_DEVICES} can be listed")
    return numbers


def compact(devices: Iterable[int]) -> str:
    """Format device numbers as short text: ``0-3, 6``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
