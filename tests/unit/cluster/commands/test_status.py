"""What `twostroke status` shows of what workers have said."""

from __future__ import annotations

import pytest

from cluster.commands.looking.status import print_tables, worker_values
from twostroke.rpc.v1 import control_pb2

MODEL = control_pb2.ModelInfo(model="tiny", dtype="bfloat16", max_model_len=128, block_size=16, pool_pages=8)


def worker(kernels: control_pb2.KernelsInfo | None) -> control_pb2.WorkerLoad:
    server = control_pb2.ServerInfo(server_id="decode-0", role="decode", epoch="0.1", kernels=kernels)
    return control_pb2.WorkerLoad(worker_id="decode-0", server=server)


@pytest.mark.parametrize(
    ("threads", "ranks", "shown"),
    [
        (1, 1, "avx2 on 1 thread (only one)"),
        (2, 1, "avx2 on 2 threads (only one)"),
        (4, 2, "avx2 on 4 threads of 2 ranks (only one)"),
    ],
)
def test_status_shows_what_computes_on_how_many_threads_and_why(
    capsys: pytest.CaptureFixture[str], threads: int, ranks: int, shown: str
) -> None:
    line = worker_values(
        worker(control_pb2.KernelsInfo(variant="avx2", reason="only one", threads=threads, ranks=ranks))
    )
    assert line["kernels"] == {"variant": "avx2", "reason": "only one", "threads": threads, "ranks": ranks}
    print_tables(MODEL, [], [line])
    assert shown in " ".join(capsys.readouterr().out.split())


def test_status_shows_no_kernels_where_a_device_computes(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(MODEL, [], [worker_values(worker(None))])
    assert capsys.readouterr().out.rstrip().endswith("-")


def test_status_shows_what_lies_on_the_tiers_below_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    entry = worker(None)
    entry.load.pages_total = entry.load.pages_free = 8
    entry.load.tiers.add(
        tier=control_pb2.TIER_DISK, page_s=0.001, blocks=512, used_bytes=37 << 20, capacity_bytes=100 << 20
    )
    line = worker_values(entry)
    assert [(tier["tier"], tier["blocks"], tier["page_s"]) for tier in line["tiers"]] == [("disk", 512, 0.001)]
    print_tables(MODEL, [], [line])
    shown = " ".join(capsys.readouterr().out.split())
    assert "8: 8 free; disk 512 (37% full)" in shown


def test_status_shows_memory_as_billed_beside_as_measured_and_the_hit_rate(capsys: pytest.CaptureFixture[str]) -> None:
    mib = 1 << 20
    memory = [
        control_pb2.MemoryUse(part="pages", billed_bytes=3 * mib, measured_bytes=4 * mib),
        control_pb2.MemoryUse(part="weights", billed_bytes=5 * mib),
    ]
    entry = worker(None)
    entry.server.memory.extend(memory)
    entry.load.queried_tokens, entry.load.hit_tokens = 200, 75
    line = worker_values(entry)
    assert [tuple(use.values()) for use in line["memory"]] == [
        ("pages", 3 * mib, 4 * mib),
        ("weights", 5 * mib, 0),
    ]
    print_tables(MODEL, [], [line])
    printed = " ".join(capsys.readouterr().out.split())
    for shown in ("37.5%", "pages 4.0 MiB (billed 3.0)", "weights billed 5.0 MiB"):
        assert shown in printed


def test_status_shows_parts_of_blocks_that_lie_apart_as_it_shows_pages(capsys: pytest.CaptureFixture[str]) -> None:
    entry = worker(None)
    entry.load.pages_total, entry.load.pages_free, entry.load.pages_cached = 91, 80, 11
    entry.load.further.total, entry.load.further.free, entry.load.further.cached = 40, 9, 31
    print_tables(MODEL, [], [worker_values(entry)])
    assert "91: 80 free, 11 cached; further 40: 9 free, 31 cached" in " ".join(capsys.readouterr().out.split())


def test_status_says_by_name_all_that_a_worker_reports() -> None:
    """So a field that workers report tomorrow needs no edit here."""
    said = worker_values(worker(None))
    assert said["state"] == "starting"
    assert set(said) == {
        field.name for kind in (control_pb2.ServerInfo, control_pb2.Load) for field in kind.DESCRIPTOR.fields
    } | {"worker_id"}
