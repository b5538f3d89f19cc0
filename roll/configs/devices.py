"""Device mappings: the devices of a role, written in a small grammar that is never evaluated as code.

``[0, 1]``, ``"0-3"``, ``"0,2,5-7"``, ``list(range(0,8,2))``, ``range(4)`` and sums of these with ``+``. Anything else
is rejected before it is interpreted. Sizes are known before a list is built, so no text can ask for more than
`MAX_DEVICES` devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from roll.configs.fields import DeviceMapping

MAX_DEVICES = 16_384
_LONGEST_TEXT = 32_768
_LIST, _RANGE = (re.compile(rf"{name}\s*\((.*)\)", re.DOTALL) for name in ("list", "range"))
_BRACKETS = re.compile(r"\[(.*)\]", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,9}")
_EXAMPLES = 'for example [0, 1], "0-3", "0,2,5-7" or list(range(0,4))'


class DeviceMappingError(ValueError):
    """A device mapping that does not denote a list of distinct devices."""


def parse_device_mapping(value: DeviceMapping) -> list[int]:
    """Return device numbers in the order written.

    Raises `DeviceMappingError` for text outside the grammar, and for an empty list, negative or repeated numbers and
    more than `MAX_DEVICES` devices.
    """
    if isinstance(value, str):
        devices = _read(value)
    elif isinstance(value, (list, int)) and not isinstance(value, bool):
        devices = list(value) if isinstance(value, list) else [value]
    else:
        raise DeviceMappingError(f"no devices are given; write them, {_EXAMPLES}")
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, int):
            raise DeviceMappingError(f"{device!r} is not a device number")
        if device < 0:
            raise DeviceMappingError(f"{device} is negative; devices are counted from 0")
    if not devices:
        raise DeviceMappingError(f"the list of devices is empty; write at least one, {_EXAMPLES}")
    if len(devices) > MAX_DEVICES:
        raise DeviceMappingError(f"more than {MAX_DEVICES} devices")
    repeated = [device for device, times in Counter(devices).items() if times > 1]
    if repeated:
        raise DeviceMappingError(f"named more than once: device {compact(repeated)}")
    return devices


def _read(text: str) -> list[int]:
    """Return the devices of all terms joined by ``+``; stop as soon as there are too many."""
    if len(text) > _LONGEST_TEXT:
        raise DeviceMappingError(f"longer than {_LONGEST_TEXT} characters")
    if not text.strip():
        raise DeviceMappingError(f"the text is empty; write devices, {_EXAMPLES}")
    devices: list[int] = []
    for term in text.split("+"):
        for numbers in _ranges(term.strip()):
            size = len(devices) + len(numbers)
            if size > MAX_DEVICES:
                raise DeviceMappingError(f"{size} devices; at most {MAX_DEVICES} can be listed")
            devices += numbers
    return devices


def _ranges(text: str) -> Iterator[range]:
    """Yield the numbers of `list(...)`, `range(...)`, `[...]`, or numbers and ranges with commas between them."""
    call = _LIST.fullmatch(text)
    inside = call[1].strip() if call else text
    arguments, brackets = _RANGE.fullmatch(inside), _BRACKETS.fullmatch(inside)
    if arguments:
        numbers = [_number(each) for each in arguments[1].split(",")]
        if len(numbers) > 3 or numbers[2:] == [0]:
            raise DeviceMappingError("range takes a stop, a start and a stop, or both and a step of at least 1")
        yield range(*numbers)
        return
    if call and not brackets:
        raise _unreadable(text)
    items = brackets[1] if brackets else inside
    for item in items.split(",") if items.strip() or not brackets else ():
        first, dash, last = item.partition("-")
        start = _number(first if first.strip() else item)
        stop = _number(last) if dash else start
        if stop < start:
            raise DeviceMappingError(f"{start}-{stop} runs backwards; write {stop}-{start}")
        yield range(start, stop + 1)


def _number(text: str) -> int:
    if text.strip().startswith("-"):
        raise DeviceMappingError("a device number is negative; devices are counted from 0")
    if not text.strip():
        raise DeviceMappingError(f"a number is missing. Write devices, {_EXAMPLES}")
    if not _NUMBER.fullmatch(text.strip()):
        raise _unreadable(text)
    return int(text)


def _unreadable(text: str) -> DeviceMappingError:
    what = text.strip()[:20]
    return DeviceMappingError(f"cannot read `{what}`; it is never evaluated as code. Write devices, {_EXAMPLES}")


def compact(devices: Iterable[int]) -> str:
    """Format device numbers as short text: ``0-3, 6``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
