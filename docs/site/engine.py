"""What a page loads: Pyodide, the views' own JavaScript, and of minipar what needs the standard library alone.

python docs/site/engine.py build/site/_static        (docs/site/build.py calls it)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
HOMES = {"minipar": ROOT, "minipar_widgets": ROOT / "widgets", "minipar_course": ROOT / "lessons"}
# Nothing that a page uses needs these: charts by matplotlib, plans for other systems, drawings of lessons, the command
# line, and what belongs to runs (profiles of layers and their memory).
WITHOUT = (
    "minipar.trace.charts", "minipar.trace.memory_picture", "minipar.strategies.exporting", "minipar_widgets.gallery",
    "minipar_course.diagrams", "minipar_course.assignments", "minipar_course.freezing", "minipar_course.lessons",
    "minipar_course.lesson_commands", "minipar.prediction.validation", "minipar.trace.kineto",
    "minipar.strategies.combinations", "minipar.strategies.micro_batch_size", "minipar.trace.peaks",
    "minipar.prediction.advice", "minipar.prediction.forecast", "minipar.prediction.memory",
    "minipar.prediction.recorded", "minipar.prediction.split_backward", "minipar.program.graph_cuts",
)  # fmt: skip
ROOMS = (
    "minipar.program", "minipar.strategies", "minipar.trace", "minipar.prediction", "minipar.planner", "minipar.costs",
    "minipar.sharding", "minipar.models", "minipar.errors", "minipar.wording", "minipar_widgets", "minipar_course",
)  # fmt: skip
MOST = 640_000  # bytes that a page with views loads of minipar; one with exercises loads those, too
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
_TRY = """
import importlib, json, sys
given = json.load(sys.stdin)
sys.path[:0] = given["homes"]
found = {}
for name in given["names"]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name] = str(error)
json.dump(found, sys.stdout)
"""


def names() -> dict[str, Path]:
    """All modules of the rooms that a page may have, by name."""
    found: dict[str, Path] = {"minipar": ROOT / "minipar" / "__init__.py"}
    for room in ROOMS:
        place = HOMES[room.partition(".")[0]] / room.replace(".", "/")
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        for path in paths:
            parts = path.relative_to(HOMES[room.partition(".")[0]]).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return {
        name: path for name, path in found.items() if not f"{name}.".startswith(tuple(f"{one}." for one in WITHOUT))
    }


def refused() -> dict[str, str]:
    """The modules that do not load in a Python that has nothing but its standard library, with the reason."""
    given = {"homes": [str(home) for home in HOMES.values()], "names": list(names())}
    command = [sys.executable, "-I", "-S", "-c", _TRY]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def pack(target: Path) -> int:
    """Write minipar.zip and exercises.zip to a folder, and return the size of the first, which all live pages load.
    Errors: ValueError if it is larger than MOST."""
    without = refused()
    table = ROOT / "minipar" / "prediction" / "published.csv"  # (read where an estimate says how far off it is)
    parts: dict[str, dict[str, Path]] = {"minipar": {table.relative_to(ROOT).as_posix(): table}, "exercises": {}}
    for name, path in names().items():
        if name not in without:
            home = name.partition(".")[0]
            part = "exercises" if home == "minipar_course" else "minipar"
            parts[part][path.relative_to(HOMES[home]).as_posix()] = path
    for part, files in parts.items():
        with zipfile.ZipFile(target / f"{part}.zip", "w") as file:
            for place, path in files.items():  # (without times, so that it is the same every time)
                file.writestr(zipfile.ZipInfo(place), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    size = (target / "minipar.zip").stat().st_size
    if size > MOST:
        raise ValueError(f"minipar.zip has {size:,} bytes; a page loads at most {MOST:,}")
    return size


def install(target: Path) -> Path:
    """The packages of package-lock.json, in a folder beside the site; returns node_modules."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        if not (target / name).exists() or (target / name).read_bytes() != (HERE / name).read_bytes():
            shutil.rmtree(target / "node_modules", ignore_errors=True)
            shutil.copy(HERE / name, target)
    if not (target / "node_modules").exists():
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=target, check=True)
    return target / "node_modules"


def build(target: Path, modules: Path) -> int:
    """All files that live views load, in a folder; returns the size of minipar.zip."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "pyodide").mkdir(parents=True)
    for name in PYODIDE:
        shutil.copy(modules / "pyodide" / name, target / "pyodide")
    (target / "plotly").mkdir()
    shutil.copy(modules / "plotly.js-basic-dist-min" / "plotly-basic.min.js", target / "plotly")
    views = ROOT / "widgets" / "minipar_widgets" / "js"
    shutil.copytree(views, target / "views", ignore=shutil.ignore_patterns("*.test.mjs", "package.json"))
    for view in (target / "views").glob("*.js"):
        view.with_suffix(".css").touch()
    shutil.copytree(HERE / "live", target / "live", ignore=shutil.ignore_patterns("*.entry.js"))
    command: list[str | Path] = [
        modules / ".bin" / "esbuild",
        HERE / "live" / "editor.entry.js",
        "--bundle",
        "--minify",
        "--format=esm",
    ]
    given = {**os.environ, "NODE_PATH": str(modules)}
    subprocess.run(
        [*command, f"--outfile={target / 'live' / 'editor.js'}", "--log-level=warning"], check=True, env=given
    )
    return pack(target)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), install(ROOT / "build" / "npm")), "bytes of minipar")
