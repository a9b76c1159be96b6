"""What goes together, as a page of one screen: docs/combinations.md, which `minipar keys --markdown` prints.

Nothing is written by hand here: each cell is a plan that is tried, and the reasons are those of `EXCLUSIONS`.
"""

from __future__ import annotations

from dataclasses import fields

from minipar.strategies import keys
from minipar.strategies.exclusions import EXCLUSIONS, Excluded
from minipar.strategies.plan import Plan

# The ways to train, a column each, and a plan of each.
WAYS = {
    "core": "pp=2 dp=2 microbatches=4",
    "priority": "dp=2 overlap=priority",
    "local steps": "dp=2 local_steps=2",
    "without flushes": "pp=2 dp=2 microbatches=4 schedule=pipedream",
    "ampnet": "pp=2 microbatches=4 schedule=ampnet",
    "servers": "dp=2 sync=ps",
    "inference": "pp=2 dp=2 microbatches=4 inference=true",
}
# The keys with a row each. What the others say is of a schedule, or of one of these keys.
ROWS = (
    "dp", "pp", "tp", "context_parallel", "ep", "accumulate", "bucket", "overlap", "local_steps", "compress",
    "checkpoint", "zero", "inference", "clip", "precision", "offload", "host_layers", "sync", "algorithm",
)  # fmt: skip

INTRODUCTION = """# What goes together

The first column is the core: every schedule that flushes. There all of these keys go together, but for the pairs in the
list below. The other columns are ways to train that go with fewer keys.

`yes`: it goes. `x`: the two contradict each other, as the list says. `no`: it is not built. Where only some values of a
key go, the cell has these. `minipar keys zero` says of one key what it does not go with, why, and what is possible.
(A model can exclude a choice, too: branches, tied layers, layers that take whole sequences. The message says so then.)

This page is made from the table that refuses: `minipar keys --markdown` prints it.
"""


def page() -> str:
    """The page: a table of keys and ways to train, and the reasons of what is refused for good."""
    lines = [INTRODUCTION, "| key | values | " + " | ".join(WAYS) + " |", "|---|---|" + "---|" * len(WAYS)]
    table: dict[str, keys.Key] = {field.name: field.metadata["key"] for field in fields(Plan)}
    defaults = {field.name: field.default for field in fields(Plan)}
    for name in ROWS:
        values = table[name].domain.values or table[name].domain.examples()
        tried = [str(value).lower() for value in values if value != defaults[name]]
        cells = " | ".join(_cell(way, name, tried) for way in WAYS.values())
        lines.append(f"| {name} | {', '.join(tried)} | {cells} |")
    lines += ["", "Contradictions:", ""]
    reasons: dict[str, list[str]] = {}
    for row in EXCLUSIONS:
        if row.fundamental:
            reasons.setdefault(row.why, []).append(f"{row.one.words} with {row.other.words}")
    lines += [f"- {'; '.join(pairs)}: {why}" for why, pairs in reasons.items()]
    return "\n".join(lines)


def _cell(way: str, name: str, values: list[str]) -> str:
    """Whether a key goes with a way to train: `yes`, the values that go, `no`, or `x` for a contradiction."""
    refused = {}
    for value in values:
        try:
            Plan.parse({**keys.words(way), name: value})
        except Excluded as error:
            refused[value] = error.row.fundamental
    if not refused:
        return "yes"
    if len(refused) == len(values):
        return "x" if all(refused.values()) else "no"
    return ", ".join(value for value in values if value not in refused)
