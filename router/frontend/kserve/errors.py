"""Errors as KServe's protocol writes them."""

from __future__ import annotations

from router.frontend.http.reply import ErrorForm, Json
from twostroke.errors import ServeError


def error_body(error: ServeError) -> Json:
    return {"error": error.message}


ERRORS = ErrorForm(error_body)
