"""Forms of values, a part of the verifier's first question: with tensor parallelism every instruction reads and writes
values in the forms that its layers take and give, and collectives change them as they can.

A form is part of a value's name. So a missing collective is a read without a producer, and a doubled one reads what was
freed: the walks of the other questions find both.
"""

from __future__ import annotations

from itertools import pairwise

from minipar.program import MOVED, Instruction, Op, Program, Value
from minipar.program.diagnostics import at, refuse, wrong
from minipar.program.forms import (
    COUNTS,
    along,
    axis_within,
    changed_axis,
    collective_of,
    in_words,
    lacking,
    letters,
    needed,
    pairs,
)


def check_forms(program: Program, rank: int, index: int) -> None:
    """A compute instruction reads and writes outputs and their gradients in the forms of its layers."""
    ins = program.ranks[rank][index]
    for values, written in ((ins.reads, False), (ins.writes, True)):
        for value in values:
            if value.kind not in MOVED:
                continue
            wanted = program.form_of(value, ins.layers, written=written)
            if value.form != wanted:
                verb = "writes" if written else "reads"
                later = value.index + 1 in ins.layers and (value.kind == "output") != written
                layer = value.index + 1 if later else value.index
                reason = f"{at(program, rank, index)} {verb} {value} as {in_words(value.form)}; layer"
                who = f"{reason} {program.title(layer)} {verb[:-1]}s it as {in_words(wanted)}"
                raise refuse(program, rank, index, f"{who}{lacking(value.form, wanted)}")


def check_inside(program: Program, rank: int, index: int) -> None:
    """The layers of a compute instruction hand values on to each other as they are. (The weight halves of backwards
    hand on nothing.)"""
    ins = program.ranks[rank][index]
    if ins.op is Op.BACKWARD_WEIGHT:
        return
    back = ins.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
    for first, second in pairwise(ins.layers):
        before, after = program.forms[first], program.forms[second]
        given, taken, giver, taker = before.writes, needed(after.reads), first, second
        if back:
            given, taken, giver, taker = after.grad_writes, needed(before.grad_reads), second, first
        if given != taken:
            value = Value("grad_output" if back else "output", first)
            raise wrong(program, rank, index, f": layer {program.title(giver)} gives {value} as {in_words(given)}, and "
                f"layer {program.title(taker)} takes it as {in_words(taken)}{lacking(given, taken)}",
            )  # fmt: skip


def check_repartition(program: Program, rank: int, index: int) -> None:
    """A collective that gives a value another form: of one value, over the ranks that share its layer."""
    if what := _mistake(program, rank, program.ranks[rank][index]):
        raise wrong(program, rank, index, what)


def _mistake(program: Program, rank: int, ins: Instruction) -> str:
    """What is wrong with a collective that gives a value another form; "": nothing."""
    if len(ins.writes) != 1 or ins.frees != ins.reads or ins.layers:
        return f": {ins.op.value} of {ins.reads[0]} reads and frees it, and writes one value"
    source, target = ins.reads[0], ins.writes[0]
    if source._replace(form="") != target._replace(form=""):
        return f" cannot make {target} of {source}"
    if (source.microbatch, source.step) != (ins.microbatch, ins.step):
        return f" is of micro-batch {ins.microbatch}, but names {source}"
    axis = changed_axis(source.form, target.form)
    sharers = program.sharers(rank, program.sharing_axes[axis or 0 :][:1])
    if ins.group != sharers or len(ins.group) < 2:
        layer = program.title(program.source(source))
        ranks = ",".join(map(str, sharers))
        return f": its group is not that of the ranks that share layer {layer}; possible are {ranks}"
    if axis is None and source.form != target.form:
        what = f" cannot make {source} of {in_words(source.form)} into {in_words(target.form)}"
        return f"{what}: its ranks lie along one axis; possible is a collective for each axis"
    old, new = along(source.form, axis or 0), along(target.form, axis or 0)
    changed = [(before, after) for before, after in pairs(old, new) if before != after]
    if not changed:
        return f" is superfluous: {source} is {in_words(source.form)} before, and after it"
    within = axis_within(source.form, target.form, axis or 0)
    if within is not None:
        outer, inner = program.sharing_axes[axis or 0], program.sharing_axes[within]
        what = f" mixes up the parts of {source} along {inner}, which are parts of what {outer} has left"
        return f"{what}; possible is {inner} first where they are joined, and {outer} first where they are cut"
    there = letters(old)
    for k, letter in enumerate(there):
        if letter[0] == "U" and letter != letters(new)[k] and COUNTS not in there[:k]:
            what = f" cannot exchange unequal shards of {source}, whose counts are not whole"
            return f"{what}; {Op.ALL_GATHER.value} of the counts is missing before it"
    for before, after in changed:
        needed = collective_of(before, after)
        if needed is not ins.op:
            what = f" cannot make {source} of {in_words(before)} into {in_words(after)}"
            return what + (f"; possible is {needed.value}" if needed is not None else "")
    return ""


def in_another_form(program: Program, rank: int, index: int, value: Value, since: int = 0) -> str:
    """Of a value that nobody makes: what is missing or too much, if some instruction from `since` on has made it in
    another form; else ""."""
    plain, built = value._replace(form=""), ""
    for ins in program.ranks[rank][since:index]:
        for other in ins.writes:
            if other._replace(form="") == plain and other.form != value.form:
                built = f"which is there as {in_words(other.form)} only{lacking(other.form, value.form)}"
    return built


def check_shards(program: Program, rank: int, index: int) -> None:
    """A sum of what ranks have a shard of is over ranks that have the same shard."""
    ins = program.ranks[rank][index]
    for g in ins.layers:
        shards = [program.part(r, g, "S") for r in ins.group] if program.groups[g].is_cut else []
        if len(set(shards)) > 1:
            own = [r for r, shard in zip(ins.group, shards, strict=True) if shard == program.part(rank, g, "S")]
            words = f"{ins.op.value} of {ins.reads[0].kind}({g}) over {','.join(map(str, ins.group))} is superfluous"
            possible = f"; possible is over {','.join(map(str, own))}" if len(own) > 1 else ""
            reason = f"{at(program, rank, index)} adds different shards of layer"
            raise refuse(
                program, rank, index, f"{reason} {program.title(program.groups[g].layers[0])}: {words}{possible}"
            )
