"""The messages of a chat, and the commands that change them. It knows no terminal and no server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tools.chat.server import Message
from twostroke.base.errors import ConfigError

HELP = """\
/help          show this
/system TEXT   tell the model who it is (without TEXT: show what it was told)
/new           forget the conversation so far; /clear does the same
/save FILE     write the conversation: as JSON where FILE ends in .json, else as text
/exit          leave; so does Ctrl-D
Ctrl-C ends an answer, Alt-Enter begins a new line, a line that begins with a space is not a command."""


@dataclass(frozen=True, slots=True)
class CommandReply:
    """The reply to a command."""

    text: str = ""
    leaves: bool = False
    """Whether the command ends the conversation."""


class Conversation:
    def __init__(self, system: str | None = None) -> None:
        self._system = system or ""
        self._turns: list[Message] = []
        self._saved: set[Path] = set()
        """Files that this conversation may write again."""

    @property
    def messages(self) -> list[Message]:
        """Messages as a server takes them."""
        begin = [{"role": "system", "content": self._system}] if self._system else []
        return [*begin, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Adds an answer, or as much as came of it. A question without any is removed, to be asked again."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def command(self, line: str) -> CommandReply:
        """Carries out a line that begins with a slash. Raises ConfigError where that is not possible."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                return CommandReply(HELP)
            case "/exit" | "/quit" | "/bye":
                return CommandReply(leaves=True)
            case "/new" | "/clear":
                self._turns.clear()
                return CommandReply("a new conversation")
            case "/system":
                self._system = rest or self._system
                return CommandReply(f"system: {self._system or '(nothing)'}")
            case "/save":
                return CommandReply(f"saved as {self._save(rest)}")
        raise ConfigError(f"there is no command {name}; /help shows those that there are")

    def _save(self, name: str) -> Path:
        if not name:
            raise ConfigError("/save needs the name of a file")
        path = Path(name).expanduser().absolute()
        if path.suffix == ".json":
            text = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        else:
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise ConfigError(f"{path} is there already: choose another name") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        self._saved.add(path)
        return path
