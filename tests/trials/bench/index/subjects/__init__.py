"""What can be measured. Each subject is imported only where it is: it may live in another environment."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from tests.trials.bench.index.content import Stored

SUBJECTS = {"twostroke": "our_index", "dynamo": "dynamo_tree"}


class Subject(Protocol):
    version: str

    def message(self, stored: Stored) -> bytes:
        """The news as they come over the wire; each is asked for once, in order."""
        ...

    def learn(self, worker: int, message: bytes) -> None: ...

    def question(self, hashes: list[bytes]) -> object:
        """In the form in which it is asked."""
        ...

    def answer(self, question: object) -> object: ...

    def depths(self, answer: object) -> dict[int, int]:
        """Worker -> leading blocks."""
        ...


def subject_named(name: str, workers: int) -> Subject:
    module = import_module(f"tests.trials.bench.index.subjects.{SUBJECTS[name]}")
    return cast(Subject, module.make(workers))
