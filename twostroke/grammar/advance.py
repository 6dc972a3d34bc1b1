"""Advances grammars by sampled tokens and computes their next masks, so that a slow one delays no other answer.

A mask takes some tens of microseconds; that of a grammar that was made to be slow takes a tenth of a second. Only how
much work it may be has a limit (`twostroke.grammar.compiler.LIMITS`), and it is known when the mask is there. So the
work is done on threads: llguidance gives Python's lock away meanwhile.
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
"""Longest wait for all grammars of a step: 16 usual ones take an eighth. An answer that is later misses a step."""
QUICK_THREADS = 4
"""Threads for grammars that were quick so far. One of them may turn out to be slow: the others serve the next steps."""
SLOW_THREADS = 1
"""A core at most for grammars that are slow, however many there are."""
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
    """False: each token is drawn, in a step of its own or after proposed ones."""
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
        """Runs on any thread; it never raises, and sets the state's `failure` instead."""
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
                break  # the mask tells whether the grammar is why
            if not self._take(token):
                return
            known = [each.token for each in self.tokens]
        self.state.compute_mask()

    def _take(self, token: SampledToken) -> bool:
        """Goes on by a token and those forced after it. Returns False where the answer ends or fails with them."""
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
    """What runs on a thread of an advancer: an `Advance`, or what looks like one."""

    @property
    def is_slow(self) -> bool: ...

    @property
    def latest_s(self) -> float:
        """Processor time of the work of the same grammar before."""

    def run(self) -> None: ...


class ThreadedAdvancer:
    """Runs on threads of its own; belongs to one event loop."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the event loop when something is done later."""
        self._wake = wake
        self._quick = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="slow-masks", initializer=be_nice)

    def run(self, advances: Sequence[GrammarWork]) -> None:
        """Begins all of them. It returns when they are done, or after a moment: then some are done later."""
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
    """Lets other threads of this process go before the one that calls (Linux)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICE)


def _run_all(advances: Sequence[GrammarWork]) -> None:
    for advance in advances:
        advance.run()
