"""The transformers-backed codec, over a tokenizer made here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actors.errors import ModelRefused, RequestRefused
from cluster.text_codec import TextCodec, TransformersCodec

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}"
    "<t>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<t>assistant:{% endif %}"
)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Writes a byte-level tokenizer with a start token to a directory."""

    def write(template: str | None = TEMPLATE, truncate: int = 0) -> Path:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: index for index, symbol in enumerate(["<s>", "<t>", *alphabet])}
        raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
        raw.add_special_tokens(["<s>", "<t>"])
        raw.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        if truncate:
            raw.enable_truncation(truncate)
            raw.enable_padding(length=truncate)
        fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", pad_token="<s>")
        if template is not None:
            fast.chat_template = template
        directory = tmp_path_factory.mktemp("tokenizer")
        fast.save_pretrained(directory)
        return directory

    return write


def test_encode_adds_the_start_token_once(make: Make) -> None:
    codec: TextCodec = TransformersCodec(make(), 1000)
    ids = codec.encode("hé 🙂\x00")
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert len(ids) == 1 + len("hé 🙂\x00".encode())


def test_chat_goes_through_the_template_as_transformers_does_it(make: Make) -> None:
    directory = make()
    codec = TransformersCodec(directory, 1000)
    messages = [{"role": "user", "content": "Hi"}]
    ids = codec.render_chat(messages)
    plain: Any = transformers.AutoTokenizer.from_pretrained(directory)
    assert ids == plain.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert plain.decode(ids) == "<t>user:Hi<t>assistant:"
    assert 0 not in ids, "the template alone decides on special tokens"


def test_template_errors_are_the_clients(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    with pytest.raises(RequestRefused, match="No tools here") as refused:
        codec.render_chat([{"role": "tool", "content": "x"}])
    assert refused.value.param == "messages"
    long = TransformersCodec(make("{{ raise_exception('y' * 5000) }}"), 1000)
    with pytest.raises(RequestRefused) as bounded:
        long.render_chat([{"role": "user", "content": "x"}])
    assert len(bounded.value.message) < 400
    broken = TransformersCodec(make("{{ messages[0].content + 1 }}"), 1000)
    with pytest.raises(RequestRefused):
        broken.render_chat([{"role": "user", "content": "x"}])


def test_no_chat_template(make: Make) -> None:
    with pytest.raises(RequestRefused, match="no chat template"):
        TransformersCodec(make(None), 1000).render_chat([{"role": "user", "content": "x"}])


def test_half_a_surrogate_pair_is_refused(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    with pytest.raises(RequestRefused):
        codec.encode("a\ud800")
    with pytest.raises(RequestRefused):
        codec.render_chat([{"role": "user", "content": "\udfff"}])


def test_vocabulary_is_the_smaller_of_tokenizer_and_model(make: Make) -> None:
    directory = make()
    assert TransformersCodec(directory, 100).vocab_size == 100
    assert TransformersCodec(directory, 1000).vocab_size == 258


def test_saved_truncation_and_padding_do_not_apply(make: Make) -> None:
    codec = TransformersCodec(make(truncate=8), 1000)
    assert len(codec.encode("x" * 50)) == 51
    assert len(codec.encode("x")) == 2


def test_threads_may_share_it(make: Make) -> None:
    codec = TransformersCodec(make(truncate=8), 1000)
    texts = ["x" * (index % 97) for index in range(400)]
    with ThreadPoolExecutor(8) as pool:
        assert [len(ids) for ids in pool.map(codec.encode, texts)] == [len(text) + 1 for text in texts]


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no tokenizer"):
        TransformersCodec(tmp_path, 1000)


def test_decoding_tells_special_tokens_and_broken_characters(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    ids = codec.encode("hé 🙂")
    assert codec.decode(ids) == "<s>hé 🙂"
    assert codec.decode(ids[1:-1]).startswith("hé \ufffd")
    assert codec.decode([]) == ""
    assert b"".join(codec.token_bytes(token) for token in ids) == "<s>hé 🙂".encode()


def test_start_tokens_can_be_left_out_or_added(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    assert codec.encode("x", add_special_tokens=False) == codec.encode("x")[1:]
    messages = [{"role": "user", "content": "Hi"}]
    assert codec.render_chat(messages, add_special_tokens=True) == [0, *codec.render_chat(messages)]


def test_special_tokens(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    assert codec.special_tokens == {"<s>": 0, "<t>": 1}
    assert [token for token in range(codec.vocab_size) if codec.is_special(token)] == [0, 1]


def test_who_goes_on_with_the_conversation(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    assert codec.decode(codec.render_chat(messages)).endswith("<t>assistant:Well, <t>assistant:")
    without = codec.render_chat(messages, add_generation_prompt=False)
    assert codec.decode(without).endswith("<t>assistant:Well, ")
    within = codec.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert codec.decode(within).endswith("<t>assistant:Well, ")
    with pytest.raises(RequestRefused):
        codec.render_chat(messages, add_generation_prompt=True, continue_final_message=True)


def test_variables_and_tools_reach_the_template(make: Make) -> None:
    codec = TransformersCodec(make("{{ mood }} {{ tools | tojson if tools else 'none' }}"), 1000)
    messages = [{"role": "user", "content": "x"}]
    assert codec.decode(codec.render_chat(messages, variables={"mood": "good"})) == "good none"
    tool = {"type": "function", "function": {"name": "add"}}
    assert '"add"' in codec.decode(codec.render_chat(messages, tools=[tool]))


@pytest.mark.parametrize(
    "name", ["messages", "conversation", "chat_template", "tokenize", "tools", "documents", "tokenizer_kwargs"]
)
def test_variables_cannot_steer_the_rendering(make: Make, name: str) -> None:
    codec = TransformersCodec(make(), 1000)
    with pytest.raises(RequestRefused) as refused:
        codec.render_chat([{"role": "user", "content": "x"}], variables={name: "{{ 1 }}"})
    assert refused.value.param == "chat_template_kwargs"


def test_the_template_that_is_told(make: Make) -> None:
    assert TransformersCodec(make(), 1000).chat_template == TEMPLATE
    assert TransformersCodec(make(None), 1000).chat_template is None


def test_the_tokenizer_for_grammars_is_made_once(make: Make) -> None:
    codec = TransformersCodec(make(), 1000)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: codec.grammar_tokenizer(), range(8)))
    assert all(one is made[0] for one in made)
    assert made[0].decode_bytes(codec.encode("é", add_special_tokens=False)) == "é".encode()
