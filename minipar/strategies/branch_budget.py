"""A budget of a model with branches: chains of layers run forward again, one more at a time, until the rest fits.

    keeps everything                                       too much
    the chain with most bytes for its seconds runs again   too much
    and the next one                                       fits

Bytes are what autograd keeps of a chain, and seconds those of its forward. A chain runs again in the segments that need
least memory. Chains that turn out to be small enough to stay are kept after all. So the budget holds, but the step need
not be the fastest one: that search (`minipar.costs.reversal`) is for a model that is one chain. What counts is the same
as there: outputs, their gradients, what is saved, and buffers for messages that are received ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minipar.costs.recomputation import LayerCosts, every, square_root
from minipar.program import Instruction
from minipar.program.edges import Edges

Recompute = Callable[[Sequence[Instruction], Sequence[range]], list[Instruction]]


def within(
    budget: int,
    row: Sequence[Instruction],
    chains: Sequence[range],
    in_flight: int,
    costs: LayerCosts,
    edges: Edges,
    recompute: Recompute,
    ahead: int = 2,
) -> tuple[list[range], int]:
    """The segments that run again on a rank, and the bytes that its activations then need: perhaps more than `budget`.

    row         the rank's instructions, which keep everything
    chains      its trained layers, each of which is in one chain
    in_flight   micro-batches that wait for their backward
    recompute   gives the row in which these segments run again
    ahead       messages that are received before they are needed
    """

    def worth(chain: range) -> float:
        kept = sum(costs.saved[layer] + costs.output[layer] for layer in chain)
        return kept / max(1e-12, sum(costs.forward[layer] for layer in chain))

    def bytes_with(chosen: Sequence[range]) -> int:
        again = [segment for chain in chosen for segment in _segments(chain, costs, in_flight)]
        return needed(recompute(row, again), costs, edges, ahead)

    chosen: list[range] = []
    need = bytes_with(chosen)
    for chain in sorted(chains, key=worth, reverse=True):
        if need <= budget:
            break
        chosen.append(chain)
        need = bytes_with(chosen)
    for chain in list(chosen) if need <= budget else ():
        fewer = [other for other in chosen if other != chain]
        if (less := bytes_with(fewer)) <= budget:
            chosen, need = fewer, less
    return [segment for chain in chosen for segment in _segments(chain, costs, in_flight)], need


def _segments(chain: range, costs: LayerCosts, in_flight: int) -> list[range]:
    length = square_root(len(chain), costs.chain(chain.start, chain.stop), in_flight)
    return [range(chain.start + one.start, chain.start + one.stop) for one in every(len(chain), length)]


def needed(row: Sequence[Instruction], costs: LayerCosts, edges: Edges, ahead: int) -> int:
    """The most bytes of activations that a rank has at a time, before it sends and receives anything."""
    written = {value for ins in row for value in ins.writes}
    freed = {value for ins in row for value in ins.frees}
    sizes: dict[str, Callable[[int], int]] = {
        "output": costs.output.__getitem__,
        "saved": costs.saved.__getitem__,
        "grad_output": lambda edge: costs.gradient[edges[edge][0]],
        "saved_weight": lambda layer: costs.saved[layer] + costs.output[layer] + costs.gradient[layer],
    }
    live: dict[object, int] = {}
    total = most = largest = 0
    for ins in row:
        for value in (*ins.reads, *ins.writes):
            if value.kind in sizes and value not in live:
                live[value] = sizes[value.kind](value.index)
                total += live[value]
                largest = max(largest, live[value] if value not in written else 0)
        most = max(most, total)
        sent = (value for value in ins.writes if value not in freed)  # another rank frees it
        for value in (*ins.frees, *sent):
            total -= live.pop(value, 0)
    return most + ahead * largest
