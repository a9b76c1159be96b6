"""`minipar doctor`: it imports what is installed, and says what is broken and how to mend it."""

from __future__ import annotations

import json
import os

import pytest

from minipar import doctor
from minipar.cli import main

NMS = "operator torchvision::nms does not exist"
BROKEN = {
    "torchvision": f"raise RuntimeError({NMS!r})",
    "timm": "import torchvision",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "chatty": "print('ImportError: not mine')",
    "nested": "try:\n    import chatty, no_such_module\nexcept ImportError as e:\n    raise ValueError('outer') from e",
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages that lie before all others, for this process and those that it starts."""
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_packages_that_can_be_imported_and_two_ranks_that_add(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "numpy"))  # (.ci/run asks for all)
    assert main(["doctor", "--json"]) == 0, capsys.readouterr().out
    found = json.loads(capsys.readouterr().out)
    assert found["two ranks sum [1,2,3] and [1,0,1]"] == "[2, 2, 4] and [2, 2, 4]"
    assert found["cores"] >= 1
    assert found["to mend"] == []


def test_each_import_that_fails_says_why_and_the_others_are_still_tried(packages):
    found = doctor.failures(["torchvision", "timm", "chatty", "dies", "nested", "json"])
    assert found == {
        "torchvision": f"RuntimeError: {NMS}",
        "timm": f"RuntimeError: {NMS}",
        "dies": "the process ended with exit status -9",
        "nested": "ModuleNotFoundError: No module named 'no_such_module'",
    }


def test_an_import_without_end_is_named(tmp_path, monkeypatch, packages):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(doctor, "PATIENCE", 1)
    assert doctor.failures(["json", "slow", "torchvision"]) == {
        "slow": "no end within 1 s", "torchvision": f"RuntimeError: {NMS}"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("torch", "wanted"),
    [
        ("2.13.0+cpu", "pip install torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cpu"),
        ("2.13.0+cu130", "pip install torch==2.13.0 torchvision --index-url https://download.pytorch.org/whl/cu130"),
        ("2.13.0", "pip install torch==2.13.0 torchvision"),
    ],
)
def test_torchvision_comes_from_where_torch_came_from(torch, wanted):
    broken = dict.fromkeys(("torchvision", "timm", "transformers"), f"RuntimeError: {NMS}")
    (text,) = doctor.mending({"torch": torch, "torchvision": "0.28.0"}, broken)
    assert text.startswith(f"torchvision 0.28.0 does not fit torch {torch}, and nothing that imports it works")
    assert "pip uninstall torchvision timm. Or" in text
    assert text.endswith(wanted)


def test_other_packages_are_installed_again():
    broken = {"sklearn": "ImportError: x", "transformers": "ImportError: y"}
    assert doctor.mending({"torch": "2.13.0"}, broken) == [
        "sklearn: pip install --force-reinstall scikit-learn",
        "transformers: pip install --force-reinstall transformers",
    ]


def test_the_command_fails_where_something_is_broken(capsys, monkeypatch, packages):
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "torchvision"))
    assert main(["doctor"]) == 1
    *facts, mend = capsys.readouterr().out.splitlines()
    assert any(line.startswith("torchvision ") and line.endswith(f", broken: RuntimeError: {NMS}") for line in facts)
    assert mend.startswith("to mend: torchvision ")
