"""Device mappings: the devices of a role, written in a small grammar that is never evaluated as code.

``[0, 1]``, ``"0-3"``, ``"0,2,5-7"``, ``list(range(0,8,2))``, ``range(4)`` and sums of these with ``+``. The text is
split into numbers, two words and punctuation; anything else is rejected before it is interpreted. Sizes are known
before a list is built, so no text can ask for more than `MAX_DEVICES` devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from roll.configs.fields import DeviceMapping

MAX_DEVICES = 4096
_LONGEST_TEXT = 32_768
_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<word>list|range)\b|(?P<sign>[\[\](),+-]))")
_EXAMPLES = 'for example [0, 1], "0-3", "0,2,5-7" or list(range(0,4))'


class DeviceMappingError(ValueError):
    """A device mapping that names no list of distinct devices."""


def parse_device_mapping(value: DeviceMapping) -> list[int]:
    """Return device numbers in the order written.

    Raises `DeviceMappingError` for text outside the grammar, and for an empty list, negative or repeated numbers and
    more than `MAX_DEVICES` devices.
    """
    if isinstance(value, str):
        devices = _Parser(value).parse()
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


class _Parser:
    """A recursive-descent parser of ``sum := term ('+' term)*``; a term contains no sum, so the depth is bounded."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST_TEXT:
            raise DeviceMappingError(f"longer than {_LONGEST_TEXT} characters")
        self.text = text
        self.tokens = _tokens(text)
        self.position = 0

    def parse(self) -> list[int]:
        if not self.tokens:
            raise DeviceMappingError(f"the text is empty; write devices, {_EXAMPLES}")
        devices = self.term()
        while self.accept("+"):
            devices += self.term()
            _bounded(len(devices))
        if self.peek():
            raise self.unexpected("`+` or the end")
        return devices

    def term(self) -> list[int]:
        if self.accept("list"):
            self.expect("(")
            devices = self.bracket() if self.peek() == "[" else self.range()
            self.expect(")")
            return devices
        if self.peek() == "range":
            return self.range()
        return self.bracket() if self.peek() == "[" else self.items()

    def bracket(self) -> list[int]:
        self.expect("[")
        devices = [] if self.peek() == "]" else self.items()
        self.expect("]")
        return devices

    def range(self) -> list[int]:
        self.expect("range")
        self.expect("(")
        arguments = [self.number()]
        while self.accept(","):
            arguments.append(self.number())
        self.expect(")")
        if len(arguments) > 3 or (len(arguments) == 3 and arguments[2] == 0):
            raise DeviceMappingError("range takes a stop, a start and a stop, or both and a step of at least 1")
        return _bounded_list(range(*arguments))

    def items(self) -> list[int]:
        devices = self.item()
        while self.accept(","):
            devices += self.item()
            _bounded(len(devices))
        return devices

    def item(self) -> list[int]:
        first = self.number()
        if not self.accept("-"):
            return [first]
        last = self.number()
        if last < first:
            raise DeviceMappingError(f"{first}-{last} runs backwards; write {last}-{first}")
        return _bounded_list(range(first, last + 1))

    def number(self) -> int:
        token = self.peek()
        if token == "-":
            raise DeviceMappingError("a device number is negative; devices are counted from 0")
        if not token.isdigit():
            raise self.unexpected("a device number")
        self.position += 1
        if len(token) > 9:
            raise DeviceMappingError(f"{token[:12]}... is no device number; at most {MAX_DEVICES} can be listed")
        return int(token)

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def accept(self, token: str) -> bool:
        if self.peek() != token:
            return False
        self.position += 1
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.unexpected(f"`{token}`")

    def unexpected(self, wanted: str) -> DeviceMappingError:
        found = f"`{self.peek()}`" if self.peek() else "the end of the text"
        return DeviceMappingError(f"expected {wanted} but found {found}; write devices, {_EXAMPLES}")


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position:].strip()[:20]
            raise DeviceMappingError(f"cannot read {rest!r}; it is never evaluated as code. Write devices, {_EXAMPLES}")
        tokens.append(match.group(match.lastgroup or 0))
        position = match.end()
    return tokens


def _bounded(size: int) -> None:
    if size > MAX_DEVICES:
        raise DeviceMappingError(f"{size} devices; at most {MAX_DEVICES} can be listed")


def _bounded_list(numbers: range) -> list[int]:
    _bounded(len(numbers))
    return list(numbers)


def compact(devices: Iterable[int]) -> str:
    """Format device numbers as short text: ``0-3, 6``."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
