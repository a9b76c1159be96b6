"""Bytes on every rank of a plan as minipar itself runs it, without a device: for `minipar memory` and MemoryExplorer.

    per_rank("pp=4 ...", "gpt2-xl", batch)      the numbers of `minipar.estimate` for every rank
    details(...)                                the same, with what they consist of

The formula is that of rank_memory.py. In an estimate for a device embedding and head are no layers, unless the plan
says so.
"""

from __future__ import annotations

from typing import Any

from minipar.costs.analytic import WHOLE, Division
from minipar.errors import PlanError
from minipar.models import table
from minipar.models.sizes import Sizes, of_preset, sizes
from minipar.models.table import Branchy
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check, numbers_of, table_of
from minipar.prediction.rank_memory import Detail, RankMemory, of_ranks
from minipar.program.rows import split_rows
from minipar.strategies.plan import Plan


def per_rank(
    plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default: one row for every micro-batch.

    division    how further ranks share each layer, which the plan does not say: the bytes are those of one of them, and
                the ranks of ep are some of the plan's replicas
    overrides   numbers that replace the model's, such as layers=48
    Errors: `PlanError` for an unknown model, and for a plan that does not fit it.
    """
    return [detail.memory for detail in details(plan, model, batch, division, **overrides)]


def details(
    plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[Detail]:
    """As `per_rank`, with the origin of the bytes."""
    chosen = model_of(model, **overrides) if isinstance(model, str) else model
    numbers = own_numbers(plan, chosen, division)
    count = plan.total_microbatches
    batch = plan.dp * count if batch is None else batch
    edges = split_rows(batch, plan.dp * count)
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first micro-batches have more rows
    found = {rows: of_ranks(numbers._replace(rows=float(rows * division.ep)), chosen) for rows in set(largest)}
    return [detail for rows in largest for detail in found[rows] for _ in range(plan.sharing)]


def model_of(model: str, **overrides: Any) -> Sizes:
    """A model by its name or words. Errors: PlanError for an unknown one, and for one whose layers branch."""
    if model not in table.names():
        return sizes(" ".join([model, *(f"{key}={value}" for key, value in overrides.items())]))
    numbers = table.numbers(model, **overrides)
    if isinstance(numbers, Branchy):
        raise PlanError(f"memory: no formula for {model}, whose layers branch; possible is `minipar run --memory`")
    return of_preset(numbers, model)


def own_numbers(plan: Plan, model: Sizes, division: Division = WHOLE) -> PlanNumbers:
    """A plan as minipar runs it, with one row in each micro-batch. Errors: PlanError for what has no formula."""
    if plan.slice_count > 1 or plan.place is not None:
        sliced = f"schedule={plan.schedule}, whose slices differ"
        raise PlanError(
            f"memory: no formula for {'place=, which cuts stages in pieces' if plan.place is not None else sliced}; "
            f"possible are `minipar memory` of a model that can be built ({', '.join(table.presets())}), or `minipar "
            "run --memory`"
        )
    found, ep = numbers_of(table_of(plan), model), division.ep
    if found.dp % ep:
        possible = ", ".join(str(n) for n in range(1, found.dp + 1) if found.dp % n == 0)
        raise PlanError(f"ep={ep}: must divide the dp={found.dp} replicas that it is of; possible are {possible}")
    found = found._replace(
        dp=found.dp // ep, ep=found.ep * ep, tp=found.tp * division.tp, cp=found.cp * division.cp,
        sequence_parallel=found.sequence_parallel or division.sequence,
    )  # fmt: skip
    check(found, model)
    return found
