"""The data of the memory explorer for a choice of model, device and plan: the numbers of `memory_formula`, for groups
of equal ranks, and the measured memory of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from minipar.costs.analytic import WHOLE, Division
from minipar.costs.quantities import size
from minipar.errors import PlanError
from minipar.models.sizes import Sizes, Transformer
from minipar.models.table import PRESETS
from minipar.prediction import on_paper
from minipar.prediction.rank_memory import KINDS, Detail
from minipar.strategies.plan import Plan
from minipar.trace.figure import MEMORY
from minipar.wording import several
from minipar_widgets import chart, memory_terms
from minipar_widgets.memory_terms import Term

MOST_RANKS = 4  # in a run that an explorer starts


@dataclass(frozen=True)
class Choice:
    """A choice of model, device and plan.

    numbers    new values for some of the model's numbers, such as {"layers": 48}
    rows       of each micro-batch
    capacity   of a device in bytes; `device` is its name
    experts    that take the place of each block's perceptron; 0: the model's own. A token goes to `top` of them
    """

    plan: Plan = field(default_factory=Plan)
    model: str = "gpt2-xl"
    numbers: Mapping[str, int] = field(default_factory=dict)
    rows: int = 1
    capacity: int = 80 * 10**9
    device: str = "a100-80gb"
    division: Division = WHOLE
    experts: int = 0
    top: int = 1

    @property
    def batch(self) -> int:
        return self.plan.dp * self.plan.total_microbatches * self.rows

    @property
    def sizes(self) -> Sizes:
        """The model. Errors: PlanError for an unknown one, and for experts that it cannot have."""
        model = on_paper.model_of(self.model, **self.numbers)
        if not self.experts or not isinstance(model, Transformer):
            return model
        return replace(model, experts=self.experts, top=self.top, capacity=1.0, expert_bias=model.bias)

    def __str__(self) -> str:
        own = "".join(f" {key}={value}" for key, value in self.numbers.items())
        more = {"tp": self.division.tp, "ep": self.division.ep, "experts": self.experts}
        words = [f"{key}={value}" for key, value in more.items() if value > 1]
        return " ".join([f"{self.model}{own}, {self.plan}", *words]) + f", {several(self.rows, 'row')} a micro-batch"


@dataclass(frozen=True)
class Memory:
    """Bytes on all ranks of a choice. `Memory.of` raises PlanError for an impossible choice."""

    choice: Choice
    details: tuple[Detail, ...]

    @staticmethod
    def of(choice: Choice) -> Memory:
        one = choice
        found = on_paper.details(one.plan, one.sizes, one.batch, one.division)
        return Memory(choice, tuple(found))

    @cached_property
    def worst(self) -> int:
        """The rank that needs most."""
        return max(range(len(self.details)), key=lambda rank: self.details[rank].memory.total)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Groups of ranks with the same numbers. The group of `worst` is the first; the others follow by rank."""
        alike: dict[object, list[int]] = {}
        for rank, detail in enumerate(self.details):
            alike.setdefault((detail.memory, detail.rows), []).append(rank)
        return sorted(alike.values(), key=lambda ranks: self.worst not in ranks)

    def terms(self, rank: int) -> list[Term]:
        return memory_terms.terms(self.choice.plan, self.details[rank])

    @cached_property
    def verdict(self) -> str:
        one = self.choice
        return memory_terms.verdict(one.plan, one.sizes, one.batch, one.capacity, one.division, one.device)


def label(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7`, or `ranks 0, 4, ... 28`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + (", ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}")


def table(memory: Memory) -> list[list[str]]:
    """A row for each group of ranks, in readable bytes."""
    rows = [["ranks", *KINDS, "total", "of the device", "on the host"]]
    for ranks in memory.groups:
        one = memory.details[ranks[0]].memory
        share = f"{one.total / memory.choice.capacity:.1%}"
        rows.append(
            [label(ranks), *(size(getattr(one, kind)) for kind in KINDS), size(one.total), share, size(one.host)]
        )
    return rows


# a real run ----------------------------------------------------------------------------------------------------------


def why_not_run(choice: Choice) -> str:
    """The reason why a choice cannot run here; "" if it can."""
    if choice.model not in PRESETS:
        return f"{choice.model} is too large to be built here; possible are {', '.join(PRESETS)}"
    if choice.division != WHOLE or choice.experts:
        return "tp and ep are formulas here; possible is tp=1 ep=1 experts=0"
    if choice.plan.ranks > MOST_RANKS:
        return f"{several(choice.plan.ranks, 'rank')} are many for this machine; possible are up to {MOST_RANKS}"
    return ""


def measure(choice: Choice) -> list[dict[str, int]]:
    """Train two steps of the choice on real ranks of this machine, with Adam, which the formulas assume. Returns every
    rank's peak by kind, as the tracker measured it. Imports torch. Errors: PlanError if the choice cannot run."""
    if reason := why_not_run(choice):
        raise PlanError(reason)
    import torch

    from minipar import data, models
    from minipar.training.training import train

    run = train(
        partial(models.build, choice.model, **choice.numbers),
        data.for_model(choice.model, **choice.numbers),
        choice.plan,
        steps=2,
        batch=choice.batch,
        loss=models.loss_of(choice.model),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        memory=True,
        progress=False,
    )
    return [run.trace.peak_by_kind(rank) for rank in range(choice.plan.ranks)]


# the figure ----------------------------------------------------------------------------------------------------------

FACES = {kind: MEMORY[kind] for kind in KINDS}
HATCHES = {"parameters": "", "gradients": "/", "optimizer": "\\", "activations": "", "buffers": "x"}  # as in shared.js
MANY = 24  # bars at most


def figure(memory: Memory, measured: Sequence[Mapping[str, int]] = ()) -> Any:
    """Bars by kind, with the device's capacity, as data for plotly. The ranks that need most come first."""
    shown = memory.groups[:MANY]
    names = [("worst: " if k == 0 and len(memory.groups) > 1 else "") + label(ranks) for k, ranks in enumerate(shown)]
    unit, word = scale_of(memory)
    found: list[dict[str, Any]] = []
    for k, kind in enumerate(KINDS):
        filled = [memory.terms(ranks[0])[k] for ranks in shown]
        hover = [f"{kind}: {size(term.bytes)}<br>{term.formula}<br>= {term.filled}" for term in filled]
        pattern = {"shape": HATCHES[kind], "fgcolor": "#333", "size": 5, "solidity": 0.2, "fillmode": "overlay"}
        found.append({
            "type": "bar", "y": names, "x": [term.bytes / unit for term in filled], "name": kind, "orientation": "h",
            "hovertext": hover, "hoverinfo": "text",
            "marker": {"color": FACES[kind], "line": {"color": "#444", "width": 0.6}, "pattern": pattern},
        })  # fmt: skip
    if measured:
        points = [sum(measured[ranks[0]].values()) for ranks in shown]
        found.append({
            "type": "scatter", "y": names, "x": [x / unit for x in points], "mode": "markers", "name": "measured",
            "hoverinfo": "text", "hovertext": [f"measured: {size(x)}" for x in points],
            "marker": {"symbol": "diamond", "size": 12, "color": "#D55E00", "line": {"color": "#fff", "width": 1.5}},
        })  # fmt: skip
    limit = memory.choice.capacity / unit
    layout = chart.layout(130 + 30 * len(shown), f"{word} on each rank")
    most = max(memory.details[memory.worst].memory.total / unit, found[-1]["x"][0])
    if limit < 3 * most:  # (a much larger capacity would make all bars tiny; `verdict` names it in words)
        text = f"{memory.choice.device or 'capacity'} {size(memory.choice.capacity)}"
        line = {"color": "#b04a00", "width": 2, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": limit, "x1": limit, "line": line}]
        above = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
        side = "center" if limit < 0.8 * most else "right"
        layout["annotations"] = [{"x": limit, "text": text, "xanchor": side, **above}]
    layout["xaxis"]["rangemode"] = "tozero"
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False}
    return {"data": found, "layout": {**layout, "barmode": "stack"}}


def scale_of(memory: Memory) -> tuple[int, str]:
    """The unit of an axis."""
    most = memory.details[memory.worst].memory.total
    return next(((whole, name) for name, whole in (("GiB", 2**30), ("MiB", 2**20)) if most >= whole), (2**10, "KiB"))
