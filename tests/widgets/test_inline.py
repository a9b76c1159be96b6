"""static/ holds what js/ says, small enough to be sent with every widget."""

from __future__ import annotations

from pathlib import Path

import pytest

from minipar_widgets import inline


def test_static_files_are_current() -> None:
    built = inline.built()
    found = {path.name: path.read_text(encoding="utf-8") for path in inline.STATIC.glob("*")}
    assert sorted(found) == sorted(built)
    for name, text in built.items():
        assert found[name] == text, f"static/{name} is not current: run python -m minipar_widgets.inline"


@pytest.mark.parametrize("name", sorted(inline.built()))
def test_module_is_small_and_whole(name: str) -> None:
    text = (inline.STATIC / name).read_text(encoding="utf-8")
    assert len(text.encode()) <= 50_000
    assert "\nimport " not in text
    assert text.endswith("export default { render };\n")


def _sources(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def test_imports_are_put_in_place_without_what_nothing_uses(tmp_path: Path) -> None:
    shared = (
        "// words\nconst hidden = 3;\nexport function used() {\n  return hidden; // why\n}\nexport const idle = 1;\n"
    )
    entry = 'import { used } from "./shared.js";\nfunction render() { used(); }\nexport default { render };\n'
    built = inline.built(_sources(tmp_path, shared=shared, ring=entry))
    assert built["ring.js"] == (
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
        inline.built(tmp_path)
