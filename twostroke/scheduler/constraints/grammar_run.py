"""An answer that has to match a grammar: masks of the tokens that may come, and runs of tokens that it forces."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as ListOf

from twostroke.base.token_mask import mask_of, narrowed
from twostroke.grammar.advance import Advance
from twostroke.grammar.state import GrammarState
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import FeatureRows
from twostroke.scheduler.sequence import Constraint, Demand, Sequence


class GrammarRun(Constraint):
    """Masks the answer's tokens and reads them: forced ones become known with those before, and run in the next step.

    If logprobs are wanted, or only some tokens are allowed, each token has to be drawn. Then forced tokens are drafted
    like others, or run one per step.
    """

    def __init__(self, state: GrammarState, params: SamplingParams, block_size: int) -> None:
        self.state = state
        self._params = params
        self._block_size = block_size

    def demand(self, sequence: Sequence, demand: Demand) -> Demand:
        """Returns the demand. Forced tokens of at most a block run like a stream's next token."""
        if demand.start < sequence.prompt_tokens or len(sequence.known) - demand.start > self._block_size:
            return demand
        return demand._replace(is_stream=True)

    def fill(self, rows: FeatureRows, row: int, sequence: Sequence, tokens: range, proposed: tuple[int, ...]) -> None:
        if tokens.stop == len(sequence.known):
            allowed = mask_of(self._params.allowed_tokens)
            rows.masks[row] = [narrowed(mask, allowed, rows.end_tokens) for mask in self.state.masks_along(proposed)]

    def most_ahead(self, sequence: Sequence, most: int) -> int:
        """Returns how many proposed tokens may run: each needs a mask."""
        return min(most, self.state.most_proposed)

    def permitted(self, tokens: tuple[int, ...]) -> int:
        return self.state.permitted_prefix(tokens)

    def reading(
        self, drawn: ListOf[SampledToken], proposed: ListOf[int], most_tokens: int, ends: Collection[int]
    ) -> Advance:
        return Advance(self.state, drawn, proposed, most_tokens, not self._params.draws_forced, ends)
