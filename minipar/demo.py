"""`make demo`: a small GPT on local ranks, compared with the same model in plain torch, with pictures of the run.

It has two parts, because four ranks on a laptop's two cores can show only one of two things at a time:

    the shape   pp=2 x dp=2, 1F1B, 8 micro-batches, on four emulated devices. They wait until the time of a device has
                passed, so that the timeline has the schedule's true shape. Numbers and messages are real.
    the speed   data parallel over the real cores, beside plain torch on one of them

It prints both, and writes one self-contained HTML page with the timeline of the first. The text that it trains on is
the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch

from minipar import data, models
from minipar.cluster import Cluster
from minipar.prediction.oversubscription import available_cores
from minipar.strategies.plan import Plan
from minipar.training.reference import gradient_error
from minipar.training.training import Run, train
from minipar.wording import several

MODEL = "gpt-demo"
SHAPE = "pp=2 dp=2 schedule=1f1b microbatches=8"
DEVICE = "forward=30ms backward=60ms"  # of one micro-batch on one rank: longer than this machine needs for its numbers
SHAPE_STEPS = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; the exit status is 1 if minipar and plain torch disagree."""
    parser = argparse.ArgumentParser(prog="minipar.demo", description="Train a small GPT on local ranks and draw it.")
    parser.add_argument("--steps", type=int, default=16, help="training steps of the second part (default 16)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default 16)")
    parser.add_argument("--out", default="demo.html", help="the page to write (default demo.html)")
    parser.add_argument("--picture", help="write the picture alone, too, as PNG or SVG")
    options = parser.parse_args(arguments)
    if find_spec("anywidget") is None:
        parser.error('the page needs anywidget: pip install "minipar[lab]"')

    begin = time.perf_counter()
    shape = models.shape(MODEL)
    size = sum(sum(group.tensors) for group in shape.groups) // 4
    what = f"{MODEL}: {several(shape.layers, 'layer')}, {size / 1e6:.1f} million parameters"
    print(f"{what}\n\n1. The shape, on four emulated devices ({DEVICE} for each micro-batch)\n   plan: {SHAPE}")
    with Cluster(Plan.parse(SHAPE).ranks, device=DEVICE) as cluster:
        drawn = trained(SHAPE, cluster, SHAPE_STEPS, options.batch, check=True)
    print(shape_report(drawn))
    speed = speed_plan()
    cores = several(available_cores(), "core")
    print(f"2. The speed, on this machine's {cores}, nothing emulated\n   plan: {speed}")
    with Cluster(Plan.parse(speed).ranks) as cluster:
        fast = trained(speed, cluster, options.steps, options.batch, check=False)
    print(speed_report(fast))
    both = drawn.trace.compare(drawn.predicted)
    both.show().to_html(options.out)
    if options.picture:
        both.plot().savefig(options.picture, dpi=192)
    print(f"{options.out} has the timeline of the first and its memory; {time.perf_counter() - begin:.0f} s in all")
    return 0 if first_error(drawn) <= 1e-5 and loss_error(fast) <= 1e-2 else 1


def speed_plan() -> str:
    """Data parallel over as many ranks as there are cores, at most 4: 1, 2 or 4, which divide the rows."""
    return f"dp={max(ranks for ranks in (1, 2, 4) if ranks <= max(1, available_cores()))}"


def trained(plan: str, cluster: Cluster, steps: int, batch: int, check: bool) -> Run:
    return train(
        partial(models.build, MODEL),
        data.for_model(MODEL),
        plan,
        cluster=cluster,
        steps=steps,
        batch=batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        reference=True,
        check=check,
    )


def first_error(run: Run) -> float:
    """Gradient error of the first step, in which both start from the same parameters, bit by bit."""
    assert run.reference is not None
    return gradient_error(run.gradients[0], run.reference.gradients[0])


def loss_error(run: Run) -> float:
    """The largest distance of the losses from plain torch's. Rounding grows from step to step with Adam."""
    assert run.reference is not None
    return max(abs(mine - plain) for mine, plain in zip(run.losses, run.reference.losses, strict=True))


def step_time(run: Run) -> float:
    """Seconds of a typical step. The first one is left out: it makes what later steps reuse."""
    return median(run.step_times[1:] or run.step_times)


def shape_report(run: Run) -> str:
    """The text of the first part."""
    predicted, measured = run.predicted, run.trace
    lines = [
        "",
        f"   {'':<17}{'predicted':>12}{'measured':>12}",
        f"   {'step time':<17}{predicted.time * 1e3:>9.1f} ms{measured.time * 1e3:>9.1f} ms",
        f"   {'bubble of total':<17}{predicted.bubble_of_total():>12.1%}{measured.bubble_of_total():>12.1%}",
        f"   {'bubble of ideal':<17}{predicted.bubble_of_ideal():>12.1%}{measured.bubble_of_ideal():>12.1%}",
        "",
        f"   {'rank':<6}{'sent a step':>12}{'peak predicted':>17}{'peak measured':>16}",
        *(f"   {rank:<6}{row[0]:>12}{row[1]:>17}{row[2]:>16}" for rank, row in enumerate(per_rank(run))),
        "",
        f"   gradient error against plain torch (float32): {first_error(run):.1e} in the first step",
    ]
    return "\n".join(lines) + "\n"


def speed_report(run: Run) -> str:
    """The text of the second part: the losses as numbers and bars, and the time of a step."""
    assert run.reference is not None
    lowest, highest = min(run.losses), max(run.losses)
    lines = ["", f"   {'step':>4}  {'minipar':>10}  {'plain torch':>11}"]
    for step, (mine, plain) in enumerate(zip(run.losses, run.reference.losses, strict=True)):
        bar = "#" * round(1 + 29 * (mine - lowest) / (highest - lowest or 1))
        lines.append(f"   {step:>4}  {mine:>10.6f}  {plain:>11.6f}  {bar}")
    return "\n".join([*lines, "", *(f"   {line}" for line in speed_lines(run))]) + "\n"


def speed_lines(run: Run) -> tuple[str, str]:
    """The time of a step in plain torch and here, in words."""
    assert run.plain_time is not None
    plain, here = run.plain_time, step_time(run)
    ranks = several(run.plan.ranks, "rank")
    verdict = (
        f"{plain / here:.2f} times as fast" if here < plain else "no faster: the cores have other work, or are few"
    )
    return (
        f"plain torch, one process on one core: {plain * 1e3:.0f} ms a step",
        f"minipar, {ranks} with a core each: {here * 1e3:.0f} ms a step, {verdict}",
    )


def per_rank(run: Run) -> list[tuple[str, str, str]]:
    """Per rank: bytes sent in a step, predicted and measured peak memory, as text."""
    peaks = zip(run.bytes_sent, run.predicted.peak_memory(), run.trace.peak_memory(), strict=True)
    return [(_mib(sent), _mib(predicted), _mib(measured)) for sent, predicted, measured in peaks]


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
