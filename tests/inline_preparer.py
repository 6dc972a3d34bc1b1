"""Prepares requests without a process of its own, for tests of what comes after."""

from __future__ import annotations

import asyncio

from llguidance import LLTokenizer

from router.metrics import RouterMetrics
from router.preparation.prepare import prepare
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.wire import packed, unpacked
from router.requests.work import PreparationOutcome, Work
from router.text.structured.compile import compile_output
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import Text


class InlinePreparer:
    """Prepares everything on the event loop; grammars with bytes as the vocabulary.

    Outcomes are packed and read again, as if a process had made them.
    """

    def __init__(self, text: Text, metrics: RouterMetrics | None = None) -> None:
        self.text = text
        self.texts = PreparedTexts(1 << 20, metrics or RouterMetrics())
        self.compilations = 0
        self.compiled_for: list[str] = []
        """The tenant of each compilation."""

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        del tenant
        work, known = self.texts.keyed(work), self.texts.known_to(work)
        return unpacked(packed(prepare(work, self.text, known)), PreparationOutcome)

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        self.compiled_for.append(tenant)
        self.compilations += 1
        outcome = PreparationOutcome(value=compile_output(output, LLTokenizer("byte")))
        return unpacked(packed(outcome), PreparationOutcome)

    async def run(self) -> None:
        await asyncio.Event().wait()
