"""Reads what is typed, with line editing and a history in the user's state folder. Only the user may read
the history.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MOST_BYTES = 1 << 20
"""Most bytes of history; the older half is removed."""
_ENTRY = b"\n# "
"""Beginning of an entry in prompt_toolkit's file."""
COMMANDS = ("/help", "/system", "/new", "/clear", "/save", "/exit")


class KeptHistory(FileHistory):
    """A history file. The conversation continues without it where it cannot be written, as on a full disk."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class Prompt:
    def __init__(self) -> None:
        keys = KeyBindings()
        keys.add("escape", "enter")(_new_line)
        self._session: PromptSession[str] = PromptSession(
            history=_history(), key_bindings=keys, completer=WordCompleter(COMMANDS, sentence=True)
        )

    def read(self) -> str:
        """Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt("> ", complete_while_typing=False)


def history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "twostroke" / "chat_history"


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _history() -> History:
    """Returns the history. It is kept only in memory where the file cannot be written."""
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home folder, as in some containers
        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
        _shorten(path)
        return KeptHistory(path)
    return InMemoryHistory()


def _shorten(path: Path) -> None:
    if path.stat().st_size <= MOST_BYTES:
        return
    kept = path.read_bytes()[-MOST_BYTES // 2 :]
    path.write_bytes(kept[max(0, kept.find(_ENTRY)) :])
