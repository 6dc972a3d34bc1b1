"""Prepares requests without a process of its own, for tests of what comes after."""

from __future__ import annotations

import asyncio

from router.frontend.preparation.prepare import PreparationOutcome, Work, prepare
from router.frontend.text.tokenizer import Text


class InlinePreparer:
    """Prepares everything on the event loop."""

    def __init__(self, text: Text) -> None:
        self.text = text

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        del tenant
        return prepare(work, self.text)

    async def run(self) -> None:
        await asyncio.Event().wait()
