"""Step outputs to deltas: what is sent, what is counted, how it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine import StepOutput
from actors.request import Delta, FinishReason, GenerateRequest, Sampling, TokenLogprob
from actors.text_stream import TextStream


class Letters:
    """Token id = code point; 0 is a special token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, (token for token in token_ids if token or not skip_special_tokens)))


def stream(stop: tuple[str, ...] = (), *, stop_ids: tuple[int, ...] = (), include: bool = False) -> TextStream:
    sampling = Sampling(100, stop_token_ids=stop_ids)
    return TextStream(GenerateRequest("r", (65,), sampling, stop=stop, include_stop_str_in_output=include), Letters())


def outputs(text: str, reason: FinishReason | None = None, *, logprobs: bool = False) -> list[StepOutput]:
    """One step for each letter. Of those that end with "stop" the last says nothing else."""
    last = len(text) - 1
    return [
        StepOutput(
            "r",
            token=ord(letter),
            finish_reason=reason if index == last else None,
            logprob=logprob(index) if logprobs else None,
            is_text=index != last or reason != "stop",
        )
        for index, letter in enumerate(text)
    ]


def logprob(index: int) -> TokenLogprob:
    return TokenLogprob(-index / 8, ((index, -0.5),))


def test_admission_alone_sends_nothing() -> None:
    assert stream().feed([StepOutput("r", cached_tokens=3)]) == Delta("")


def test_several_steps_become_one_delta() -> None:
    assert stream().feed(outputs("abc")) == Delta("abc", (97, 98, 99))


def test_the_end_of_sequence_token_is_counted_but_is_no_text() -> None:
    assert stream().feed(outputs("ab", "stop")) == Delta("a", (97, 98), "stop", None)


def test_a_stop_token_is_named() -> None:
    assert stream(stop_ids=(98,)).feed(outputs("ab", "stop")) == Delta("a", (97, 98), "stop", 98)


def test_the_last_token_of_a_full_length_is_text() -> None:
    assert stream().feed(outputs("ab", "length")) == Delta("ab", (97, 98), "length")


def test_tokens_behind_a_stop_string_are_neither_sent_nor_counted() -> None:
    assert stream(("bc",)).feed(outputs("abcde")) == Delta("a", (97, 98, 99), "stop", "bc")
    assert stream(("bc",), include=True).feed(outputs("abcde")) == Delta("abc", (97, 98, 99), "stop", "bc")


def test_held_back_text_is_sent_when_the_sequence_ends_otherwise() -> None:
    text = stream(("bcd",))
    assert text.feed(outputs("ab")) == Delta("a", (97, 98))
    assert text.feed(outputs("c", "length")) == Delta("bc", (99,), "length")


def test_an_answer_that_is_complete_with_its_last_token_has_that_as_text() -> None:
    ended = StepOutput("r", token=98, finish_reason="stop")
    assert stream(("bc",)).feed([*outputs("a"), ended]) == Delta("ab", (97, 98), "stop", None)


def test_an_end_without_a_token_sends_what_was_held_back() -> None:
    text = stream(("bc",))
    assert text.feed(outputs("ab")) == Delta("a", (97, 98))
    assert text.feed([StepOutput("r", finish_reason="stop")]) == Delta("b", (), "stop", None)


def test_logprobs_go_with_their_tokens_also_where_a_stop_string_cuts() -> None:
    assert stream(("bc",)).feed(outputs("abcde", logprobs=True)) == Delta(
        "a", (97, 98, 99), "stop", "bc", tuple(map(logprob, range(3)))
    )
    assert stream().feed(outputs("ab", "stop", logprobs=True)).logprobs == (logprob(0), logprob(1))


@pytest.mark.parametrize("reason", ["length", "stop"])
@given(text=st.text("abc", min_size=1, max_size=20), cuts=st.sets(st.integers(1, 19)), stop=st.text("abc", max_size=3))
def test_cutting_into_steps_changes_nothing(text: str, cuts: set[int], stop: str, reason: FinishReason) -> None:
    stops = (stop,) if stop else ()
    made = outputs(text, reason, logprobs=True)
    whole = stream(stops).feed(made)
    pieces, at, parts = stream(stops), 0, []
    for cut in [*sorted(cut for cut in cuts if cut < len(made)), len(made)]:
        parts.append(pieces.feed(made[at:cut]))
        at = cut
        if parts[-1].finish_reason:
            break
    assert "".join(part.text for part in parts) == whole.text
    assert tuple(token for part in parts for token in part.token_ids) == whole.token_ids
    assert tuple(one for part in parts for one in part.logprobs) == whole.logprobs
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
