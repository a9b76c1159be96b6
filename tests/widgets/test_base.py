"""What all widgets share: a live view with a kernel, a page that asks for nothing, and the same colours everywhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from array import array

import numpy as np
import pytest

from minipar import Plan, simulate
from minipar.trace import labels
from minipar.trace.figure import DIFFERENCES, LOOKS, MEMORY
from minipar_widgets import Explorer, Timeline, base
from minipar_widgets.inline import SOURCES
from minipar_widgets.packing import pack


def _timeline() -> Timeline:
    return Timeline(simulate(Plan(pp=2, microbatches=3).compile(layers=4)))


def test_widgets_import_without_torch() -> None:
    script = "import sys, minipar_widgets as m; [getattr(m, n) for n in m.__all__]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_live_view_comes_with_a_kernel_unless_static(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython

    class Shell:
        kernel = object()

    monkeypatch.setattr(IPython, "get_ipython", Shell)
    widget = _timeline()
    assert widget._repr_mimebundle_()[0][base._VIEW]["model_id"] == widget.model_id
    monkeypatch.setenv("MINIPAR_STATIC", "1")
    assert base._VIEW not in widget._repr_mimebundle_()[0]


def test_page_is_whole_and_asks_for_nothing() -> None:
    page = _timeline().to_html()
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|@import", page)
    assert page.count("<script") == page.count("</script>") == 2  # of the head, and of the widget
    state = json.loads(re.search(r"const state = (.*), heard", page)[1])  # type: ignore[index]
    assert state["label"] == _timeline().summary()
    assert "_esm" not in state


def test_whole_numbers_travel_in_the_narrowest_type() -> None:
    arrays = {"few": [0, 255], "more": [0, 256], "most": [0, 2**32 - 1], "signed": [-1, 3], "none": []}
    packed = {name: array("i" if name == "signed" else "I", values) for name, values in arrays.items()}
    data, layout = pack(packed | {"exact": array("d", [0.5, 2.0])})
    codes = {"few": "u1", "more": "u2", "most": "u4", "signed": "i4", "none": "u4", "exact": "f8"}
    assert {name: code for name, (code, _, _) in layout.items()} == codes
    for name, (code, at, count) in layout.items():
        assert np.frombuffer(data, np.dtype(f"<{code}"), count, at).tolist() == [*arrays.get(name, (0.5, 2.0))]


HOSTILE = "<!--<script> PLACE STATE </script> <\\/ ]]>"


def test_a_note_of_any_text_stays_a_note() -> None:
    widget = _timeline()
    widget.caption_text = HOSTILE
    page = widget.to_html()
    state = json.loads(re.search(r"const state = (.*), heard", page)[1])  # type: ignore[index]
    assert state["caption_text"] == HOSTILE
    script = page[page.index("<script") + 1 : page.index("</script>")]
    assert "<!--" not in script
    assert "<script" not in script


def test_explorer_shows_its_views_and_settings() -> None:
    class Both(Explorer):
        def summary(self) -> str:
            return "two timelines"

        def settings(self) -> dict[str, str]:
            return {"stages": "<2>"}

    page = Both([_timeline(), _timeline()]).to_html()
    assert page.count("<script") == 3  # of the head, and of each view
    assert "widget-0" in page
    assert "widget-1" in page
    assert "<dt>stages</dt><dd>&lt;2&gt;</dd>" in page


@pytest.mark.skipif(shutil.which("node") is None, reason="no node (18 or newer) on this machine")
def test_colours_are_those_of_the_pictures() -> None:
    script = f'import {{ LOOKS, MEMORY, DIFFERENCES }} from "{(SOURCES / "shared.js").as_uri()}";'
    script += "console.log(JSON.stringify([LOOKS, MEMORY, DIFFERENCES]))"
    run = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    looks, memory, differences = json.loads(done.stdout)
    assert list(looks) == list(LOOKS)
    for kind, look in LOOKS.items():
        face, edge, ink, hatch, letter, *bands = looks[kind]
        assert (face, edge, ink, hatch, *bands) == (*look[:3], look.hatch[:1], *(look[4:] if look.bands else ()))
        assert letter == labels.LETTERS.get(kind, letter)
    assert {kind: face for kind, (face, _) in memory.items()} == MEMORY
    assert [tuple(one) for one in differences] == list(DIFFERENCES)
