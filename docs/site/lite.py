"""JupyterLite: the views and some lessons as notebooks in the browser, with a kernel that is Pyodide.

    python -m docs.site.lite build/site/lite      (docs/site/build.py calls it)

Notebooks are made from the lessons: cells are run here in a Python that has no torch, and what cannot run there (real
ranks, and what uses their results) is left out, with a line that says so. The kernel's own wheels come from PyPI, in
the versions that Pyodide's list names; what is compiled (NumPy, matplotlib) comes from Pyodide's server, into the page.
JupyterLite itself has a folder of its own: beside JupyterLab its kernel would be one of JupyterLab's extensions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs.site import engine, lessons
from docs.site.without_torch import PACKAGES
from minipar import __version__

ROOT = engine.ROOT
NOTEBOOKS = ("explorer", "01_*", "05_*", "10_*", "11_*", "13_*", "16_*")
ELSEWHERE = "https://cdn.jsdelivr.net/pyodide/v{version}/full/"
TOOLS = ("jupyterlite-core==0.8.6", "jupyterlite-pyodide-kernel==0.8.6")
KERNEL = ("micropip", "packaging", "ipython", "jedi")
NEEDS = ("anywidget", "cloudpickle", "tqdm", "typing-extensions")  # of minipar, beside torch and what is compiled
WIDGETS = ("anywidget", "ipywidgets", "jupyterlab-widgets", "comm", "psygnal")  # what is not in Pyodide's list
EXTENSIONS = (
    "@jupyterlite/pyodide-kernel-extension", "@jupyter-widgets/jupyterlab-manager", "anywidget", "jupyterlab-plotly",
)  # fmt: skip
INSTALL = "# minipar as it is in this page, without torch\n%pip install --quiet minipar"
PICTURES = "# from Pyodide's own server\n%pip install --quiet {}"
LEFT_OUT = "*Left out here, as it needs torch or real ranks: it runs after `pip install`.*"


def install(target: Path) -> Path | None:
    """JupyterLite and its kernel in a folder; None if they cannot be had."""
    if not (target / "jupyterlite_core").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, *TOOLS]
        if subprocess.run([*command, "-c", ROOT / "constraints.txt"]).returncode:
            return None
    return target


def build(target: Path, modules: Path, tools: Path, cache: Path, notebooks: Sequence[Path]) -> None:
    """Write JupyterLite with these notebooks to a folder. `modules` has npm's pyodide, `tools` is what `install` made,
    `cache` keeps wheels between builds."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work)
        files, static, packages = source / "files", source / "static" / "pyodide", source / "pypi"
        for folder in (files, static, packages):
            folder.mkdir(parents=True)
        for path in notebooks:
            (files / path.name).write_text(json.dumps(prepared(path)))
        for name in engine.PYODIDE:
            shutil.copy(modules / "pyodide" / name, static)
        lock = json.loads((static / "pyodide-lock.json").read_text())
        address = ELSEWHERE.format(version=json.loads((modules / "pyodide" / "package.json").read_text())["version"])
        own = wheels(cache, needed(lock["packages"], (*KERNEL, *NEEDS)))
        for entry in lock["packages"].values():
            wheel = own.get((entry["name"].lower().replace("_", "-"), entry["version"]))
            entry["file_name"] = wheel.name if wheel else address + entry["file_name"]
            if wheel:
                entry["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
                shutil.copy(wheel, static)
        (static / "pyodide-lock.json").write_text(json.dumps(lock))
        for wheel in wheels(cache, {name: version(name) for name in WIDGETS}).values():
            shutil.copy(wheel, packages)
        pack(packages)
        homes = [home / "share" / "jupyter" / "labextensions" for home in (tools, Path(sys.prefix))]
        found = [str(home.resolve() / name) for name in EXTENSIONS for home in homes if (home / name).exists()]
        chosen_ones = {"ignore_sys_prefix": True, "federated_extensions": found}
        settings = {"LiteBuildConfig": {"no_sourcemaps": True, **chosen_ones}}
        (source / "jupyter_lite_config.json").write_text(json.dumps(settings))
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "jupyterlite_core", "build", "--lite-dir", source, "--contents", files]
        apps = [word for app in ("lab", "notebooks") for word in ("--apps", app)]
        done = subprocess.run(
            [*command, "--output-dir", target.resolve(), *apps], capture_output=True, text=True, cwd=source,
            env={**os.environ, "PYTHONPATH": str(tools.resolve())},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)


def needed(listed: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Of packages those in Pyodide's list, with all that they need, and their versions."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in listed and name not in found:
            found[name] = listed[name]["version"]
            waiting += listed[name]["depends"]
    return found


def wheels(cache: Path, versions: dict[str, str]) -> dict[tuple[str, str], Path]:
    """Wheels for any machine, from PyPI, by name and version. Errors: SystemExit if one cannot be had."""
    cache.mkdir(parents=True, exist_ok=True)

    def here() -> dict[tuple[str, str], Path]:
        parts = ((path.name.split("-"), path) for path in cache.glob("*.whl"))
        return {(part[0].lower().replace("_", "-"), part[1]): path for part, path in parts}

    asked = {(name.replace("_", "-"), number) for name, number in versions.items()}
    if missing := asked - set(here()):
        any_machine = ["--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            cache,
            "--python-version=3.14",
            *any_machine,
        ]
        done = subprocess.run([*command, *("==".join(one) for one in missing)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
    return {one: path for one, path in here().items() if one in asked}


def pack(target: Path) -> Path:
    """Write minipar as a wheel that asks for no torch: all modules are in it, and those that need torch say so."""
    wheel = target / f"minipar-{__version__}-py3-none-any.whl"
    info = f"minipar-{__version__}.dist-info"
    asks = "".join(f"Requires-Dist: {name}\n" for name in NEEDS)
    said = {
        "METADATA": f"Metadata-Version: 2.1\nName: minipar\nVersion: {__version__}\n{asks}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: minipar\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for package, home in engine.HOMES.items():
            for path in sorted((home / package).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    file.write(path, path.relative_to(home))
        for name, text in said.items():
            file.writestr(f"{info}/{name}", text)
    return wheel


# notebooks ------------------------------------------------------------------------------------------------------------


def chosen() -> list[Path]:
    return [path for name in NOTEBOOKS for path in sorted(lessons.HOME.glob(f"{name}.ipynb"))]


def prepared(path: Path) -> dict[str, Any]:
    """A lesson for Python without torch."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    notebook["metadata"]["kernelspec"] = {"name": "python", "display_name": "Python (Pyodide)", "language": "python"}
    title, *others = [cell for cell in notebook["cells"] if "find_spec" not in "".join(cell["source"])]
    kept, packages = runnable(["".join(cell["source"]) for cell in others if cell["cell_type"] == "code"])
    cells = [_words("title", lessons.within("".join(title["source"]), path, {})), _code("install", INSTALL)]
    if packages:
        cells.append(_code("pictures", PICTURES.format(" ".join(packages))))
    waiting = iter(kept)
    for cell in others:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            cells.append(_words(cell["id"], lessons.within(text, path, {})))
            continue
        runs, left = next(waiting)
        if not runs:
            cells.append(_words(f"{cell['id']}-left-out", f"{LEFT_OUT}\n\n```python\n{text}\n```"))
        if left:
            cells.append(_code(cell["id"], left))
    return {**notebook, "cells": cells}


def _code(name: str, text: str) -> dict[str, Any]:
    rest: dict[str, Any] = {"outputs": [], "execution_count": None}
    return {"cell_type": "code", "id": name, "metadata": {}, "source": text, **rest}


def _words(name: str, text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def runnable(texts: Sequence[str]) -> tuple[list[tuple[bool, str]], list[str]]:
    """For cells, in order, whether they run without torch, and their text then; and what packages they use."""
    for packages in ([], [*PACKAGES.values()]):
        command = [sys.executable, "-m", "docs.site.without_torch", *packages]
        settings = {**os.environ, "MPLBACKEND": "agg"}
        given = json.dumps(texts)
        done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=settings)
        if done.returncode:
            raise SystemExit(done.stderr)
        if cells := json.loads(done.stdout.splitlines()[-1]):
            return cells, packages
    raise SystemExit("cells ask for packages that are not installed")


if __name__ == "__main__":
    if (tools := install(ROOT / "build" / "lite")) is None:
        sys.exit("JupyterLite cannot be had")
    build(Path(sys.argv[1]), engine.install(ROOT / "build" / "npm"), tools, ROOT / "build" / "wheels", chosen())
