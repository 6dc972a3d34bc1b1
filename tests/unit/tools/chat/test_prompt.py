"""What is kept of what was typed into a chat, and where nothing can be kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from tools.chat import prompt
from tools.chat.prompt import KeptHistory


def test_a_user_without_a_home_folder_has_a_history_while_the_chat_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert isinstance(prompt._history(), InMemoryHistory)


def test_a_history_that_can_be_written_no_more_does_not_end_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = prompt._history()
    assert isinstance(history, KeptHistory)
    history.append_string("first")
    path = prompt.history_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"+first" in path.read_bytes()
    path.unlink()
    path.mkdir()  # nobody writes there, not even root
    history.append_string("second")
    assert history.get_strings()[-1] == "second"


def test_a_long_history_loses_its_older_half_and_keeps_whole_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(prompt, "MOST_BYTES", 2000)
    for number in range(100):
        KeptHistory(prompt.history_path()).store_string(f"question {number}") if number else prompt._history()
    kept = list(prompt._history().load_history_strings())
    assert prompt.history_path().stat().st_size <= 1000
    assert kept == [f"question {number}" for number in range(99, 99 - len(kept), -1)]
