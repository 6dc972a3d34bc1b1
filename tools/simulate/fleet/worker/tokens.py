"""Tokens of simulated answers: when each was emitted, and how the routers hear of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from decode_worker.output_stream import OutputStream
from decode_worker.request_state import RequestState
from tools.simulate.fleet.results import Gaps
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.steps import Flight, further_tokens
from twostroke.base.ids import RequestId
from twostroke.request import FinishReason


class HeardTokens(NamedTuple):
    """What a router needs of a message about the tokens of a request."""

    request_id: RequestId
    attempt: int
    cached_tokens: int
    finish: FinishReason | None
    """How the answer ended; None where more tokens follow."""


Hear = Callable[[HeardTokens], None]


class TokenTimes:
    """Counts the tokens of one decode worker's steps, each at the end of its step."""

    def __init__(self, requests: Mapping[RequestId, SimulatedRequest], gaps: Counter[int]) -> None:
        self._requests = requests
        self._gaps = gaps
        """Gaps between tokens of the whole run (tools.simulate.fleet.results.Gaps)."""

    def has_first(self, flight: Flight) -> bool:
        """Returns whether some attempt has its first token in these steps."""
        requests = self._requests
        return any(chunk.samples and not requests[chunk.sequence.request_id].has_begun for chunk in flight.step.chunks)

    def count(self, flight: Flight) -> None:
        first_s, last_s = flight.begun_s + flight.after(1), flight.end_s
        for chunk in flight.step.chunks:
            request = self._requests.get(chunk.sequence.request_id)
            if request is None or chunk.sequence.ended or not chunk.samples:
                continue
            kept = further_tokens(chunk)
            request.emitted += flight.steps + kept
            if kept:
                self._gaps[Gaps.bucket_of(0.0)] += kept  # they come with the token before them
            if request.last_token_s is not None:
                self._note_gap(request, first_s - request.last_token_s)
            request.last_token_s = last_s
            request.has_begun = True
            if request.first_token_s is None:
                request.first_token_s = last_s
            if flight.steps > 1:
                request.longest_gap_s = max(
                    request.longest_gap_s, last_s - flight.begun_s - flight.after(flight.steps - 1)
                )
        self._note_steps(flight)

    def _note_gap(self, request: SimulatedRequest, gap_s: float) -> None:
        request.longest_gap_s = max(request.longest_gap_s, gap_s)
        self._gaps[Gaps.bucket_of(gap_s)] += 1

    def _note_steps(self, flight: Flight) -> None:
        """Notes the gaps between the tokens of all steps but the first. They are as long as those steps."""
        streams, steps = flight.terms.streams, flight.steps
        if steps < 2:
            return
        shortest, longest = (Gaps.bucket_of(flight.after(step) - flight.after(step - 1)) for step in (2, steps))
        if shortest == longest and not flight.noisy:
            self._gaps[shortest] += streams * (steps - 1)
            return
        for step in range(2, steps + 1):
            self._gaps[Gaps.bucket_of(flight.after(step) - flight.after(step - 1))] += streams


class SimulatedStream(OutputStream):
    """A router's token stream without messages: the router hears of first tokens and of ends.

    It hears of all that a step has told at once, as from a message of the live stream, and of nothing between.
    """

    _hear: Hear | None = None
    _is_due = False
    """Whether the router is about to hear of something."""

    def connect(self, hear: Hear) -> None:
        """Lets a router hear from now on."""
        self._begin_stream()
        self._hear = hear
        self._tell_soon()

    def disconnect(self) -> None:
        self._hear = self._stream = None
        self._park()

    def notify(self, *states: RequestState) -> None:
        super().notify(*states)
        if self._updated and not self._is_due:
            self._tell_soon()

    def _tell_soon(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        if self._hear is None:
            return
        updated, self._updated = self._updated, {}
        for state in updated:
            sent = self._sent[state]
            if not sent.number or state.has_ended:
                sent.number = 1
                assert state.error is None, state.error
                attempt = state.attempt
                self._hear(HeardTokens(attempt.request_id, attempt.number, state.cached_tokens, state.finish))
