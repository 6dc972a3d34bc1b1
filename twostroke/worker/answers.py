"""The port of features that single answers of a decode worker may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from typing import Protocol

from twostroke.base.errors import NonFiniteLogits, ServeError, UnsupportedFeature
from twostroke.config import SPECULATE_AUTO, SPECULATE_OFF
from twostroke.request import Attempt, GenerateRequest
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.reading import Proposer, TokenReader
from twostroke.scheduler.sequence import Constraint, Sequence

ASKED: Mapping[str, Callable[[Attempt], bool]] = {
    "prompt_logprobs": lambda attempt: attempt.scores_prompt,
    "grammar": lambda attempt: attempt.request.sampling.grammar is not None,
    "speculation": lambda attempt: attempt.request.speculation not in ("", SPECULATE_AUTO, SPECULATE_OFF),
}
"""Fields of a request that ask for a feature of its answer."""


class AnswerFeature:
    """What one feature does for one answer. A method does nothing unless a feature overrides it."""

    constraints: tuple[Constraint, ...] = ()
    reader: TokenReader | None = None
    proposer: Proposer | None = None
    computes_all = False
    """Whether the answer's sequence computes its whole prompt itself."""
    forced_run: Callable[[int], ListOf[int]] | None = None
    """Finds tokens that are certain to come next. None: there are none, or they become known without being proposed."""

    @property
    def facts(self) -> Mapping[str, float]:
        """Returns numbers for the trace and the log of an answer that has ended."""
        return {}

    def add_to_first(self, message: worker_pb2.TokenEntry | worker_pb2.RequestSnapshot) -> None:
        """Adds the fields that are sent with the first token."""

    def add_to_last(self, entry: worker_pb2.TokenEntry) -> None:
        """Adds the fields that are sent with the end of the answer."""

    def why_unsampled(self, request: GenerateRequest) -> ServeError | None:
        """Returns why no token could be drawn. None: the reason is not this feature."""
        return None

    def ended(self, sequence: Sequence, *, is_whole: bool) -> None:
        """Counts and learns from the answer, which has ended."""


class AnswerBranch(Protocol):
    """Makes one feature for answers."""

    @property
    def field(self) -> str:
        """The field of a request that asks for it, one of ASKED."""

    @property
    def is_default(self) -> bool:
        """Whether answers have the feature even if the request does not ask for it."""

    async def feature_of(self, attempt: Attempt, others: ListOf[AnswerFeature]) -> AnswerFeature | None:
        """Returns the feature of an answer that has `others` already; None if it needs nothing. Raises ServeError."""


class AnswerFeatures:
    """All features of one answer, as one."""

    def __init__(self, each: Iterable[AnswerFeature] = ()) -> None:
        self.each = tuple(each)
        self.constraints = tuple([constraint for each in self.each for constraint in each.constraints])
        self.reader = next((each.reader for each in self.each if each.reader is not None), None)
        self.proposer = next((each.proposer for each in self.each if each.proposer is not None), None)
        self.computes_all = any(each.computes_all for each in self.each)

    @property
    def facts(self) -> dict[str, float]:
        return {name: value for each in self.each for name, value in each.facts.items()}

    def why_unsampled(self, request: GenerateRequest) -> ServeError:
        """Returns why the answer got no token."""
        reasons = [each.why_unsampled(request) for each in self.each]
        unknown = NonFiniteLogits("the model's numbers overflowed for this request: no token to draw")
        return next(filter(None, reasons), unknown)


async def features_of(attempt: Attempt, branches: ListOf[AnswerBranch]) -> AnswerFeatures:
    """Makes the features of an answer, in the order of the branches. Branches of features that it lacks are not called.

    Raises UnsupportedFeature where the request asks for what no branch makes.
    """
    asked = {field for field, asks in ASKED.items() if asks(attempt)}
    missing = asked.difference([branch.field for branch in branches])
    if missing:
        field = min(missing)
        raise UnsupportedFeature(f"{field}: this worker was started without the branch for it", field=field)
    made: list[AnswerFeature] = []
    for branch in branches:
        if branch.is_default or branch.field in asked:
            feature = await branch.feature_of(attempt, made)
            made += [] if feature is None else [feature]
    return AnswerFeatures(made)
