"""`make demo`: a small GPT on four local ranks, compared with the same model in plain torch, with pictures of the run.

It uses pp=2 x dp=2, 1F1B and 8 micro-batches, and trains on the source text of Python's standard library. It prints
both losses, predicted and measured step time, both bubbles, bytes sent and peak memory per rank, and writes one
self-contained HTML page.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

import torch

from minipar import data, models
from minipar.cluster import Cluster
from minipar.prediction.oversubscription import available_cores
from minipar.strategies.plan import Plan
from minipar.trace.webpage import table
from minipar.training.reference import gradient_error
from minipar.training.training import Run, train
from minipar.wording import several

PLAN = "pp=2 dp=2 schedule=1f1b microbatches=8"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if minipar and plain torch disagree."""
    parser = argparse.ArgumentParser(prog="minipar.demo", description="Train a small GPT on 4 ranks and draw the run.")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default 12)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default 16)")
    parser.add_argument("--out", default="demo.html", help="the page to write (default demo.html)")
    parser.add_argument("--picture", help="write the picture alone, too, as PNG or SVG")
    options = parser.parse_args(arguments)

    begin = time.perf_counter()
    plan = Plan.parse(PLAN)
    name = "gpt-demo"
    shape = models.shape(name)
    size = sum(sum(group.tensors) for group in shape.groups) // 4
    what = f"{name}: {several(shape.layers, 'layer')}, {size / 1e6:.1f} million parameters"
    print(f"{what}\nplan: {PLAN}, on {plan.ranks} local processes and {available_cores()} cores")
    with Cluster(plan.ranks) as cluster:
        run = train(
            partial(models.build, name),
            data.for_model(name),
            plan,
            cluster=cluster,
            steps=options.steps,
            batch=options.batch,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            check=True,
        )
    print(report(run))
    write_page(run, what, options.out)
    if options.picture:
        run.trace.compare(run.predicted).plot().savefig(options.picture, dpi=110)
    print(f"{options.out} has the timeline and the memory of this run; {time.perf_counter() - begin:.0f} s in all")
    return 0 if first_error(run) <= 1e-5 else 1


def first_error(run: Run) -> float:
    """Gradient error of the first step, in which both start from the same parameters, bit by bit."""
    assert run.reference is not None
    return gradient_error(run.gradients[0], run.reference.gradients[0])


def report(run: Run) -> str:
    """The text that the demo prints."""
    assert run.reference is not None
    assert run.plain_time is not None
    predicted, measured = run.predicted, run.trace
    lines = ["", f"{'step':>4}  {'minipar':>10}  {'plain torch':>11}"]
    for step, (mine, plain) in enumerate(zip(run.losses, run.reference.losses, strict=True)):
        lines.append(f"{step:>4}  {mine:>10.6f}  {plain:>11.6f}")
    lines += [
        "",
        f"gradient error against plain torch (float32): {first_error(run):.1e} in the first step",
        "",
        f"{'':<17}{'predicted':>12}{'measured':>12}",
        f"{'step time':<17}{predicted.time * 1e3:>9.1f} ms{measured.time * 1e3:>9.1f} ms",
        f"{'bubble of total':<17}{predicted.bubble_of_total():>12.1%}{measured.bubble_of_total():>12.1%}",
        f"{'bubble of ideal':<17}{predicted.bubble_of_ideal():>12.1%}{measured.bubble_of_ideal():>12.1%}",
        f"plain torch, one process, one core: {run.plain_time * 1e3:.1f} ms a step",
        "",
        f"{'rank':<6}{'sent a step':>12}{'peak predicted':>17}{'peak measured':>16}",
    ]
    for rank, row in enumerate(per_rank(run)):
        lines.append(f"{rank:<6}{row[0]:>12}{row[1]:>17}{row[2]:>16}")
    lines.append(f"\n{predicted.note}")
    return "\n".join(lines) + "\n"


def per_rank(run: Run) -> list[tuple[str, str, str]]:
    """Per rank: bytes sent in a step, predicted and measured peak memory, as text."""
    peaks = zip(run.bytes_sent, run.predicted.peak_memory(), run.trace.peak_memory(), strict=True)
    return [(_mib(sent), _mib(predicted), _mib(measured)) for sent, predicted, measured in peaks]


def write_page(run: Run, what: str, path: str) -> None:
    """Write the self-contained page: timeline, predicted over measured, memory curves, losses, numbers."""
    assert run.reference is not None
    assert run.plain_time is not None
    losses = [
        (step, f"{mine:.6f}", f"{plain:.6f}")
        for step, (mine, plain) in enumerate(zip(run.losses, run.reference.losses, strict=True))
    ]
    ranks = [(rank, *row) for rank, row in enumerate(per_rank(run))]
    predicted, measured = run.predicted, run.trace
    run.trace.compare(run.predicted).to_html(
        path,
        heading="A GPT on four ranks, predicted and measured",
        intro=f"{what}, trained on the source text of Python's standard library by the plan {PLAN}. "
        "The prediction was made before the run.",
        facts=[
            ("Step time", f"{predicted.time * 1e3:.1f} ms predicted, {measured.time * 1e3:.1f} ms measured"),
            ("Plain torch, one process", f"{run.plain_time * 1e3:.1f} ms a step"),
            (
                "Bubble, of total",
                f"{predicted.bubble_of_total():.1%} predicted, {measured.bubble_of_total():.1%} measured",
            ),
            (
                "Bubble, of ideal",
                f"{predicted.bubble_of_ideal():.1%} predicted, {measured.bubble_of_ideal():.1%} measured",
            ),
            ("Gradient error, first step", f"{first_error(run):.1e} against plain torch (float32)"),
            ("Prediction", predicted.note),
        ],
        sections=[
            ("Memory and messages", table(["rank", "sent a step", "peak predicted", "peak measured"], ranks)),
            ("Losses", table(["step", "minipar, 4 ranks", "plain torch, 1 process"], losses)),
        ],
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
