"""Logprobs of prompts as a branch of a decode worker."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.request import Attempt, PromptLogprobs
from twostroke.rpc.convert import prompt_logprobs_to_message
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.constraints.scored_prompt import ScoredPrompt
from twostroke.worker.answers import AnswerFeature
from twostroke.worker.branches import Branch


class ScoredAnswer(AnswerFeature):
    computes_all = True

    def __init__(self) -> None:
        self._scored = ScoredPrompt()
        self.constraints = (self._scored,)

    def add_to_first(self, message: worker_pb2.TokenEntry | worker_pb2.RequestSnapshot) -> None:
        message.prompt_logprobs.CopyFrom(prompt_logprobs_to_message(PromptLogprobs.joined(self._scored.scores)))


class _Answers:
    field = "prompt_logprobs"
    is_default = False

    async def feature_of(self, attempt: Attempt, others: Sequence[AnswerFeature]) -> ScoredAnswer:
        return ScoredAnswer()


class ScoredPrompts(Branch):
    answers = _Answers()
