"""The table of a router's branches: one line for each."""

from __future__ import annotations

from router.adapter_admin import RouterAdapters
from router.adapters.named_adapter import named_adapters
from router.console.branch import Console
from router.pin_admin import RouterPins
from router.server_branch import RouterTable

NAMED_MODELS = named_adapters
"""Reads the models that the fleet serves beside its own."""
BRANCHES: RouterTable = (RouterAdapters, RouterPins, Console)
