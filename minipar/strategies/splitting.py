"""split=auto: the layers of each stage, such that a step takes as little time as possible.

    begin with   3 3 2 2      the equal split, and the dynamic program's (costs/partition.py)
    then try     2 4 2 2  3 2 3 2  4 2 2 2 ...      one layer more in a stage, and one less in another
    and go on    from the best few, until none of their neighbours is better

The dynamic program is exact where every rank has one stage and gpipe flushes. Every other schedule is judged by whoever
can predict a program: `train` gives the simulator's time, and estimates give theirs. Without such a judge the dynamic
program's split is taken.

Layers that ranks share stay whole, as `split=` counts them. Recomputation counts as a forward of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from minipar.costs.measured import Profile
from minipar.costs.partition import partition
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.strategies.layout import Layout
from minipar.wording import several

Split = tuple[int, ...]

BANDWIDTH = 1.5e9  # bytes a second of every link, as `ProgramCosts` assumes
BEAM = 4  # splits from which the search goes on
WORK = 40_000  # most forwards and backwards of layers in all programs that are predicted, which take about 4 seconds


def by_chain(costs: LayerCosts | Profile | None, stages: int, layout: Layout, again: bool) -> Split:
    """The dynamic program's split of the model's own layers.

    costs    of the layers. A profile is in seconds, so that its messages count, too. The times of LayerCosts may have
             any unit, for example operations; then messages are free
    layout   any layout of the model
    again    whether layers run forward again before their backward

    Errors: `PlanError` without costs, or with costs of another number of layers.
    """
    if costs is None:
        raise PlanError(
            "split=auto: needs what the layers cost; give compile(..., costs=minipar.profile(model, batch)), "
            "or layer counts such as 3,3,2, or even"
        )
    layers, shape = LayerCosts.of(costs) if isinstance(costs, Profile) else costs, layout.shape
    if len(layers.forward) != shape.layers:
        raise PlanError(f"costs: of {several(len(layers.forward), 'layer')}, but the model has {shape.layers}")
    first = layout.first_trainable
    work = [
        forward * (2 if again and layer >= first else 1) + (backward if layer >= first else 0.0)
        for layer, (forward, backward) in enumerate(zip(layers.forward, layers.backward, strict=True))
    ]
    own = list(pairwise(shape.firsts))
    sizes = [layers.output[end - 1] + layers.gradient[end - 1] for _, end in own]
    messages = [size / BANDWIDTH * isinstance(costs, Profile) for size in sizes]
    return partition([sum(work[a:b]) for a, b in own], stages, layout.microbatches, activations=messages).split


def fastest(starts: Sequence[Split], time_of: Callable[[Split], float], work: int) -> Split:
    """The split of least time that is found from these; of equally fast ones, that which is nearest to the first.

    work   about how many forwards and backwards of layers the program of a split has. Where that is too much for a
           search, it is the last of `starts`
    """
    if work * len(starts) > WORK:
        return starts[-1]
    tried: dict[Split, tuple[float, int]] = {}
    fresh = list(dict.fromkeys(starts))
    while fresh:
        for split in fresh:
            distance = sum(abs(a - b) for a, b in zip(split, starts[0], strict=True))
            tried[split] = float(f"{time_of(split):.12g}"), distance  # (sums in another order differ by rounding)
        best = sorted(tried, key=tried.__getitem__)[:BEAM]
        near = dict.fromkeys(split for one in best for split in _neighbours(one) if split not in tried)
        fresh = list(near)[: max(0, WORK // work - len(tried))]
    return best[0]


def _neighbours(split: Split) -> Iterator[Split]:
    """Splits with one layer less in one stage, and one more in another."""
    for a, count in enumerate(split):
        for b in range(len(split)) if count > 1 else ():
            if a != b:
                yield tuple(n - (s == a) + (s == b) for s, n in enumerate(split))
