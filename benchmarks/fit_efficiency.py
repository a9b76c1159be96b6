"""Fits the constants of `minipar.costs.hardware.Efficiency`: `python -m benchmarks.fit_efficiency`.

Three constants (matmul, half, near) are solved for on three rows of Narayanan's table 1: a small model without tensor
parallelism, one with eight ranks in a node, and a large one with a pipeline. Then one (beside) on one row of table 2,
with ZeRO-3. As many equations as unknowns, so these rows say nothing about how good the predictions are. All other
rows of `minipar validate` are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
from numpy.typing import NDArray

from minipar.costs.hardware import Efficiency
from minipar.prediction import validation
from minipar.prediction.validation import A100, FITTED, FITTED_ZERO, TABLE_1, TABLE_2

Vector = NDArray[numpy.float64]


def solved(errors: Callable[[Vector], list[float]], start: tuple[float, ...]) -> list[float]:
    """The numbers at which all errors are 0, by Newton's method."""
    point: Vector = numpy.array(start, dtype=numpy.float64)
    for _ in range(20):
        here: Vector = numpy.array(errors(point), dtype=numpy.float64)
        slopes = []
        for k, number in enumerate(point):
            moved = point.copy()
            moved[k] = number * 1.001
            slopes.append((numpy.array(errors(moved), dtype=numpy.float64) - here) / (0.001 * number))
        step = numpy.linalg.solve(numpy.array(slopes).T, here)
        point = point - step
        if max(abs(step / point)) < 1e-6:
            break
    return [float(number) for number in point]


def fit() -> Efficiency:
    """The constants."""
    rows = [row for row in TABLE_1 if row.model in FITTED]
    zero = next(row for row in TABLE_2 if row.pp == 1 and (row.model, row.gpus) == FITTED_ZERO)

    def of_megatron(point: Vector) -> list[float]:
        share = replace(A100.efficiency, matmul=point[0], half=point[1], near=point[2])
        machine = replace(A100, efficiency=share)
        return [validation.tflops(validation.megatron(row), row.model, machine) / row.tflops - 1 for row in rows]

    matmul, half, near = solved(of_megatron, (0.75, 200.0, 0.75))
    found = replace(A100.efficiency, matmul=round(matmul, 3), half=round(half), near=round(near, 3))

    def of_zero(point: Vector) -> list[float]:
        machine = replace(A100, efficiency=replace(found, beside=point[0]))
        return [validation.tflops(validation.table_2(zero), zero.model, machine) / zero.tflops - 1]

    return replace(found, beside=round(solved(of_zero, (0.5,))[0], 2))


if __name__ == "__main__":
    print(fit())
