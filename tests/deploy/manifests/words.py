"""The forms that the API demands of names, labels, quantities and ports."""

from __future__ import annotations

import difflib
import re
from decimal import Decimal
from typing import Any

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""DNS-1123: names of containers, volumes, namespaces, gRPC groups."""
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUALIFIED = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
_PORT_NAME = re.compile(r"(?!.*--)(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?\d+)?")
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_IMAGE = re.compile(
    r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_ALMOST = 0.9
MOST_PORT = 65535
MOST_INT32 = (1 << 31) - 1


def is_label_value(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 63 and _LABEL_VALUE.fullmatch(value) is not None


def is_qualified_name(key: Any) -> bool:
    """Tells whether it is a key of labels, annotations or resources: an optional DNS prefix, a slash, a name."""
    if not isinstance(key, str):
        return False
    prefix, slash, name = key.rpartition("/")
    return bool(_QUALIFIED.fullmatch(name)) and (not slash or is_subdomain(prefix))


def is_subdomain(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= 253 and SUBDOMAIN.fullmatch(name) is not None


def is_image(text: str) -> bool:
    return _IMAGE.fullmatch(text) is not None


def is_slip(text: str, meant: str) -> bool:
    """Nearly that word, or its last part alone."""
    return text != meant and (
        text == meant.rpartition("/")[2] or difflib.SequenceMatcher(None, text, meant).ratio() > _ALMOST
    )


def is_schedule(text: str) -> bool:
    """Tells whether it is a schedule of cron: five fields, or a name for them."""
    if text.startswith("@"):
        return text in ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
    fields = text.split()
    return len(fields) == len(_CRON) and all(
        re.fullmatch(r"(\*|[0-9A-Za-z]+(-[0-9A-Za-z]+)?)(/\d+)?", part)
        and all(least <= int(number) <= most for number in re.findall(r"(?<!/)\b\d+", part))
        for field, (least, most) in zip(fields, _CRON, strict=True)
        for part in field.split(",")
    )


def is_port_name(name: Any) -> bool:
    """IANA's: at most 15 characters, a letter among them."""
    return isinstance(name, str) and _PORT_NAME.fullmatch(name) is not None


def is_port_number(port: Any) -> bool:
    return isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= MOST_PORT


def quantity(value: Any) -> Decimal | None:
    """None: the API would not take it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Decimal(str(value))
    matched = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        return None
    number, suffix = Decimal(matched[1]), matched[2] or ""
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(suffix[1:]))


def share(value: Any) -> Decimal | None:
    """Returns the number of an int-or-percentage: "25%" is 0.25, an int is itself, and None is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value) if abs(value) <= MOST_INT32 else None
    matched = re.fullmatch(r"(\d+)%", value) if isinstance(value, str) else None
    return None if matched is None else Decimal(matched[1]) / 100
