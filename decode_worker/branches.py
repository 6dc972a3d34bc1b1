"""The table of a decode worker's branches: one line for each.

The first branch that gives a gate, an extension or a form is used; a comment says where order matters otherwise.
"""

from __future__ import annotations

from decode_worker.grammars import Grammars
from decode_worker.scored_prompts import ScoredPrompts
from decode_worker.speculations import Speculations
from twostroke.worker.adapters.branch import Adapters
from twostroke.worker.branches import BranchTable
from twostroke.worker.drafts.branch import DraftModel
from twostroke.worker.page_forms.branch import PageForms
from twostroke.worker.pins.branch import Pins
from twostroke.worker.tiers.branch import Tiers

BRANCHES: BranchTable = (
    DraftModel,
    Tiers,
    Adapters,
    PageForms,
    ScoredPrompts,
    Grammars,
    Speculations,  # after grammars, whose forced tokens it proposes
    Pins,
)
