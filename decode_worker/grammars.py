"""The grammars of a decode worker's requests, compiled where neither steps nor other requests wait for them."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from decode_worker.grammar_metrics import GrammarMetrics
from twostroke.engine.build import LoadedModel
from twostroke.errors import InvalidRequest
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Request

LONGEST_COMPILE_S = 10.0
"""Time for one grammar, those before it included. The router has compiled it within two seconds."""


class Grammars:
    def __init__(self, facts: LoadedModel, metrics: GrammarMetrics) -> None:
        self._facts = facts
        self._metrics = metrics
        self._compiler: GrammarCompiler | None = None
        """None until the first request that has a grammar: only then is the vocabulary read."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def state(self, request: Request) -> GrammarState | None:
        """Returns where the answer of a request stands in its grammar, if it has one, with the tokens it has already.

        Raises InvalidRequest for a grammar that cannot be compiled, and for tokens that it does not permit.
        """
        if request.sampling.grammar is None:
            return None
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, request)
        try:
            return await asyncio.wait_for(compiling, LONGEST_COMPILE_S)
        except TimeoutError as error:
            raise InvalidRequest(
                f"the grammar was not compiled within {LONGEST_COMPILE_S:g} s", field="grammar"
            ) from error

    def ended(self, state: GrammarState) -> None:
        """Counts the tokens of an answer that has ended."""
        self._metrics.tokens.inc(state.tokens)
        self._metrics.forced_tokens.inc(state.forced_tokens)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, request: Request) -> GrammarState:
        assert request.sampling.grammar is not None
        began_s = time.perf_counter()
        if self._compiler is None:
            facts = self._facts
            vocabulary = load_vocabulary(facts.model_dir, facts.vocab_size, facts.eos_token_ids)
            self._compiler = GrammarCompiler(vocabulary, self._metrics.mask_seconds.observe)
        state = self._compiler.state(request.sampling.grammar, [sampled.token for sampled in request.emitted])
        self._metrics.compile_seconds.observe(time.perf_counter() - began_s)
        return state
