"""The server that clients share: a router and two workers as processes, plain or with everything that secures them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from router.auth.api_keys import draw_key
from tests.certificates import Authority
from tests.cluster.processes import ProcessCluster, port_of, running_cluster
from tests.metrics_page import total
from tests.process_table import listening_ports
from tests.trials.chaos.neighbours.target import Target
from twostroke.config import CacheConfig, EndpointsConfig, ModelConfig

VOCABULARY = 4000
CONNECTIONS = 100
"""What the server is told to take at most."""
DOCS = Path(__file__).parents[4] / "docs"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PACE = f"paced:prefill_tokens_per_s=200000,step_ms=1,step_us_per_seq=20,vocab={VOCABULARY},page_bytes=4096"
READERS = "readers"
"""The router's child processes, in which long requests are read. Counted for their memory."""
HOSTILE_CALLS = 8
"""Calls that the hostile client's key may have open at once."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server's processes have, by name."""

    pids: dict[str, int]
    resident_mb: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]


class Died(Exception):
    """A process of the server has ended, with the end of its log."""


class Site:
    def __init__(self, cluster: ProcessCluster, target: Target, keys: tuple[str, str]) -> None:
        """`keys`: the honest client's and the hostile one's; empty where none are needed."""
        self._cluster = cluster
        self.honest = dataclasses.replace(target, key=keys[0])
        self.hostile = dataclasses.replace(target, key=keys[1])

    def usage(self) -> Usage:
        """Raises psutil.NoSuchProcess where one of them has died."""
        found = {name: psutil.Process(pid) for name, pid in self._pids().items()}
        resident_mb = {name: process.memory_info().rss / 1e6 for name, process in found.items()}
        resident_mb[READERS] = sum(each.memory_info().rss / 1e6 for each in found["router"].children())
        return Usage(
            {name: process.pid for name, process in found.items()},
            resident_mb,
            {name: process.num_fds() for name, process in found.items()},
            {name: process.num_threads() for name, process in found.items()},
        )

    def dead(self) -> list[str]:
        running = {"router": self._cluster.routers[0].process}
        running |= {name: worker.process for name, worker in self._cluster.workers.items()}
        return [name for name, process in running.items() if process.returncode is not None]

    def open_requests(self) -> float:
        router = self._cluster.routers[0].addresses.metrics
        return total(router, "twostroke_open_requests") + total(router, "twostroke_queued_requests")

    def last_words(self) -> str:
        """The ends of all logs."""
        logs = sorted(self._cluster.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _pids(self) -> dict[str, int]:
        workers = {name: worker.process.pid for name, worker in self._cluster.workers.items()}
        return {"router": self._cluster.routers[0].process.pid} | workers


@contextlib.asynccontextmanager
async def serving(folder: Path, *, secured: bool) -> AsyncIterator[Site]:
    """`secured`: with TLS at the clients' ports, API keys, and TLS between processes."""
    write_tokenizer(folder)
    endpoints, keys = _endpoints(folder, secured=secured)
    clients, cluster_ca = Authority(folder, "clients"), Authority(folder, "cluster")
    tls = dataclasses.replace(clients.config(clients.issue("endpoint", names=("localhost",))), ca=None)
    async with running_cluster(
        prefill=1,
        decode=1,
        model=ModelConfig(model=f"{PACE},max_model_len=4096", served_model_name="paced"),
        model_dir=folder,
        cache=CacheConfig(kv_cache_memory_bytes=32 << 20),
        transports=("tcp",),
        endpoints=endpoints,
        tls=tls if secured else None,
        cluster_tls=cluster_ca.config(cluster_ca.issue("worker")) if secured else None,
    ) as cluster:
        site = Site(cluster, _target(cluster, str(clients.file) if secured else ""), keys)
        yield site
        if site.dead():
            raise Died(site.last_words())


def _endpoints(folder: Path, *, secured: bool) -> tuple[EndpointsConfig, tuple[str, str]]:
    if not secured:
        return EndpointsConfig(max_connections=CONNECTIONS, metrics_port=0), ("", "")
    honest, hostile = draw_key(), draw_key()
    entries: dict[str, dict[str, object]] = {
        honest.id: {"tenant": "honest", "sha256": honest.sha256},
        hostile.id: {"tenant": "hostile", "sha256": hostile.sha256, "concurrency": HOSTILE_CALLS},
    }
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    endpoints = EndpointsConfig(max_connections=CONNECTIONS, metrics_port=0, api_keys=str(folder / "keys.yaml"))
    return endpoints, (honest.key, hostile.key)


def _target(cluster: ProcessCluster, ca: str) -> Target:
    addresses = cluster.routers[0].addresses
    rpc = tuple(str(worker.info["address"]) for worker in cluster.workers.values())
    metrics = tuple(str(worker.info["metrics_address"]) for worker in cluster.workers.values())
    known = {port_of(address) for address in (*rpc, *metrics)}
    listening = {
        port for worker in cluster.workers.values() for port in listening_ports(psutil.Process(worker.process.pid))
    }
    return Target(
        http=addresses.http,
        grpc=addresses.grpc,
        admin=addresses.admin,
        metrics=addresses.metrics,
        fleet=cluster.fleet_address,
        workers=rpc,
        worker_metrics=metrics,
        pages=tuple(f"127.0.0.1:{port}" for port in sorted(listening - known)),
        model="paced",
        most_connections=CONNECTIONS,
        ca=ca,
    )


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of the usual kind, learned from our own pages, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(page) for page in sorted(DOCS.glob("*.md"))], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
