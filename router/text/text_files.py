"""The files of a model's tokenizer and chat templates. All processes of a router read the same version of them."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twostroke.base.cache_key import content_digest
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.places import TEMPLATES, cache_dir
from twostroke.models.file_versions import unchanged

log = logging.getLogger(__name__)

TEXT_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PACED: Final = "none"
"""The digest for a paced model, which has no files."""


def text_digest(model_dir: str) -> str:
    """Returns a digest of the names and the contents of the files; `PACED` for the empty directory of a paced model."""
    if not model_dir:
        return PACED
    return content_digest((name, Path(model_dir) / name) for name in _names(model_dir)).hex()


def text_copy(model_dir: str, digest: str) -> str:
    """Returns a folder with the files of that digest, for processes that start later. By then the files in the model's
    folder may have been replaced, because workers can load other weights.

    The folder is a copy, or the model's own if it cannot be copied. One copy of each digest is kept for other routers.
    """
    if not model_dir:
        return model_dir
    place = cache_dir() / "texts" / digest
    try:
        if not place.exists():
            _copy_text(Path(model_dir), place)
        if text_digest(str(place)) == digest:
            return str(place)
        problem = f"{place} has other files"
    except OSError as error:
        problem = str(error)
    log.warning("no copy of a model's text: it must not be replaced while this router serves problem=%s", problem)
    return model_dir


def _copy_text(model_dir: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".copying-", dir=place.parent) as folder:
        made = Path(folder) / "text"
        for name in _names(str(model_dir)):
            if (model_dir / name).is_file():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model_dir / name, made / name)
        with contextlib.suppress(OSError):
            made.rename(place)  # unless another router was quicker


@contextlib.contextmanager
def one_text(model_dir: str, digest: str | None = None) -> Iterator[None]:
    """Checks that the files have the `digest`, and do not change while the context reads them. Raises ConfigError."""
    if not model_dir:
        yield
        return
    with unchanged(Path(model_dir), _names(model_dir), field="model_dir"):
        if digest is not None and text_digest(model_dir) != digest:
            raise ConfigError(
                f"the tokenizer or the chat template in {model_dir} was replaced after this router had started: "
                "restart the routers and the workers with the new one",
                field="model_dir",
            )
        yield


def _names(model_dir: str) -> tuple[str, ...]:
    templates = (Path(model_dir) / TEMPLATES).glob("*.jinja")
    return (*TEXT_FILES, *sorted(f"{TEMPLATES}/{path.name}" for path in templates))
