"""Whoever is about to compute a prompt fetches what a peer holds of it (as twostroke.worker.pulls.peer_pulls)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.simulate.fleet.host import Host
from tools.simulate.fleet.pulls import Party, Pull, PullSpec
from twostroke.rpc.peer import ANSWER_S
from twostroke.scheduler.sequence import Sequence as Running


def pull_from_peer(
    host: Host, sequence: Running, peer: Party, blocks: Sequence[int], arrived: Callable[[int], None]
) -> Pull | None:
    """None where there is nothing to fetch. What does not come is computed."""
    if not blocks or peer.worker == host.worker:
        return None
    spec = PullSpec(
        request_id=sequence.request_id,
        session=host.new_session(),
        source=peer,
        block_hashes=sequence.block_hashes[: blocks[-1] + 1],
        pages={block: sequence.pages[block] for block in blocks},
        cached_within_s=ANSWER_S + host.queued_s,
        arrived=arrived,
    )
    return host.pull(spec)
