"""Text from tokenizer files equals what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from router.chat_template import ChatTemplate
from router.text import LONG_TEXT_CHARS, ByteText, TokenizerText, encode_off_loop, load_text, token_text
from twostroke.errors import ConfigError, InvalidRequest, UnsupportedFeature

SAMPLES = [
    "Hello, world!",
    "  two  spaces\n\n\ttabs ",
    "The capital of France is",
    "naïve café – “quotes” 你好，世界 😀👩‍👩‍👧 \u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2\n",
    "0123456789 " * 40,
]

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Why?"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two\n"},
        {"role": "user", "content": ' three <b>&"quotes" '},
    ],
]


@pytest.fixture(scope="module")
def both(smollm2_dir):
    return TokenizerText(smollm2_dir), AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("sample", SAMPLES)
def test_tokens_and_text_equal_those_of_transformers(both, sample):
    ours, theirs = both
    assert ours.encode(sample) == theirs(sample).input_ids
    ids = theirs(sample).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompted", [True, False])
def test_chats_equal_those_of_transformers(both, chat, prompted):
    ours, theirs = both
    rendered = ours.render_chat(chat, add_generation_prompt=prompted)
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=prompted, return_dict=False)
    assert ours.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize("content", ["The answer is", "trailing space ", "The "])
def test_a_continued_message_equals_that_of_transformers(both, content):
    ours, theirs = both
    chat = [*CHATS[0], {"role": "assistant", "content": content}]
    rendered = ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_stream_of_a_real_tokenizer_is_its_whole_text(both, sample):
    ours, _ = both
    ids = ours.encode(sample)
    for skip in (True, False):
        decoder = ours.decoder(ids[:3], skip_special_tokens=skip)
        texts = [decoder.feed(token) for token in ids[3:]]
        whole = "".join([*texts, decoder.flush()])
        assert ours.decode(ids[:3], skip_special_tokens=skip) + whole == ours.decode(ids, skip_special_tokens=skip)
        assert not any("\ufffd" in text for text in texts)


def test_the_bytes_of_tokens_join_to_the_text(both):
    ours, _ = both
    for sample in SAMPLES:
        assert b"".join(map(ours.token_bytes, ours.encode(sample))).decode() == sample
    assert token_text(ours, ours.encode(" France")[0]) == " France"


async def test_long_texts_are_tokenized_on_a_thread_to_the_same_tokens(both):
    ours, _ = both
    text = "word " * LONG_TEXT_CHARS
    assert await encode_off_loop(ours, text, add_special_tokens=True) == ours.encode(text)


def write_tokenizer(directory: Path, config: dict[str, object]) -> None:
    """A little tokenizer that begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["a b c"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def test_a_completion_gets_the_begin_token_and_a_chat_does_not_get_it_twice(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    write_tokenizer(tmp_path, config)
    text = load_text(str(tmp_path))
    assert text.encode("abcdefgh")[0] == 0
    assert len(text.encode("abcdefgh")) > 4
    rendered = text.render_chat([{"role": "user", "content": "x"}])
    assert rendered == "<s>x</s>"
    assert text.encode(rendered, add_special_tokens=False).count(0) == 1


def test_of_named_templates_the_default_is_taken_and_a_template_file_wins(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write_tokenizer(tmp_path, {"chat_template": named})
    assert load_text(str(tmp_path)).render_chat([{"role": "user", "content": "x"}]) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_text(str(tmp_path)).render_chat([{"role": "user", "content": "x"}]) == "file"


def test_a_model_without_a_template_has_no_chats(tmp_path):
    write_tokenizer(tmp_path, {})
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        load_text(str(tmp_path)).render_chat([{"role": "user", "content": "x"}])


def test_a_directory_without_tokenizer_or_with_a_broken_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_text(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_text(str(tmp_path))


def test_templates_may_use_the_conventions_of_published_ones():
    source = """{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{% endfor %}{{ strftime_now("%Y") | length }}{{ enable_thinking }}"""
    rendered = ChatTemplate(source, {}).render(
        [{"role": "user", "content": "<é>"}] * 3, variables={"enable_thinking": False}
    )
    assert rendered.count('{"role": "user", "content": "<é>"}') == 2
    assert rendered.endswith("4False")


@pytest.mark.parametrize(
    ("source", "message"),
    [("{{ raise_exception('roles must alternate') }}", "alternate"), ("{{ messages[5].content.x }}", "no element 5")],
)
def test_messages_that_a_template_refuses_are_the_clients_mistake(source, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert refused.value.field == "messages"


def test_templates_run_in_a_sandbox():
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {}).render([{"role": "u"}])
    with pytest.raises(ConfigError):
        ChatTemplate("{% if %}", {})


def test_a_template_that_trims_messages_cuts_a_continued_one_at_its_last_word():
    source = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
    rendered = ChatTemplate(source, {}).render(
        [{"role": "assistant", "content": " so "}], add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == "[so"
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        ChatTemplate("nothing", {}).render([{"content": "x"}], continue_final_message=True)


def test_byte_text_goes_both_ways_and_shows_ids_beyond_bytes():
    text = ByteText()
    assert text.decode(text.encode("héllo 😀")) == "héllo 😀"
    assert text.decode([104, 300, 0xC3, 301]) == "h<300>\ufffd<301>"
