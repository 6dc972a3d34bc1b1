"""The table of a router's optional features: one branch for each."""

from __future__ import annotations

from router.adapters.named_adapter import named_adapters
from router.adapters.pages import RouterAdapters
from router.console.api import Console
from router.kserve.service import KServe
from router.pins.admin import RouterPins
from router.server_branch import RouterTable

NAMED_MODELS = named_adapters
"""Returns the models that workers serve besides the base model: their LoRA adapters."""
BRANCHES: RouterTable = (KServe, RouterAdapters, RouterPins, Console)
