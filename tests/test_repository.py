"""The repository's own files agree with each other."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minipar.strategies.schedules import registry
from tests import everything
from tests.lending import lend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
IMPORT_NAMES = {"scikit-learn": "sklearn", "pyyaml": "yaml", "pillow": "PIL"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ranges(lines):
    """Version range by package name; a package that is named twice must have one range."""
    found = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        assert found.setdefault(name, requirement.specifier) == requirement.specifier, name
    return found


def named():
    """Every package of pyproject.toml, extras included, with its range."""
    extras = project()["optional-dependencies"]
    return ranges([*project()["dependencies"], *(line for lines in extras.values() for line in lines)])


def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_environment_has_the_same_packages_and_ranges():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    lines = [line for line in pip if not line.startswith("-")]
    assert ranges(lines) == named()
    assert len(lines) == len(named()), "a package is listed twice"
    assert "-c constraints.txt" in pip
    assert "-e ." in pip
    assert f"python{project()['requires-python']}" in environment["dependencies"]


def test_extras():
    assert set(project()["optional-dependencies"]) == {"lab", "test", "search", "book", "models"}


def test_every_package_has_one_tested_version_within_its_range():
    pins = constraints()
    assert sorted(canonicalize_name(pin.name) for pin in pins) == sorted(named())
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert named()[canonicalize_name(pin.name)].contains(exact.version), pin
    assert "torch==2.13.0" in map(str, pins)


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("minipar", ["test", "search", "models"]),
        ("lessons/minipar_course", ["lab"]),
        ("widgets", ["lab"]),
        ("tests", ["test", "search", "lab", "book", "models"]),
    ],
)
def test_every_import_is_a_declared_package(folder, extras):
    lines = [*project()["dependencies"], *(line for e in extras for line in project()["optional-dependencies"][e])]
    known = {IMPORT_NAMES.get(name, name) for name in ranges(lines)} | {"tests"}
    known |= {"minipar", "minipar_course", "minipar_widgets"}
    known |= {"packaging", "tomli", "IPython", "traitlets"}  # pytest's, ipykernel's, ipywidgets'
    known |= {"jupyter_client", "benchmarks", "docs"}  # nbval's, ours, ours
    for path in python_files(folder):
        for name in imports(path, everywhere=folder != "tests"):  # tests may import what they make
            assert name in known or name in sys.stdlib_module_names, f"{path.relative_to(ROOT)} imports {name}"


def statements(tree):
    """All statements of a file: only they import, and most nodes of a tree are expressions."""
    left = [tree]
    for node in left:
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            left += getattr(node, part, [])
    return left


@cache
def imports(path, everywhere):
    """The packages that a file of Python 3.10 imports: at its beginning, or everywhere in it."""
    tree = ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))
    found = set()
    for node in statements(tree) if everywhere else tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found.update(name.split(".")[0] for name in names)
    return found


def test_source_is_python_3_10():
    for folder in ("minipar", "widgets", "lessons", "benchmarks", "tests"):
        for path in python_files(folder):
            imports(path, everywhere=folder != "tests")


def test_versions_agree():
    import minipar
    import minipar_widgets
    from minipar.strategies import plan_file

    assert minipar.__version__ == minipar_widgets.__version__ == plan_file.VERSION == project()["version"]


def test_no_module_has_the_name_of_a_public_function():
    import minipar

    functions = {name for name in minipar.__all__ if callable(getattr(minipar, name))}
    assert "verify" in functions
    modules = {path.stem for path in (ROOT / "minipar").iterdir()}  # files and folders
    assert not functions & modules


def test_the_wheel_has_both_packages_and_the_command(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel")
    tree = tmp_path / "tree"  # a copy, so that the build leaves nothing behind
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("minipar", "widgets", "tests", "lessons"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    (wheel,) = hatchling.WheelBuilder(str(tree)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "minipar/program/__init__.py" in names
    assert {"minipar_widgets/__init__.py", "minipar_course/exercises/start.py"} <= set(names)
    lessons = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "lessons").rglob("*.ipynb"))
    assert [f"minipar/{name}" for name in lessons] == sorted(name for name in names if name.endswith(".ipynb"))
    assert "minipar/lessons/README.md" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"minipar", "minipar_course", "minipar_widgets"}
    assert "minipar = minipar.cli:main" in entry_points


def pages():
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "lessons" / "README.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def length_of(path, name):
    """Lines of a function, or of a method such as Executor.run."""
    body = ast.parse((ROOT / "minipar" / path).read_text()).body
    for part in name.split("."):
        (node,) = (node for node in body if getattr(node, "name", "") == part)
        body = node.body
    return node.end_lineno - node.lineno + 1


def test_the_functions_to_read_first_are_as_long_as_the_page_says():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (\w[\w/]+\.py) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 12
    found = {name: (int(lines), length_of(path, name)) for name, path, lines in rows}
    assert all(abs(said - real) <= 5 for said, real in found.values()), found
    assert sum(real for _, real in found.values()) < 800  # an hour


def test_the_parts_of_the_runtime_are_as_long_as_the_page_says():
    page = (ROOT / "ARCHITECTURE.md").read_text().partition("## What stands beside the loop")[2]
    package, named = ROOT / "minipar", []
    for said, words in re.findall(r"^\| [^|]+ \| ([\d,]+) \| ([^|]+) \|", page, re.MULTILINE):
        files = []
        for room, names in re.findall(r"([a-z_/]+)/(\{[a-z_,]+\}\.py|[a-z_]+\.py|\*)", words):
            found = re.findall(r"[a-z_]+", names.removesuffix(".py")) or ["*"]
            files += [path for name in found for path in (package / room).glob(f"{name}.py")]
        assert abs(int(said.replace(",", "")) - sum(len(path.read_text().splitlines()) for path in files)) <= 100, words
        named += files
    rooms = ("execution", "comm", "cluster", "server", "training")
    everything = {path for room in rooms for path in (package / room).rglob("*.py") if path.name != "__init__.py"}
    assert sorted(named) == sorted({*named} | everything)


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test", "lab", "bench", "soak", "lint", "clean"} <= targets
    for path in [*pages(), ROOT / ".ci" / "run"]:
        assert set(re.findall(r"(?:`|timed \d+m |^)make ([a-z-]+)", path.read_text(), flags=re.MULTILINE)) <= targets, (
            path
        )


def test_make_check_runs_the_rooms_below_cluster():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rooms = contract["layers"][contract["layers"].index("cluster") + 1 :]
    folders = {f"tests/{room}" for room in rooms if (ROOT / "tests" / room).is_dir()}
    fast = [folder for half in everything.FAST for folder in half]
    assert sorted(fast) == sorted(folders)


def test_make_test_runs_every_test_file_once():
    found = Counter()
    parts = [part for part in (*everything.first([]), *everything.then([])) if part.name != "lint"]
    for part in parts:
        words = part.command[3:]
        ignored = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
        for path in (ROOT / word for word in words if not word.startswith("-")):
            files = path.rglob("test_*.py") if path.is_dir() else [path]
            found.update(file for file in files if not any(path in (file, *file.parents) for path in ignored))
    lessons = [*(ROOT / "lessons").glob("*.ipynb"), ROOT / everything.SOLUTION]
    assert found == Counter([*(ROOT / "tests").rglob("test_*.py"), *lessons])


def test_pytest_collects_the_lessons_which_alone_need_nbval():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "lessons" in options["testpaths"]
    usual, plain = options["addopts"].split(), everything.NO_NOTEBOOKS[-1].partition("addopts=")[2].split()
    assert usual[: len(plain)] == plain
    assert "--nbval" in usual
    assert all(word.startswith("--nbval") for word in usual[len(plain) :])
    for part in everything.then([]):
        assert any(word.endswith(".ipynb") for word in part.command) <= (everything.NO_NOTEBOOKS[0] not in part.command)


def test_readme_begins_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert 0 < text.index("make demo") < text.index("make test") < 3000


def test_a_model_of_ones_own_takes_twelve_lines():
    """From the installation to a checked run under dp=2 and its picture; that they run is tested below."""
    text = (ROOT / "README.md").read_text()
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "class Net" in one]
    assert len([line for line in block.splitlines() if line.strip()]) + 1 <= 12
    assert all(word in block for word in ('"dp=2", check=True', "max_error()", "savefig"))


def test_ci_runs_the_readmes_commands():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "git clone" in text
    assert "make test" in text
    assert "make demo" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/reference.md"])
def test_the_python_of_a_page_runs(page, clusters, monkeypatch, tmp_path, pytestconfig):
    """Its blocks are cells of one notebook, in order; with --thorough a script, which starts ranks of its own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    if pytestconfig.getoption("--thorough"):
        (tmp_path / "example.py").write_text("\n".join(blocks))
        command = [sys.executable, "example.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    lend(clusters, monkeypatch)
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "a_page"})


def test_long_tests_have_a_short_form() -> None:
    """A test that `make test` leaves out, as it is marked extra, names one that it runs."""
    marks = re.compile(r"pytest\.mark\.extra\((\"[^\"]*\")\)")
    for path in (ROOT / "tests").rglob("test_*.py"):
        for words in marks.findall(path.read_text()):
            name, _, function = words.strip('"').partition("::")
            text = (path if not name else ROOT / "tests" / name).read_text()
            found = re.search(rf"^((?:@.*\n)*)def {function}\(", text, re.MULTILINE)
            assert found, f"{path}: no test {words}"
            assert "mark.extra" not in found[1], f"{path}: {words} is left out, too"
