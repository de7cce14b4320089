"""Stop strings are never sent, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from actors.stops import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    sent: list[str] = []
    for piece in pieces:
        screened = matcher.push(piece)
        sent.append(screened.text)
        if screened.stop is not None:
            return sent, screened.stop
    sent.append(matcher.flush())
    return sent, None


def test_no_part_of_a_stop_is_sent_before_it_completes() -> None:
    sent, stop = run(("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "J", "K"])
    assert sent == ["ABC", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_a_stop_across_and_inside_tokens_is_cut_at_its_start() -> None:
    assert run(("beta gamma",), ["alpha be", "ta ga", "mma delta"]) == (["alpha ", "", ""], "beta gamma")
    assert run(("gamma",), ["xgammay"]) == (["x"], "gamma")


def test_what_only_looked_like_a_stop_is_sent() -> None:
    sent, stop = run(("STOP",), ["a ST", "A", "ST"])
    assert "".join(sent) == "a STAST"
    assert stop is None


def test_included_stops_are_sent_up_to_their_end() -> None:
    assert run(("\n\n",), ["one\n", "\ntwo"], include=True) == (["one", "\n\n"], "\n\n")


def test_the_first_stop_in_the_text_wins() -> None:
    assert run(("world", "lo w"), ["hello world"]) == (["hel"], "lo w")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30)),
)
def test_any_cutting_sends_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    sent, stop = run(tuple(stops), pieces)
    # Character by character, what is complete first ends the text.
    for end in range(len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            assert stop is not None
            assert "".join(sent) in {text[: text.find(s)] for s in stops if s in text}
            assert all(s not in "".join(sent) for s in stops)
            return
    assert stop is None
    assert "".join(sent) == text
