"""Controls on a page without a kernel: a table of results, one for each combination of their values.

    controls = [Control("schedule", "schedule", ("gpipe", "1f1b"), "1f1b"), Control("stages", "stages", (2, 3), 2)]
    html = panel("widget", "a title", controls, lambda chosen: Point(view.state(), {"line": "..."}, "another"))

The results of one value of the first control are one parcel, compressed. A browser opens it when that value is first
chosen. In a parcel equal arrays of all results follow one another, and of their numbers first all lowest bytes, then
all next ones, and so on: so the bytes that change little are neighbours. js/offline.js reads what `parcel` writes.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from typing import Any

import numpy as np

from minipar_widgets.inline import SOURCES, inline

Chosen = Mapping[str, Any]
_WIDTH = {"f8": np.float64, "f4": np.float32, "u4": np.uint32, "u2": np.uint16, "i4": np.int32, "u1": np.uint8}


@dataclass(frozen=True)
class Control:
    """A control of a page: a slider where its values are numbers, else a list. `shown` is its value at first."""

    name: str
    label: str
    values: tuple[Any, ...]
    shown: Any

    @property
    def slides(self) -> bool:
        return len(self.values) > 2 and all(isinstance(one, int) for one in self.values)


@dataclass(frozen=True)
class Point:
    """The result of one combination.

    traits   of the view. An array's layout is in the trait that names it: data in `about`, details in `more`
    parts    HTML of the page's other parts, by name
    title    of the page
    """

    traits: Mapping[str, Any]
    parts: Mapping[str, str] = field(default_factory=dict)
    title: str = ""


def combinations(controls: Sequence[Control]) -> Iterator[dict[str, Any]]:
    """All combinations of the controls' values; the last control changes first."""
    for values in product(*(one.values for one in controls)):
        yield dict(zip((one.name for one in controls), values, strict=True))


def panel(place: str, title: str, controls: Sequence[Control], find: Callable[[Chosen], Point]) -> str:
    """The controls as HTML, with the results, for the page's parts and its view, whose id is `place`-0. `find` gives
    the result of a combination. A page with this title is given that of each result."""
    parcels = []
    for first in controls[0].values:
        one = [Control(controls[0].name, "", (first,), first), *controls[1:]]
        parcels.append(base64.b64encode(parcel([find(chosen) for chosen in combinations(one)])).decode())
    data = {
        "place": place,
        "title": title,
        "controls": [
            {
                "name": control.name,
                "label": control.label,
                "values": list(control.values),
                "shown": control.values.index(control.shown),
                "slides": control.slides,
            }
            for control in controls
        ],
        "parcels": parcels,
    }  # fmt: skip
    script = inline(SOURCES / "offline.js").replace("export default {", "const page = {")
    style = (SOURCES / "offline.css").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    words = "controls of this page; every result was computed when it was made"
    return (
        f"<style>{style}</style>\n"
        f'<form class="mp-controls" id="{place}-controls" aria-label="{escape(words)}"></form>\n'
        f'<script type="module">\n{script}page.start({text});\n</script>\n'
    )


def parcel(points: Sequence[Point]) -> bytes:
    """Results as compressed bytes: the length of a JSON text in 4 bytes, the text, and the columns that it names."""
    columns: dict[str, list[np.ndarray]] = {}
    plain = []
    for point in points:
        traits = dict(point.traits)
        for trait, about in (("data", "about"), ("details", "more")):
            raw = traits.get(trait)
            if isinstance(raw, (bytes, bytearray, memoryview)):
                traits[trait] = None
                for name, (code, at, count) in traits[about].get("layout", {}).items():
                    array = np.frombuffer(raw, np.dtype(_WIDTH[code]), count, at)
                    columns.setdefault(f"{trait} {about} {name} {code}", []).append(array)
        plain.append({"traits": traits, "parts": dict(point.parts), "title": point.title})
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    heads = [[*name.split(" "), len(array)] for name, array in joined.items()]
    text = json.dumps({"points": plain, "columns": heads}, separators=(",", ":")).encode()
    planes = [array.view(np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes() for array in joined.values()]
    return zlib.compress(b"".join([len(text).to_bytes(4, "little"), text, *planes]), 9)
