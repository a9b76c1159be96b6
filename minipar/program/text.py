"""Programs as plain lists and numbers, and back: what `Program.to_json` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any, TypeVar

from minipar.errors import ProgramError
from minipar.program import Forms, Group, Instruction, Op, Part, Program
from minipar.program.consistency import Contract, Local, Serving, Staleness, Synchronous
from minipar.program.values import Value
from minipar.program.verify import fields

T = TypeVar("T")


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
        "groups": [[list(g.layers), list(g.tensors), g.frozen, *([g.form] if g.form else [])] for g in program.groups],
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
        **({"forms": [list(forms) for forms in program.forms]} if program.forms else {}),
        **({"inputs": program.inputs} if program.inputs else {}),
        **({"names": list(program.names)} if program.names else {}),
        "state": [refs(sorted(values)) for values in program.state],
        "ranks": ranks,
        "values": [list(value if value.form else value[:4]) for value in names],
    }


_NEEDED = (
    "name", "layers", "microbatches", "steps", "mesh", "groups", "receives_ahead", "state", "ranks", "values",
)  # fmt: skip


def from_json(data: dict[str, Any]) -> Program:
    """The program that `to_json` wrote. It is not verified.

    Errors: ProgramError, which names the field, if a field is missing or has a wrong type.
    """
    if not isinstance(data, dict):
        raise ProgramError(f"program {fields.shown(data)}: must be a dictionary, as Program.to_json gives it")
    for name in _NEEDED:
        if name not in data:
            raise ProgramError(f"{name}: is missing; a program has {', '.join(_NEEDED)}")
    values = dict(enumerate(_read(data, "values", lambda entries: [Value(*entry) for entry in entries])))

    def named(refs: Iterable[int]) -> tuple[Value, ...]:
        return tuple(values[k] for k in refs)

    def sets(found: Iterable[Iterable[int]]) -> tuple[frozenset[Value], ...]:
        return tuple(frozenset(named(refs)) for refs in found)

    rows = _read(data, "ranks", lambda found: [list(row) for row in found])
    program = Program(
        tuple(
            tuple(_instruction(rank, index, entry, named) for index, entry in enumerate(row))
            for rank, row in enumerate(rows)
        ),
        data["layers"],
        data["microbatches"],
        _read(
            data, "groups",
            lambda found: tuple(
                Group(tuple(layers), tuple(tensors), frozen, *form) for layers, tensors, frozen, *form in found
            ),
        ),
        _read(data, "mesh", lambda found: tuple((name, size) for name, size in found)),
        _read(data, "state", sets),
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
        chunks=_read(data, "chunks", tuple),
        final=_read(data, "final", sets),
        serving=_read(data, "serving", lambda found: Serving(*found)) if "serving" in data else None,
        selective=data.get("selective", False),
        in_flight=data.get("in_flight"),
        slices=_read(data, "slices", _slices, 1),
        carries=_read(data, "carries", tuple),
        edges=_read(data, "edges", lambda found: tuple((a, b) for a, b in found)),
        forms=_read(data, "forms", lambda found: tuple(Forms(*each) for each in found)),
        inputs=data.get("inputs", ""),
        names=_read(data, "names", tuple),
    )  # fmt: skip
    fields.check_types(program)
    return program


def _read(data: dict[str, Any], name: str, make: Callable[[Any], T], default: object = ()) -> T:
    """A field, made by `make` from plain lists and numbers. Errors: ProgramError if `make` cannot read them."""
    found = data.get(name, default)
    try:
        return make(found)
    except fields.STUMBLES as error:
        raise ProgramError(f"{name}={fields.shown(found)}: must be as Program.to_json writes it ({error})") from error


def _instruction(rank: int, index: int, entry: Any, named: Callable[[Iterable[int]], tuple[Value, ...]]) -> Instruction:
    """An instruction, made from its list of fields. Errors: ProgramError if a field has a wrong type."""
    try:
        op, layers, i, step, reads, writes, frees, stream, peer, group, parts, *name = entry
        found = Instruction(
            Op[op], tuple(layers), i, step, named(reads), named(writes), named(frees), stream, peer, tuple(group),
            tuple(Part(Op[part], *rest) for part, *rest in parts), *name,
        )  # fmt: skip
    except fields.STUMBLES as error:
        where = f"ranks: rank {rank} instruction {index}"
        raise ProgramError(
            f"{where} is {fields.shown(entry)}: must be as Program.to_json writes it ({error})"
        ) from error
    fields.check_instruction(rank, index, found)
    return found


def _slices(found: int | list[int]) -> int | tuple[int, ...]:
    return found if isinstance(found, int) else tuple(found)


def _contract(data: dict[str, Any]) -> Contract:
    if "local_steps" in data:
        return Local(data["local_steps"])
    return _read(data, "staleness", _staleness) if "staleness" in data else Synchronous()


def _staleness(found: list[Any]) -> Staleness:
    return Staleness(
        *(found[:4] if found[4:] == [0] else found)
    )  # (programs of before end with a number of local steps)
