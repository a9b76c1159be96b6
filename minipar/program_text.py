"""Programs as plain lists and numbers, and back: what `Program.to_json` gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

from minipar.contracts import Contract, Local, Serving, Staleness, Synchronous
from minipar.program import Group, Instruction, Op, Part, Program
from minipar.values import Value


def to_json(program: Program) -> dict[str, Any]:
    """Plain lists and numbers, for `json.dump`. `from_json` gives an equal program."""
    names: dict[Value, int] = {}

    def refs(values: Iterable[Value]) -> list[int]:
        return [names.setdefault(value, len(names)) for value in values]

    ranks = [
        [
            [i.op.name, list(i.layers), i.microbatch, i.step, refs(i.reads), refs(i.writes), refs(i.frees),
             i.stream, i.peer, list(i.group), [[p.op.name, *p[1:]] for p in i.parts],
             *([i.name] if i.name else [])]
            for i in instructions
        ]
        for instructions in program.ranks
    ]  # fmt: skip
    return {
        "format": "minipar-program/1",
        "name": program.name,
        "layers": program.layers,
        "microbatches": program.microbatches,
        "steps": program.steps,
        "mesh": [list(axis) for axis in program.mesh],
        "groups": [[list(g.layers), list(g.tensors), g.frozen] for g in program.groups],
        "receives_ahead": program.receives_ahead,
        **({} if program.clip is None else {"clip": program.clip}),
        **({} if program.precision == "float32" else {"precision": program.precision}),
        **({"local_steps": program.contract.steps} if isinstance(program.contract, Local) else {}),
        **({} if program.compress == "none" else {"compress": program.compress}),
        **({"algorithm": program.algorithm} if program.algorithm else {}),
        **({"folder": program.folder} if program.folder else {}),
        **({} if program.room is None else {"room": program.room}),
        **({"chunks": list(program.chunks)} if program.chunks else {}),
        **({"final": [refs(sorted(values)) for values in program.final]} if program.final else {}),
        **({} if program.in_flight is None else {"in_flight": program.in_flight}),
        **({} if program.serving is None else {"serving": [program.serving.servers, program.serving.mode]}),
        **({"staleness": list(astuple(program.contract))} if isinstance(program.contract, Staleness) else {}),
        **({"selective": True} if program.selective else {}),
        **({} if program.slices == 1 else {"slices": program.slices, "carries": list(program.carries)}),
        **({"edges": [list(edge) for edge in program.edges]} if program.edges else {}),
        "state": [refs(sorted(values)) for values in program.state],
        "ranks": ranks,
        "values": [list(value) for value in names],
    }


def from_json(data: dict[str, Any]) -> Program:
    """The program that `to_json` gave."""
    values = [Value(*entry) for entry in data["values"]]

    def named(refs: Iterable[int]) -> tuple[Value, ...]:
        return tuple(values[k] for k in refs)

    ranks = tuple(
        tuple(
            Instruction(Op[op], tuple(layers), mb, step, named(reads), named(writes), named(frees), stream, peer,
                        tuple(group), tuple(Part(Op[part], *rest) for part, *rest in parts), *name)
            for op, layers, mb, step, reads, writes, frees, stream, peer, group, parts, *name in instructions
        )
        for instructions in data["ranks"]
    )  # fmt: skip
    return Program(
        ranks,
        data["layers"],
        data["microbatches"],
        tuple(Group(tuple(layers), tuple(tensors), frozen) for layers, tensors, frozen in data["groups"]),
        tuple((name, size) for name, size in data["mesh"]),
        tuple(frozenset(named(refs)) for refs in data["state"]),
        data["steps"],
        contract=_contract(data),
        receives_ahead=data["receives_ahead"],
        name=data["name"],
        clip=data.get("clip"),
        precision=data.get("precision", "float32"),
        compress=data.get("compress", "none"),
        algorithm=data.get("algorithm", ""),
        folder=data.get("folder", ""),
        room=data.get("room"),
        chunks=tuple(data.get("chunks", ())),
        final=tuple(frozenset(named(refs)) for refs in data.get("final", ())),
        serving=Serving(*data["serving"]) if "serving" in data else None,
        selective=data.get("selective", False),
        in_flight=data.get("in_flight"),
        slices=_slices(data.get("slices", 1)),
        carries=tuple(data.get("carries", ())),
        edges=tuple((a, b) for a, b in data.get("edges", ())),
    )


def _slices(found: int | list[int]) -> int | tuple[int, ...]:
    return found if isinstance(found, int) else tuple(found)


def _contract(data: dict[str, Any]) -> Contract:
    if "local_steps" in data:
        return Local(data["local_steps"])
    return Staleness(*data["staleness"]) if "staleness" in data else Synchronous()
