"""Small simulated fleets for tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from router.routing.policies import RECONSIDERING, policy_named
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.fleet.simulation import simulate
from tools.simulate.traces.formats import TraceRow
from tools.simulate.traces.trace import Trace
from twostroke.scheduler.cost import StepCost

BLOCK = 16
COST = StepCost(
    step_s=0.01,
    stream_s=0.001,
    context_token_s=1e-6,
    prompt_token_s=1e-3,
    prompt_step_s=0.002,
    prompt_pair_s=1e-7,
)
SMALL = FleetShape(
    prefill=2,
    decode=2,
    block_size=BLOCK,
    prefill_pages=400,
    decode_pages=200,
    page_bytes=1000,
    link_bytes_per_s=1e6,
    cost=COST,
    step_tokens=64,
    max_num_seqs=32,
)


ALONE = dataclasses.replace(SMALL, prefill=0, decode=1)


def row(at_s: float, tokens: int, answer: int, chat: int, shared: int = 0) -> TraceRow:
    """A prompt whose first `shared` blocks are those of all others, the rest those of its chat."""
    blocks = [number if number < shared else 1000 * (chat + 1) + number for number in range(-(-tokens // BLOCK))]
    return TraceRow(at_s, tokens, answer, tuple(blocks))


def trace(rows: Sequence[TraceRow]) -> Trace:
    return Trace("test", BLOCK, tuple(sorted(rows, key=lambda each: each.timestamp_s)))


def chats(count: int = 120, seed: int = 0, every_s: float = 0.12) -> Trace:
    """Chats that grow from turn to turn; no prompt ends with a block."""
    draws = random.Random(seed)
    lengths = [0] * 12
    rows = []
    for number in range(count):
        chat = draws.randrange(len(lengths))
        lengths[chat] = (lengths[chat] + draws.randrange(10, 120)) % 700
        tokens = lengths[chat] + (1 if lengths[chat] % BLOCK == 0 else 0)
        rows.append(row(number * every_s + 0.05 * draws.random(), tokens, draws.randrange(1, 40), chat, shared=2))
    return trace(rows)


def run(of: Trace, shape: FleetShape = SMALL, setup: RoutingSetup | str = "kv") -> SimulatedRun:
    """Policies that may be asked again hold what their workers have no time for."""
    if isinstance(setup, str):
        name = setup
        setup = RoutingSetup(name, lambda: policy_named(name), holds=name in RECONSIDERING)
    return simulate(of, shape, setup)
