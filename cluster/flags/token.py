"""The secret that all processes of a cluster share: in a file, because arguments are for everybody to read."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from twostroke.errors import ConfigError

VARIABLE = "TWOSTROKE_TOKEN_FILE"
SHORTEST = 16
"""Characters: nobody guesses so many."""
_MAKE = "(umask 077; openssl rand -hex 32 > FILE)"


def add(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--token-file",
        default=os.environ.get(VARIABLE) or None,
        metavar="FILE",
        help=f"with the secret that workers, routers and supervisor share (default: ${VARIABLE}, or a drawn one that "
        "only what this command starts knows)",
    )


def check_private(flag: str, path: str) -> None:
    """Raises ConfigError where every user of this host may read a secret. Its group may: as in pods."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise ConfigError(
            f"{flag} {path} may be read by every user of this host: chmod 600 {path} (or 640, for a group)", field=flag
        )


def read(path: str) -> str:
    """Raises ConfigError that says what is wrong with the file, and nothing of what is in it."""
    said = f"${VARIABLE}" if os.environ.get(VARIABLE) == path else "--token-file"
    try:
        check_private(said, path)
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{said} {path}: {error.strerror}; make one with: {_MAKE}", field="token_file") from error
    except UnicodeDecodeError:
        token = ""
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{said} {path} must hold one word of at least {SHORTEST} characters; make one with: {_MAKE}",
            field="token_file",
        )
    return token
