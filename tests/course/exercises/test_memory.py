"""The exercises of lesson 02, and orders of work: mistakes fail, and the reason is given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from minipar import simulate, verify
from minipar_course.exercise import check
from minipar_course.exercises import memory as tasks
from minipar_course.exercises.kinds import order
from minipar_course.exercises.kinds.order import (
    FETCH,
    GATHER,
    OFFLOAD,
    SCATTER,
    STEP,
    B,
    Device,
    F,
    MiB,
    R,
    ms,
    program_of,
)

# gradients


def forwards(layers):
    return [(F, layer) for layer in range(layers)]


def early(layers):
    return forwards(layers) + [(op, layer) for layer in reversed(range(layers)) for op in (B, STEP)]


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (
            lambda n: forwards(n) + [(B, k) for k in reversed(range(n))],
            "needs 260 MiB; the target is 233 MiB",
            "gradients 64 MiB",
        ),
        (lambda n: itertools.repeat((F, 0)), "yields more than 800 pairs", "does a loop end?"),
    ],
)
def test_wrong_orders(answer, reason, hint):
    verdict = check(answer, tasks.GRADIENTS)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# orders as programs: what is kept, freed and counted


def device(layers: int, **more: Any) -> Device:
    return Device(order.LayerCosts.equal(layers, MiB, 2 * MiB, 10 * ms, 20 * ms), **more)


def test_who_reads_last_frees():
    row = program_of(early(3), device(3)).ranks[0]
    assert [" ".join(map(str, ins.frees)) for ins in row] == [
        "",
        "",
        "",
        "saved(2) mb0 output(2) mb0 output(1) mb0",
        "grad(2)",
        "saved(1) mb0 grad_output(1) mb0 output(0) mb0",
        "grad(1)",
        "saved(0) mb0 grad_output(0) mb0",
        "grad(0)",
    ]


def test_a_run_that_is_repeated_keeps_nothing():
    program = program_of([*forwards(3), (B, 2), (R, 0), (R, 1), (B, 1), (B, 0)], device(3))
    verify(program)
    kept = [[v.kind for v in ins.writes] for ins in program.ranks[0][:6]]
    assert kept == [
        ["output"],
        ["output"],
        ["output", "saved"],
        ["grad_output", "grad"],
        ["output", "saved"],
        ["saved"],
    ]
    assert program.ranks[0][1].frees[0].index == 0  # the output of layer 0 is made again


def test_a_device_with_a_host():
    made = [(F, 0), (OFFLOAD, 0), (F, 1), (B, 1), (FETCH, 0), (B, 0)]
    slow = device(2, link=2 * MiB / (25 * ms))
    program = program_of(made, slow)
    verify(program)
    trace = simulate(program, slow)
    assert trace.time == pytest.approx((10 + 10 + 20 + 25 + 20) * ms)  # out beside F 1 and B 1; back before B 0
    assert max(trace.peak_memory()) == 7 * MiB  # both layers, the gradient between them: the copy ends during B 1


def test_shards_are_gathered_and_scattered():
    made = [(GATHER, 0), (F, 0), (B, 0), (SCATTER, 0)]
    ranks = device(1, parameters=(8 * MiB,), optimizer=2.0, ranks=4, network=6 * MiB / (7 * ms))
    program = program_of(made, ranks)
    verify(program)
    trace = simulate(program, ranks)
    assert trace.time == pytest.approx((7 + 10 + 20 + 7) * ms)
    assert trace.peak_by_kind(3)["optimizer"] == 4 * MiB
    assert len(set(program.ranks)) == 1
