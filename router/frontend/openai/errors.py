"""Errors as the OpenAI API writes them."""

from __future__ import annotations

from router.frontend.http.reply import ErrorForm, Json
from twostroke.errors import ServeError


def error_body(error: ServeError) -> Json:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.code,
        }
    }


ERRORS = ErrorForm(error_body)
