"""Every event arrives as it was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.request import Admitted, Delta, Event, TokenLogprob
from cluster.event_wire import pack, unpack

_IDS = st.integers(0, 2**40)
_NUMBERS = st.floats(-9999, 0)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_LOGPROBS = st.builds(TokenLogprob, _NUMBERS, st.lists(st.tuples(_IDS, _NUMBERS), max_size=3).map(tuple))
_EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Admitted, _TEXT, _IDS, _IDS, _TEXT),
    st.builds(
        Delta,
        _TEXT,
        st.lists(_IDS, max_size=4).map(tuple),
        st.sampled_from(["stop", "length", None]),
        st.one_of(st.none(), _TEXT, _IDS),
        st.lists(_LOGPROBS, max_size=4).map(tuple),
    ),
)


@given(_EVENTS)
def test_what_is_packed_comes_out_again(event: Event) -> None:
    assert unpack(pack(event)) == event
