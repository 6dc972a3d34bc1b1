"""Bodies of /v1/messages become chats in OpenAI's form."""

from __future__ import annotations

import time
from typing import Any

import pytest

from router.dialects.anthropic.schema import counted_chat, parse_messages
from router.text.cache_hints import MessageHint
from router.text.prompts import ChatPrompt
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

ASK = {"role": "user", "content": "hi"}
KEEP = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
SCHEMA_FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
PICTURE_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}
WEATHER = {"name": "weather", "description": "Says it.", "input_schema": {"type": "object"}}


def chat_of(**body: Any) -> ChatPrompt:
    return counted_chat({"messages": [ASK]} | body)


def messages_of(*messages: Any, **body: Any) -> list[Any]:
    return list(chat_of(messages=list(messages), **body).messages)


def text(said: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | others


def test_a_string_and_one_text_block_are_the_same() -> None:
    assert messages_of({"role": "user", "content": [text("hi")]}) == messages_of(ASK) == [ASK]


def test_a_system_prompt_is_the_first_message() -> None:
    expected = [{"role": "system", "content": "a\nb"}, ASK]
    assert messages_of(ASK, system="a\nb") == expected
    assert messages_of(ASK, system=[text("a"), text("b")]) == expected


def test_system_messages_stay_where_they_are() -> None:
    told = {"role": "system", "content": "17 tokens used"}
    assert messages_of(ASK, told, ASK, system="be brief") == [{"role": "system", "content": "be brief"}, ASK, told, ASK]


def test_consecutive_messages_of_one_role_are_one_turn_as_if_they_were_blocks_of_one_message() -> None:
    def said(role: str, *blocks: Any) -> dict[str, Any]:
        return {"role": role, "content": list(blocks)}

    called = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turns = (
        [said("user", text("a")), said("user", text("b"), text("c")), said("user", text(""))],
        [said("assistant", thought, text("d")), said("assistant", thought, called), said("assistant", text("e"))],
        [said("user", text("f"), result), said("user", text("g")), said("user", text("h"))],
        [said("assistant", text("i")), said("assistant", text("j"))],
    )
    apart = [message for turn in turns for message in turn]
    joined = [
        said(turn[0]["role"], *(block for message in turn for block in message["content"] if block != text("")))
        for turn in turns
    ]
    assert messages_of(*apart) == messages_of(*joined)
    assert [message["role"] for message in messages_of(*apart)] == [
        "user", "assistant", "user", "tool", "user", "assistant",
    ]  # fmt: skip
    assert chat_of(messages=apart).continue_final_message
    assert messages_of(*apart)[-1]["content"] == "i\nj"
    kept = chat_of(messages=[ASK, said("user", text("b", cache_control=KEEP)), said("assistant", text("i"))])
    assert kept.hints == (MessageHint(1, 300.0),), "the hint is at the turn"


def test_a_turn_of_many_messages_is_joined_once() -> None:
    """What came before was copied for each message: a body of 8 MiB kept other large ones waiting for minutes."""
    began_s = time.process_time()
    (message,) = messages_of({"role": "user", "content": "y" * (1 << 20)}, *[ASK] * 10_000)
    assert message["content"].endswith("y" + "\nhi" * 10_000)
    assert time.process_time() - began_s < 1.0


def test_calls_results_and_thoughts_take_openais_form() -> None:
    called = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("rain"), text("wind")]}
    failed = {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True}
    silent = {"type": "tool_result", "tool_use_id": "c1"}
    assert messages_of(
        ASK,
        {"role": "assistant", "content": [thought, hidden, text("I look."), called]},
        {"role": "user", "content": [result, failed, text("and"), silent, text("then?")]},
    ) == [
        ASK,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain\nwind", "name": "weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no such city"},
        {"role": "user", "content": "and"},
        {"role": "tool", "tool_call_id": "c1", "content": "", "name": "weather"},
        {"role": "user", "content": "then?"},
    ]


def test_an_answer_goes_on_with_the_last_message_of_the_assistant() -> None:
    begun = chat_of(messages=[ASK, {"role": "assistant", "content": "The answer is ("}])
    assert begun.continue_final_message
    assert not begun.add_generation_prompt
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    called = chat_of(messages=[ASK, {"role": "assistant", "content": [call]}])
    assert called.add_generation_prompt


def test_hints_count_the_messages_that_templates_see() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x", "cache_control": KEEP | {"ttl": "1h"}}
    chat = chat_of(
        system=[text("a"), text("b", cache_control=KEEP)],
        messages=[{"role": "user", "content": [result, text("go on")]}, ASK],
        cache_control=KEEP,
    )
    assert chat.hints == (MessageHint(1, 300.0), MessageHint(2, 3600.0), MessageHint(3, 300.0))


def test_a_hint_at_tools_is_one_at_the_system_prompt_which_has_them() -> None:
    tools = [WEATHER | {"cache_control": KEEP}]
    assert chat_of(tools=tools, tool_choice={"type": "none"}, system="a").hints == (MessageHint(1, 300.0),)
    assert chat_of(tools=tools, tool_choice={"type": "none"}).hints == (MessageHint(0, 300.0),)


def test_tools_take_openais_form() -> None:
    strict = WEATHER | {"type": "custom", "strict": True, "eager_input_streaming": True}
    chat = chat_of(tools=[WEATHER, strict], tool_choice={"type": "none"})
    function = {"name": "weather", "description": "Says it.", "parameters": {"type": "object"}}
    assert chat.tools == (
        {"type": "function", "function": function},
        {"type": "function", "function": function | {"strict": True}},
    )


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [({"type": "enabled", "budget_tokens": 2048}, True), ({"type": "adaptive"}, True), ({"type": "disabled"}, False)],
)
def test_templates_are_told_whether_to_think(thinking: dict[str, Any], wanted: bool) -> None:
    assert chat_of(thinking=thinking).variables == {"enable_thinking": wanted, "thinking": wanted}
    assert chat_of().variables == {}


def test_the_billing_header_is_no_part_of_the_prompt() -> None:
    for nonce in ("a1b2c", "00000"):
        header = BILLING.format(nonce)
        blocks = [text(header), text("You are Claude Code."), text("Be brief.")]
        expected = [{"role": "system", "content": "You are Claude Code.\nBe brief."}, ASK]
        assert messages_of(ASK, system=blocks) == expected
        assert messages_of(ASK, system=f"{header}\nYou are Claude Code.\nBe brief.") == expected
        inline = {"role": "system", "content": f"{header}\nYou are Claude Code.\nBe brief."}
        assert messages_of(inline, ASK) == expected
        assert messages_of(ASK, system=[text(header)]) == [ASK]


def test_what_only_mentions_the_billing_header_stays() -> None:
    said = f"What is this?\n{BILLING.format('a1b2c')}"
    assert messages_of({"role": "user", "content": BILLING}, system=said) == [
        {"role": "system", "content": said},
        {"role": "user", "content": BILLING},
    ]


def test_sampling_limits_and_the_user_reach_the_request() -> None:
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "stop_sequences": ["\n\nHuman:"], "max_tokens": 7, "n": 3}
    wanted = parse_messages({"messages": [ASK], "metadata": {"user_id": "u"}, "stop": ["x"], **body})
    options = wanted.options
    assert (options.temperature, options.top_p, options.top_k, options.max_tokens) == (0.5, 0.9, None, 7)
    assert (options.stop, options.n, wanted.user) == (("\n\nHuman:",), 1, "u")


def test_a_users_id_that_is_too_long_is_its_digest() -> None:
    users = {
        parse_messages({"messages": [ASK], "max_tokens": 1, "metadata": {"user_id": user}}).user
        for user in ("u" * 300, "u" * 301, "a\nb")
    }
    assert len(users) == 3
    assert {len(user) for user in users} == {64}


@pytest.mark.parametrize("said", [None, True, False])
def test_a_client_asks_for_the_letter_of_a_schema_beside_its_format(said: bool | None) -> None:
    others = {"structured_outputs": {"disable_additional_properties": said}}
    wanted = parse_messages({"messages": [ASK], "max_tokens": 1, "output_config": {"format": SCHEMA_FORMAT}, **others})
    assert wanted.options.structured is not None
    assert wanted.options.structured.is_open is (said is False)


@pytest.mark.parametrize("body", [{"output_config": {"format": SCHEMA_FORMAT}}, {"output_format": SCHEMA_FORMAT}])
def test_an_answer_can_be_asked_to_match_a_schema(body: dict[str, Any]) -> None:
    wanted = parse_messages({"messages": [ASK], "max_tokens": 7} | body).options.structured
    assert wanted is not None
    assert (wanted.kind, wanted.body, wanted.is_strict) == ("json", b'{"type":"object"}', True)


@pytest.mark.parametrize(
    "harmless",
    [
        {"service_tier": "auto"},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"effort": "high"}},
        {"container": None, "mcp_servers": [], "anthropic_beta": ["x"], "inference_geo": "us"},
    ],
)
def test_fields_that_change_no_answer_pass(harmless: dict[str, Any]) -> None:
    assert chat_of(**harmless).messages == (ASK,)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"container": "c1"}, "container"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"output_format": {"type": "json_object"}}, "output_format"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [PICTURE_RESULT]}]},
            "messages[0].content[0].content[0]",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        parse_messages({"messages": [ASK], "max_tokens": 1} | body)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"output_config": 5}, "output_config"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": SCHEMA_FORMAT, "output_config": {"format": SCHEMA_FORMAT}}, "output_format.schema"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": BILLING}]}, "messages"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 5}, "system"),
        ({"system": [text("a", cache_control={"type": "x"})]}, None),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ],
)
def test_a_mistake_is_refused_with_the_name_of_its_field(body: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_messages({"messages": [ASK], "max_tokens": 1} | body)
    if field is not None:
        assert refused.value.field == field
        assert field in refused.value.message
