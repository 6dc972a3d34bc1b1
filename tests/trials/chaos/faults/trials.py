"""Which faults are tried, and in which order. Pure."""

from __future__ import annotations

import fnmatch
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.trials.chaos.injection.plan import Kind
from tests.trials.chaos.injection.points import Process, cells
from twostroke.base.fault_points import Point

HEAD = "head"
"""Ray's: not a process of ours, so it has no points; it is broken while streams run."""
ANYWHERE = "streams open"
HEAD_KINDS = (Kind.KILL, Kind.STOP)

SECONDS = {Kind.STOP: 10.0, Kind.PARTITION: 5.0, Kind.SLOW: 2.0}
"""How long a fault lasts that ends by itself."""
QUICK_SECONDS = {Kind.STOP: 2.7, Kind.PARTITION: 2.7, Kind.SLOW: 1.0}
"""Long enough to be declared dead, and to come back."""

WAKING: dict[str, tuple[Kind, ...]] = {Process.DECODE: (Kind.STOP, Kind.PARTITION), Process.ROUTER: (Kind.STOP,)}

OFTEN = frozenset(
    {
        Point.ROUTER_TOKEN,
        Point.ROUTER_EVENTS,
        Point.DECODE_SAMPLED,
        Point.DECODE_SENDING,
        Point.WORKER_STEP,
        Point.WORKER_COMPUTED,
    }
)
"""Points that every stream comes to many times."""
MOST_OFTEN, MOST_SELDOM = 40, 2
"""How many times a point is reached before its fault happens, at most."""
MOST_STEPS_OF_PREFILL = 6
"""Most steps of prefill before its fault: prompts that are not cached take few, and decode workers compute some."""

ON_THEIR_OWN = frozenset({Point.WORKER_EVENTS, Point.ROUTER_EVENTS, Point.ROUTER_VIEW})
"""Points that are reached without any request: armed only when streams are open."""
SELDOM = frozenset(
    {
        Point.WORKER_DRAINING,
        Point.ROUTER_ATTACHING,
        Point.DECODE_ATTACHING,
        Point.TRANSPORT_CONNECTING,
        Point.TRANSPORT_GREETED,
        Point.TIER_WRITING,
        Point.TIER_WRITTEN,
        Point.TIER_LOADING,
        Point.TIER_LOADED,
        Point.ROUTER_PINNING,
        Point.PIN_PUTTING,
        Point.PIN_BUILDING,
        Point.PIN_BUILT,
    }
)
"""Points to which one stream of a wave may come, or one connection in an epoch: a second time may never come."""
_AS_READER = frozenset({Point.TRANSPORT_CONNECTING, Point.TRANSPORT_ASKING})

QUICK = (
    "decode/decode.sampled/kill",
    "decode/pull.announced/stop",
    "prefill/pages.announcing/kill",
    "prefill/transport.serving/corrupt",
    "router/router.token/kill",
    "router/router.opened/partition",
)
"""Each kind of process that serves, and each sort of fault."""


@dataclass(frozen=True, slots=True)
class Trial:
    process: str
    point: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.process}/{self.point}/{self.kind}"

    @property
    def is_of_peers(self) -> bool:
        """It takes a decode worker that others read from, or a prefill worker that reads."""
        word = self.point.partition(".")[0]
        reads = word == "pull" or self.point in _AS_READER
        serves = word == "pages" or (word == "transport" and not reads)
        return reads if self.process == Process.PREFILL else serves and self.process == Process.DECODE

    @property
    def wakes_up(self) -> bool:
        """Streams of its go on elsewhere before it knows: it may speak of them once more."""
        return self.kind in WAKING.get(self.process, ())

    def count(self, draws: random.Random) -> int:
        if self.is_of_peers or self.process == Process.SUPERVISOR or self.point in SELDOM:
            return 1
        if self.process == Process.PREFILL and self.point in OFTEN:
            return draws.randint(1, MOST_STEPS_OF_PREFILL)
        return draws.randint(1, MOST_OFTEN if self.point in OFTEN else MOST_SELDOM)


def trials(transport: str, seed: int, only: Sequence[str], ranks: int = 1) -> list[Trial]:
    """Those that a pattern of `only` names (all, where there is none); kinds of processes in turns."""
    everything = [Trial(cell.process.value, cell.point.value, cell.kind) for cell in cells(transport, ranks)]
    everything += [Trial(HEAD, ANYWHERE, kind) for kind in HEAD_KINDS if ranks == 1]
    wanted = [trial for trial in everything if not only or any(fnmatch.fnmatch(str(trial), each) for each in only)]
    return in_turns(wanted, random.Random(seed))


def drawn(wanted: Sequence[Trial], count: int, draws: random.Random) -> list[Trial]:
    """Draws so many that every kind has been at every point before any comes there again, in another kind of process.

    Of what is equal in that, points and processes that were seldom drawn come first.
    """
    left = draws.sample(wanted, len(wanted))
    seen = Counter[object]()

    def often(trial: Trial) -> tuple[int, ...]:
        return seen[trial.point, trial.kind], seen[trial.process, trial.point], seen[trial.process], seen[trial.kind]

    chosen: list[Trial] = []
    for _ in range(min(count, len(left))):
        trial = min(left, key=often)
        left.remove(trial)
        chosen.append(trial)
        parts = ((trial.point, trial.kind), (trial.process, trial.point), trial.process, trial.kind)
        seen.update(parts)
    return chosen


def in_turns(wanted: Iterable[Trial], draws: random.Random) -> list[Trial]:
    """Shuffled, and spread so that a process has time to grow old before its kind is broken again."""
    by_process: dict[str, list[Trial]] = {}
    for trial in wanted:
        by_process.setdefault(trial.process, []).append(trial)
    due: list[tuple[float, str, Trial]] = []
    for process, its in by_process.items():
        draws.shuffle(its)
        due += [((at + 0.5) / len(its), process, trial) for at, trial in enumerate(its)]
    return [trial for _, _, trial in sorted(due, key=lambda entry: entry[:2])]


PROCESSES = (*(process.value for process in Process), HEAD)
