"""After a run that did not fit: the plans that would, judged by a program of each and by the tapes of measured layers.

Which plans are tried, and which of them are told, is the idea of fitting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minipar.errors import DeviceOutOfMemory, MiniparError
from minipar.prediction.forecast import Facts, Forecast
from minipar.prediction.program_costs import microbatch_rows
from minipar.strategies.plan import Plan
from minipar.trace.memory_series import mib


def ways_that_fit(
    plan: Plan, batch: int, capacity: int, measure: Callable[[tuple[int, ...]], Facts]
) -> list[tuple[str, int]]:
    """At most three ways to fit, with their predicted peaks in bytes: the smallest change of each kind.

    Changed plans come first, then a smaller batch, then more ranks, then a device as large as this plan needs.
    measure(rows)   what is known of the model's layers for these numbers of rows, with tapes
    """
    from minipar.prediction import fitting  # (formulas that a run which fits does not need)

    near = fitting.changes(plan.dp, plan.pp, plan.microbatches, plan.accumulate)
    families = [[(f'"{b}"', (b, batch)) for _, b in family] for family in fitting.changed(plan, batch, near)]
    smaller = [batch // k for k in (2, 4, 8) if batch // k >= plan.dp * plan.total_microbatches]
    families.append([(f"batch={rows}", (plan, rows)) for rows in smaller])
    for family in fitting.changed(plan, batch, fitting.more_ranks(plan)):
        families.append([(f'"{built}" on {built.ranks} ranks', (built, batch)) for _, built in family])
    tried = [*(one for family in families for one in family), ("", (plan, batch))]
    rows = {n for _, (built, b) in tried for n in microbatch_rows(b, built.dp, built.total_microbatches)}
    known = measure(tuple(sorted(rows)))

    def peak(one: tuple[Plan, int]) -> int:
        built, rows = one
        program = built.compile(known.shape, costs=known.profile)
        x, y = (size * rows // batch for size in known.data_bytes)
        trace = Forecast(known._replace(data_bytes=(x, y)), rows).of(program)
        return max(round(trace.memory(rank).peak) for rank in range(program.workers))  # (servers use their hosts)

    found = fitting.ways_that_fit(families, peak, capacity)
    if len(found) == fitting.MOST:
        return found
    return [*found, ("a device for the plan as it is", peak((plan, batch)))]


def advised(error: DeviceOutOfMemory, found: list[tuple[str, int]]) -> DeviceOutOfMemory:
    """The error with the ways that are predicted to fit. They take the place of those that the rank itself gave: it
    knows only what was allocated when it failed, and a step may need more than that later."""
    ways = [f"{text} (peak {mib(peak)})" for text, peak in found]
    built = DeviceOutOfMemory(
        error.reason.partition("; possible: ")[0] + "; predicted to fit: " + "; ".join(ways), error.details
    )
    built.__dict__.update({**error.__dict__, "reason": built.reason, "ways_out": tuple(ways)})
    return built


@contextmanager
def advising(plan: Plan, batch: int, measure: Callable[[tuple[int, ...]], Facts]) -> Iterator[None]:
    """Inside the block, a DeviceOutOfMemory also says which plans would fit. See `ways_that_fit`."""
    try:
        yield
    except DeviceOutOfMemory as error:
        if plan.slice_count > 1:  # (`measure` measures whole rows)
            raise
        try:
            found = ways_that_fit(plan, batch, error.capacity, measure)
        except MiniparError:  # the original error is more important
            raise error from None
        raise advised(error, found) from None
