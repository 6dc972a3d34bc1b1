"""A simulated prefill worker's role: pulls become sequences that only build pages (as prefill_worker.jobs)."""

from __future__ import annotations

from tools.simulate.fleet.host import Host
from tools.simulate.fleet.peers import pull_from_peer
from tools.simulate.fleet.pulls import Job, PullSpec
from tools.simulate.fleet.steps import TOKEN, Flight
from twostroke.errors import InvalidRequest
from twostroke.ids import PageId
from twostroke.scheduler.scheduler import Admission, Emission
from twostroke.scheduler.sequence import Sequence, building


class BuildJob:
    """One pull being served."""

    def __init__(self, builder: Builder, sequence: Sequence, spec: PullSpec) -> None:
        self._builder = builder
        self.sequence = sequence
        self.spec = spec
        self.computed: set[int] = set()
        """Blocks that nobody had: they are computed here, except those that come from elsewhere."""

    def page(self, block: int) -> PageId | None:
        if not self.sequence.pages:
            return None
        page = self.sequence.pages[block]
        return page if self._builder.host.pool.is_filled(page) else None

    def was_computed(self, block: int) -> bool:
        return block in self.computed

    def close(self) -> None:
        self._builder.forget(self)


class Builder:
    def __init__(self, host: Host) -> None:
        self.host = host
        self._jobs: dict[Sequence, BuildJob] = {}

    def serve(self, spec: PullSpec) -> Job:
        """Raises InvalidRequest for what can never be built, or Overloaded."""
        host = self.host
        if len(spec.block_hashes) > host.pool.total:
            raise InvalidRequest(f"{len(spec.block_hashes)} blocks are wanted; this pool holds {host.pool.total}")
        tokens = [TOKEN] * (len(spec.block_hashes) * host.shape.block_size)
        sequence = building(spec.request_id, host.new_session(), tokens, spec.block_hashes)
        host.scheduler.enqueue(sequence)
        job = self._jobs[sequence] = BuildJob(self, sequence, spec)
        host.wake()
        return job

    def forget(self, job: BuildJob) -> None:
        del self._jobs[job.sequence]
        self.host.scheduler.end(job.sequence)
        self.host.prune()
        self.host.wake()

    def admitted(self, admission: Admission) -> None:
        """Runs before any block of the job is computed."""
        host, job = self.host, self._jobs[admission.sequence]
        job.computed.update(admission.missing)
        missing = admission.missing
        if host.host_memory is not None:
            coming = set(host.host_memory.bring_up(job.sequence, missing, job.computed.discard))
            missing = [block for block in missing if block not in coming]
        peer = job.spec.peer
        if peer is None:
            return

        def arrived(block: int) -> None:
            job.computed.discard(block)
            job.spec.from_peer()

        pull_from_peer(host, job.sequence, peer, [b for b in missing if b < job.spec.peer_blocks], arrived)

    def planning(self) -> None:
        """Whatever was asked for is computed here."""

    def preempted(self, sequence: Sequence) -> None:
        raise AssertionError("a build claims all its pages at admission and never grows")

    def emitted(self, flight: Flight, emissions: list[Emission]) -> None:
        assert not emissions, "a prefill worker never samples"

    def most_steps(self, flight: Flight) -> int:
        return flight.steps
