"""The metrics port of a process: scrapers are served beside those who connect and say nothing."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from twostroke.observability import telemetry
from twostroke.observability.telemetry import RENDERING_SHARE, MetricsServer, Scrapes


def test_those_who_say_nothing_have_no_threads_for_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "MOST_SCRAPERS", 2)
    monkeypatch.setattr(telemetry._SilentHandler, "timeout", 0.3)
    server = MetricsServer(CollectorRegistry(), "127.0.0.1")
    host, _, port = server.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=60) for _ in range(5)]
    try:
        for each in silent:
            assert each.recv(1) == b""
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
            assert answer.status == 200
    finally:
        for each in silent:
            each.close()
        server.close()
    assert capfd.readouterr().err == ""


def test_many_scrapers_get_a_share_of_the_time():
    made = []

    def page(environ, start_response):
        made.append(time.monotonic())
        time.sleep(0.005)
        return [b"page"]

    scrapes = Scrapes(page)
    begun_s = time.monotonic()
    threads = [threading.Thread(target=scrapes, args=({}, None)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 10
    assert (len(made) - 1) * 0.005 <= 1.5 * RENDERING_SHARE * (time.monotonic() - begun_s)
