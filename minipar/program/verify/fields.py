"""The types and ranges of a program's fields. Every reader of programs relies on them.

The few fields of the program itself are checked before the walks. Most fields of instructions are not checked in
advance: if a walk fails because a field has a wrong type, `explain` finds that field afterwards. So nothing is checked
twice in a program that is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from minipar.errors import PlanError, ProgramError
from minipar.program import PRECISIONS, Group, Instruction, Op, Part, Program, Value, home, version_of
from minipar.program import edges as graphs
from minipar.program.consistency import Local, Serving, Staleness, Synchronous
from minipar.program.forms import Forms, is_form
from minipar.program.repeated import Repeated
from minipar.wording import several

STATE = (
    "param", "grad", "optimizer_state", "param_shard", "grad_shard", "optimizer_shard", "residual", "served",
    "served_state",
)  # fmt: skip
STUMBLES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_MANY = 100_000  # layers, micro-batches or steps; fewer are not counted
_MODE = re.compile(r"sync|async|ssp:[0-9]+|k-of-n:[0-9]+/[0-9]+")
_COMPRESSED = re.compile(r"none|bf16|fp16|topk:[0-9.e+-]+|powersgd:[1-9][0-9]*")


def _whole(value: object, least: float = float("-inf")) -> bool:
    """Whether this is a whole number of at least `least`."""
    return hasattr(value, "__index__") and bool(value.__index__() >= least)


def _wholes(value: object, least: float = float("-inf")) -> bool:
    return type(value) is tuple and all(_whole(each, least) for each in value)


def _tuple_of(fits: Callable[[object], bool], value: object) -> bool:
    return type(value) is tuple and all(map(fits, value))


def _is_row(value: object) -> bool:
    return type(value) is tuple


def _are_rows(value: object) -> bool:
    return type(value) is Repeated or _tuple_of(_is_row, value)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _values(value: object) -> bool:
    return type(value) in (tuple, frozenset) and all(map(_is_value, value))  # type: ignore[call-overload]


def _sets(value: object) -> bool:
    """Whether this is a tuple of sets of values. Ranks that do the same share one set, which is looked at once."""
    return type(value) is tuple and all(map(_values, {id(held): held for held in value}.values()))


def _is_value(value: object) -> bool:
    return (
        type(value) is Value
        and type(value.kind) is str
        and all(map(_whole, value[1:4]))
        and type(value.form) is str
        and is_form(value.form)
    )


# the program's own fields --------------------------------------------------------------------------------------------

Rule = tuple[Callable[[Any], bool], str]
_AT_LEAST_0: Rule = (lambda value: _whole(value, 0), "a whole number from 0 on")
_FLAG: Rule = (lambda value: type(value) is bool, "True or False")
_TEXT: Rule = (lambda value: type(value) is str, "text")

_OWN: dict[str, Rule] = {
    "ranks": (lambda value: _are_rows(value), "a tuple of instructions for each rank"),
    "layers": _AT_LEAST_0,
    "microbatches": _AT_LEAST_0,
    "steps": _AT_LEAST_0,
    "receives_ahead": _AT_LEAST_0,
    "groups": (lambda value: _tuple_of(_is_group, value), "a tuple of Group(layers, tensors, frozen)"),
    "mesh": (lambda value: _is_mesh(value), 'axes and their sizes, such as (("dp", 2), ("pp", 1))'),
    "state": (lambda value: _sets(value), "the set of values that each rank holds"),
    "final": (lambda value: _sets(value), "the set of values that each rank ends with"),
    "contract": (lambda value: _is_contract(value), "Synchronous(), Local(steps) or Staleness(bound, versions, every)"),
    "name": _TEXT,
    "folder": _TEXT,
    "clip": (lambda value: value is None or _positive(value), "a positive number, or None"),
    "precision": (lambda value: value in PRECISIONS, " or ".join(PRECISIONS)),
    "compress": (lambda value: _is_compression(value), "none, bf16, fp16, topk:R (0 < R <= 1) or powersgd:R (R >= 1)"),
    "room": (lambda value: value is None or _whole(value, 0), "bytes, or None"),
    "chunks": (lambda value: _wholes(value, 0), "a tuple of sizes in bytes"),
    "selective": _FLAG,
    "serving": (lambda value: value is None or _is_serving(value), "Serving(servers, mode), or None"),
    "in_flight": (lambda value: value is None or _whole(value, 1), "a whole number from 1 on, or None"),
    "slices": (lambda value: _whole(value, 1) or (value != () and _wholes(value, 1)), "how many, or each one's length"),
    "carries": (lambda value: _wholes(value, 0), "a tuple of layers"),
    "edges": (lambda value: type(value) is tuple, "a tuple of pairs of layers"),
    "forms": (lambda value: _tuple_of(_is_forms, value), "a tuple of Forms for each layer"),
    "inputs": (lambda value: _is_inputs(value), '"", "S0", "S1", or one of these for each axis, such as "S0/S1"'),
    "names": (lambda value: _tuple_of(lambda name: type(name) is str, value), "a tuple of texts"),
}  # fmt: skip


def _is_group(value: object) -> bool:
    wholes = type(value) is Group and _wholes(value.layers, 0) and _wholes(value.tensors, 0)
    return wholes and _whole(value.frozen, 0) and _is_group_form(value.form)  # type: ignore[attr-defined]


def _is_group_form(value: object) -> bool:
    return type(value) is str and all(part in ("", "S", "P") for part in value.split("/"))


def _is_inputs(value: object) -> bool:
    return type(value) is str and (not value or all(part in ("R", "S0", "S1") for part in value.split("/")))


def _is_forms(value: object) -> bool:
    return type(value) is Forms and all(type(form) is str and is_form(form, read=True) for form in value)


def _is_mesh(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_axis, value))


def _is_axis(value: object) -> bool:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is str and _whole(value[1], 1)


def _is_contract(value: object) -> bool:
    if isinstance(value, Local):
        return _whole(value.steps, 1)
    if isinstance(value, Staleness):
        numbers = ((value.bound, 0), (value.versions, 1), (value.every, 1))
        return all(number is None or _whole(number, least) for number, least in numbers)
    return type(value) is Synchronous


def _is_compression(value: object) -> bool:
    if type(value) is not str or not _COMPRESSED.fullmatch(value):
        return False
    try:
        return not value.startswith("topk") or 0 < float(value.partition(":")[2]) <= 1
    except ValueError:
        return False


def _is_serving(value: object) -> bool:
    fits = isinstance(value, Serving) and _whole(value.servers, 1) and type(value.mode) is str
    return fits and bool(_MODE.fullmatch(value.mode))  # type: ignore[attr-defined]


def check_types(program: Program) -> None:
    """ProgramError if a field of the program itself has a wrong type."""
    for name, (fits, possible) in _OWN.items():
        value = getattr(program, name)
        if not fits(value):
            raise ProgramError(f"{name}={shown(value)}: must be {possible}")
    if not program.chunks:
        _check_counts(program)


def _check_counts(program: Program) -> None:
    """ProgramError if there are many times more layers, micro-batches or steps than instructions speak of: to list them
    would fill the memory."""
    for name in ("layers", "microbatches", "steps"):
        value = getattr(program, name)
        if value > _MANY:
            named = sum(max(1, len(ins.layers)) for row in program.ranks for ins in row)
            if value > named:
                raise ProgramError(f"{name}={value:.3g}: the instructions name {named:,} at most")


def check_fields(program: Program) -> None:
    """ProgramError if a field of the program, other than its instructions, has a wrong type or an impossible value."""
    check_types(program)
    for name, held in (("state", program.state), ("final", program.final)):
        if held and len(held) != len(program.ranks):
            count = several(len(program.ranks), "rank")
            raise ProgramError(f"{name}: of {several(len(held), 'rank')}, but the program has {count}")
    if program.chunks:
        _check_chunks(program)
        return
    if not program.ranks:
        raise ProgramError("ranks=(): a program has at least one rank")
    for name in ("layers", "microbatches", "steps"):
        if getattr(program, name) < 1:
            raise ProgramError(f"{name}={getattr(program, name)}: must be at least 1")
    if program.final and program.final != program.state:
        raise ProgramError("final: of collectives only; a training program ends with its state")
    _check_mesh(program)
    _check_model(program)
    _check_state(program)
    if program.local_steps and (program.sharded or program.serving is not None):
        what = "slices" if program.serving is None else "servers"
        raise ProgramError(
            f"contract={program.contract}: replicas that train alone have whole states, no {what}; possible is "
            f"{Synchronous()}"
        )
    if program.local_steps and (program.workers > program.replicas or program.clip is not None):
        raise ProgramError(f"contract={program.contract}: of replicas of one rank each, without clip")
    if program.sharing > 1:
        if isinstance(program.contract, Staleness):
            raise ProgramError(f"contract={program.contract}: of whole layers; possible is a mesh of dp and pp")
        if program.compress != "none":
            raise ProgramError(f"compress={program.compress}: of whole layers; possible is a mesh of dp and pp")
    if program.in_flight is not None:
        _check_deciding(program)


def _check_chunks(program: Program) -> None:
    for rank, held in enumerate((*program.state, *program.final)):
        for value in sorted(held):
            if value.kind != "chunk" or not 0 <= value.index < len(program.chunks) or value[2:] != (-1, -1, ""):
                which = f"rank {rank % len(program.ranks)} holds {value}"
                raise ProgramError(f"{which}; possible are chunk(0) to chunk({len(program.chunks) - 1})")
    if not program.state:
        raise ProgramError("state=(): a collective begins with chunks on its ranks")


def _check_mesh(program: Program) -> None:
    if program.serving is not None and program.serving.servers >= len(program.ranks):
        raise ProgramError(
            f"serving: {several(program.serving.servers, 'server')} of {several(len(program.ranks), 'rank')}; at least "
            "one rank is a worker"
        )
    names, product = [name for name, _ in program.mesh], 1
    for _, size in program.mesh:
        product *= size
    words = ", ".join(f"{name}={size}" for name, size in program.mesh)
    if product != program.workers or len(set(names)) < len(names):
        raise ProgramError(
            f"mesh {words}: has {several(product, 'place')} for {several(program.workers, 'rank')}; sizes multiply to "
            "the number of ranks that hold layers"
        )
    before = program.mesh[: names.index("dp")] if "dp" in names else ()
    if any(size > 1 for _, size in before):
        raise ProgramError(f"mesh {words}: dp must be the first axis; replicas are runs of neighbouring ranks")


def _check_model(program: Program) -> None:
    layers = program.layers
    for g, group in enumerate(program.groups):
        if not group.layers or list(group.layers) != sorted(set(group.layers)) or group.layers[-1] >= layers:
            raise ProgramError(
                f"group {g} is of layers {shown(group.layers)}: must be ascending, each once, from 0 to {layers - 1}"
            )
    if program.edges:
        try:
            right = graphs.numbered(program.edges, layers)
        except PlanError as error:
            raise ProgramError(error.reason) from None
        if right != program.edges:
            raise ProgramError(f"edges={shown(program.edges)}: are numbered in another order; possible is {right}")
    if program.forms and len(program.forms) != layers:
        raise ProgramError(f"forms: of {several(len(program.forms), 'layer')}, but the program has {layers}")
    if program.forms and program.edges:
        raise ProgramError("forms: of layers in a row only; possible is edges=(), or forms=()")
    count = program.slice_count
    if count > 1 and program.microbatches % count:
        raise ProgramError(
            f"{several(program.microbatches, 'micro-batch')} are no whole sequences of {several(count, 'slice')}"
        )
    if (count > 1) != bool(program.carries):
        what = "no layer carries anything from slice to slice" if count > 1 else "sequences are not cut"
        raise ProgramError(
            f"slices={shown(program.slices)} carries={shown(program.carries)}: {what}; possible are several slices "
            "and the layers that carry, or slices=1 carries=()"
        )
    if len(set(program.carries)) < len(program.carries) or max(program.carries, default=0) >= layers:
        raise ProgramError(f"carries={shown(program.carries)}: must be layers from 0 to {layers - 1}, each once")


def _check_state(program: Program) -> None:
    """The values that ranks hold between steps are state of parameter groups that exist."""
    stale = isinstance(program.contract, Staleness)
    known: set[Value] = set()
    for rank, held in enumerate(program.state):
        for value in sorted(held - known):
            version = version_of(value) == 0 and stale
            if home(value).kind not in STATE or value.microbatch != -1 or (value.step != -1 and not version):
                raise ProgramError(f"rank {rank} begins with {value}; possible is the state of parameter groups")
            if stale and program.serving is None and (home(value) != value or "shard" in value.kind):
                raise ProgramError(
                    f"rank {rank} begins with {value}, but its contract is {program.contract}; possible are whole "
                    "parameter groups on the device"
                )
            if not 0 <= value.index < len(program.groups):
                raise ProgramError(
                    f"rank {rank} begins with {value}, but groups count from 0 to {len(program.groups) - 1}"
                )
        known |= held


def _check_deciding(program: Program) -> None:
    """A program with in_flight has stages in a row. The rule by which its ranks decide is made only for these."""
    contract, why = program.contract, ""
    stages = [layer for mine in program.placement for layer in mine]
    if not isinstance(contract, Staleness) or contract.stashed or contract.every is None:
        why = "its contract is not Staleness(every=..., stashed=False), by which ranks decide"
    elif contract.bound is not None and contract.bound < -(-((program.in_flight or 1) - 1) // contract.every):
        why = f"makes gradients older than the {several(contract.bound, 'update')} that its contract allows"
    elif program.replicas > 1 or program.edges:
        why = "replicas and branches do not decide"
    elif stages != list(range(program.layers)) or not all(program.placement):
        why = "ranks that decide are stages in a row, each with layers of its own"
    if why:
        raise ProgramError(f"in_flight={program.in_flight}: {why}; possible is in_flight=None")


# instructions --------------------------------------------------------------------------------------------------------

_FIELDS: dict[str, Rule] = {
    "op": (lambda value: isinstance(value, Op), "one of Op"),
    "layers": (_wholes, "a tuple of whole numbers"),
    "microbatch": (_whole, "a whole number"),
    "step": (_whole, "a whole number"),
    "reads": (lambda value: type(value) is tuple and _values(value), "a tuple of values"),
    "writes": (lambda value: type(value) is tuple and _values(value), "a tuple of values"),
    "frees": (lambda value: type(value) is tuple and _values(value), "a tuple of values"),
    "stream": _TEXT,
    "peer": (_whole, "a whole number"),
    "group": (_wholes, "a tuple of ranks"),
    "parts": (lambda value: _tuple_of(_is_part, value), "a tuple of Part(op, layer, bytes, start, end)"),
    "name": _TEXT,
}  # fmt: skip


def _is_part(value: object) -> bool:
    return type(value) is Part and isinstance(value.op, Op) and all(map(_whole, value[1:]))


def check_instruction(rank: int, index: int, ins: object) -> None:
    """ProgramError if an instruction, or a field of it, has a wrong type."""
    if type(ins) is not Instruction:
        raise ProgramError(f"rank {rank} instruction {index} is {shown(ins)}: must be an Instruction")
    for (name, (fits, possible)), value in zip(_FIELDS.items(), ins, strict=True):
        if not fits(value):
            raise ProgramError(f"rank {rank} instruction {index}: {name}={shown(value)} must be {possible}")


def explain(program: Program, error: Exception) -> ProgramError:
    """The error for a program on which a walk failed: it names the first instruction with a field of a wrong type."""
    rows: Sequence[Any] = program.ranks
    for rank, row in enumerate(rows):
        for index, ins in enumerate(row):
            try:
                check_instruction(rank, index, ins)
            except ProgramError as found:
                return found
    return ProgramError(f"the program cannot be read: {type(error).__name__}: {error}")


def shown(value: object) -> str:
    """The value as Python writes it, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
