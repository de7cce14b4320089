from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.tool_format import GENERIC, HERMES, LLAMA3, MISTRAL, ToolFormat
from cluster.api.tool_reader import CallArguments, CallStart, Content, Part, ToolReader

LAYOUTS = [HERMES, GENERIC, LLAMA3, MISTRAL, replace(MISTRAL, bare=False), replace(LLAMA3, opening="")]
CUTS = st.lists(st.floats(0, 1), max_size=6)
"""Where a text is cut, as shares of its length."""

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
NAMES = frozenset({"f", "get_weather"})
SCRAPS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[TOOL",
        "\n",
        " ",
        ";",
        "hi",
        "<",
        "é",
        "🙂",
    ),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": "nobody", "arguments": {}}'),
    *(
        '{"name": "get_weather", "arguments": ',
        '{"city": "Köln </tool_call> <tool_call>"}',
        '{"a": [1, tru',
        '{"a": "x',
        "}",
        "]",
        "[",
    ),
    *(
        '{"arguments": {"b": null}, "id": 7, "name": "f"}',
        '{"name": "f"}',
        ",",
        ', "id": "123"',
        "{",
        '"',
        '{"a": 1,}',
        '{"a"',
    ),
    *(
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": {"a": 1}',
    ),
]


@dataclass
class Told:
    """What parts add up to. A call is [name, arguments]."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


def reader(layout: ToolFormat) -> ToolReader:
    ids = count()
    return ToolReader(layout, NAMES, lambda: f"{next(ids)}")


def add_up(parts: Iterable[Part]) -> Told:
    told = Told()
    for part in parts:
        kind = "content" if isinstance(part, Content) else f"call {part.index}"
        if not told.order or told.order[-1] != kind:
            told.order.append(kind)
        if isinstance(part, Content):
            assert part.text
            told.content += part.text
        elif isinstance(part, CallStart):
            assert part.index == len(told.calls)
            told.calls.append([part.name, ""])
        else:
            assert part.text
            assert part.index == len(told.calls) - 1
            told.calls[part.index][1] += part.text
    return told


def read(layout: ToolFormat, *pieces: str) -> Told:
    """`pieces` through a new reader, whose parts are checked on the way."""
    one = reader(layout)
    parts = [part for piece in pieces for part in one.push(piece)] + one.finish()
    told = add_up(parts)
    assert one.called == bool(told.calls)
    return told


def cut(text: str, cuts: list[float]) -> list[str]:
    at = sorted(round(share * len(text)) for share in cuts)
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


F = '{"name": "f", "arguments": {"a": 1}}'
W = '{"name": "get_weather", "arguments": {"city": "Köln"}}'


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (HERMES, hermes(F, W)),
        (HERMES, f"<tool_call>{F}</tool_call><tool_call>{W}</tool_call>"),
        (HERMES, f"\n{hermes(F)}\n\n{hermes(W)}\n"),
        (HERMES, hermes(F[:-1], W)),
        (HERMES, hermes('{"arguments": {"a": 1}, "name": "f"}', W[:-1] + ', "id": "x"}')),
        (HERMES, f"<tool_call>\n{F}\n<tool_call>\n{W}\n</tool_call>"),
        (MISTRAL, f"[TOOL_CALLS] [{F}, {W}]"),
        (MISTRAL, f"[TOOL_CALLS][{F},{W}]\n"),
        (MISTRAL, f" [{F}, {W}]"),
        (LLAMA3, f"{F}; {W}".replace("arguments", "parameters")),
        (LLAMA3, f"<|python_tag|>{F}\n{W}"),
        (LLAMA3, f"\n\n{F}{W};"),
    ],
)
def test_calls_of_each_layout_are_read_and_nothing_else_is_told(layout: ToolFormat, text: str) -> None:
    assert read(layout, text) == Told(
        calls=[["f", '{"a": 1}'], ["get_weather", '{"city": "Köln"}']], order=["call 0", "call 1"]
    )


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"Let me look.\n{hermes(F)}", "Let me look.\n"),
        (f"{hermes(F)}\nDone.", "\nDone."),
        (f"a < b <tool_cal {hermes(F)}", "a < b <tool_cal "),
        (f"<tool_call>oops{hermes(F)}", "<tool_call>oops"),
        (f'<tool_call>\n{{"name": {hermes(F)}', '<tool_call>\n{"name": '),
        (f"{hermes('no JSON')}{hermes(F)}", hermes("no JSON")),
    ],
)
def test_content_around_calls_is_kept_as_it_is(text: str, content: str) -> None:
    told = read(HERMES, text)
    assert told.calls == [["f", '{"a": 1}']]
    assert told.content == content


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "\n\n",
            "hello",
            "<",
            "<tool_call",
            "<tool_call>",
            "<tool_call>\n",
            "a <tool_call> b",
            hermes(""),
            hermes("[]"),
        ),
        *(
            hermes('{"name": "nobody", "arguments": {}}'),
            hermes('{"arguments": {}}'),
            hermes('{"name": 1, "arguments": {}}'),
        ),
        *(
            hermes('{"name": "f", "arguments": []}'),
            hermes('{"name": "f", "arguments": "text"}'),
            hermes('{"name": "f", "arguments": 3}'),
        ),
        *(
            hermes('{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}'),
            '<tool_call>\n{"name": "f", "arg',
            hermes("{'name': 'f'}"),
        ),
    ],
)
@pytest.mark.parametrize("layout", [HERMES, GENERIC])
def test_what_is_no_call_comes_out_as_content_byte_for_byte(layout: ToolFormat, text: str) -> None:
    assert read(layout, text) == Told(content=text, order=["content"] if text else [])


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[TOOL_CALLS] none", f"[TOOL_CALLS] {F}", "[TOOL_CALLS]", f"see [{F}]", "[", "{}"]
)
def test_what_is_no_array_of_calls_is_content(text: str) -> None:
    assert read(MISTRAL, text).content == text


@pytest.mark.parametrize(
    "text", ["{}", '{"answer": 42}', f"It is {F}", '{"name": "nobody", "parameters": {}}', "{", '{"name": "f"']
)
def test_json_that_is_an_answer_is_content_where_calls_need_no_tag(text: str) -> None:
    assert read(LLAMA3, text).content == text


def test_a_call_without_tag_is_content_where_the_tag_is_needed() -> None:
    assert read(replace(MISTRAL, bare=False), f"[{F}]").content == f"[{F}]"
    assert read(HERMES, F).content == F


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
        ('{"id": 1, "name": "f", "parameters": {"x": 1E400}}', '{"x": 1E400}'),
        ('{"name": "g", "name": "f", "arguments": {}}', "{}"),
        ('{"name" : "f" ,\n "arguments" : { "a" : "</tool_call>" } }', '{ "a" : "</tool_call>" }'),
    ],
)
def test_arguments_are_told_as_the_model_wrote_them(call: str, arguments: str) -> None:
    assert read(HERMES, hermes(call)).calls == [["f", arguments]]


@pytest.mark.parametrize("arguments", ['{"a": 1,}', '{"a": 1', '{"a": "x\ny"}', '{"a": nope}'])
def test_arguments_that_stop_being_json_go_on_to_the_closing_tag(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}</tool_call>{hermes(W)} bye'
    told = read(HERMES, text)
    assert told.calls == [["f", arguments], ["get_weather", '{"city": "Köln"}']]
    assert told.content == " bye"


@EVERY_LAYOUT
def test_arguments_stream_as_they_come(layout: ToolFormat) -> None:
    one = reader(layout)
    before = "[TOOL_CALLS][" if layout.array else layout.opening
    assert one.push(before + '{"name": "f", "arguments": ') == []
    assert [type(part) for part in one.push('{"te')] == [CallStart, CallArguments]
    assert one.push("xt") == [CallArguments(0, "xt")]
    assert one.push('": "') == [CallArguments(0, '": "')]
    assert one.push("</tool") == [CallArguments(0, "</tool")]
    assert one.push('"}') == [CallArguments(0, '"}')]
    assert one.push("}") == []


def test_content_is_not_held_back_longer_than_it_may_become_a_call() -> None:
    one = reader(HERMES)
    assert one.push("Hello <tool") == [Content("Hello ")]
    assert one.push("s") == [Content("<tools")]
    assert one.push("<tool_call>") == []
    assert one.push("x") == [Content("<tool_call>x")]


def test_ids_differ_and_are_as_the_template_takes_them() -> None:
    for layout, text in ((HERMES, hermes(F, W)), (MISTRAL, f"[TOOL_CALLS][{F}, {W}]")):
        ids = [part.id for part in reader(layout).push(text) if isinstance(part, CallStart)]
        assert len(set(ids)) == 2
        if layout.short_ids:
            assert all(len(one) == 9 and one.isalnum() for one in ids)


@EVERY_LAYOUT
@settings(max_examples=60, deadline=None)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=10), cuts=CUTS)
def test_no_cut_changes_what_is_read(layout: ToolFormat, scraps: list[str], cuts: list[float]) -> None:
    text = "".join(scraps)
    whole = read(layout, text)
    assert read(layout, *text) == whole
    assert read(layout, *cut(text, cuts)) == whole
    assert read(layout, *scraps) == whole


@EVERY_LAYOUT
@pytest.mark.parametrize(
    "after", [" hi", "\n</tool_call>\n hi", "] hi", " , hi", " ; hi", "} hi", ', "id": 1} hi', "}\n</tool_call", "}"]
)
def test_no_single_cut_changes_what_follows_a_call(layout: ToolFormat, after: str) -> None:
    text = ("[TOOL_CALLS][" if layout.array else layout.opening) + F[:-1] + after
    whole = read(layout, text)
    assert len(whole.calls) == 1
    for at in range(len(text)):
        assert read(layout, text[:at], text[at:]) == whole


@EVERY_LAYOUT
@settings(max_examples=60, deadline=None)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=10))
def test_without_a_call_everything_is_content(layout: ToolFormat, scraps: list[str]) -> None:
    text = "".join(scraps)
    told = read(layout, text)
    if not told.calls:
        assert told.content == text
    for _, arguments in told.calls:
        assert arguments.startswith("{")


@EVERY_LAYOUT
@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.dictionaries(st.text(max_size=4), st.text(max_size=12) | st.integers(), max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    ascii_only=st.booleans(),
    content=st.text(alphabet="ab <>\n", max_size=10),
    cuts=CUTS,
)
def test_calls_that_were_written_are_calls_that_are_read(
    layout: ToolFormat,
    calls: list[tuple[str, dict[str, str | int]]],
    ascii_only: bool,
    content: str,
    cuts: list[float],
) -> None:
    objects = [
        json.dumps({"name": name, layout.arguments_key: arguments}, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    if layout.array:
        text = f"[TOOL_CALLS] [{', '.join(objects)}]"
    elif layout.closing:
        text = hermes(*objects)
    else:
        text = "; ".join(objects)
    before = content if not layout.bare and content.strip() else ""
    told = read(layout, *cut(before + text, cuts))
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == calls
    assert told.content == before
