"""docs/gallery.md: a small static picture of every view, with its caption; made by a command.

    python -m minipar_widgets.gallery [FOLDER]       default: docs/, where `make gallery` runs it

Everything in it except the live run is predicted, and is the same on every machine. lessons/explorer.ipynb has the
same views, made by the same lines.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipar_widgets.base import Shown

if TYPE_CHECKING:
    from minipar.training.training import Run

HEAD = """# Gallery

All views of `minipar_widgets`, as the static pictures that stand for them where nothing runs. They are alive on the
site (`make site`), with nothing installed, and in JupyterLab: `lessons/explorer.ipynb` has all of them on one page. And
`widget.to_html("page.html")` makes a page of each that works without a kernel. Made by `make gallery`.
"""
IMPORTS = """from functools import partial
from minipar import Cluster, Plan, data, models, simulate
from minipar_widgets import *"""


@dataclass(frozen=True)
class Exhibit:
    """A view: its name, two sentences about it, and the lines that make it.

    measured   whether the lines run something, so that the numbers differ each time
    """

    name: str
    says: str
    code: str
    measured: bool = False

    def make(self) -> Shown:
        """The view that the lines give; a live run is shown as it is at its end."""
        names: dict[str, Any] = {}
        exec(IMPORTS, names)
        *first, last = ast.parse(self.code).body
        exec(compile(ast.Module([*first, *([last] if self.measured else [])], []), self.name, "exec"), names)
        if self.measured:
            return _at_the_end(names["run"])
        assert isinstance(last, ast.Expr)
        built = eval(compile(ast.Expression(last.value), self.name, "eval"), names)
        assert isinstance(built, Shown)
        return built


def _at_the_end(run: Run) -> Shown:
    from minipar.execution.following import Moment
    from minipar_widgets.live_run import LiveRun

    steps = len(run.losses)
    view = LiveRun(str(run.plan), steps)
    view.heard(Moment(steps, steps, run.losses, run.trace, sum(run.step_times)))
    return view


EXHIBITS = (
    Exhibit(
        "ScheduleExplorer",
        "Sliders for the schedule, its sizes and what things cost: the timeline, the memory, the staleness and the "
        "program follow at once, and settings that cannot be are answered in words. *run it* trains a small model on "
        "real processes that emulate such devices, and puts the measured timeline under the predicted one.",
        'ScheduleExplorer(schedule="1f1b", stages=4, microbatches=8)',
    ),
    Exhibit(
        "ScheduleEditor",
        "Drag a block along its rank, or select it with the arrow keys and move it with Shift and arrow: the engine "
        "verifies every order, and says what is wrong with one that would hang. *split* cuts a backward into the half "
        "that the rank before waits for and the half that can wait; the order can be played, and taken away as code.",
        'ScheduleEditor("1f1b", stages=4, microbatches=6)',
    ),
    Exhibit(
        "Timeline",
        "One trace, or a measured one under its prediction: zoom with `+` and `-`, walk with the arrow keys, ask what "
        "waits for what. Here two replicas of a pipeline, whose gradients are summed at the end.",
        'program = Plan(pp=4, dp=2, microbatches=8, schedule="1f1b").compile(layers=8)\n'
        "Timeline(simulate(program, latency=0.2))",
    ),
    Exhibit(
        "MemoryExplorer",
        "What a plan needs on every rank, by kind and by formula, against a device; and what to change so that it "
        "fits. A small model's plan can be run, and what was measured is laid over it.",
        "MemoryExplorer()",
    ),
    Exhibit(
        "CheckpointExplorer",
        "The tape of forward, drop, forward again and backward, and how memory and time depend on the length of the "
        "segments, with the best length marked. *measure* runs some lengths on a real rank.",
        'CheckpointExplorer(layers=16, checkpoint="sqrt")',
    ),
    Exhibit(
        "CollectivePlayer",
        "How chunks go from rank to rank, step by step, with real numbers in them. The cost is that of the alpha-beta "
        "model, beside the least that any algorithm must send.",
        'CollectivePlayer("allreduce", "ring", ranks=4)',
    ),
    Exhibit(
        "ServerView",
        "Workers and parameter servers over time: versions pulled and pushed, and how old the parameters of each "
        "gradient were. Here one of three workers is slow, and nobody waits for it.",
        'served = Plan.parse("dp=3 sync=ps mode=async").compile(layers=4, steps=6)\n'
        "ServerView(simulate(served, latency=0.1, stage_factors=(1, 1.2, 2.5, 1)))",
    ),
    Exhibit(
        "ShardingExplorer",
        "Click the form of a tensor: the forms of the others follow, the collectives that they need appear between "
        "them, with bytes and predicted time, and the tensor's blocks are drawn on the mesh. Here the MLP of Megatron: "
        "two forms are fixed, and one all-reduce forward and one backward follow. A form that cannot be is answered "
        "where it is, with the nearest one that can. A captured layer of your own model can be handed over, too.",
        'ShardingExplorer("MLP", mesh="tp=4")',
    ),
    Exhibit(
        "PlanExplorer",
        "Which strategy for a model on a machine, and why: the fastest plans with the memory of a device, what makes "
        "each loser slower, the front of time against memory, and what another value of a key would cost. A click on a "
        "value pins it, and the search answers again: the price of the pins stands beside them. The sliders also work "
        "on a page without a kernel, as far as its table of results goes.",
        'PlanExplorer("llama3-70b", "h100", gpus=64, batch=512)',
    ),
    Exhibit(
        "LiveRun",
        "A training run as it goes on: progress, loss, and the timeline of the last step, at most ten times a second. "
        "The notebook's stop button ends it.",
        'with Cluster(2, device="forward=20ms backward=40ms") as cluster:\n'
        '    model, text = partial(models.build, "mlp-tiny"), data.for_model("mlp-tiny")\n'
        '    run = live(model, text, "pp=2 microbatches=4", cluster=cluster, steps=8)',
        measured=True,
    ),
)


def write(folder: Path) -> list[Path]:
    """Write gallery.md and gallery/*.png, and return the paths of all files."""
    pictures = folder / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    text, written = [HEAD], []
    for exhibit in EXHIBITS:
        widget = exhibit.make()
        path = pictures / f"{exhibit.name}.png"
        path.write_bytes(widget._png(None))
        written.append(path)
        caption = "" if exhibit.measured else f"\n*{' '.join(widget.caption().split())}*\n"
        text.append(
            f"## {exhibit.name}\n\n{exhibit.says}\n\n```python\n{exhibit.code}\n```\n\n"
            f"![{widget.summary()}](gallery/{exhibit.name}.png)\n{caption}"
        )
    page = folder / "gallery.md"
    page.write_text("\n".join(text), encoding="utf-8")
    return [page, *written]


if __name__ == "__main__":
    for made in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(f"{made}: {made.stat().st_size / 1000:.1f} kB")
