"""One fault after the other in a cluster under load, and what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.trials.chaos.faults import head, pins
from tests.trials.chaos.faults.answer import Transcript, difference, longest_wait_s
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.fetches import prefill_workers_fetch
from tests.trials.chaos.faults.leak_check import drafts, leaks_within, refusals
from tests.trials.chaos.faults.load import Ask, Load, asks, crowd, family, flood, long_ones
from tests.trials.chaos.faults.outcome import Drafts, Outcome
from tests.trials.chaos.faults.testbed import Bed, Happened, Target
from tests.trials.chaos.faults.trials import HEAD, ON_THEIR_OWN, Trial
from tests.trials.chaos.faults.triggers import (
    CROWDED,
    ON_NEW_CONNECTIONS,
    TRIGGERS,
    WRITING,
    Trigger,
    peer_leaves,
    worker_dies,
)
from tests.trials.chaos.faults.zombies import LongStreams, met
from tests.trials.chaos.injection.injector import HIT
from tests.trials.chaos.injection.plan import Fault, Kind
from tests.trials.chaos.injection.points import OF_RANKS, SPOILING, Process
from twostroke.base.errors import ConfigError, ServeError
from twostroke.base.fault_points import Point

WAVES_TO_REACH = 30
"""Waves of requests after which a point counts as not reached."""
WAVES_OF_ONE = 2
"""In which one process is armed; then all of its kind are."""
WHOLE_S = 40.0
"""For all to serve again."""
REST_S = 20.0
"""For all to be given back: more than a worker keeps answers for a router that may come again."""
HEADLESS_S = 2.0
"""Without Ray's head, under load."""
MID_WAVE_S = 0.4
"""After a wave has begun: streams are open."""
CROWD = 8
"""More than all pools hold, but not so many that those who are left have a long queue."""
FAMILY = 15
FLOOD = 10
"""Prompts beside all other streams: decode workers that have little to do would compute them themselves."""
LONG = 3
"""Streams that are there when something freezes: one for each decode worker."""
INDEXED_S = 0.3
"""For routers to learn what the first of a family has left in a cache."""


ENDING = frozenset({Kind.KILL, *OF_RANKS})
"""Faults with which a process ends."""


class FaultRun:
    """In one cluster. `prepare` first."""

    def __init__(self, bed: Bed, clients: Clients, load: Load, seconds: Mapping[Kind, float]) -> None:
        """`seconds`: how long faults last that end by themselves."""
        seed, tokens, prompt_letters = load.seed, load.tokens, load.prompt_letters
        self._seconds = seconds
        self._bed = bed
        self._clients = clients
        self._draws = random.Random(f"play {seed}")
        self._asks = asks(seed, tokens=tokens, prompt_letters=prompt_letters)
        self._crowd = crowd(seed, CROWD, tokens=3 * tokens)
        self._long = long_ones(seed, LONG, tokens=load.long_tokens)
        self._family = family(seed, FAMILY, tokens=tokens // 2, prompt_letters=prompt_letters)
        self._flood = flood(seed, FLOOD, prompt_letters=prompt_letters)
        self._expected: dict[str, Transcript] = {}
        self._broken_s: dict[str, float] = {}
        """When each process was broken last."""
        self._waves = 0
        self._journal_lines = 0
        """Before this trial."""
        self._met: int | None = None
        self._heads: list[asyncio.subprocess.Process] = []

    async def prepare(self, known: dict[str, Transcript]) -> dict[str, Transcript]:
        """What every stream is without faults; `known`: as an earlier cluster answered. Raises ConfigError."""
        missing = await self._bed.whole_within(WHOLE_S)
        if missing is not None:
            raise ConfigError(f"the cluster is not whole before anything was broken: {missing}")
        plain = [ask.staying() for ask in [*self._asks, *self._crowd, *self._family, *self._flood, *self._long]]
        first = await self._ask(plain)
        texts = {transcript.name: transcript.choices[0].text for transcript in first if transcript.choices}
        self._asks = [ask.stopping_within(texts[ask.name]) if ask.stops_early else ask for ask in self._asks]
        again = await self._ask([ask.staying() for ask in self._asks])
        now = {transcript.name: transcript for transcript in [*first, *again]}
        for name, transcript in now.items():
            wrong = transcript.failure or difference(known.get(name, transcript), transcript)
            if wrong is not None:
                raise ConfigError(f"without faults, answers are not what they were: {wrong}")
        self._expected = known | now
        return self._expected

    async def close(self) -> None:
        for process in self._heads:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def undisturbed(self, seconds: float) -> tuple[int, list[str]]:
        """Waves of requests while nothing is broken: how many there were, and what was wrong with them."""
        until_s, got = time.monotonic() + seconds, list[Transcript]()
        while time.monotonic() < until_s:
            got += await self._ask(self._asks)
        return len(got), self._wrong(got)

    async def one(self, trial: Trial, *, transports: str, model: str) -> Outcome:
        """A cluster that cannot even be broken any more is a miss, too."""
        try:
            return await self._play(trial, transports, model)
        except ServeError as error:
            return Outcome.lost(trial, transports, model, f"{type(error).__name__}: {error}")

    async def _play(self, trial: Trial, transports: str, model: str) -> Outcome:
        if trial.process == Process.ROUTER:
            await self._compile_grammars()
        began_s = time.time()
        before, epochs = await refusals(self._bed), await self._bed.epochs()
        drafts_before = await drafts(self._bed)
        self._journal_lines, self._met = len(self._bed.journal()), None
        if trial.process == HEAD:
            broken, happened, got = await self._break_head(trial)
        elif trial.wakes_up or (self._bed.served.has_draft_model and trial.process == Process.DECODE):
            async with LongStreams(self._clients, self._long).lasting() as long:
                broken, happened, got = await self._break(trial, epochs, long)
        else:
            broken, happened, got = await self._break(trial, epochs)
        missing = await self._bed.whole_within(WHOLE_S) or await pins.agreed_within(self._bed, WHOLE_S)
        left = await leaks_within(self._bed, REST_S)
        recovery_s, slowest = _slowest(got, happened)
        return Outcome(
            trial=trial,
            transports=transports,
            model=model,
            broken=broken,
            fault="" if happened is None else happened.fault,
            has_happened=happened is not None,
            streams=len(got),
            wrong=(*self._wrong(got), *(_left_in_silence(got, happened) if trial.process == Process.ROUTER else ())),
            left=left,
            missing=missing,
            recovery_s=recovery_s,
            slowest=slowest,
            resumed=sum(bool(each.turns) for each in got),
            met=self._met if trial.wakes_up else None,
            refused=await self._refused_since(before),
            drafts=await self._drafts_since(drafts_before),
            draft_age_s=None if happened is None else happened.draft_age_s,
            took_s=time.time() - began_s,
        )

    async def _compile_grammars(self) -> None:
        """Asks each router for one token under each grammar.

        To compile, a router starts a process with the first grammar that it gets. Under load that takes longer than the
        clients of this run may be patient, and one that has replaced a dead router is not silent for being broken.
        """
        short = [replace(ask, max_tokens=1) for ask in self._asks if ask.has_grammar]
        routers = range(len(self._clients.routers))
        await asyncio.gather(*(self._clients.follow(ask, router) for router in routers for ask in short))

    def _wrong(self, got: Sequence[Transcript]) -> list[str]:
        return [wrong for each in got if (wrong := difference(self._expected[each.name], each)) is not None]

    async def _break(
        self, trial: Trial, epochs: Mapping[str, str], long: LongStreams | None = None
    ) -> tuple[str, Happened | None, list[Transcript]]:
        """A process of the kind, where it comes to the point; waves of requests until that is over."""
        got: list[Transcript] = []
        armed: list[Target] = []
        fault = Fault(Point(trial.point), trial.kind, trial.count(self._draws), self._seconds.get(trial.kind, 1.0))
        for wave in range(WAVES_TO_REACH):
            has_newborn = wave == WAVES_OF_ONE and trial.point in ON_NEW_CONNECTIONS
            if has_newborn:
                reads = trial.process == Process.DECODE and trial.point == Point.TRANSPORT_CONNECTING
                await worker_dies(self._bed, self._draws, Process.PREFILL if reads else Process.DECODE)
            if long is not None:
                # Two that have grown old fill a small pool: in a crowd they would wait for one another.
                await long.be_there(afresh=has_newborn or trial.point in CROWDED)
            if wave in (0, WAVES_OF_ONE):
                armed = await self._targets(trial, only_one=wave == 0 and not trial.is_of_peers)
            got += await self._wave(trial, armed, fault, wave)
            happened = self._happened(fault)
            if happened is not None:
                # Healing those that are broken would end their fault.
                await self._disarm([target for target in armed if target.name not in self._broken])
                if long is not None:
                    long.release(happened.at_s)
                is_dead = trial.kind in ENDING and happened.process in epochs
                over = {happened.process: epochs[happened.process]} if is_dead else {}
                back_s = happened.at_s + self._seconds.get(trial.kind, 0.0)
                got += await self._until_over(back_s, over)
                if long is not None:
                    streamed = await long.end(back_s)
                    self._met = met(streamed, happened.at_s, back_s)
                    got += streamed
                return happened.process, happened, got
        await self._disarm(armed)
        return "", None, got

    async def _targets(self, trial: Trial, *, only_one: bool) -> list[Target]:
        """Returns the targets of a kind; one alone is that which has been whole for the longest time."""
        targets = [target for target in await self._bed.targets() if target.kind == trial.process]
        if only_one:
            self._draws.shuffle(targets)
            targets = [min(targets, key=lambda each: self._broken_s.get(each.name, 0.0))]
        self._broken_s.update({target.name: time.time() for target in targets})
        return targets

    async def _disarm(self, armed: Sequence[Target]) -> None:
        for target in armed:
            with contextlib.suppress(ServeError):  # some are dead, or cut off
                await self._bed.disarm(target)

    @property
    def _broken(self) -> set[str]:
        """Processes in this trial."""
        return {each.process for each in self._bed.journal()[self._journal_lines :]}

    def _happened(self, fault: Fault) -> Happened | None:
        """Returns the fault that happened; of pages that were to be corrupted, once some were."""
        line = f"{fault}{HIT}" if fault.kind in SPOILING else str(fault)
        return next((each for each in self._bed.journal()[self._journal_lines :] if each.fault == line), None)

    async def _until_over(self, at_s: float, over: Mapping[str, str]) -> list[Transcript]:
        """Waves go on while the process is away and until it is back: one that wakes up meets requests."""
        got: list[Transcript] = []
        waiting = asyncio.create_task(self._over(at_s, over))
        try:
            while not waiting.done():
                got += await self._ask(self._asks)
        finally:
            waiting.cancel()
        return got

    async def _over(self, at_s: float, over: Mapping[str, str]) -> None:
        await asyncio.sleep(at_s - time.time())
        await self._bed.whole_within(WHOLE_S, over)

    async def _wave(self, trial: Trial, armed: Sequence[Target], fault: Fault, wave: int) -> list[Transcript]:
        """Sends the requests of one wave. What is not armed yet is armed before it, or as soon as streams are open."""
        is_new = wave in (0, WAVES_OF_ONE)
        is_early = trial.point not in ON_THEIR_OWN
        if is_new and is_early:
            await self._arm(armed, fault)
        asking = asyncio.create_task(self._load(trial))
        try:
            await asyncio.sleep(MID_WAVE_S)
            if is_new and not is_early:
                await self._arm(armed, fault)
            trigger = self._trigger(trial, wave)
            if trigger is not None:
                with contextlib.suppress(ServeError):  # whoever is asked may be the one that breaks
                    await trigger(self._bed, armed[0], fault, self._draws)
        finally:
            got = await asking
        return got

    def _trigger(self, trial: Trial, wave: int) -> Trigger | None:
        """Returns what has to happen in a wave besides its requests.

        Prefill workers read from one another when one leaves, if it holds what the other one lacks. Every other wave
        makes that so: a point that was not reached by chance is reached then.
        """
        if trial.process == Process.PREFILL and trial.is_of_peers and wave % 2:
            return prefill_workers_fetch
        if trial.is_of_peers and self._takes_a_leave(trial, wave):
            return peer_leaves
        return TRIGGERS.get(Point(trial.point))

    def _takes_a_leave(self, trial: Trial, wave: int) -> bool:
        """Whether pages travel between peers where one leaves alone: prompts may be too cheap for anything else."""
        return trial.process == Process.PREFILL or self._bed.served.all_travel or wave >= WAVES_OF_ONE

    async def _arm(self, armed: Sequence[Target], fault: Fault) -> None:
        self._bed.allow_once(fault)
        for target in armed:
            if self._happened(fault) is not None:
                return  # those that were armed for the waves before
            try:
                await self._bed.arm(target, fault)
            except ServeError:
                if target.name not in self._broken:
                    raise

    async def _load(self, trial: Trial) -> list[Transcript]:
        if trial.is_of_peers:
            eldest = await self._ask(self._family[:1])
            await asyncio.sleep(INDEXED_S)
            return eldest + await self._ask_at_once(self._family[1:])
        if trial.process == Process.PREFILL and trial.point in WRITING:
            return await self._ask([*self._asks, *self._crowd, *self._family, *self._flood])
        return await self._ask([*self._asks, *self._crowd] if trial.point in CROWDED else self._asks)

    async def _ask(self, load: Sequence[Ask]) -> list[Transcript]:
        """All at once. Every other wave finds the caches empty."""
        self._waves += 1
        if self._waves % 2 or len(load) == 1:
            with contextlib.suppress(ServeError):
                await self._bed.forget_cached()
        return await self._ask_at_once(load)

    async def _ask_at_once(self, load: Sequence[Ask]) -> list[Transcript]:
        """At both routers in turns."""
        return await asyncio.gather(*(self._clients.follow(ask, at + self._waves) for at, ask in enumerate(load)))

    async def _break_head(self, trial: Trial) -> tuple[str, Happened | None, list[Transcript]]:
        """Streams run without it; a worker that dies after its return comes back."""
        process = self._bed.head()
        restart = head.Restart(process)
        asking = asyncio.create_task(self._ask(self._asks))
        await asyncio.sleep(MID_WAVE_S)
        happened = Happened(HEAD, process.pid, str(trial), time.time())
        if trial.kind is Kind.KILL:
            head.kill(process)
            got = [*await asking, *await self._ask(self._asks)]
            await asyncio.sleep(max(0.0, happened.at_s + HEADLESS_S - time.time()))
            self._heads.append(await restart.start())
        else:
            freezing = asyncio.create_task(head.freeze(process, self._seconds[trial.kind]))
            got = await asking
            while not freezing.done():
                got += await self._ask(self._asks)
            await freezing
        await worker_dies(self._bed, self._draws)
        await asyncio.sleep(1.0)  # for the death to be known: until then all seem to serve
        return HEAD, happened, got

    async def _drafts_since(self, before: Mapping[str, Drafts]) -> Drafts:
        """Counters of an epoch that has begun meanwhile are as they are."""
        total = Drafts()
        with contextlib.suppress(ServeError):
            for epoch, counted in (await drafts(self._bed)).items():
                total = total.plus(counted.since(before.get(epoch, Drafts())))
        return total

    async def _refused_since(self, before: dict[str, int]) -> dict[str, int]:
        """Counters of a process that began again are as they are."""
        try:
            after = await refusals(self._bed)
        except ServeError:
            return {}
        return {name: count - min(count, before.get(name, 0)) for name, count in after.items() if count}


def _left_in_silence(got: Sequence[Transcript], happened: Happened | None) -> list[str]:
    """Clients that had to give up a router that nobody had broken."""
    if happened is None:
        return []
    return [
        f"{each.name}: silence of {silence.router}, too"
        for each in got
        for silence in each.silences
        if silence.at_s > happened.at_s and silence.router != happened.process
    ]


def _slowest(got: Sequence[Transcript], happened: Happened | None) -> tuple[float | None, str]:
    """The longest wait of a stream that was open, and which it was; patience with a router that was broken is free."""
    if happened is None:
        return None, ""
    waits = {
        at: wait
        for at, each in enumerate(got)
        if (wait := longest_wait_s(each, happened.at_s, free=happened.process)) is not None
    }
    if not waits:
        return None, ""
    slowest = got[max(waits, key=waits.__getitem__)]
    return max(waits.values()), ": ".join([slowest.name, *slowest.turns[:3]])
