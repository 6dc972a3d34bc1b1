"""Features for sequences on a bench, as a worker would hand them to its scheduler."""

from __future__ import annotations

from twostroke.grammar.state import GrammarState
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import PromptLogprobs
from twostroke.scheduler.branches import SchedulerBranches
from twostroke.scheduler.constraints.drafting import Drafting
from twostroke.scheduler.constraints.exact_blocks import ExactBlocks
from twostroke.scheduler.constraints.grammar_run import GrammarRun
from twostroke.scheduler.constraints.scored_prompt import ScoredPrompt
from twostroke.scheduler.reading import InlineReadings, ReadingRunner
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits


def all_branches(
    pool: BlockPool,
    limits: SchedulerLimits,
    *,
    has_exact_blocks: bool = False,
    readings: ReadingRunner | None = None,
) -> SchedulerBranches:
    shared = (ExactBlocks(pool, limits.block_size),) if has_exact_blocks else ()
    return SchedulerBranches(shared, Drafting(limits), readings or InlineReadings())


def released_pages(branches: SchedulerBranches) -> set[int]:
    """Returns the pages of which the next step is told that nothing exact is needed."""
    return {page for each in branches.shared if isinstance(each, ExactBlocks) for page in each.finished}


def match(sequence: Sequence, state: GrammarState, block_size: int) -> None:
    """Lets the answer match a grammar."""
    assert sequence.sampling is not None
    run = GrammarRun(state, sequence.sampling, block_size)
    sequence.constraints = (*sequence.constraints, run)
    sequence.reader = run


def score(sequence: Sequence) -> None:
    """Want the logprobs of the prompt."""
    sequence.constraints = (*sequence.constraints, ScoredPrompt())
    sequence.computes_all = True
    sequence.block_hashes = []


def grammar_of(sequence: Sequence) -> GrammarState | None:
    return next((each.state for each in sequence.constraints if isinstance(each, GrammarRun)), None)


def scores_found(sequence: Sequence) -> PromptLogprobs:
    (scored,) = [each for each in sequence.constraints if isinstance(each, ScoredPrompt)]
    return PromptLogprobs.joined(scored.scores)
