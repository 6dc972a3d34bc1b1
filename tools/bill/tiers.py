"""Loading a page against computing it: seconds per page of each tier, and the prefix from which loading pays."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.scheduler.cost import StepCost


@dataclass(frozen=True, slots=True)
class TierCost:
    """Bringing pages up from one tier, digests checked."""

    tier: str
    first_s: float
    """Seconds until the first page is there."""
    page_s: float
    """Seconds of each page in a run of them."""

    def load_s(self, pages: int) -> float:
        return self.first_s + max(0, pages - 1) * self.page_s


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Computing a prompt's pages."""

    cost: StepCost
    step_tokens: int
    block_size: int

    def compute_s(self, pages: int) -> float:
        """Returns the seconds for the first pages of a prompt, with nothing else to run."""
        return self.cost.of_prompt(pages * self.block_size, 0, self.step_tokens)


def break_even_pages(tier: TierCost, compute: ComputeCost, most_pages: int) -> int | None:
    """Returns the shortest prefix, in pages, that is loaded sooner than computed; None where none of them is."""
    return next((pages for pages in range(1, most_pages + 1) if tier.load_s(pages) < compute.compute_s(pages)), None)
