"""What plans, predicts and draws runs without torch, as in a web page; all of it in one fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXERCISES = Path(__file__).parents[1] / "lessons" / "minipar_course" / "exercises"
BUILDS = {"building", "engine", "operators", "experts", "inexact", "sequences"}  # with torch, as students do
DONE = """
import importlib, sys
import minipar

program = minipar.Plan.parse("pp=2 dp=2 microbatches=4").compile(layers=4)
minipar.verify(program)
assert minipar.simulate(program, forward=1.0, backward=2.0).time == 15
minipar.schedule, minipar.Forward, minipar.Trace, minipar.strategies.schedules()
assert "numpy" not in sys.modules

import minipar.sharding, minipar.cli, minipar.errors, minipar.costs.measured, minipar.costs.rates
from minipar import data, models
from minipar.costs import analytic
from minipar.costs.recomputation import LayerCosts
from minipar.models import table
from minipar.prediction import on_paper
from minipar_course import assignments, diagrams, exercise
from minipar_widgets import MemoryExplorer, PlanExplorer, ShardingExplorer

minipar.Plan.parse("checkpoint=9B").compile(layers=16, costs=LayerCosts.equal(16))
assert [models.shape(name) for name in models.presets()] and len(dir(models))
[analytic.layer_costs(name, 2) for name in table.names()]
on_paper.per_rank(minipar.Plan.parse("zero=1 dp=2"), "gpt2-xl")
on_paper.predict("pp=2 dp=2 microbatches=4 zero=1", "gpt-demo", "flops=8GFLOP/s bandwidth=100MB/s latency=1ms", 16)
minipar.estimate("dp=2 pp=2 microbatches=4 zero=1", "llama3-8b", "h100")
data.stdlib_text()
exercise.check(len, exercise.GPIPE_TIME)
diagrams.ring()
memory = MemoryExplorer()
memory.to_html(), memory.figure(), PlanExplorer("llama3-8b", "h100", 2, 8).picture(), ShardingExplorer().picture()
for name in sys.argv[1:]:
    importlib.import_module(f"minipar_course.exercises.{name}")
assert "torch" not in sys.modules
"""


def test_what_plans_predicts_and_draws_needs_no_torch() -> None:
    names = sorted({path.stem for path in EXERCISES.glob("[a-z]*.py")} - BUILDS)
    assert names
    subprocess.run([sys.executable, "-c", DONE, *names], check=True, timeout=300)
