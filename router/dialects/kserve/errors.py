"""Errors as KServe's protocol writes them."""

from __future__ import annotations

from router.dialects.reply import ErrorForm, Json
from twostroke.base.errors import ServeError


def error_body(error: ServeError) -> Json:
    return {"error": error.message}


ERRORS = ErrorForm(error_body)
