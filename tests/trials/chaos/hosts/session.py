"""Hosts are booted, a cluster is launched on them, and fault after fault happens; progress and the table."""

from __future__ import annotations

import asyncio
import dataclasses
import fnmatch
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.clients import state_file
from cluster.clients.state_file import ServeState
from tests.trials.chaos import page_section
from tests.trials.chaos.faults.client import Clients
from tests.trials.chaos.faults.load import Load
from tests.trials.chaos.faults.testbed import Bed
from tests.trials.chaos.hosts.faults import CUT_DECODE, FAULTS, HostFault
from tests.trials.chaos.hosts.network import being_on, network
from tests.trials.chaos.hosts.report import Facts, written
from tests.trials.chaos.hosts.result import Result
from tests.trials.chaos.hosts.run import HostFaultRun
from tests.trials.chaos.hosts.site import Site
from tools.doctor.examine import scrape
from twostroke.base.errors import ConfigError
from twostroke.config import Role

LOAD = Load(tokens=60, prompt_letters=320, long_tokens=700)
QUICK_LOAD = Load(tokens=20, prompt_letters=160, long_tokens=300)
PATIENCE_S = 60.0
"""Patience of clients: none of the hosts with routers is struck, so that none of them should need any."""
DECODE_HOSTS = 2
READY_S = 600.0
REFUSED_S = 60.0
LOG_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOptions:
    quick: bool
    """Three hosts and one cable."""
    runs: int
    only: tuple[str, ...]
    seed: int
    write: Path | None
    logs: Path | None

    @property
    def faults(self) -> Sequence[HostFault]:
        if self.quick:  # on machines that do other things meanwhile: only tables judge times
            return [dataclasses.replace(CUT_DECODE, bound_s=None)]
        return [
            fault for fault in FAULTS if not self.only or any(fnmatch.fnmatch(str(fault), each) for each in self.only)
        ]


def run_session(options: HostsOptions) -> int:
    """Exit status: 1 on any problem."""
    results: list[Result] = []
    began_s = time.time()
    # Not in /tmp: Ray's folder there is each host's own, and this one is everybody's.
    folder = Path(tempfile.mkdtemp(prefix="tsh-", dir="/var/tmp"))
    try:
        with network(folder) as hosts:
            takes = Role.PREFILL if options.quick else None
            site = Site(hosts, decode=DECODE_HOSTS, head_takes=takes)
            with being_on(site.client):
                facts = asyncio.run(_Session(options, site, results).run())
    finally:
        if options.logs is not None:
            kept = shutil.ignore_patterns("gcs", "*.token", "tls", "t")
            shutil.copytree(folder, options.logs, dirs_exist_ok=True, ignore=kept)
        shutil.rmtree(folder, ignore_errors=True)
    if options.write is not None:
        told = written(results, Facts.now(facts, time.time() - began_s))
        page_section.put(options.write, page_section.HOSTS, told)
    return 1 if any(result.problems for result in results) else 0


class _Session:
    def __init__(self, options: HostsOptions, site: Site, results: list[Result]) -> None:
        self._options = options
        self._site = site
        self._results = results
        self._began_s = time.monotonic()

    async def run(self) -> str:
        """What was true before anything was broken."""
        site, options = self._site, self._options
        missing = await site.boot(READY_S)
        if missing is not None:
            raise ConfigError(f"{missing}; {self._tails()}")
        self._say(f"{1 + len(site.nodes)} hosts are up, and in one Ray cluster")
        site.launch(decode=DECODE_HOSTS)
        refused = await self._strangers()
        state = await self._launched()
        bed = Bed(
            routers=state.routers,
            model=state.model,
            journal=site.runtime_folder / "journal",
            workers=1 + DECODE_HOSTS,
            token=site.fleet_token,
            fleet_address=site.fleet_address,
        )
        clients = Clients(routers=state.routers, model=state.model, patience_s=PATIENCE_S)
        runner = HostFaultRun(site, bed, clients, (QUICK_LOAD if options.quick else LOAD).with_seed(options.seed))
        await runner.prepare()
        crossed = await self._bytes_across(bed)
        self._say(crossed)
        for run in range(1, options.runs + 1):
            for fault in options.faults:
                self._tell(await runner.one(fault, run))
        return f"{refused} {crossed}"

    async def _strangers(self) -> str:
        """A node with another token, and one without TLS: neither gets in. Raises ConfigError where one does."""
        site = self._site
        host = site.nodes[f"decode-{DECODE_HOSTS - 1}"]
        command = [*host.services[0].command]
        kinds = {"with another token": site.stranger(host)}
        if not self._options.quick:  # Ray would wait for ever
            kinds["without TLS"] = site.without_tls(host) | {"START_TIMEOUT_S": "15"}
        for kind, variables in kinds.items():
            done = await asyncio.to_thread(host.run, *command, environment=variables)
            if done.returncode == 0 or "twostroke: Ray" not in done.stderr:
                raise ConfigError(f"a node {kind} is not refused: status {done.returncode}: {done.stderr[-500:]}")
        told = f"Nodes {' and '.join(kinds)} were refused."
        self._say(told)
        return told

    async def _launched(self) -> ServeState:
        give_up_s = time.monotonic() + READY_S
        while time.monotonic() < give_up_s:
            for path in self._site.runtime_folder.glob("twostroke/*.json"):
                return state_file.read(path)
            await asyncio.sleep(0.1)
        raise ConfigError(f"the cluster does not get ready; {self._tails()}")

    async def _bytes_across(self, bed: Bed) -> str:
        """Raises ConfigError where no page went from one host to another."""
        pulled = 0.0
        hosts = {}
        for worker in (await bed.view()).workers:
            hosts[worker.worker_id] = self._site.host_at(worker.address).name
            samples = await asyncio.to_thread(scrape, worker.metrics_address)
            if worker.role == Role.DECODE:
                series = samples.get("twostroke_pull_bytes_total", ())
                pulled += sum(value for labels, value in series if labels["transport"] == "tcp")
        placed = ", ".join(f"{worker} on {host}" for worker, host in hosts.items())
        if not pulled or len(set(hosts.values())) < len(hosts):
            raise ConfigError(f"{pulled:g} bytes of pages went from host to host; {placed}")
        return f"{pulled / 1e6:.1f} MB of pages went from host to host over TCP ({placed})."

    def _tell(self, result: Result) -> None:
        self._results.append(result)
        waited = "" if result.recovery_s is None else f", next token after {result.recovery_s:.2f} s"
        later = "" if result.later_s is None else f", later streams' within {result.later_s:.2f} s"
        back = "" if result.capacity_s is None else f", all serve after {result.capacity_s:.1f} s"
        ended = "" if result.fenced_s is None else f", the old epoch ended {result.fenced_s:.1f} s after the return"
        self._say(
            f"{result.fault} ({result.host}): {result.open_streams} of {result.streams} streams were open"
            f"{waited}{later}{back}{ended}: {result.verdict}"
        )

    def _tails(self) -> str:
        logs = sorted(self._site.folder.glob("*.log"))
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) for log in logs
        )

    def _say(self, text: str) -> None:
        print(f"hosts: [{time.monotonic() - self._began_s:5.1f} s] {text}", file=sys.stderr, flush=True)
