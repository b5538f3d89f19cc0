"""Stop strings are found wherever tokens and characters are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roll.engines.base import StopStringMatcher


class ByteDecoder:
    """One token per UTF-8 byte; unfinished characters decode to the replacement character."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class WordDecoder:
    """Tokens are words; like SentencePiece it drops the space before the first word of a text."""

    words = ("one", "two", "</end", ">", "x")

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)


def first_match(decoder, tokens, stops) -> int | None:
    """Number of tokens after which a stop string is first seen."""
    matcher = StopStringMatcher(decoder, stops)
    for count, token in enumerate(tokens, start=1):
        if matcher.push([token]):
            return count
    return None


@given(
    text=st.text(alphabet="abé✓", max_size=20),
    stops=st.lists(st.text("abé✓", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_match_comes_with_the_byte_that_completes_a_stop_string(text, stops):
    data = text.encode()
    expected = None
    for count in range(1, len(data) + 1):
        if any(stop.encode() in data[:count] for stop in stops):
            expected = count
            break
    assert first_match(ByteDecoder(), data, stops) == expected


def test_a_stop_string_over_several_words_is_found_with_its_spaces():
    assert first_match(WordDecoder(), [0, 1, 0, 2, 3, 4], ["two one"]) == 3
    assert first_match(WordDecoder(), [0, 1, 2, 3, 4], ["</end >"]) == 4
    assert first_match(WordDecoder(), [0, 1, 4], ["onetwo"]) is None


def test_text_of_an_earlier_attempt_counts_towards_a_stop_string():
    matcher = StopStringMatcher(ByteDecoder(), ["END"])
    assert not matcher.push(b"some text E")
    assert not matcher.push(b"N")
    assert matcher.push(b"D")
