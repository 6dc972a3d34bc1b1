"""The grammars of a decode worker's requests, compiled where neither steps nor other requests wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, ThreadPoolExecutor

from decode_worker.grammar_metrics import GrammarMetrics
from twostroke.base.errors import Overloaded
from twostroke.engine.backends.facts import LoadedModel
from twostroke.grammar.advance import be_nice
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.mask import mask_of, narrowed
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Attempt, Grammar, SamplingParams

LONGEST_COMPILE_S = 8.0
"""Time for one grammar, those before it included: less than routers wait for a worker that opens a request. A router
has compiled it with two seconds of processor time."""


THREADS = 2
"""Grammars that are compiled at a time: one that takes long does not hold up the next. Steps need the other cores."""


class Grammars:
    def __init__(self, facts: LoadedModel, metrics: GrammarMetrics) -> None:
        self._facts = facts
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars", initializer=be_nice)
        self._compiler: Future[GrammarCompiler] | None = None
        if facts.model_dir:  # before the first request: reading a vocabulary keeps Python's lock for up to some seconds
            self._compiler = self._new_compiler()

    async def state(self, attempt: Attempt) -> GrammarState | None:
        """Returns where the answer of an attempt stands in its grammar, if it has one, with the tokens it has already.

        Raises InvalidRequest for a grammar that cannot be compiled, and for tokens that it does not permit; Overloaded
        where too many others come first.
        """
        grammar = attempt.request.sampling.grammar
        if grammar is None:
            return None
        tokens = [sampled.token for sampled in attempt.emitted]
        if self._compiler is None:
            self._compiler = self._new_compiler()
        compiling = asyncio.get_running_loop().run_in_executor(
            self._threads, self._compiled, self._compiler, grammar, tokens
        )
        try:
            return await asyncio.wait_for(compiling, LONGEST_COMPILE_S)
        except TimeoutError as error:
            raise Overloaded(f"the grammar was not compiled within {LONGEST_COMPILE_S:g} s; try again") from error

    def ended(self, state: GrammarState) -> None:
        """Counts the tokens of an answer that has ended."""
        self._metrics.tokens.inc(state.tokens)
        self._metrics.forced_tokens.inc(state.forced_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new_compiler(self) -> Future[GrammarCompiler]:
        return self._threads.submit(_compiler_of, self._facts, self._metrics)

    def _compiled(self, compiler: Future[GrammarCompiler], grammar: Grammar, tokens: ListOf[int]) -> GrammarState:
        began_s = time.perf_counter()
        state = compiler.result().state(grammar, tokens)
        self._metrics.compile_seconds.observe(time.perf_counter() - began_s)
        return state


def allows_none(state: GrammarState, params: SamplingParams) -> bool:
    """Tells whether a request allows none of the tokens with which its answer's grammar may go on."""
    return not narrowed(state.mask, mask_of(params.allowed_tokens), ()).any()


def _compiler_of(facts: LoadedModel, metrics: GrammarMetrics) -> GrammarCompiler:
    vocabulary = load_vocabulary(facts.model_dir, facts.vocab_size, facts.eos_token_ids, facts.fingerprint)
    return GrammarCompiler(vocabulary, metrics.mask_seconds.observe)
