"""Join js/<name>.js with what it imports: a widget's module must be one text, since a page loads it from memory.

The text of `./other.js` replaces its import, without comments, indentation, and unused declarations. This works on
plain text, without a parser, because the modules keep three rules: every declaration begins at the start of a line,
imports name what they import (no `as`, no default), and no two modules declare the same name.
"""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).parent / "js"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_DECLARED = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+|\{[^}]*\})")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")


class InlineError(Exception):
    """A module breaks one of the rules at the top of this file."""


def inline(entry: Path) -> str:
    """A module and what it imports as one module; InlineError if one of them breaks a rule."""
    pieces: dict[str, str] = {}  # by declared name, in order
    seen: set[Path] = set()
    main: list[str] = []

    def add(path: Path) -> None:
        if path in seen:
            return
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        for names, other in _IMPORT.findall(text):
            add(path.parent / f"{other}.js")
            for name in (name.strip() for name in names.split(",")):
                if name and name not in pieces:
                    raise InlineError(f"{path.name} imports {name!r}, which {other}.js does not declare")
        text = _IMPORT.sub("", text)
        if re.search(r"^import ", text, re.MULTILINE):
            raise InlineError(f'{path.name}: possible imports are `import {{ a, b }} from "./other.js";`')
        for piece in _pieces(text):
            if path == entry and piece.startswith("export default "):
                main.append(piece)
                continue
            piece = piece.removeprefix("export ")
            name = _DECLARED.match(piece)
            if name is None:
                raise InlineError(f"{path.name}: neither declaration nor import: {piece.splitlines()[0]!r}")
            if name[1] in pieces:
                raise InlineError(f"{path.name}: {name[1]!r} is declared in two modules")
            pieces[name[1]] = piece

    add(entry)
    needed: set[str] = set()
    ahead = ["".join(main)]
    while ahead:
        words = set(_WORD.findall(ahead.pop()))
        for name in pieces.keys() - needed:
            if words & set(_WORD.findall(name)):
                needed.add(name)
                ahead.append(pieces[name])
    return "".join(piece for name, piece in pieces.items() if name in needed) + "".join(main)


def _pieces(text: str) -> list[str]:
    """The declarations of a module, each with all its lines, without comments and indentation."""
    pieces: list[str] = []
    comment = False
    for line in text.splitlines():
        bare = line.strip()
        comment = comment or bare.startswith("/*")
        if comment or not bare or bare.startswith("//"):
            comment = comment and not bare.endswith("*/")
            continue
        bare = re.sub(r"\s+// .*$", "", bare)
        if line[0] not in " \t})]`":
            pieces.append("")
        if not pieces:
            raise InlineError(f"a module begins with {line!r}")
        pieces[-1] += bare + "\n"
    return pieces
