"""The commands of a conversation, and an answer on a terminal."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tools.chat.conversation import HELP, Conversation
from tools.chat.screen import Screen
from twostroke.base.errors import ConfigError

COLUMNS = 40
MARKDOWN = """# A heading with `code` in it

Some **bold words** and `inline code`, and a * that is nothing. 2 ** 3 is not closed.
Next line is plain, and a_word_that_is_longer_than_the_whole_screen_is_cut_by_the_terminal_itself.

```python
def spaces_stay(inside: int) -> str:
    return "and lines of code are not wrapped, however long they are"
```
字符没有空格所以必须在任何地方换行字符没有空格所以必须在任何地方换行. Done"""


def shown(text: str, cuts: random.Random | None = None, *, has_colours: bool = True) -> str:
    """What is printed where the text comes in pieces."""
    written: list[str] = []
    screen = Screen(written.append, columns=COLUMNS, has_colours=has_colours)
    while text:
        length = len(text) if cuts is None else cuts.randint(1, 7)
        screen.add(text[:length])
        text = text[length:]
    screen.end()
    return "".join(written)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_looks_the_same_however_it_is_cut_and_nothing_of_it_is_lost(seed: int) -> None:
    printed = shown(MARKDOWN, random.Random(seed))
    assert without_colours(printed).replace("\n", "").replace(" ", "") == MARKDOWN.replace("\n", "").replace(" ", "")
    assert without_colours(printed) == without_colours(shown(MARKDOWN, random.Random(seed + 100)))
    assert without_colours(printed) == shown(MARKDOWN, random.Random(seed), has_colours=False)
    assert '    return "and lines of code are not wrapped, however long they are"' in without_colours(printed)


def test_lines_of_prose_end_between_words() -> None:
    prose = " ".join(f"word{number}" for number in range(40))
    lines = shown(prose).splitlines()
    assert len(lines) > 5
    assert all(len(line) <= COLUMNS for line in lines)
    assert words(" ".join(lines)) == words(prose)


def test_marks_colour_what_they_enclose_and_end_with_their_line() -> None:
    printed = shown("a **b** `c` **open\nplain ` here\nplain")
    assert "\x1b[1m**b**" in printed.replace("\x1b[0m\x1b[1m", "")
    assert "\x1b[36mc\x1b[0m" in printed
    assert printed.endswith("\nplain\n")


def test_a_model_cannot_send_commands_to_the_terminal() -> None:
    printed = shown("clear \x1b[2J\x07 and \x9b1m\r\nnext", has_colours=False)
    assert printed == "clear ^[[2J^G and ^[1m^M\nnext\n"


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
