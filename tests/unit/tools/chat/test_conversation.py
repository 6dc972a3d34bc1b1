"""The commands of a conversation, and what of an answer a terminal gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.chat.command import visible
from tools.chat.conversation import HELP, Conversation
from twostroke.base.errors import ConfigError


def test_a_model_cannot_send_commands_to_the_terminal() -> None:
    printed = visible("clear \x1b[2J\x07 and \x9b1m\r\nnext\tcell")
    assert printed == "clear ^[[2J^G and ^[1m^M\nnext\tcell"


def test_a_conversation_remembers_what_was_asked_and_answered() -> None:
    chat = Conversation("be brief")
    chat.ask("one")
    chat.answered("1")
    chat.ask("two")
    chat.answered("")
    assert chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
    ]
    assert chat.command("/system").text == "system: be brief"
    chat.command("/new")
    chat.command("/system  be long ")
    assert chat.messages == [{"role": "system", "content": "be long"}]


def test_commands_are_told_and_unknown_ones_refused() -> None:
    chat = Conversation()
    assert chat.command("/help").text == HELP
    assert [chat.command(word).leaves for word in ("/exit", "/quit", "/help", "/clear")] == [True, True, False, False]
    with pytest.raises(ConfigError, match="no command /nonsense; /help"):
        chat.command("/nonsense at all")


def test_a_conversation_is_saved_and_overwrites_nothing_but_itself(tmp_path: Path) -> None:
    chat = Conversation("be brief")
    chat.ask("Größe?")
    chat.answered("1 m")
    chat.command(f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text()) == {"messages": chat.messages}
    chat.command("/new")
    chat.command(f"/save {tmp_path / 'chat.json'}")
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 1
    chat.command(f"/save {tmp_path / 'chat.txt'}")
    assert (tmp_path / "chat.txt").read_text() == "system: be brief\n"
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        chat.command(f"/save {tmp_path / 'precious'}")
    for where, why in (("", "needs the name"), (str(tmp_path / "no" / "folder"), "cannot be written")):
        with pytest.raises(ConfigError, match=why):
            chat.command(f"/save {where}")
    assert (tmp_path / "precious").read_text() == "mine"
