"""Errors as Anthropic's API writes them."""

from __future__ import annotations

from collections.abc import Mapping

from router.dialects.reply import ErrorForm, Json
from twostroke.base.errors import ContextLengthExceeded, Overloaded, RateLimitExceeded, ServeError

_STATUSES: Mapping[type[ServeError], int] = {Overloaded: 529, RateLimitExceeded: 429}
"""Statuses that differ from those of OpenAI's API. A 429 says there that the client's own limit is used up."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types by status, where they are neither `invalid_request_error` (below 500) nor `api_error`. Anthropic's API has no
503. It stays one here because gateways send such requests to another router."""


def error_body(error: ServeError) -> Json:
    status = _STATUSES.get(type(error), error.http_status)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


ERRORS = ErrorForm(error_body, _STATUSES, has_request_id=True)


def _message(error: ServeError) -> str:
    """Returns the sentence that Claude Code and other agents search for where a prompt is too long."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    if error.tokens is None or error.most_tokens is None:
        return f"prompt is too long: {error.message}"
    return f"prompt is too long: {error.tokens} tokens > {error.most_tokens} maximum"
