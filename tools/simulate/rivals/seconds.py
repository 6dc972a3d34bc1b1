"""Policies of other systems that predict seconds, as ours does, but look only at this request."""

from __future__ import annotations

from router.routing.forecast import Computing, Forecaster, PrefixHolder, decide
from router.routing.policies.baselines import least
from router.routing.policy import Decision, Snapshot, WorkerView


class MooncakeConductor:
    """Algorithm 1 of "Mooncake: Trading More Storage for Less Computation" (FAST'25): the prefill worker with the
    earliest first token, and the decode worker with the shortest step. The prefill worker fetches the longest prefix
    where that is `balancing` times longer than its own. The paper gives no value of that threshold."""

    def __init__(self, balancing: float = 2.0) -> None:
        self._balancing = balancing

    def __call__(self, snapshot: Snapshot) -> Decision:
        forecaster = Forecaster(snapshot)
        decode = least(snapshot.decode, lambda view: (forecaster.step_s(view),), snapshot.turn)
        if not snapshot.prefill or not snapshot.lacks_blocks(decode):
            return decide(snapshot, decode, None)
        best = max(snapshot.prefill, key=lambda view: view.resident_blocks)
        ways = {view.worker: self._way(forecaster, view, best) for view in snapshot.prefill}

        def first_token_s(view: WorkerView) -> tuple[float, ...]:
            way = ways[view.worker]
            return (way.queue_s + way.fetch_s + way.prefill_s,)

        source = least(snapshot.prefill, first_token_s, snapshot.turn)
        way = ways[source.worker]
        return Decision(
            decode=decode.worker,
            source=source.worker,
            peer=way.peer.view.worker if way.peer is not None else None,
            peer_blocks=way.peer.blocks if way.peer is not None else 0,
            forecast=forecaster.forecast(decode, way, source),
        )

    def _way(self, forecaster: Forecaster, view: WorkerView, best: WorkerView) -> Computing:
        if best.resident_blocks > self._balancing * view.cached_blocks:
            return forecaster.at_source(view, PrefixHolder(best, best.resident_blocks))
        return forecaster.at_source(view)


def choose_earliest(snapshot: Snapshot) -> Decision:
    """Returns the earliest predicted first token for this request, whatever it costs others (AIBrix's "conductor" is of
    this kind: pkg/plugins/gateway/algorithms/pd).
    """
    forecaster = Forecaster(snapshot)
    decode = least(
        snapshot.decode, lambda view: (forecaster.admission_s(view, 1) + forecaster.step_s(view),), snapshot.turn
    )
    if not snapshot.prefill:
        return decide(snapshot, decode, None)

    def first_token_s(view: WorkerView) -> tuple[float, ...]:
        way = forecaster.at_source(view)
        return (way.wait_s + way.prefill_s,)

    return decide(snapshot, decode, least(snapshot.prefill, first_token_s, snapshot.turn))
