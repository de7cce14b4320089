from __future__ import annotations

from itertools import count

import pytest

from cluster.api.tool_format import GENERIC, HERMES, LLAMA3, MISTRAL, ToolFormat, detect

# Short stand-ins with the marks of the real templates.
PLAIN = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{% endfor %}"
QWEN = (
    "{%- if tools %}# Tools\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n<tool_call>\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call>{%- endif %}' + PLAIN
)
LLAMA = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}. ' }}{%- endif %}" + PLAIN
)
MISTRAL_V3 = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}{{ '[TOOL_CALLS] [' }}" + PLAIN
)
MISTRAL_V11 = MISTRAL_V3.replace("[TOOL_CALLS] [", "[TOOL_CALLS]' + name + '[ARGS]")
QWEN_CODER = (
    "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\n</parameter></function></tool_call>{% endif %}"
)
GLM = "{% if tools %}<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key></tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "layout"),
    [
        (QWEN, HERMES),
        (LLAMA, LLAMA3),
        (LLAMA.replace('"', '\\"'), LLAMA3),
        (MISTRAL_V3, MISTRAL),
        (MISTRAL_V11, GENERIC),
        (QWEN_CODER, GENERIC),
        (GLM, GENERIC),
        (PLAIN, GENERIC),
        ("<tool_call> is mentioned, but no list of them is taken", GENERIC),
        ("", None),
        (None, None),
    ],
)
def test_a_template_tells_how_calls_are_written(template: str | None, layout: ToolFormat | None) -> None:
    assert detect(template) is layout


def test_call_ids_are_made_of_fresh_ones() -> None:
    ids = count()
    assert [HERMES.call_id(lambda: f"{next(ids):032x}") for _ in range(2)] == [f"call_{0:032x}", f"call_{1:032x}"]
    short = [MISTRAL.call_id(lambda: f"{next(ids):032x}") for _ in range(100)]
    assert len(set(short)) == 100
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in short)
