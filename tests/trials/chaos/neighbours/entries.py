"""The table of hostile clients."""

from __future__ import annotations

from tests.trials.chaos.neighbours import http2_entries, http_entries, request_entries, rpc_entries
from tests.trials.chaos.neighbours.target import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for module in (http_entries, request_entries, http2_entries, rpc_entries)
    for entry in module.TABLE.entries
}
