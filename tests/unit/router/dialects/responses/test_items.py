"""Input items become the messages of a chat; what would change the conversation is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from router.dialects.responses.items import encoded_reasoning, messages_of
from router.text.prompts import MAX_MESSAGES
from tests.unit.router.dialects.responses.codex import INPUT
from twostroke.base.errors import InvalidRequest, UnsupportedFeature

USER = {"role": "user", "content": "hi"}


def call(name: str, call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments}


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    assert messages_of("hi", "Be brief.") == ({"role": "system", "content": "Be brief."}, USER)
    assert messages_of("hi", None) == (USER,)


def test_parts_of_text_are_joined_as_in_chats() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    assert messages_of([{"role": "user", "content": parts}], None) == ({"role": "user", "content": "a\nb\nc"},)


def test_codex_items_are_one_message_for_each_turn() -> None:
    _, user, assistant, output, patching, patched, agent = messages_of(INPUT, None)
    assert user == {"role": "user", "content": "Mend it."}
    assert assistant == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": {"command": ["ls"]}}}
        ],
    }
    assert output == {"role": "tool", "content": "a.py", "tool_call_id": "call_1"}
    assert patching["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert patched == {"role": "tool", "content": "Done", "tool_call_id": "call_2"}
    assert agent == {"role": "user", "content": "Ready.", "name": "/root/helper"}


def test_calls_in_a_row_are_one_message() -> None:
    (message,) = messages_of([call("a", "1"), call("b", "2")], None)
    assert [each["id"] for each in message["tool_calls"]] == ["1", "2"]
    (message,) = messages_of([{"role": "assistant", "content": "x"}, call("a", "1"), call("b", "2")], None)
    assert message["content"] == "x"
    assert len(message["tool_calls"]) == 2


def test_reasoning_belongs_to_the_turn_after_it() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    first, second = messages_of([thought, call("a", "1"), thought, call("b", "2")], None)
    assert first["reasoning_content"] == second["reasoning_content"] == "so"
    (user,) = messages_of([thought, USER], None)
    assert user == USER


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (encoded_reasoning("so 猫"), "so 猫"),
        ("gAAAA", None),
        ("twostroke:%%%", None),
        ("twostroke:/w==", None),
        (5, None),
    ],
)
def test_reasoning_that_this_server_encoded_is_read_again(encoded: Any, text: str | None) -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": encoded}
    (message,) = messages_of([item, {"role": "assistant", "content": "x"}], None)
    assert message.get("reasoning_content") == text


@pytest.mark.parametrize(
    ("items", "field"),
    [
        (None, "input"),
        ([], "input"),
        (5, "input"),
        ([{"type": "web_search_call"}], "input"),
        ([USER] * (MAX_MESSAGES + 1), "input"),
        (["hi"], "input[0]"),
        ([{}], "input[0]"),
        ([USER, {"type": 5}], "input[1]"),
        ([USER, {"type": ["message"]}], "input[1]"),
        ([USER, {"type": "item_reference", "id": "msg_1"}], "input[1]"),
        ([USER, {"type": "compaction", "encrypted_content": "x"}], "input[1]"),
        ([USER, {"type": "newest_thing"}], "input[1]"),
        ([{"role": "robot", "content": "hi"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}], "input[0].content[0]"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "1", "output": 5}], "input[0].output"),
        ([{"type": "function_call", "call_id": "1", "arguments": "{}"}], "input[0].tool_calls[0].function"),
        ([{"type": "custom_tool_call", "name": "a", "call_id": "1"}], "input[0].input"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(items: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages_of(items, None)
    assert refused.value.field == field


def test_arguments_of_a_call_that_was_cut_stand_in_an_object() -> None:
    (message,) = messages_of([call("a", "1", '{"at": "sk')], None)
    assert message["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": '{"at": "sk'}


def test_a_reference_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(UnsupportedFeature, match="send the item itself"):
        messages_of([{"type": "item_reference", "id": "msg_1"}], None)
