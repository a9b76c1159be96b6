"""What a rank says when its device is full: what it was doing, who holds the memory, and what would make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from minipar.errors import DeviceOutOfMemory
from minipar.program import Program
from minipar.program.mesh import Mesh
from minipar.strategies.plan import Plan
from minipar.trace.memory_series import by_kind, mib, owners


def out_of_memory(
    program: Program, rank: int, doing: str, held: Mapping[tuple[str, int], int], request: int, capacity: int
) -> DeviceOutOfMemory:
    """The error of an allocation of `request` bytes, which `held`, bytes by (kind, layer), includes already."""
    kinds = {kind: size for kind, size in by_kind(dict(held)).items() if size}
    needed = sum(kinds.values())
    largest = sorted(kinds, key=lambda kind: -kinds[kind])
    ways = ways_out(program, kinds, needed, capacity)
    summary = ", ".join(f"{kind} {mib(kinds[kind])}" for kind in largest[:3])
    error = DeviceOutOfMemory(
        f"rank {rank}: {doing} needs {mib(request)} more, which makes {mib(needed)} of the {mib(capacity)} that its "
        f"device holds ({summary}); possible: {'; '.join(ways)}",
        "\n".join(["largest owners:", *(f"  {_owner(*one)}" for one in owners(dict(held))[:6])]),
    )
    error.rank, error.instruction, error.capacity, error.needed = rank, doing, capacity, needed
    error.by_kind, error.ways_out = kinds, ways
    return error


def _owner(kind: str, layer: int, size: int) -> str:
    return f"{mib(size):>12}  {kind}" + (f" of layer {layer}" if layer >= 0 else "")


def ways_out(program: Program, kinds: Mapping[str, int], needed: int, capacity: int) -> tuple[str, ...]:
    """Three changes of the plan; those that free most come first. Sizes are what this rank holds now, scaled."""
    rows = sum(kinds.get(kind, 0) for kind in ("activations", "buffers", "temporary", "data"))
    states = {kind: kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer")}
    fixed = sum(states.values())
    dp, pp, m = program.replicas, Mesh(program.mesh).length("pp"), program.microbatches
    known = {field.name for field in fields(Plan)}
    found: list[tuple[int, str]] = []  # bytes freed, and how

    def offer(freed: float, text: str) -> None:
        if freed > 0:
            found.append((round(freed), f"{text} ({mib(needed)} -> about {mib(needed - freed)})"))

    key = "microbatches" if pp == 1 else "accumulate"
    offer(rows / 2, f"{key}: twice as many micro-batches, of half the rows each")
    alone = program.serving is None  # a worker of parameter servers has the whole model, and no optimizer
    if "checkpoint" in known:
        offer(kinds.get("activations", 0) / 2, "checkpoint=sqrt: recompute activations instead of keeping them")
    if alone and pp < program.layers:
        offer((fixed + rows) / 2, f"pp={pp * 2}: half the layers on each rank")
    if alone and "zero" in known:
        n = max(dp, 2)
        more = "" if dp > 1 else " dp=2"
        offer(states["optimizer"] * (1 - 1 / n), f"zero=1{more}: optimizer states sharded over {n} ranks")
        offer(fixed * (1 - 1 / n), f"zero=3{more}: all model states sharded over {n} ranks")
    if alone and "offload" in known:
        offer(states["optimizer"], "offload=optimizer: its states on the host")
    fraction = (capacity - fixed) / rows if rows else 0.0
    if 0 < fraction < 1:
        found.append((needed - capacity, f"a smaller batch: about {fraction:.0%} of the rows"))
    elif rows:
        offer(rows / 2, "a smaller batch: half the rows")
    if dp > 1 and m > 1:
        found.append((0, "more replicas of fewer rows: a larger dp with the same batch"))
    found.append((0, "a smaller model: fewer or narrower layers"))
    found.append((0, "an optimizer with less state, such as SGD without momentum"))
    found.append((0, f"a device with at least {mib(needed)}"))
    return tuple(text for _, text in sorted(found, key=lambda one: -one[0])[:3])
