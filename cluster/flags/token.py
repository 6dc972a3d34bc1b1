"""The token that all processes of a cluster share. It is in a file, because every user can read arguments."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import ConfigError

SHORTEST = 16
"""Characters of a token that nobody guesses."""
_MAKE = "(umask 077; openssl rand -hex 32 > FILE)"


def check_private(flag: str, path: str) -> None:
    """Raises ConfigError where every user of this host may read a secret. Its group may, as in pods."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise ConfigError(
            f"{flag} {path} may be read by every user of this host: chmod 600 {path} (or 640, for a group)", field=flag
        )


def read(path: str) -> str:
    """Returns the token. Raises ConfigError that says what is wrong with the file and nothing of its content."""
    from_environment = os.environ.get(TOKEN_VARIABLE)
    is_from_there = bool(from_environment) and str(Path(from_environment or "").expanduser().absolute()) == path
    flag = f"${TOKEN_VARIABLE}" if is_from_there else "--token-file"
    try:
        check_private(flag, path)
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; make one with: {_MAKE}", field="token_file") from error
    except UnicodeDecodeError:
        token = ""
    if len(token) < SHORTEST or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{flag} {path} must hold one word of at least {SHORTEST} characters; make one with: {_MAKE}",
            field="token_file",
        )
    return token
