"""Reservations as the messages that routers send each other."""

from __future__ import annotations

from collections.abc import Iterator

from router.reservations import Batch, Reservation, Share
from twostroke.ids import BlockName, RequestId, WorkerId
from twostroke.kv_cache.block import NAME_BYTES
from twostroke.rpc.v1 import routing_pb2

MESSAGE_BLOCKS = 1 << 16
"""Block names in one message, about: a mebibyte, far below what a message may hold."""


def messages_of(batch: Batch) -> Iterator[routing_pb2.ReservationBatch]:
    """At least one; several where all that is open at a router would not fit into one."""
    message = routing_pb2.ReservationBatch(opened=batch.opened, ended=batch.ended)
    blocks = 0
    for reservation in batch.placed:
        if blocks > MESSAGE_BLOCKS:
            yield message
            message, blocks = routing_pb2.ReservationBatch(), 0
        message.placed.append(_message_of(reservation))
        blocks += len(reservation.names)
    yield message


def batch_from(message: routing_pb2.ReservationBatch) -> Batch:
    return Batch(
        placed=tuple(_reservation_from(each) for each in message.placed),
        opened=tuple(RequestId(each) for each in message.opened),
        ended=tuple(RequestId(each) for each in message.ended),
    )


def _message_of(reservation: Reservation) -> routing_pb2.Reservation:
    return routing_pb2.Reservation(
        request_id=reservation.request_id,
        shares=[
            routing_pb2.WorkerShare(
                worker_id=worker,
                tokens=share.tokens,
                seconds=share.seconds,
                pages=share.pages,
                streams=share.streams,
            )
            for worker, share in reservation.shares.items()
        ],
        names=b"".join(reservation.names),
        opened=reservation.is_opened,
    )


def _reservation_from(message: routing_pb2.Reservation) -> Reservation:
    names = message.names
    return Reservation(
        request_id=RequestId(message.request_id),
        shares={
            WorkerId(share.worker_id): Share(share.tokens, share.seconds, share.pages, share.streams)
            for share in message.shares
        },
        names=[BlockName(names[start : start + NAME_BYTES]) for start in range(0, len(names), NAME_BYTES)],
        is_opened=message.opened,
    )
