"""The table of a router's branches: one line for each."""

from __future__ import annotations

from router.adapter_admin import RouterAdapters
from router.console.branch import Console
from router.pin_admin import RouterPins
from router.server_branch import RouterTable

BRANCHES: RouterTable = (RouterAdapters, RouterPins, Console)
