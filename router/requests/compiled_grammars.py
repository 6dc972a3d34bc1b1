"""Grammars that have compiled, and those that were refused, by digest: each is compiled once, off the event loop."""

from __future__ import annotations

import asyncio
import collections
import dataclasses

from router.metrics import RouterMetrics
from router.requests.work import Preparer
from router.text.structured.compile import CompiledGrammar, Refusal
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import InvalidRequest

MOST_KNOWN_BYTES = 32 << 20
"""Most bytes of grammars and errors that are kept."""
ENTRY_BYTES = 1024
"""Bytes that are counted for each entry besides its text: more than it has."""
COMPILE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class CompiledGrammars:
    def __init__(self, preparer: Preparer, metrics: RouterMetrics, *, most_bytes: int = MOST_KNOWN_BYTES) -> None:
        self._preparer = preparer
        self._most_bytes = most_bytes
        self._known: collections.OrderedDict[bytes, CompiledGrammar | Refusal] = collections.OrderedDict()
        """Grammars and refusals by digest, the least recently used first."""
        self._known_bytes = 0
        self._compiling: dict[tuple[str, bytes], asyncio.Event] = {}
        """Events that are set when a compilation ends, by tenant and digest. Tenants do not wait for one another's,
        because a tenant's compilation may be far back in its queue."""
        self._hits = metrics.counter("grammar_cache_hits", "Requests whose grammar this router had compiled before.")
        self._compiled = metrics.labelled_counter("grammars_compiled", "Grammars compiled, by kind.", "kind")
        self._refused = metrics.labelled_counter(
            "grammars_refused", "Grammars refused, by kind and cause: a keyword, size, syntax, unsatisfiable.",
            "kind", "cause",
        )  # fmt: skip
        self._compile_seconds = metrics.histogram(
            "grammar_compile_seconds", "Compilation of one grammar, without waiting for its turn.", COMPILE_BUCKETS_S
        )

    async def compiled(self, output: StructuredOutput, tenant: str) -> CompiledGrammar:
        """Returns the grammar of an output, or that of `output.otherwise` if the output is refused.

        Requests of a tenant for the same output wait for one compilation. Raises InvalidRequest, naming the field, if
        all are refused, and Overloaded if too many compilations wait.
        """
        digest = output.digest
        wanted = tenant, digest
        while (known := self._find(digest)) is None:
            if (others := self._compiling.get(wanted)) is not None:
                await others.wait()
                continue
            done = self._compiling[wanted] = asyncio.Event()
            try:
                known = await self._compile(output, tenant)
            finally:
                del self._compiling[wanted]
                done.set()
            self._keep(digest, known)
            break
        else:
            self._hits.inc()
        if isinstance(known, Refusal) and output.otherwise is not None:
            return await self.compiled(output.otherwise, tenant)
        if isinstance(known, Refusal):
            # Each request gets an error of its own: one that is raised holds its frames.
            raise type(known.error)(known.error.message, field=known.error.field)
        return known

    async def _compile(self, output: StructuredOutput, tenant: str) -> CompiledGrammar | Refusal:
        outcome = await self._preparer.compile(dataclasses.replace(output, otherwise=None), tenant)
        known = outcome.value
        if isinstance(outcome.error, InvalidRequest):
            known = Refusal("size", InvalidRequest(f"{output.field}: {outcome.error.message}", field=output.field))
        elif outcome.error is not None:
            raise outcome.error
        if isinstance(known, Refusal):
            self._refused.labels("router", output.kind, known.cause).inc()
            return known
        assert isinstance(known, CompiledGrammar)
        self._compiled.labels("router", output.kind).inc()
        self._compile_seconds.observe(known.compile_s)
        return known

    def _find(self, digest: bytes) -> CompiledGrammar | Refusal | None:
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def _keep(self, digest: bytes, outcome: CompiledGrammar | Refusal) -> None:
        if digest in self._known:  # another tenant's compilation ended first
            return
        self._known[digest] = outcome
        self._known_bytes += _size_bytes(outcome)
        while self._known_bytes > self._most_bytes and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self._known_bytes -= _size_bytes(dropped)


def _size_bytes(outcome: CompiledGrammar | Refusal) -> int:
    text = outcome.grammar.source if isinstance(outcome, CompiledGrammar) else outcome.error.message
    return len(text) + ENTRY_BYTES
