"""What `Plan(check=True)` finds, and what it costs: `python -m tests.faults.checking [--write docs/reliability.md]`.

Every seeded mistake of tests/execution/seeded_bugs.py is planted in real ranks, once without the check and once with
it. Then a few plans train a small GPT, each a few times with and without the check in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from minipar import Cluster, Plan
from minipar.data import stdlib_text
from minipar.errors import CheckFailed
from minipar.execution.execution import Execution, Job, execute
from minipar.models import gpt
from minipar.models.parameter_groups import shape_of
from minipar.program.mesh import Mesh
from minipar.server.serving import execute_served
from minipar.training.training import annotations_of
from tests.execution import seeded_bugs
from tests.execution.seeded_bugs import BUGS
from tests.toys import rows, toy

PLANS = (
    "microbatches=2",
    "dp=4",
    "dp=4 zero=3",
    "pp=4 schedule=1f1b microbatches=8",
    "dp=2 pp=2 zero=1 microbatches=4",
    "tp=2 dp=2",
)
EASY = partial(toy, ("linear", "linear"))
SMALL = partial(gpt, layers=4)


def run(
    cluster: Cluster, text: str, passes: int, big: bool = False, report: Callable[[int, float], None] = lambda *_: None
) -> Execution:
    """Run a plan, without profile and prediction."""
    plan, optimizer = Plan.parse(text), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if plan.sharing > 1 or big:
        job = Job(SMALL, stdlib_text(), 16, optimizer=optimizer, annotations=annotations_of(plan))
        model = job.build()
        shared = job.share(model, 0, Mesh(plan.shared), plan.inputs, plan.cut) if plan.sharing > 1 else list(model)
        shape = shape_of(shared)
    else:
        job = Job(EASY, rows(16), loss=torch.nn.functional.mse_loss, optimizer=optimizer, dtype=torch.float64)
        shape = shape_of(list(job.build()))
    if plan.sync == "ps":
        return execute_served(plan.compile(shape, steps=passes), job, cluster, on_death=plan.on_death)[0]
    return execute(plan.compile(shape), job, cluster=cluster, passes=passes, check=False, report=report)


def mistakes(clusters: dict[int, Cluster]) -> str:
    """A table of the seeded mistakes: whether they are noticed without the check, and what it names."""
    lines = ["| mistake | plan | without the check | first instruction named |", "|---|---|---|---|"]
    caught = 0
    for name, bug in BUGS.items():
        cluster = clusters[Plan.parse(bug.plan).ranks]
        said = ["unnoticed", "not found"]
        for k, text in enumerate((bug.plan, f"{bug.plan} check=true")):
            cluster.run(seeded_bugs.plant, name)
            try:
                run(cluster, text, 3)
            except CheckFailed as error:
                said[k] = f"rank {error.rank}, step {error.step}, `{error.instruction}`"
                caught += 1
            except Exception as error:
                said[k] = type(error).__name__
            finally:
                cluster.run(seeded_bugs.mend)
        lines.append(f"| {name} | `{bug.plan}` | {said[0]} | {said[1]} |")
    return f"{caught} of {len(BUGS)} seeded mistakes are found.\n\n" + "\n".join(lines)


def cost(clusters: dict[int, Cluster], repeats: int) -> str:
    """A table of the seconds of a step without and with the check."""
    lines = ["| plan | a step without | with the check | times |", "|---|---|---|---|"]
    for text in PLANS:
        cluster = clusters[Plan.parse(text).ranks]
        taken: dict[str, list[float]] = {text: [], f"{text} check=true": []}
        for _ in range(repeats):
            for each, seconds in taken.items():
                seconds.append(step(cluster, each))
        plain, checked = (min(seconds) for seconds in taken.values())
        lines.append(f"| `{text}` | {1000 * plain:.0f} ms | {1000 * checked:.0f} ms | {checked / plain:.1f} |")
    return "\n".join(lines)


def step(cluster: Cluster, text: str) -> float:
    """Seconds of a step, as a mean over those after the first (reports of several may come at once)."""
    ends: list[float] = []
    run(cluster, text, 6, big=True, report=lambda *_: ends.append(time.monotonic()))
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cost-only", action="store_true", help="print the second table only")
    parser.add_argument("--write", help="a file for the tables, such as docs/reliability.md")
    options = parser.parse_args()
    clusters = {n: Cluster(n, device="cpu") for n in (1, 2, 3, 4)}
    try:
        if options.cost_only:
            print(cost(clusters, options.repeats))
            return 0
        load = os.getloadavg()[0]
        costs = (
            f"On {os.cpu_count()} cores, whose load was {load:.0f} before; the shortest of {options.repeats} runs.\n\n"
        )
        page = f"{mistakes(clusters)}\n\n{costs}{cost(clusters, options.repeats)}\n"
    finally:
        for cluster in clusters.values():
            cluster.close()
    print(page)
    if options.write:
        from tests.faults.campaign import write_between

        write_between(Path(options.write), "checking", page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
