"""The types and ranges of a program's fields. Every reader of programs relies on them.

A field has the type that its class is annotated with, and `_RULES` says what else must hold of the program's own ones.
These are checked before the walks. Most fields of instructions are not checked in advance: if a walk fails because a
field has a wrong type, `explain` finds that field afterwards. So nothing is checked twice in a program that is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from minipar.errors import PlanError, ProgramError
from minipar.program import PRECISIONS, Forms, Instruction, Op, Program, Value, home, version_of
from minipar.program import edges as graphs
from minipar.program.consistency import Staleness, Synchronous
from minipar.program.forms import is_form
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
_FROM_1 = ("steps", "versions", "every")  # of a contract
_WORDS = {int: "whole number", float: "number", str: "text", Forms: "form"}
_PLAIN = {int: "a whole number", str: "text", bool: "True or False", NoneType: "None", Op: "one of Op"}


# types ----------------------------------------------------------------------------------------------------------------


@cache
def hints_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """The fields of a class, each with its annotated type."""
    return tuple(get_type_hints(kind).items())


@cache
def fits(kind: Any, least: float = float("-inf")) -> Callable[[Any], bool]:
    """Tells whether a value is of an annotated type, and the whole numbers in it are at least `least`."""
    origin, parts = get_origin(kind), [fits(one, least) for one in get_args(kind) if one is not ...]
    if origin is UnionType:
        return lambda value: any(part(value) for part in parts)
    if origin is tuple and ... not in get_args(kind):
        return lambda value: (
            type(value) is tuple
            and len(value) == len(parts)
            and all(part(one) for part, one in zip(parts, value, strict=True))
        )
    if origin is not None:  # (a mesh is a tuple, too)
        return lambda value: isinstance(value, origin) and all(map(parts[0], value))
    if kind is int:
        return lambda value: hasattr(value, "__index__") and bool(value.__index__() >= least)
    if kind is float:
        return lambda value: isinstance(value, (int, float))
    if kind is Value:
        return _is_value
    if kind in (str, bool, NoneType, Op):
        return lambda value: type(value) is kind
    own = [(name, fits(hint, least)) for name, hint in hints_of(kind)]
    return lambda value: type(value) is kind and all(part(getattr(value, name)) for name, part in own)


def _is_value(value: object) -> bool:
    return (
        type(value) is Value
        and type(value.kind) is str
        and all(map(fits(int), value[1:4]))
        and type(value.form) is str
        and is_form(value.form)
    )


def in_words(kind: Any, least: float = float("-inf")) -> str:
    """What a value of an annotated type is, for messages."""
    inner, since = get_args(kind), f" from {least} on" if least >= 0 and kind is int else ""
    if get_origin(kind) is UnionType:
        return ", or ".join(in_words(one, least) for one in inner)
    if inner:
        return f"a {get_origin(kind).__name__} of {_WORDS.get(inner[0]) or inner[0].__name__.lower()}s"
    return _PLAIN.get(kind, f"a {kind.__name__}") + since


# the program's own fields ---------------------------------------------------------------------------------------------


def _anything(value: object) -> bool:
    return True


class Rule(NamedTuple):
    """What must hold of a field beside its type: the `least` whole number in it, and `also` something; in words, if
    those of its type do not say it."""

    least: float = float("-inf")
    also: Callable[[Any], bool] = _anything
    words: str = ""


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("layers", "microbatches", "steps", "receives_ahead", "room", "chunks", "carries"), Rule(0)),
    "groups": Rule(0, lambda groups: {part for g in groups for part in g.form.split("/")} <= {"", "S", "P"}),
    "mesh": Rule(1, words='axes and their sizes, such as (("dp", 2), ("pp", 1))'),
    "contract": Rule(0, lambda contract: all(getattr(contract, name, 1) != 0 for name in _FROM_1),
                     "Synchronous(), Local(steps) or Staleness(bound, versions, every)"),
    "edges": Rule(words="a tuple of pairs of layers"),
    "clip": Rule(also=lambda clip: clip is None or 0 < clip < float("inf"), words="a positive number, or None"),
    "precision": Rule(also=lambda name: name in PRECISIONS, words=" or ".join(PRECISIONS)),
    "compress": Rule(also=lambda choice: _is_compression(choice),
                     words="none, bf16, fp16, topk:R (0 < R <= 1) or powersgd:R (R >= 1)"),
    "serving": Rule(1, lambda serving: serving is None or bool(_MODE.fullmatch(serving.mode)),
                    "Serving(servers, mode), or None"),
    "in_flight": Rule(1),
    "slices": Rule(1, lambda slices: slices != (), "how many, or each one's length"),
    "forms": Rule(also=lambda forms: all(is_form(form, read=True) for each in forms for form in each)),
    "inputs": Rule(also=lambda form: not form or {*form.split("/")} <= {"R", "S0", "S1"},
                   words='"", "S0", "S1", or one of these for each axis, such as "S0/S1"'),
}  # fmt: skip


def _is_compression(choice: str) -> bool:
    try:
        return bool(_COMPRESSED.fullmatch(choice)) and (choice[:4] != "topk" or 0 < float(choice[5:]) <= 1)
    except ValueError:
        return False


def _has_type(name: str, kind: Any, value: Any, least: float) -> bool:
    """Whether a field is of its type. Of rows only that they are rows; sets that ranks share are looked at once."""
    if name == "ranks":
        return type(value) is Repeated or (type(value) is tuple and all(type(row) is tuple for row in value))
    if name in ("state", "final") and type(value) is tuple:
        value = tuple({id(held): held for held in value}.values())
    return fits(kind, least)(value)


def check_types(program: Program) -> None:
    """ProgramError if a field of the program itself has a wrong type."""
    for name, kind in hints_of(Program):
        value, rule = getattr(program, name), _RULES.get(name, Rule())
        if not (_has_type(name, kind, value, rule.least) and rule.also(value)):
            raise ProgramError(f"{name}={shown(value)}: must be {rule.words or in_words(kind, rule.least)}")
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


def check_instruction(rank: int, index: int, ins: object) -> None:
    """ProgramError if an instruction, or a field of it, has a wrong type."""
    if type(ins) is not Instruction:
        raise ProgramError(f"rank {rank} instruction {index} is {shown(ins)}: must be an Instruction")
    for (name, kind), value in zip(hints_of(Instruction), ins, strict=True):
        if not fits(kind)(value):
            raise ProgramError(f"rank {rank} instruction {index}: {name}={shown(value)} must be {in_words(kind)}")


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
