"""Programs as plain lists and numbers, and back: what `Program.to_json` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from minipar.errors import ProgramError
from minipar.program import Forms, Group, Instruction, Op, Part, Program
from minipar.program.consistency import Contract, Local, Serving, Staleness, Synchronous
from minipar.program.values import Value
from minipar.program.verify import fields

T = TypeVar("T")

_NEEDED = (
    "name", "layers", "microbatches", "steps", "mesh", "groups", "receives_ahead", "state", "ranks", "values",
)  # fmt: skip
# How fields are made of plain lists and numbers; the others are as they are, or name values.
_READ: dict[str, Callable[[Any], object]] = {
    "groups": lambda found: tuple(
        Group(tuple(layers), tuple(tensors), frozen, *form) for layers, tensors, frozen, *form in found
    ),
    "mesh": lambda found: tuple((name, size) for name, size in found),
    "chunks": tuple,
    "serving": lambda found: Serving(*found),
    "slices": lambda found: found if isinstance(found, int) else tuple(found),
    "carries": tuple,
    "edges": lambda found: tuple((a, b) for a, b in found),
    "forms": lambda found: tuple(Forms(*each) for each in found),
    "names": tuple,
}


def to_json(program: Program) -> dict[str, Any]:
    """Plain lists and numbers, for `json.dump`. `from_json` gives an equal program. What has its default is left
    out."""
    names: dict[Value, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Value):
            return names.setdefault(value, len(names))
        if isinstance(value, Op):
            return value.name
        if isinstance(value, Serving):
            return list(astuple(value))
        if isinstance(value, (Instruction, Group)) and not value[-1]:
            value = value[:-1]  # (no name, or no form)
        entries = sorted(value) if isinstance(value, frozenset) else value
        return entries if isinstance(entries, str) or not isinstance(entries, Iterable) else [*map(plain, entries)]

    found: dict[str, Any] = {"format": "minipar-program/1"}
    for field in fields_of(program):
        value = getattr(program, field.name)
        if field.name == "contract":
            found |= {"local_steps": value.steps} if isinstance(value, Local) else {}
            found |= {"staleness": list(astuple(value))} if isinstance(value, Staleness) else {}
        elif field.name in _NEEDED or value != field.default:
            found[field.name] = plain(value)
    return found | {"values": [list(value if value.form else value[:4]) for value in names]}


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
    given: dict[str, Any] = {"contract": _contract(data)}
    given["ranks"] = tuple(
        tuple(_instruction(rank, index, entry, named) for index, entry in enumerate(row))
        for rank, row in enumerate(rows)
    )
    readers = {**_READ, "state": sets, "final": sets}
    for field in fields_of(Program):
        if field.name in data and field.name not in given:
            given[field.name] = _read(data, field.name, readers.get(field.name, lambda found: found))
    program = Program(**given)
    fields.check_types(program)
    return program


def _read(data: dict[str, Any], name: str, make: Callable[[Any], T]) -> T:
    """A field, made by `make` from plain lists and numbers. Errors: ProgramError if `make` cannot read them."""
    found = data[name]
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


def _contract(data: dict[str, Any]) -> Contract:
    if "local_steps" in data:
        return Local(data["local_steps"])
    return _read(data, "staleness", lambda found: Staleness(*found)) if "staleness" in data else Synchronous()
