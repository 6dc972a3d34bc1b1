"""What a request log says about a pool: lengths of requests, and hit rates by capacity."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tools.bill.options import RequestFlags
from tools.bill.requests.capacity import LruHits, Optimum, capacities, distinct_blocks, least_recently_used
from tools.bill.requests.chains import Answers, RequestChains, chains_of
from tools.simulate.traces.formats import TraceRow, lines_of
from tools.simulate.traces.trace import Trace, parse_trace
from twostroke.base.errors import ConfigError
from twostroke.kv_cache.pool_size import LengthSpread

CURVE_POINTS: Final = 40


@dataclass(frozen=True, slots=True)
class HitPoint:
    """Shares of prompt tokens that are found with room for this many tokens."""

    capacity_tokens: int
    lru: float
    optimum: float


@dataclass(frozen=True, slots=True)
class LogBill:
    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    lengths: tuple[int, ...]
    """Prompt and answer together, ascending."""
    curve: tuple[HitPoint, ...]
    most: float
    """Hit rate of a pool that never evicts."""
    distinct_tokens: int
    """Tokens of all blocks that ever were in the pool: with so much room nothing is evicted."""
    measured: float | None
    """Share of prompt tokens that were cached, as the log says."""
    _requests: RequestChains
    _lru: LruHits
    _optimum: Optimum

    def at(self, capacity_tokens: int) -> HitPoint:
        """Returns the hit rates with room for this many tokens."""
        blocks = capacity_tokens // self._requests.block_tokens
        return HitPoint(capacity_tokens, self._rate(self._lru.at(blocks)), self._rate(self._optimum.hits(blocks)))

    def spread(self, block_size: int) -> LengthSpread:
        """Returns the pages that its requests hold at their ends."""
        pages = [-(-length // block_size) for length in self.lengths]
        return LengthSpread(statistics.fmean(pages), statistics.pstdev(pages))

    def percentile(self, percent: int) -> int:
        return self.lengths[math.ceil(percent / 100 * len(self.lengths)) - 1]

    def _rate(self, hit_blocks: int) -> float:
        return hit_blocks * self._requests.block_tokens / self.prompt_tokens


def read_log(flags: RequestFlags, block_size: int) -> LogBill | None:
    """Raises ConfigError naming the line that cannot be read; None where no log is asked for."""
    if flags.file is None:
        return None
    lines = lines_of(flags.file, flags.file_flag)
    return log_bill(parse_trace(lines, str(flags.file), flags.limit), Answers(flags.answers), block_size)


def log_bill(trace: Trace, answers: Answers, block_size: int) -> LogBill:
    """Raises ConfigError where the log's blocks are not a whole number of the pool's."""
    if trace.block_tokens % block_size:
        raise ConfigError(
            f"{trace.name}: its blocks have {trace.block_tokens} tokens, which is not a multiple of --block-size "
            f"{block_size}",
            field="block_size",
        )
    requests = chains_of(trace, answers)
    lru, optimum = least_recently_used(requests), Optimum(requests)
    bill = LogBill(
        name=trace.name,
        requests=len(trace.rows),
        prompt_tokens=requests.prompt_tokens,
        output_tokens=sum(row.output_tokens for row in trace.rows),
        lengths=tuple(sorted(row.input_tokens + row.output_tokens for row in trace.rows)),
        curve=(),
        most=lru.most * trace.block_tokens / requests.prompt_tokens,
        distinct_tokens=distinct_blocks(requests.chains) * trace.block_tokens,
        measured=_measured(trace.rows),
        _requests=requests,
        _lru=lru,
        _optimum=optimum,
    )
    points = capacities(requests, CURVE_POINTS)
    return dataclasses.replace(bill, curve=tuple(bill.at(blocks * trace.block_tokens) for blocks in points))


def _measured(rows: Sequence[TraceRow]) -> float | None:
    with_counts = [row for row in rows if row.cached_tokens is not None]
    if not with_counts:
        return None
    return sum(row.cached_tokens or 0 for row in with_counts) / sum(row.input_tokens for row in with_counts)
