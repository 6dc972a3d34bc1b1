"""The table of a router's branches: one line for each."""

from __future__ import annotations

from router.adapters.named_adapter import named_adapters
from router.adapters.pages import RouterAdapters
from router.console.api import Console
from router.kserve.service import KServe
from router.pins.admin import RouterPins
from router.server_branch import RouterTable

NAMED_MODELS = named_adapters
"""Reads the models that the fleet serves beside its own."""
BRANCHES: RouterTable = (KServe, RouterAdapters, RouterPins, Console)
