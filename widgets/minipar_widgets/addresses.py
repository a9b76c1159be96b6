"""What controls say as text, so that an address carries them: `schedule=zb-v&stages=4`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote_plus

from minipar.errors import PlanError
from minipar_widgets.arguments import number, one_of, whole


def said(control: Any) -> str:
    """A control's value as text."""
    value = control.value
    if hasattr(control, "options"):
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return next(str(label) for label, one in _pairs(control) if one == value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def heard(control: Any, name: str, text: str) -> Any:
    """The value that a text means for a control. Errors: PlanError if the control cannot have it."""
    if hasattr(control, "options"):
        known = {str(label): value for label, value in _pairs(control)}
        if isinstance(control.value, tuple):
            return tuple(known[one_of(name, word, known)] for word in text.split(",") if word)
        return known[one_of(name, text, known)]
    if isinstance(control.value, bool):
        return one_of(name, text, ("yes", "no")) == "yes"
    if isinstance(control.value, str):
        return text
    try:
        value = type(control.value)(text)
    except ValueError:
        raise PlanError(f"{name}={text!r}: must be a number") from None
    base = getattr(control, "base", None)
    least, most = (control.min, control.max) if base is None else (base**control.min, base**control.max)
    if isinstance(value, int):
        return whole(name, value, least, most)
    return number(name, value, least * (1 - 1e-9), most * (1 + 1e-9))


def words_of(address: str) -> dict[str, str]:
    """The words of an address: `a=1&b=2`."""
    pairs = (part.partition("=") for part in address.split("&") if part)
    return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}


def address_of(words: Mapping[str, str]) -> str:
    """Words as an address."""
    return "&".join(f"{quote(name)}={quote(value, safe=',:;. ').replace(' ', '+')}" for name, value in words.items())


def _pairs(control: Any) -> list[tuple[Any, Any]]:
    return [one if isinstance(one, tuple) else (one, one) for one in control.options]
