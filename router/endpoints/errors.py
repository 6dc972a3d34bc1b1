"""Error responses. Their headers are the same in every dialect; their status and body are the dialect's."""

from __future__ import annotations

import math

from starlette.responses import JSONResponse, Response

from router.dialects.reply import ErrorForm
from twostroke.base.errors import InvalidApiKey, Overloaded, ServeError, without_frames

SHOULD_RETRY_HEADER = "x-should-retry"
"""Header that tells OpenAI's and Anthropic's clients whether to retry. Without it they retry after 408, 409, 429, and
every status from 500 on."""
LONGEST_RETRY_S = 60.0
"""Longest wait of OpenAI's clients before a retry. If a retry is due later, they are told not to retry: they would do
so too early."""


def error_response(error: ServeError, form: ErrorForm, request_id: str = "") -> Response:
    without_frames(error)
    headers = {SHOULD_RETRY_HEADER: "true" if _is_worth_retrying(error) else "false"}
    if error.retryable:
        headers["retry-after"] = str(_retry_after_s(error))
    if isinstance(error, InvalidApiKey):
        headers["www-authenticate"] = "Bearer"
    body = {**form.body(error), "request_id": request_id} if form.has_request_id else form.body(error)
    return JSONResponse(body, status_code=form.statuses.get(type(error), error.http_status), headers=headers)


def _is_worth_retrying(error: ServeError) -> bool:
    predicted_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return error.retryable and (predicted_s is None or predicted_s <= LONGEST_RETRY_S)


def _retry_after_s(error: ServeError) -> int:
    """Returns whole seconds, as HTTP wants them."""
    predicted_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return max(1, math.ceil(predicted_s or 0.0))
