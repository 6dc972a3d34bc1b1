"""The engine check decides whether an engine that failed a step can be trusted with the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from twostroke.base.errors import EngineLost
from twostroke.engine.loop import EngineThread
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow

PROBE_TOKENS = 4
PROBE_TIMEOUT_S = 10.0
"""Time limit of a probe, the smallest step there is."""
MOST_FAILED_STEPS = 5
"""Failed steps within FAILED_WITHIN_S after which the epoch ends even if probes succeed: a restart costs less."""
FAILED_WITHIN_S = 60.0
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


class EngineCheck:
    """Runs a probe before the worker serves, and again after a failed step: its token must be the same.

    The probe reads and writes only the scratch page.
    """

    def __init__(self, engine: EngineThread, probe: Batch, now_s: Callable[[], float]) -> None:
        self._engine = engine
        self._probe = probe
        self._now_s = now_s
        self._expected: list[int] | None = None
        self._failed_at_s: deque[float] = deque(maxlen=MOST_FAILED_STEPS)
        self._most_tokens = 0
        """Tokens of the largest step that succeeded since sequences were last blamed for a failure."""

    async def learn(self) -> None:
        """Runs the probe for the first time and keeps its tokens. If the engine raises, the worker does not serve."""
        self._expected = await self._run()

    async def examine(self, error: Exception) -> None:
        """Returns if the engine still works after a step raised `error`; raises EngineLost if not."""
        if isinstance(error, EngineLost):
            raise error
        cause = f"a step failed with {type(error).__name__}: {error}"
        now_s = self._now_s()
        is_frequent = len(self._failed_at_s) == MOST_FAILED_STEPS and now_s - self._failed_at_s[0] < FAILED_WITHIN_S
        self._failed_at_s.append(now_s)
        if is_frequent:
            raise EngineLost(f"more than {MOST_FAILED_STEPS} steps failed within {FAILED_WITHIN_S:g} s; {cause}")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                tokens = await self._run()
        except Exception as failure:
            raise EngineLost(f"the engine fails a probe with {type(failure).__name__}: {failure}; {cause}") from error
        if tokens != self._expected:
            raise EngineLost(f"the engine computes {tokens} in a probe, {self._expected} before; {cause}") from error

    def computed(self, tokens: int) -> None:
        """Notes that a step succeeded."""
        self._most_tokens = max(self._most_tokens, tokens)

    def blame(self, tokens: int) -> None:
        """Attributes the last failure to sequences of this many tokens.

        It does not count against an engine that has computed as many for others meanwhile. Otherwise one client
        could end every worker.
        """
        if self._most_tokens >= tokens:
            self._failed_at_s.pop()
        self._most_tokens = 0

    async def _run(self) -> list[int]:
        result = await self._engine.start(self._probe)
        return [sampled.token if sampled.is_sound else -1 for sampled in result.tokens]


def probe_batch(block_size: int, scratch_page: int, max_model_len: int, *, samples: bool) -> Batch:
    """Returns a step of a few prompt tokens on the scratch page."""
    count = min(PROBE_TOKENS, block_size, max_model_len)
    positions = np.arange(count, dtype=np.int32)
    return Batch(
        tokens=np.zeros(count, np.int32),
        positions=positions,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.full((1, 1), scratch_page, np.int32),
        write_slots=scratch_page * block_size + positions.astype(np.int64),
        samples=(SampleRow(0, GREEDY, count),) if samples else (),
    )
