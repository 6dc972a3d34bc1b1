"""Advances grammars by sampled tokens and computes their next masks, so that a slow one delays no other answer.

A mask takes some tens of microseconds, but a tenth of a second for a grammar that was made to be slow.
`twostroke.grammar.compiler.LIMITS` bounds the work for a mask, but how long it takes is only known afterwards. So the
work is done on threads: llguidance releases the GIL meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from twostroke.grammar.state import GrammarState
from twostroke.observability.bug_log import log_bug
from twostroke.request import SampledToken, equal_tokens, plain_token

log = logging.getLogger(__name__)

WAIT_S = 0.004
"""Longest wait for all grammars of a step, in seconds: 16 usual ones take an eighth of it. An answer whose grammar
takes longer misses a step."""
QUICK_THREADS = 4
"""Threads for grammars that were quick so far. If one of these grammars turns out to be slow, the other threads serve
the next steps."""
SLOW_THREADS = 1
"""Threads for grammars that are slow. However many there are, they take at most one core."""
SLOW_NICE = 10
"""Niceness of threads with possibly slow work: the engine's threads need the cores."""


@dataclass(slots=True, eq=False)
class Advance:
    """Sampled tokens by which a grammar state advances, and the tokens that are forced after them."""

    state: GrammarState
    drawn: Sequence[SampledToken]
    """The token after the last known one, and that after each of `proposed`."""
    proposed: Sequence[int]
    most_tokens: int
    """Tokens that the answer may still get, at least one."""
    takes_forced: bool
    """Whether forced tokens become known without being drawn. If not, each is drawn, in a step of its own or after
    proposed ones."""
    ends: Collection[int]
    """Tokens that end the answer."""
    tokens: list[SampledToken] = field(default_factory=list)
    """Tokens that become known: drawn ones, as long as the proposed ones before them are right, and forced ones."""
    failed: SampledToken | None = None
    """The token, if any, at which the answer has failed."""
    is_done: bool = False
    """Whether the state belongs to its sequence again. Nothing else may be read before."""

    @property
    def is_slow(self) -> bool:
        return self.state.is_slow

    @property
    def latest_s(self) -> float:
        return self.state.latest_s

    def run(self) -> None:
        """Advances the state and computes its mask, on any thread. It never raises, but sets the state's `failure`."""
        began_s = time.thread_time()
        try:
            self._run()
        except Exception as error:
            log_bug(log, "a grammar failed", error=error)
            self.state.failure = f"the answer's grammar failed: {type(error).__name__}"
        if self.state.failure is not None and self.failed is None:
            self.failed = self.drawn[0]
        self.state.note_advance(time.thread_time() - began_s)
        self.is_done = True

    def _run(self) -> None:
        known: list[int] = []
        while len(known) < len(self.drawn) and equal_tokens(known, self.proposed) == len(known):
            token = self.drawn[len(known)]
            if not token.is_sound:
                self.failed = token
                break  # the next mask shows whether the grammar is the cause
            if not self._take(token):
                return
            known = [each.token for each in self.tokens]
        self.state.compute_mask()

    def _take(self, token: SampledToken) -> bool:
        """Advances by a token and those forced after it. Returns False where the answer ends or fails with them."""
        state = self.state
        while True:
            if token.token in self.ends:
                state.end(token.token)
                if state.failure is None:
                    self.tokens.append(token)
                return False
            self.tokens.append(token)
            if len(self.tokens) == self.most_tokens:
                return False
            state.consume(token.token)
            if state.failure is not None:
                return False
            forced = state.take_forced() if self.takes_forced else None
            if forced is None:
                return True
            token = plain_token(forced)


class GrammarWork(Protocol):
    """Work for a thread of an advancer: an `Advance`, or another object with the same methods."""

    @property
    def is_slow(self) -> bool: ...

    @property
    def latest_s(self) -> float:
        """Processor time of the previous work for the same grammar, in seconds."""

    def run(self) -> None: ...


class ThreadedAdvancer:
    """Runs grammar work on its own threads. It belongs to one event loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the event loop when work ends that `run` did not wait for."""
        self._wake = wake
        self._quick = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="slow-masks", initializer=be_nice)

    def run(self, advances: Sequence[GrammarWork]) -> None:
        """Starts all advances, and waits for them, but no longer than WAIT_S.

        It does not wait for slow grammars that took WAIT_S or more the last time.
        """
        quick = [each for each in advances if not each.is_slow]
        slow = [each for each in advances if each.is_slow]
        futures = {self._slow.submit(each.run): each.latest_s < WAIT_S for each in slow}
        if quick:
            futures[self._quick.submit(_run_all, quick)] = True
        concurrent.futures.wait([future for future, is_awaited in futures.items() if is_awaited], WAIT_S)
        for future in futures:
            if not future.done():
                future.add_done_callback(partial(self._tell, asyncio.get_running_loop()))

    def close(self) -> None:
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)

    def _tell(self, loop: asyncio.AbstractEventLoop, _: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._wake)


def be_nice() -> None:
    """Lowers the priority of the calling thread, so that other threads of this process run first (Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICE)


def _run_all(advances: Sequence[GrammarWork]) -> None:
    for advance in advances:
        advance.run()
