"""A router with a console, and those who call it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from router.auth.api_keys import operator_key
from tests.unit.router.conftest import Frontend, open_frontend
from twostroke.config import EndpointsConfig

TOKEN = "the cluster's token"
OPERATOR = {"authorization": f"Bearer {operator_key(TOKEN)}"}


@asynccontextmanager
async def console(fleet_address: str = "", keys: Path | None = None) -> AsyncIterator[Frontend]:
    endpoints = EndpointsConfig(api_keys=None if keys is None else str(keys))
    async with open_frontend(endpoints, fleet_address, cluster_token=TOKEN) as frontend:
        yield frontend


async def read(frontend: Frontend, name: str, **query: str) -> Any:
    answer = await frontend.http.get(f"/console/api/{name}", params=query, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return answer.json()
