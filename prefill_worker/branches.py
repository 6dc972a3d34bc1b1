"""The table of a prefill worker's branches: one line for each.

The first branch that gives a gate, an extension or a form is used; a comment says where order matters otherwise.
"""

from __future__ import annotations

from twostroke.worker.adapters.branch import Adapters
from twostroke.worker.branches import BranchTable
from twostroke.worker.drafts.branch import DraftModel
from twostroke.worker.page_forms.branch import PageForms
from twostroke.worker.pins.branch import Pins
from twostroke.worker.tiers.branch import Tiers

BRANCHES: BranchTable = (
    DraftModel,  # for the epochs of a flexible worker that decode
    Tiers,
    Adapters,
    PageForms,
    Pins,
)
