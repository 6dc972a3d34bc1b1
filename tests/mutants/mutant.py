"""A mutant: one mistake in one file of the product, the claim that it breaks, and the test that notices it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    """Words joined by hyphens; no other mutant has it."""
    claim: str
    """What is not so any more: a claim of docs/claims.md, or a part of one."""
    file: str
    """The file of the product, from the root of the tree on."""
    old: str
    """Text that is in the file exactly once."""
    new: str
    test: str
    """Node id of pytest: every test that it names is run, and one of them at least has to fail."""

    @property
    def test_file(self) -> str:
        return self.test.partition("::")[0]

    def text_in(self, root: Path) -> str:
        """Returns the text of its file with the mistake. Raises ValueError where the old text is not there once."""
        text = (root / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {count} times, and not once")
        return text.replace(self.old, self.new)

    def problem(self, root: Path = ROOT) -> str | None:
        """Returns what is wrong with the row, whatever its test says; None where nothing is."""
        if not (root / self.file).is_file():
            return f"{self.name}: there is no {self.file}"
        try:
            text = self.text_in(root)
        except ValueError as error:
            return str(error)
        if self.old == self.new:
            return f"{self.name}: it changes nothing"
        if self.file.endswith(".py"):
            try:
                ast.parse(text)
            except SyntaxError as error:
                return f"{self.name}: no Python any more: {error}"
        return self._problem_of_test(root)

    def _problem_of_test(self, root: Path) -> str | None:
        path = root / self.test_file
        if not path.is_file():
            return f"{self.name}: there is no {self.test_file}"
        named = self.test.partition("::")[2].partition("[")[0].partition("::")[0]
        if re.search(rf"\b{named}\b", path.read_text()) is None:
            return f"{self.name}: {self.test_file} has no {named}"
        return None
