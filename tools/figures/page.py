"""Templates to pages that fetch nothing, all in one style that light and dark screens can read."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

COLOURS = 12
"""Beyond them the first one comes again."""
PAGE, STYLE = "page.html.jinja", "style.css.jinja"


def rendered(package: str, **values: Any) -> str:
    """The page.html.jinja of `package`; it includes style.css.jinja."""
    texts = {
        name: files(where).joinpath(name).read_text("utf-8") for where, name in ((package, PAGE), (__package__, STYLE))
    }
    environment = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(PAGE).render(colours=COLOURS, **values)
