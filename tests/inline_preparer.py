"""Prepares requests without a process of its own, for tests of what comes after."""

from __future__ import annotations

import asyncio

from llguidance import LLTokenizer

from router.frontend.preparation.prepare import PreparationOutcome, Work, prepare
from router.frontend.structured.compile import compile_output
from router.frontend.structured.output import StructuredOutput
from router.frontend.text.tokenizer import Text


class InlinePreparer:
    """Prepares everything on the event loop; grammars with bytes as the vocabulary."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.compilations = 0

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        del tenant
        return prepare(work, self.text)

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        del tenant
        self.compilations += 1
        return PreparationOutcome(value=compile_output(output, LLTokenizer("byte")))

    async def run(self) -> None:
        await asyncio.Event().wait()
