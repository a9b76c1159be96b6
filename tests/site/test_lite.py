"""Notebooks of JupyterLite, made from lessons for a Python without torch. (test_pages.py opens one.)"""

from __future__ import annotations

from docs.site import lessons, lite
from docs.site.without_torch import PACKAGES


def test_cells_on_real_ranks_are_left_out_and_what_needs_no_torch_stays() -> None:
    cells = [
        "import torch\nfrom minipar import Cluster, Plan, verify as proof\n\nplan = Plan(pp=2)\nprint(plan)",
        "from minipar import simulate\nwidth = 3\nworkers = Cluster(2)",
        "trace = simulate(plan)\nassert 'width' not in globals()",
        "workers.close()",
        "def mine(stages):\n    raise NotImplementedError\n\nmine(2)",
    ]
    runs = [
        (True, "from minipar import Plan, verify as proof\n\nplan = Plan(pp=2)\nprint(plan)"),
        (False, "from minipar import simulate"),
        (True, cells[2]),
        (False, ""),
        (True, cells[4]),
    ]
    found, packages = lite.runnable(cells)
    assert ([tuple(one) for one in found], packages) == (runs, [])
    found, packages = lite.runnable([*cells, "trace.plot()"])
    assert ([tuple(one) for one in found], packages) == ([*runs, (True, "trace.plot()")], list(PACKAGES.values()))


def test_a_lesson_says_what_it_leaves_out() -> None:
    cells = lite.prepared(next(lessons.HOME.glob("01_*.ipynb")))["cells"]
    texts = [cell["source"] for cell in cells]
    assert texts[1:3] == [lite.INSTALL, lite.PICTURES.format("numpy matplotlib scipy pillow")]
    left = [text for text in texts if text.startswith(lite.LEFT_OUT)]
    assert len(left) >= 3
    assert all("train(" in text or "Cluster" in text or "gpipe" in text for text in left)
    code = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    assert "verify(program)" in code
    assert "Cluster(" not in code
