"""What a decode worker checks of a request before it queues it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from twostroke.base.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from twostroke.engine.backends.facts import LoadedModel
from twostroke.request import Attempt, highest_token


def check_request(attempt: Attempt, facts: LoadedModel, now_s: float) -> None:
    """Raises InvalidRequest, naming the field, or DeadlineExceeded for what can never be served here."""
    request = attempt.request
    prompt, longest = len(request.prompt), len(request.prompt) + request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    _check_ids(attempt.known, "prompt", facts)
    _check_ids([token for token, _ in request.sampling.logit_bias], "logit_bias", facts)
    _check_ids(request.sampling.stop_token_ids, "stop_token_ids", facts)
    _check_ids(request.sampling.logprob_token_ids, "logprob_token_ids", facts)
    _check_ids([highest_token(request.sampling.allowed_tokens)], "allowed_token_ids", facts)
    fits = facts.pages * facts.block_size
    if longest > min(fits, facts.max_model_len):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {min(fits, facts.max_model_len)} tokens. However, prompt "
            f"({prompt} tokens) plus max_tokens ({request.sampling.max_tokens}) is {longest}. The model serves "
            f"{facts.max_model_len}, the whole page pool holds {fits} tokens. (context_length_exceeded)",
            field="max_tokens",
        )
    if len(attempt.emitted) >= request.sampling.max_tokens:
        raise InvalidRequest(f"all {request.sampling.max_tokens} tokens are emitted already", field="emitted")
    blocks = attempt.known_tokens // facts.block_size
    if len(attempt.block_hashes) != blocks:
        raise InvalidRequest(f"{len(attempt.block_hashes)} block hashes for {blocks} full blocks", field="block_hashes")
    if request.public_blocks > prompt // facts.block_size:
        raise InvalidRequest(
            f"{request.public_blocks} public blocks, but the prompt has {prompt // facts.block_size}",
            field="public_blocks",
        )
    if request.deadline_s is not None:
        check_deadline(request.deadline_s)
        if request.deadline_s <= now_s:
            raise DeadlineExceeded("the deadline had passed when the request arrived")


def _check_ids(tokens: Iterable[int], field: str, facts: LoadedModel) -> None:
    highest = max(tokens, default=0)
    if highest >= facts.vocab_size:
        raise InvalidRequest(f"token ids go up to {facts.vocab_size - 1}, got {highest}", field=field)


def check_deadline(deadline_s: float) -> None:
    if not math.isfinite(deadline_s):
        raise InvalidRequest(f"the deadline must be finite, got {deadline_s}", field="deadline_s")
