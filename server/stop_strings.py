"""Finds stop strings in text that arrives in pieces, and holds back what could be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The match that ends first wins; of several that end at one character, the longest.

    That rule looks at characters only, so the result does not depend on how the text was cut into pieces. Each stop
    string has a Knuth-Morris-Pratt automaton: its state is the length of the longest end of the text that begins the
    stop string, which is both what finds a match and what has to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """stops: none empty. include_stop: the matched string is part of the text."""
        self._stops = stops
        self._failures = [_failure_function(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Returns the text that is certain to be before any stop string. After a match nothing is taken or returned."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        states = self._states
        for position, character in enumerate(piece, len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                state, failure = states[index], self._failures[index]
                while state and stop[state] != character:
                    state = failure[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    if self.matched is None or len(stop) > len(self.matched):
                        self.matched = stop
                    state = 0  # never looked at again
                states[index] = state
            if self.matched is not None:
                self._held = ""
                return text[:position] if self._include_stop else text[: position - len(self.matched)]
        certain = len(text) - max(states, default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """At the end of the text: what was held back for nothing."""
        held, self._held = self._held, ""
        return held


def _failure_function(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of stop[: i + 1] that is also its end."""
    failure = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = failure[state - 1]
        if stop[state] == stop[index]:
            state += 1
        failure[index] = state
    return failure
