"""A module joined with what it imports is small enough to be sent with every widget."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipar_widgets import inline

ENTRIES = sorted(path for path in inline.SOURCES.glob("*.js") if "\nexport default " in path.read_text())


@pytest.mark.parametrize("entry", ENTRIES, ids=[path.stem for path in ENTRIES])
def test_module_is_small_and_whole(entry: Path) -> None:
    text = inline.inline(entry)
    assert len(text.encode()) <= 60_000
    assert "\nimport " not in text
    assert text.endswith(("export default { render };\n", "export default { start };\n"))  # (of a widget, of a page)


def _sources(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def test_imports_are_put_in_place_without_what_nothing_uses(tmp_path: Path) -> None:
    shared = (
        "// words\nconst hidden = 3;\nexport function used() {\n  return hidden; // why\n}\nexport const idle = 1;\n"
    )
    entry = 'import { used } from "./shared.js";\nfunction render() { used(); }\nexport default { render };\n'
    assert inline.inline(_sources(tmp_path, shared=shared, ring=entry) / "ring.js") == (
        "const hidden = 3;\nfunction used() {\nreturn hidden;\n}\n"
        "function render() { used(); }\nexport default { render };\n"
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('import { other } from "./shared.js";\nexport default { other };\n', "shared.js does not declare"),
        ('import all from "./shared.js";\nexport default { all };\n', "possible imports are"),
        ('import { used } from "./shared.js";\nconst used = 1;\nexport default { used };\n', "declared in two modules"),
    ],
)
def test_what_cannot_be_inlined_is_refused(tmp_path: Path, entry: str, words: str) -> None:
    _sources(tmp_path, shared="export const used = 1;\n", ring=entry)
    with pytest.raises(inline.InlineError, match=words):
        inline.inline(tmp_path / "ring.js")
