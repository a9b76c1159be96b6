"""A predicted trace with memory to the byte, from tapes of its model's layers."""

from __future__ import annotations

from dataclasses import replace

from minipar.prediction.memory import Sizes, predict_memory
from minipar.prediction.recorded import Tapes
from minipar.program.graph_cuts import pieces_of
from minipar.trace import Trace


def with_memory(trace: Trace, tapes: Tapes, sizes: Sizes) -> Trace:
    """The same trace with `series`: what every rank allocates and frees, temporaries and messages included.

    tapes   of one layer at a time (`minipar.execution.memory.tape.record`)
    sizes   of the program's values and the rows of its micro-batches, such as `ProfiledCosts`
    """
    program = trace.program
    data = trace.data or [0] * len(program.ranks)
    series = [
        predict_memory(
            program, rank, pieces_of(program, rank), tapes, sizes, data[rank], trace.starts[rank], trace.ends[rank]
        )
        for rank in range(len(program.ranks))
    ]
    return replace(trace, series=series)
