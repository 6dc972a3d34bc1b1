"""Commands that documents tell people to type: in blocks of `sh`, and in line as `twostroke up -f FILE`.

A command may be excused: `not run: REASON` in the comment beside it, in the comment that its block begins with, in its
own paragraph or row of a table, or in the first paragraph of a section that it is in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = (
    *("twostroke", "make", "python", "python3", "pip", "curl", "openssl", "git", "apt-get", "hf", "huggingface-cli"),
    *("kubectl", "helm", "kind", "docker", "buildah", "ray", "systemctl", "systemd-analyze"),
)
EXCUSE = re.compile(r"\bnot run: +(\w.*\w)", re.IGNORECASE)
_FENCE = re.compile(r"^```(\w*)$")
_HEADING = re.compile(r"^(#+) ")
_CODE = re.compile(r"`([^`]+)`")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=\S*")


@dataclass(frozen=True, slots=True)
class Command:
    document: str
    line: int
    text: str
    """With one space between words, without its comment."""
    excuse: str | None = None
    is_excused_beside: bool = False
    """The rule is excused by its own comment, not by something that covers others, too."""

    @property
    def words(self) -> list[str]:
        """Without the variables that stand before it."""
        words = self.text.split()
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        return words

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


@dataclass(slots=True)
class _Section:
    depth: int
    first: str | None = None
    """Its first paragraph, once there is one."""


@dataclass(slots=True)
class _Reader:
    name: str
    sections: list[_Section] = field(default_factory=list)

    def heading(self, depth: int) -> None:
        while self.sections and self.sections[-1].depth >= depth:
            self.sections.pop()
        self.sections.append(_Section(depth))

    def paragraph(self, line: int, text: str) -> Iterator[Command]:
        if self.sections and self.sections[-1].first is None:
            self.sections[-1].first = text
        for code in _CODE.finditer(text):
            command = Command(self.name, line, " ".join(code[1].split()), self._excuse(text))
            if is_command(command):
                yield command

    def block(self, line: int, lines: list[str]) -> Iterator[Command]:
        whole = " ".join(text for text in lines[:1] if text.startswith("#"))
        for text in "\n".join(lines).replace("\\\n", " ").splitlines():
            bare, comment = _without_comment(text)
            if bare:
                beside = _reason(comment)
                yield Command(
                    self.name, line, " ".join(bare.split()), beside or self._excuse(whole), beside is not None
                )

    def _excuse(self, around: str) -> str | None:
        said = (around, *(section.first or "" for section in self.sections))
        return next((reason for text in said if (reason := _reason(text))), None)


def commands(path: Path, name: str) -> list[Command]:
    return commands_in(path.read_text(), name)


def commands_in(text: str, name: str) -> list[Command]:
    reader, found = _Reader(name), list[Command]()
    paragraph, block, fence, start = list[str](), list[str](), None, 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if (opened := _FENCE.match(line)) is not None:
            if fence is not None:
                found += reader.block(start, block) if fence in ("sh", "bash") else ()
                fence, block = None, []
            else:
                fence, start = opened[1], number + 1
        elif fence is not None:
            block.append(line)
        if fence is None and not opened and line and not line.startswith(("#", "|")):
            paragraph.append(line)
            continue
        if paragraph:
            found += reader.paragraph(number - len(paragraph), "\n".join(paragraph))
            paragraph = []
        if fence is None and (heading := _HEADING.match(line)) is not None:
            reader.heading(len(heading[1]))
        elif fence is None and line.startswith("|"):  # a row of a table says what it says for itself
            found += reader.paragraph(number, line)
    return found


def codes(path: Path) -> Iterator[tuple[int, str]]:
    """What stands in line in backquotes; (line of its paragraph, text)."""
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.M | re.S)
    for code in _CODE.finditer(text):
        yield text.count("\n", 0, code.start()) + 1, " ".join(code[1].split())


def is_command(command: Command) -> bool:
    """`twostroke` alone is a name, and `job.sh` one of a file."""
    words = command.words
    return len(words) > 1 and (command.program in PROGRAMS or words[0].endswith(".sh"))


def _reason(text: str) -> str | None:
    found = EXCUSE.search(" ".join(text.split()))
    return None if found is None else found[1]


def _without_comment(line: str) -> tuple[str, str]:
    matched = re.fullmatch(r"""((?:[^#'"]|'[^']*'|"[^"]*"|(?<=\S)#)*)(#.*)?""", line.strip())
    assert matched is not None, line
    return matched[1].strip(), matched[2] or ""
