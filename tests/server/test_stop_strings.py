"""Stop strings are found whatever pieces the text comes in, and no part of one is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.stop_strings import StopMatcher

# Few letters, so that almost-matches and overlaps are common.
_TEXT = st.text("ab", max_size=40)
_STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def _reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, directly: the match that ends first, of several the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _cut(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]


@given(_TEXT, _STOPS, st.lists(st.integers(0, 1000), max_size=12))
def test_any_cut_gives_the_defined_result(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    expected, matched = _reference(text, stops)
    for piece in _cut(text, cuts):
        shown += matcher.push(piece)
        assert expected.startswith(shown)  # nothing shown has to be taken back
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, matched)


@given(_TEXT, _STOPS)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(character) for character in text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_can_be_part_of_the_text() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert [matcher.push(piece) for piece in ("the E", "N", "D and more")] == ["the ", "", "END"]
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_of_a_stop_and_its_prefix_the_shorter_ends_first() -> None:
    matcher = StopMatcher(["abcd", "ab"])
    assert matcher.push("xabcd") == "x"
    assert matcher.matched == "ab"
