"""Grammars as a branch of a decode worker. Threads compile them, so that no step and no other request waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as ListOf
from concurrent.futures import Future, ThreadPoolExecutor

from prometheus_client import CollectorRegistry, Counter, Histogram

from twostroke.base.errors import InvalidRequest, Overloaded, ServeError
from twostroke.base.token_mask import mask_of, narrowed
from twostroke.engine.backends.facts import LoadedModel
from twostroke.grammar.advance import ThreadedAdvancer, be_nice
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.request import Attempt, GenerateRequest, Grammar, SamplingParams
from twostroke.rpc.server import RpcServer
from twostroke.scheduler.constraints.grammar_run import GrammarRun
from twostroke.scheduler.sequence import Sequence
from twostroke.worker.answers import AnswerFeature
from twostroke.worker.branches import Branch, BranchHost

LONGEST_COMPILE_S = 8.0
"""Most seconds until a grammar is compiled, those before it included: less than routers wait for `Open`. A router has
compiled the same grammar within two seconds of processor time."""
MASK_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
COMPILE_BUCKETS_S = (1e-4, 1e-3, 1e-2, 1e-1, 5e-1, 1.0, 2.0, 5.0)
THREADS = 2
"""Grammars that are compiled at a time: one that takes long does not hold up the next. Steps need the other cores."""


class GrammarMetrics:
    """Metrics of answers that have to match a grammar."""

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"twostroke_grammar_{name}", text, ("role",), registry=registry).labels(role)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"twostroke_grammar_{name}"
            return Histogram(name, text, ("role",), buckets=buckets, registry=registry).labels(role)

        self.compile_seconds = histogram(
            "compile_seconds",
            "Time to compile a grammar, and to replay an answer in it.",
            COMPILE_BUCKETS_S,
        )
        self.mask_seconds = histogram("mask_seconds", "Time to find which tokens may come next.", MASK_BUCKETS_S)
        self.tokens = counter("tokens_total", "Tokens of answers that have a grammar.")
        self.forced_tokens = counter("forced_tokens_total", "Those of them that took no step of their own.")


class GrammarAnswer(AnswerFeature):
    """An answer that has to match a grammar."""

    def __init__(self, state: GrammarState, params: SamplingParams, block_size: int, metrics: GrammarMetrics) -> None:
        self.state = state
        self.reader = run = GrammarRun(state, params, block_size)
        self.constraints = (run,)
        self.forced_run = state.forced_run if params.draws_forced else None
        self._metrics = metrics

    def why_unsampled(self, request: GenerateRequest) -> ServeError | None:
        if self.state.failure is not None:
            return InvalidRequest(self.state.failure, field="grammar")
        if allows_none(self.state, request.sampling):
            return InvalidRequest("allowed_token_ids has no token that the grammar permits", field="allowed_token_ids")
        return None

    def ended(self, sequence: Sequence, *, is_whole: bool) -> None:
        """Counts the tokens of the answer."""
        self._metrics.tokens.inc(self.state.tokens)
        self._metrics.forced_tokens.inc(self.state.forced_tokens)


class CompiledAnswers:
    """Compiles the grammars of answers, on threads."""

    field = "grammar"
    is_default = False

    def __init__(self, facts: LoadedModel, metrics: GrammarMetrics) -> None:
        self._facts = facts
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars", initializer=be_nice)
        self._compiler: Future[GrammarCompiler] | None = None

    def begin(self) -> None:
        """Reads the vocabulary before the first request, because that may hold Python's lock for some seconds."""
        if self._facts.model_dir:
            self._compiler = self._new_compiler()

    async def feature_of(self, attempt: Attempt, others: ListOf[AnswerFeature]) -> GrammarAnswer:
        """Returns the feature in the state after the tokens that the attempt has already.

        Raises InvalidRequest for a grammar that cannot be compiled, and for tokens that it does not permit; Overloaded
        where too many others come first.
        """
        grammar, params = attempt.request.sampling.grammar, attempt.request.sampling
        assert grammar is not None
        tokens = [sampled.token for sampled in attempt.emitted]
        if self._compiler is None:
            self._compiler = self._new_compiler()
        compiling = asyncio.get_running_loop().run_in_executor(
            self._threads, self._compiled, self._compiler, grammar, tokens
        )
        try:
            state = await asyncio.wait_for(compiling, LONGEST_COMPILE_S)
        except TimeoutError as error:
            raise Overloaded(f"the grammar was not compiled within {LONGEST_COMPILE_S:g} s; try again") from error
        return GrammarAnswer(state, params, self._facts.block_size, self._metrics)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new_compiler(self) -> Future[GrammarCompiler]:
        return self._threads.submit(_compiler_of, self._facts, self._metrics)

    def _compiled(self, compiler: Future[GrammarCompiler], grammar: Grammar, tokens: ListOf[int]) -> GrammarState:
        began_s = time.perf_counter()
        state = compiler.result().state(grammar, tokens)
        self._metrics.compile_seconds.observe(time.perf_counter() - began_s)
        return state


class Grammars(Branch):
    def __init__(self, host: BranchHost) -> None:
        super().__init__(host)
        self.readings = self._advancer = ThreadedAdvancer(host.wake)
        metrics = GrammarMetrics(host.metrics.registry, host.config.role.value)
        self.answers = self._answers = CompiledAnswers(host.facts, metrics)

    def serve(self, rpc: RpcServer, tasks: asyncio.TaskGroup) -> None:
        """Reads the vocabulary now, because the costs of steps have been measured."""
        self._answers.begin()

    def stop(self) -> None:
        self._answers.close()
        self._advancer.close()


def allows_none(state: GrammarState, params: SamplingParams) -> bool:
    """Returns whether a request allows none of the tokens with which its answer's grammar may continue."""
    return not narrowed(state.mask, mask_of(params.allowed_tokens), ()).any()


def _compiler_of(facts: LoadedModel, metrics: GrammarMetrics) -> GrammarCompiler:
    vocabulary = load_vocabulary(facts.model_dir, facts.vocab_size, facts.eos_token_ids, facts.fingerprint)
    return GrammarCompiler(vocabulary, metrics.mask_seconds.observe)
