"""Event batches <-> messages: the same from a worker and from a router that passes them on."""

from __future__ import annotations

from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import Epoch, WorkerId
from twostroke.kv_cache.events import EventBatch, TierChange
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.convert import hashes_from_bytes, hashes_to_bytes
from twostroke.rpc.v1 import control_pb2

_TIERS = {
    Tier.DEVICE: control_pb2.TIER_DEVICE,
    Tier.HOST: control_pb2.TIER_HOST,
    Tier.DISK: control_pb2.TIER_DISK,
}
_GROUPS = frozenset(GroupKind)
_FROM_MESSAGE = {message: tier for tier, message in _TIERS.items()}


def tier_to_message(tier: Tier) -> control_pb2.Tier:
    return _TIERS[tier]


def tier_from_message(message: control_pb2.Tier) -> Tier:
    tier = _FROM_MESSAGE.get(message)
    if tier is None:
        raise InvalidRequest(f"tier {message} is not known here", field="tier")
    return tier


def batch_to_message(
    worker: WorkerId, epoch: Epoch, batch: EventBatch, load: control_pb2.Load | None = None
) -> control_pb2.KvEventBatch:
    return control_pb2.KvEventBatch(
        worker_id=worker,
        epoch=str(epoch),
        sequence=batch.sequence,
        snapshot=batch.snapshot,
        stored=hashes_to_bytes(batch.stored),
        removed=hashes_to_bytes(batch.removed),
        cleared=batch.cleared,
        block_count=batch.block_count,
        digest=batch.digest,
        load=load,
        further=[_change_to_message(change) for change in batch.further],
        published_s=batch.published_s,
        part=batch.part,
        more=batch.more,
    )


def batch_from_message(message: control_pb2.KvEventBatch) -> EventBatch:
    return EventBatch(
        sequence=message.sequence,
        stored=tuple(hashes_from_bytes(message.stored)),
        removed=tuple(hashes_from_bytes(message.removed)),
        block_count=message.block_count,
        digest=message.digest,
        snapshot=message.snapshot,
        cleared=message.cleared,
        further=tuple(_change_from_message(change) for change in message.further),
        published_s=message.published_s,
        part=message.part,
        more=message.more,
    )


def _change_to_message(change: TierChange) -> control_pb2.TierChange:
    return control_pb2.TierChange(
        tier=tier_to_message(change.tier),
        stored=hashes_to_bytes(change.stored),
        removed=hashes_to_bytes(change.removed),
        group=change.group,
    )


def _change_from_message(message: control_pb2.TierChange) -> TierChange:
    if message.group not in _GROUPS:
        raise InvalidRequest(f"page group {message.group} is not known here", field="group")
    return TierChange(
        tier_from_message(message.tier),
        tuple(hashes_from_bytes(message.stored)),
        tuple(hashes_from_bytes(message.removed)),
        GroupKind(message.group),
    )
