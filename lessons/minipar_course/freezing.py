"""Store notebooks without the state of widgets, which cannot be drawn without their kernel.

    output   {widget-view, image/png, text/plain}  ->  {image/png, text/plain}
    metadata {widgets: megabytes}                  ->  {}

A saved widget shows "model not found" in a trusted JupyterLab, nothing in an HTML export, and hides the picture in the
same output. An output with a picture or text keeps that; a widget without either is not changed, but named.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minipar.errors import MiniparError

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


class Frozen(NamedTuple):
    """What freezing a notebook does: its new text, what is removed in words, and widgets without a picture."""

    text: str
    removed: list[str]
    bare: list[str]


def freeze(text: str) -> Frozen:
    """A notebook's text without widget state. MiniparError if it is not a notebook."""
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise MiniparError(f"not a notebook: {error}") from None
    removed: list[str] = []
    bare: list[str] = []
    state = notebook.get("metadata", {}).pop("widgets", None)
    if state is not None:
        models = len(state.get(STATE, {}).get("state", {}))
        removed.append(f"state of {models} widgets ({len(json.dumps(state)) / 1000:,.0f} kB)")
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if VIEW not in data:
                continue
            if any(kind.startswith("image/") or kind == "text/html" for kind in data):
                del data[VIEW]
                removed.append(f"widget of cell {number}")
            elif "text/plain" in data and state is not None:
                del data[VIEW]
                removed.append(f"widget of cell {number}, which has text only")
            else:
                bare.append(f"cell {number}: {''.join(data.get('text/plain', ''))[:60]}")
    if not removed:
        return Frozen(text, [], bare)
    return Frozen(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", removed, bare)


def freeze_files(paths: Sequence[str | os.PathLike[str]], check: bool = False) -> dict[str, Any]:
    """Freeze notebooks in place (for a folder, all in it); with `check` only say what would change."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MiniparError(f"{path}: there is no such notebook or folder")
        inside = sorted(p for p in path.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
        found += inside if path.is_dir() else [path]
    changed: dict[str, list[str]] = {}
    bare: dict[str, list[str]] = {}
    for path in found:
        try:
            frozen = freeze(path.read_text(encoding="utf-8"))
        except MiniparError as error:
            raise MiniparError(f"{path}: {error}") from None
        if frozen.removed:
            changed[str(path)] = frozen.removed
            if not check:
                path.write_text(frozen.text, encoding="utf-8")
        if frozen.bare:
            bare[str(path)] = frozen.bare
    return {"notebooks": len(found), "changed": changed, "without_picture": bare, "check": check}


def add(commands: Any) -> None:
    """Add `notebooks` to the command line's commands."""
    text = "notebooks as files: strip what a saved notebook cannot show"
    parser: argparse.ArgumentParser = commands.add_parser("notebooks", help=text, description=text)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    text = "remove the state of widgets; pictures and text stay"
    one: argparse.ArgumentParser = actions.add_parser("freeze", help=text, description=text)
    one.add_argument("paths", metavar="PATH", nargs="*", default=["lessons"], help="notebooks, or folders of them")
    one.add_argument("--check", action="store_true", help="change nothing; exit status 1 if something would change")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.set_defaults(command=_freeze, show=_show)


def _freeze(options: argparse.Namespace) -> dict[str, Any]:
    result = freeze_files(options.paths, options.check)
    if options.check and result["changed"]:
        raise SystemExit("\n".join([_show(result), "run `minipar notebooks freeze`"]))
    return result


def _show(result: dict[str, Any]) -> str:
    verb = "would change" if result["check"] else "frozen"
    lines = [f"{path}: {verb}: {', '.join(removed)}" for path, removed in result["changed"].items()]
    lines += [
        f"{path}: no picture beside the widget of {where}"
        for path, all_ in result["without_picture"].items()
        for where in all_
    ]
    return "\n".join([*lines, f"{result['notebooks']} notebooks, {len(result['changed'])} {verb}"])
