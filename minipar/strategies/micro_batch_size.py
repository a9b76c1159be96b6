"""A plan in words that says how many rows a micro-batch has, as searches and estimates write it.

A `Plan` has microbatches=m, and the rows of a step are given beside it. With both of them micro_batch_size=b says no
more, so it is taken out here.
"""

from __future__ import annotations

from minipar.errors import PlanError
from minipar.program.rows import MOST_ROWS
from minipar.strategies import keys
from minipar.wording import several

KEY = "micro_batch_size"


def without_micro_batch_size(text: str, batch: int | None) -> tuple[str, int | None]:
    """The same words without micro_batch_size=b, and the rows of a step over all replicas.

    batch   rows of a step, if they are given

    Beside microbatches=m the rows are dp x m x b; without it there are as many micro-batches as the batch has.
    Errors: PlanError for numbers that do not go together.
    """
    table = keys.words(text)
    if KEY not in table:
        return " ".join(text.split()), batch
    rows = keys.whole_number(KEY, table.pop(KEY), most=MOST_ROWS)
    parts = keys.whole_number("dp", table.get("dp", 1)) * keys.whole_number("accumulate", table.get("accumulate", 1))
    if "microbatches" in table or batch is None:
        count = keys.whole_number("microbatches", table.get("microbatches", 1))
        built = parts * count * rows
        if batch not in (None, built):
            raise PlanError(
                f"batch={batch}: the plan's micro-batches have {built} rows together ({KEY}={rows}, {count} of each "
                f"replica); possible is batch={built}"
            )
    else:
        count, rest = divmod(batch, parts * rows)
        if rest or not count:
            near = batch // (parts * rows) * parts * rows
            possible = f"batch={near} or {near + parts * rows}" if near else f"batch={parts * rows}"
            words = f"batch={batch}: {KEY}={rows} does not divide it among {several(parts, 'replica')}"
            raise PlanError(f"{words}; possible is {possible}")
        built = batch
    table["microbatches"] = str(count)
    return " ".join(f"{key}={value}" for key, value in table.items()), built
