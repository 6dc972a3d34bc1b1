"""Loads and unloads adapters: a router reads and checks the files, and the supervisor keeps names for all routers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from router.adapters.named_adapter import NamedAdapter
from router.fleet.named_models import NamedModels
from router.server_branch import SupervisorCalls
from router.serving.dispatcher import RouterCore
from twostroke.base.errors import ConfigError, InvalidRequest, NotFound, PeerLost
from twostroke.config.adapters import MOST_NAME_CHARS, AdapterConfig
from twostroke.models.adapters.shapes import ProjectionShapes
from twostroke.models.adapters.store import check_place, take_in
from twostroke.request import WeightsRef
from twostroke.rpc.v1 import adapters_pb2
from twostroke.rpc.v1.adapters_pb2_grpc import AdaptersStub

SUPERVISOR_S = 10.0
"""Seconds for the supervisor to store a name."""
VIEW_S = 5.0
"""Longest wait, in seconds, until the supervisor's view shows the change."""
FIRST_TRIES_S = 60.0
"""Seconds for which a starting router tries to reach the supervisor."""
PAUSE_S = 0.25
"""Seconds between two such tries."""


class AdapterAdmin:
    def __init__(
        self, config: AdapterConfig, served: str, model_dir: str, fleet: RouterCore, supervisor: SupervisorCalls
    ) -> None:
        """`served` is the base model's name for clients, and `model_dir` its folder: empty for a paced model."""
        self._config = config
        self._served = served
        self._shapes = ProjectionShapes.of_directory(Path(model_dir)) if model_dir else None
        self._fleet = fleet
        self._supervisor = supervisor
        self._reading = asyncio.Lock()
        """Adapters are read one after the other: each may take gigabytes of memory."""

    @property
    def adapters(self) -> dict[str, NamedAdapter]:
        return {name: each for name, each in self._fleet.named_models.items() if isinstance(each, NamedAdapter)}

    async def load(self, name: str, path: str, *, replaces: bool = False) -> NamedAdapter:
        """Reads the adapter in a folder and serves it under a name. Returns once this router serves it.

        Raises InvalidRequest if it cannot be served, or PeerLost if the supervisor does not answer.
        """
        self._check_name(name)
        if not replaces and name in self.adapters:
            raise InvalidRequest(
                f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                field="lora_name",
            )
        try:
            folder = await asyncio.to_thread(check_place, Path(path), self._config.lora_dirs)
            adapter = await self._read(name, folder)
        except ConfigError as error:
            raise InvalidRequest(error.message, field="lora_path") from error
        return await self._put(adapter, replaces=replaces)

    async def unload(self, name: str) -> None:
        """Removes a name. Requests that have begun continue. Raises NotFound, or PeerLost."""
        if name not in self.adapters:
            raise NotFound(f"The lora adapter {name!r} cannot be found.", field="lora_name")
        await self._supervisor.ask(AdaptersStub, "Remove", adapters_pb2.RemoveAdapterRequest(name=name), SUPERVISOR_S)
        await self._fleet.wait_for_named(lambda adapters: name not in adapters, VIEW_S)

    async def load_first(self) -> None:
        """Serves the adapters of the command line, unless the fleet already knows their names.

        Raises ConfigError for an adapter that cannot be served, and PeerLost if no supervisor answers.
        """
        for name, path in self._config.modules:
            if name == self._served:
                raise ConfigError(f"--lora-modules: {name!r} is the name of the model itself", field="--lora-modules")
            adapter = await self._read(name, Path(path))
            await self._put_first(adapter)

    async def _put_first(self, adapter: NamedAdapter) -> None:
        until_s = time.monotonic() + FIRST_TRIES_S
        while True:
            try:
                request = adapters_pb2.PutAdapterRequest(adapter=adapter.to_message(), first=True)
                await self._supervisor.ask(AdaptersStub, "Put", request, SUPERVISOR_S)
                return
            except PeerLost:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _read(self, name: str, folder: Path) -> NamedAdapter:
        async with self._reading:
            adapter = await asyncio.to_thread(take_in, folder, most_lora_rank=self._config.max_lora_rank)
        if self._shapes is not None:
            adapter.check_fits(self._shapes)
        ref = WeightsRef(adapter.digest, str(folder))
        return NamedAdapter(name, ref, adapter.lora_rank, adapter.parameters, time.time())

    async def _put(self, adapter: NamedAdapter, *, replaces: bool) -> NamedAdapter:
        request = adapters_pb2.PutAdapterRequest(adapter=adapter.to_message(), replace=replaces)
        await self._supervisor.ask(AdaptersStub, "Put", request, SUPERVISOR_S)
        name, digest = adapter.name, adapter.ref.digest

        def is_served(adapters: NamedModels) -> bool:
            known = adapters.get(name)
            return known is not None and (known.ref.digest == digest or known.loaded_s > adapter.loaded_s)

        await self._fleet.wait_for_named(is_served, VIEW_S)
        return adapter

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MOST_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"the name of an adapter must be printable, with 1 to {MOST_NAME_CHARS} characters", field="lora_name"
            )
        if name == self._served:
            raise InvalidRequest(f"{name!r} is the name of the model itself", field="lora_name")
