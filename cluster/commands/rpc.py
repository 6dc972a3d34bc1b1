"""What a failed call of a synchronous stub says."""

from __future__ import annotations

from typing import cast

import grpc


def status_of(error: grpc.RpcError) -> grpc.StatusCode:
    return cast(grpc.Call, error).code()


def describe(error: grpc.RpcError) -> str:
    return f"{status_of(error).name}: {cast(grpc.Call, error).details()}"
