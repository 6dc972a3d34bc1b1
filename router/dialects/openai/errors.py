"""Errors as the OpenAI API writes them."""

from __future__ import annotations

from router.dialects.reply import ErrorForm, Json
from twostroke.base.errors import ServeError


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
