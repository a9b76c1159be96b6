"""Which cells of a notebook run in a Python that has no torch: reads a JSON list of cells, writes what remains of them.

    python -m docs.site.without_torch             nor NumPy and other PACKAGES; null if a cell needs one of these
    python -m docs.site.without_torch PACKAGES    with them

    cells before       from minipar import Plan, Cluster | Cluster(2).run(f) | Plan(pp=2)
    cells after        from minipar import Plan          | (nothing)         | Plan(pp=2)

A cell is left out, but for its imports, if it needs torch, or a name that only such a cell has made. Other errors are
the lesson's own. Written are for each cell whether it runs, and its text then.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

MISSING = ("torch", "safetensors", "_multiprocessing", "_posixshmem")
PACKAGES = {
    "numpy": "numpy",
    "matplotlib": "matplotlib",
    "scipy": "scipy",
    "PIL": "pillow",
}  # Pyodide's, loaded where needed


class Lacking(Exception):
    """A cell needs one of PACKAGES, which is not there."""


def remains(text: str, space: dict[str, Any], lacking: set[str]) -> tuple[bool, str]:
    """Whether a cell runs, and its text then; it is run with the names of `space`, and adds its own. To `lacking` go
    names that are missing for want of PACKAGES. Errors: Lacking."""
    lines, imports = text.splitlines(), []
    for part in reversed(ast.parse(text).body):
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            kept = list(_imports(part, space, lacking))
            if len(kept) != len(part.names):
                part.names = kept
                lines[part.lineno - 1 : part.end_lineno] = [ast.unparse(part)] if kept else []
            imports += [ast.unparse(part)] if kept else []
    left, tried = "\n".join(lines).strip(), dict(space)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(left, "cell", "exec"), tried)
    except NotImplementedError:  # (an exercise)
        pass
    except ImportError as error:
        if _for_packages(error):
            raise Lacking from None
        return False, "\n".join(reversed(imports))
    except NameError as error:
        if error.name in lacking:
            raise Lacking from None
        return False, "\n".join(reversed(imports))
    space.update(tried)
    return True, left


def _imports(part: ast.Import | ast.ImportFrom, space: dict[str, Any], lacking: set[str]) -> Iterator[ast.alias]:
    """The names of an import that are there, which go to `space`."""
    for name in part.names:
        alone = ast.Import([name]) if isinstance(part, ast.Import) else ast.ImportFrom(part.module, [name], part.level)
        try:
            exec(ast.unparse(alone), space)
        except ImportError as error:
            if _for_packages(error):
                lacking.add(name.asname or name.name)
        else:
            yield name


def _for_packages(error: ImportError) -> bool:
    name = (error.name or "").partition(".")[0]
    return name in PACKAGES and sys.modules[name] is None


def main() -> None:
    for name in (*MISSING, *(() if sys.argv[1:] else PACKAGES)):
        sys.modules[name] = None  # type: ignore[assignment]
    space: dict[str, Any] = {"__name__": "__main__", "display": lambda *_: None}
    try:
        lacking: set[str] = set()
        print(json.dumps([remains(text, space, lacking) for text in json.load(sys.stdin)]))
    except Lacking:
        print("null")


if __name__ == "__main__":
    main()
