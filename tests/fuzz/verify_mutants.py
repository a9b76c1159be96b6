"""Mutants of programs of every kind, each judged by `verify` and by the numbers that it computes (fingerprints.py).

    python -m tests.fuzz.verify_mutants --count 20000 --seed 0

A mutant differs from a valid program in one to three places: any field of an instruction or of the program, or the
order of instructions. verify must refuse it with a ProgramError, or accept it; a mutant that it accepts must be
correct. Correct mutants that it refuses are counted by reason: verify may require an order that the executor does not
need.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from minipar import Plan, Program, ProgramError, simulate, verify
from minipar.program import (
    MOVED,
    TRANSFERS,
    Forms,
    Group,
    Instruction,
    Local,
    Op,
    Part,
    Serving,
    Staleness,
    Synchronous,
    Value,
    collectives,
    repartitions,
)
from minipar.program.shape import Shape, divided, uniform
from tests.fuzz.fingerprints import judge
from tests.interpreters import shape

PLAIN, TIED, FROZEN = shape(4), shape(4, tied=[(0, 3)]), shape(4, frozen=[0, 2])
LARGE = shape(4, size=8)
BRANCHES = replace(shape(5), edges=((0, 1), (1, 3), (2, 3), (3, 4), (0, 2)))
DIMS = replace(shape(4, size=64), dims=tuple((((4, 4)), ((4, 4))) for _ in range(4)))
EIGHT = shape(8)
CAUSAL = replace(shape(4), carries=(1, 2))


def _nodes(inputs: str, nodes: Sequence[tuple[str, Forms]]) -> Shape:
    """The shape of layers of one node each: the form of its parameters, and those that it takes and gives."""
    groups = tuple(Group((k,), (8,), form=form) for k, (form, _) in enumerate(nodes))
    forms = tuple(each for _, each in nodes)
    return Shape(len(nodes), groups, "nodes", inputs=inputs, forms=forms, nodes=(1,) * len(nodes))


# What a capture makes of a transformer whose tokens and operators are shared (cp, tp): tokens are cut twice, keys are
# gathered, their gradients are summed. And of experts whose rows and operators are (ep, tp): entries go by counts.
TOKENS = _nodes("S1", [
    ("P/S", Forms("S1", "R,S1/P", "S1", "")),
    ("P", Forms("C0,S1", "S1", "S1", "S1")),
    ("P/S", Forms("S1", "S1,S2/S1,S2/S1", "S1,S2/S1,S2/S1", "S1/P")),
    ("P/S", Forms("S1,S2/S1,R/S1", "S1/P", "S1", "S1,S2/S1,P/S1")),
    ("P/P", Forms("S1/S1", "S1/S1", "C1/C1", "S1/S1")),
    ("", Forms()),
])  # fmt: skip
EXPERTS = _nodes("S0", [
    ("P/S", Forms("S0", "S0/P", "S0", "")),
    ("P", Forms("S0", "S0,S0,U0", "N,S0,U0", "S0")),
    ("S", Forms("N,S0,U1", "N,S0,U1", "N,S0,U1", "N,S0,U1")),
    ("P", Forms("N,S0,U0", "S0", "S0", "N,S0,U0")),
    ("P/S", Forms("S0", "S0/S2", "S0/C2", "S0/P")),
    ("P/P", Forms("S0/S1", "S0/S1", "S0/S1", "S0/S1")),
])  # fmt: skip


def _equal(words: str, layers: int) -> Shape:
    """The layers of which a plan without a model is."""
    return Plan.parse(words)._uniform(layers)


GRID, ALL = "tp=2 context_parallel=2", "tp=2 context_parallel=2 ep=2"
ON_AXES: list[tuple[str, Shape, int]] = [  # programs whose ranks share layers along several axes
    *[(words, _equal(words, layers), steps) for words, layers, steps in [
        (f"{GRID} microbatches=2 bucket=none", 1, 2),
        (f"{GRID} sequence_parallel=true", 1, 1),
        (f"dp=2 {GRID} zero=1 clip=1.0", 1, 1),
        ("context_parallel=2 ep=2 pp=2 microbatches=2", 4, 1),
        ("tp=2 ep=2 pp=2 sequence_parallel=true microbatches=2", 2, 1),
        (ALL, 1, 1),
        (f"{ALL} pp=2 bucket=none", 2, 1),
    ]],
    (f"{GRID} microbatches=2", TOKENS, 1),
    (f"pp=2 {GRID} checkpoint=1 schedule=zb-h1 microbatches=2", TOKENS, 1),
    (f"dp=2 {GRID} zero=3", TOKENS, 1),
    ("tp=2 ep=2 microbatches=2", EXPERTS, 1),
    ("pp=2 tp=2 ep=2 place=0,0,1,1,0,1", EXPERTS, 1),
    ("dp=2 tp=2 ep=2 zero=2 bucket=none", EXPERTS, 1),
]  # fmt: skip
DECIDED: list[tuple[str, Shape, int]] = [  # servers decide as they run: the programs are those that happen
    ("dp=2 sync=ps mode=async microbatches=2", PLAIN, 2),
    ("dp=2 sync=ps mode=async servers=2", FROZEN, 2),
    ("dp=3 sync=ps mode=ssp:0 servers=2", PLAIN, 3),
    ("dp=3 sync=ps mode=k-of-n:2/3 checkpoint=1", PLAIN, 3),
]
PLANS: list[tuple[str, Shape, int]] = [  # words, model, steps
    *[(f"pp=2 microbatches=3 schedule={name}", m, 1) for name in ("naive", "gpipe", "1f1b") for m in (PLAIN, TIED)],
    ("pp=2 dp=2 microbatches=2", FROZEN, 1),
    ("pp=4 microbatches=4", PLAIN, 1),
    ("pp=2 microbatches=2", PLAIN, 2),
    ("dp=2 microbatches=2 bucket=none", PLAIN, 2),
    ("dp=3 microbatches=1 bucket=flat", PLAIN, 2),
    ("dp=2 microbatches=2 clip=1.0", PLAIN, 1),
    ("pp=2 dp=2 clip=1.0 microbatches=2", TIED, 1),
    ("pp=2 schedule=interleaved microbatches=2", PLAIN, 1),
    ("pp=2 schedule=looped-bfs microbatches=2", PLAIN, 1),
    ("pp=2 schedule=zb-h1 microbatches=3", PLAIN, 1),
    ("pp=2 schedule=zb-h2 microbatches=3", FROZEN, 1),
    ("pp=2 schedule=zb-v microbatches=2", PLAIN, 1),
    ("pp=2 schedule=chimera microbatches=2", PLAIN, 1),
    ("pp=2 dp=2 schedule=chimera microbatches=2", TIED, 1),
    ("pp=2 schedule=dualpipe microbatches=4", PLAIN, 1),
    ("pp=2 schedule=dualpipe-v microbatches=4", PLAIN, 1),
    ("dp=2 zero=1 microbatches=2", PLAIN, 2),
    ("dp=2 zero=2 microbatches=2", PLAIN, 2),
    ("dp=2 zero=2 microbatches=2 reduce=step bucket=none", FROZEN, 1),
    ("dp=2 zero=3 microbatches=2", PLAIN, 2),
    ("dp=2 pp=2 zero=3 microbatches=2 prefetch=2", TIED, 1),
    ("dp=2 zero=3 clip=1.0 checkpoint=2", PLAIN, 1),
    ("checkpoint=2 microbatches=2", EIGHT, 1),
    ("checkpoint=1 microbatches=2 pp=2", PLAIN, 1),
    ("checkpoint=sqrt dp=2", EIGHT, 2),
    ("pp=2 checkpoint=2 schedule=zb-h1 microbatches=3", PLAIN, 1),
    ("checkpoint=selective", PLAIN, 2),
    (f"dp=2 overlap=priority bucket={8 / 2**20}", LARGE, 2),
    ("dp=2 overlap=priority bucket=none microbatches=2", PLAIN, 2),
    ("dp=2 compress=bf16", PLAIN, 2),
    ("dp=2 compress=topk:0.5 bucket=none", PLAIN, 2),
    ("dp=2 compress=powersgd:1", DIMS, 1),
    ("dp=2 local_steps=2 microbatches=2", PLAIN, 3),
    ("dp=2 local_steps=1 pp=1", FROZEN, 2),
    ("offload=activations microbatches=2", EIGHT, 1),
    ("offload=activations checkpoint=2", EIGHT, 1),
    ("offload=parameters", PLAIN, 2),
    ("offload=optimizer", PLAIN, 2),
    ("offload=optimizer offload_to=disk", PLAIN, 2),
    ("offload=activations,parameters,optimizer", FROZEN, 2),
    ("dp=2 zero=1 offload=optimizer", PLAIN, 2),
    ("dp=2 zero=3 offload=parameters prefetch=1", PLAIN, 1),
    ("dp=2 offload=optimizer bucket=flat", PLAIN, 2),
    ("host_layers=0 microbatches=2", PLAIN, 2),
    ("pp=2 schedule=terapipe slices=2 microbatches=2", CAUSAL, 1),
    ("schedule=terapipe slices=3 checkpoint=2", CAUSAL, 1),
    ("pp=2 dp=2 schedule=terapipe slices=2 zero=1", CAUSAL, 1),
    ("pp=2 microbatches=2", BRANCHES, 1),
    ("pp=2 place=0,0,1,0,0 microbatches=2", BRANCHES, 1),
    ("pp=2 dp=2 place=branches", BRANCHES, 1),
    ("pp=2 schedule=zb-h1 microbatches=2", BRANCHES, 1),
    ("pp=2 precision=bf16", PLAIN, 1),
    ("inference=true pp=2 microbatches=2", PLAIN, 1),
    *[(f"pp=2 schedule=pipedream{name} microbatches=2", PLAIN, 2) for name in ("", "-2bw", "-vertical")],
    ("pp=3 schedule=pipedream microbatches=3", FROZEN, 1),
    ("pp=2 schedule=pipedream microbatches=2 checkpoint=1", PLAIN, 2),
    ("dp=2 schedule=pipedream microbatches=2", PLAIN, 1),
    ("dp=2 pp=2 schedule=pipedream-2bw microbatches=2 bucket=none compress=bf16", FROZEN, 2),
    ("pp=2 schedule=pipedream-2bw microbatches=3", shape(4, tied=[(2, 3)]), 2),
    ("pp=2 schedule=ampnet microbatches=3", PLAIN, 1),
    ("pp=3 schedule=ampnet microbatches=2 in_flight=2 update_every=2", PLAIN, 2),
    *[(f"dp=2 sync=ps servers={n}", PLAIN, 2) for n in (1, 2)],
    ("dp=3 sync=ps microbatches=2", FROZEN, 1),
    ("dp=2 sync=ps schedule=zb-h1 microbatches=2", PLAIN, 1),
    ("dp=2 sync=ps compress=topk:0.5 servers=2", PLAIN, 1),
    ("tp=2 microbatches=2", divided(uniform(2), 2), 2),
    ("tp=2 pp=2 checkpoint=1 microbatches=2", divided(uniform(2), 2), 1),
    ("tp=2 dp=2 zero=1 clip=1.0 bucket=none", divided(uniform(1), 2), 1),
    ("tp=2 dp=2 microbatches=2 sequence_parallel=true", divided(uniform(1), 2, True), 1),
]  # fmt: skip

COLLECTIVES = [
    (collective, name, ranks)
    for collective in collectives.COLLECTIVES
    for name in collectives.names(collective)
    for ranks in (2, 3, 4)
    if name != "halving-doubling" or ranks != 3
]


def _compiled(plans: Sequence[tuple[str, Shape, int]]) -> list[Program]:
    return [Plan.parse(words).compile(model, steps=steps, check=False) for words, model, steps in plans]


@lru_cache(None)
def on_axes() -> tuple[Program, ...]:
    """Those of the programs whose ranks share layers along several axes."""
    return tuple(_compiled(ON_AXES))


@lru_cache(None)
def decided() -> tuple[Program, ...]:
    """Those of the programs whose servers decide as they run: before and after that."""
    before = _compiled(DECIDED)
    return (*before, *(simulate(program, forward=1.0, backward=2.0).program for program in before))


@lru_cache(None)
def valid() -> tuple[Program, ...]:
    """The programs that are changed."""
    found = [*_compiled(PLANS), *on_axes(), *decided()]
    for collective, name, ranks in COLLECTIVES:
        found.append(collectives.program(collective, name, ranks, 24, nodes=2 if ranks == 4 else 1))
    return tuple(found)


# changes -------------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (None, "x", 1.5, (), ("x",), (None,), -7)
Change = Callable[[Instruction, Random], Instruction]


def _other(items: Sequence[Any], random: Random) -> tuple[Any, ...]:
    """A sequence with one thing changed: reversed, one doubled, dropped, added, or two swapped."""
    found = list(items)
    kind = random.randrange(6)
    k = random.randrange(len(found)) if found else 0
    if kind == 0:
        found.reverse()
    elif kind == 1 and found:
        found.insert(random.randrange(len(found) + 1), found[k])
    elif kind == 2 and found:
        del found[k]
    elif kind == 3 and len(found) > 1:
        j = random.randrange(len(found))
        found[k], found[j] = found[j], found[k]
    elif kind == 4:
        return ()
    elif found and isinstance(found[k], int):
        found[k] += random.choice((-1, 1, 2))
    return tuple(found)


class _Mutator:
    """Random changes of one program."""

    def __init__(self, program: Program, random: Random) -> None:
        self.program, self.random = program, random
        named = {value for row in program.ranks for ins in row for value in (*ins.reads, *ins.writes, *ins.frees)}
        self.values = sorted(named.union(*program.state))

    def value(self, value: Value, random: Random) -> Value:
        """Another value: of the program, or one that differs in a field."""
        kind = random.randrange(6)
        if kind < 2 and self.values:
            near = [v for v in self.values if v.kind == value.kind and v != value]
            return random.choice(near if near and kind else self.values)
        if kind == 2:
            return value._replace(index=value.index + random.choice((-1, 1)))
        if kind == 3:
            return value._replace(microbatch=value.microbatch + random.choice((-1, 1)))
        if kind == 4:
            return value._replace(step=value.step + random.choice((-1, 1)))
        return value._replace(kind=random.choice(("x", f"host {value.kind}", "param", "saved", "grad", "grad_shard")))

    def listed(self, values: Sequence[Value], random: Random) -> tuple[Value, ...]:
        found = list(values)
        kind = random.randrange(4)
        if kind == 0 and found:
            k = random.randrange(len(found))
            found[k] = self.value(found[k], random)
        elif kind == 1 and self.values:
            found.insert(random.randrange(len(found) + 1), random.choice(self.values))
        elif kind == 2 and found:
            del found[random.randrange(len(found))]
        else:
            return _other(values, random)
        return tuple(found)

    def field(self, name: str) -> Change:
        program = self.program

        def number(least: int, most: int) -> Callable[[int, Random], int]:
            return lambda old, random: random.choice((-1, 0, 1, old + 1, old - 1, random.randint(least, most), 99))

        def parts(old: tuple[Part, ...], random: Random) -> tuple[Part, ...]:
            if not old or random.random() < 0.3:
                return (*_other(old, random), *((Part(Op.ALL_REDUCE, -1, 8, 0, 8),) if not old else ()))
            k = random.randrange(len(old))
            some = (("layer", (-1, 0)), ("bytes", (-8, 16)), ("start", (0, 8)), ("end", (8, 16)))
            name, values = random.choice(some)
            change = {name: random.choice(values)}
            return (*old[:k], old[k]._replace(**change), *old[k + 1 :])

        streams = sorted({ins.stream for row in program.ranks for ins in row} | {"host", "compute", "disk", ""})
        groups = sorted({ins.group for row in program.ranks for ins in row} | {tuple(range(len(program.ranks)))})
        ranks = len(program.ranks)
        ops = sorted({ins.op for row in program.ranks for ins in row})
        makers: dict[str, Callable[[Any, Random], Any]] = {
            "op": lambda old, random: random.choice(ops if random.random() < 0.6 else list(Op)),
            "layers": _other,
            "microbatch": number(-1, program.microbatches),
            "step": number(-1, program.steps),
            "reads": self.listed,
            "writes": self.listed,
            "frees": self.listed,
            "stream": lambda old, random: random.choice(["host", *streams]),
            "peer": number(-1, ranks),
            "group": lambda old, random: random.choice(groups) if random.random() < 0.4 else _other(old, random),
            "parts": parts,
            "name": lambda old, random: random.choice(("text", "", "F 0", "x" * 50)),
        }

        def change(ins: Instruction, random: Random) -> Instruction:
            odd = random.random() < 0.04
            new = random.choice(ODD) if odd else makers[name](getattr(ins, name), random)
            return ins._replace(**{name: new})

        return change

    def change(self) -> tuple[str, Program]:
        """What was changed, and the program with this change."""
        random = self.random
        several = len(self.program.sharing_axes) > 1
        kind = random.choice(("order", "field", "field", "field", "program", *("axes",) * 5 * several))
        if kind == "axes":
            return self.of_axes()
        if kind == "program" or not len(self.program):
            return self.of_program()
        if kind == "order":
            return self.of_order()
        name = random.choice(Instruction._fields)
        rank = random.choice([r for r, row in enumerate(self.program.ranks) if row])
        row = self.program.ranks[rank]
        fitting = [k for k, ins in enumerate(row) if ins.group] if name in ("group", "parts") else []
        fitting = [k for k, ins in enumerate(row) if ins.peer >= 0] if name == "peer" else fitting
        if fitting and random.random() < 0.2:
            fitting = []
        k = random.choice(fitting or range(len(row)))
        scope = random.choice(("one", "one", "alike", "always"))
        chosen, change, seed = row[k], self.field(name), random.random()

        def meant(r: int, n: int, ins: Instruction) -> bool:
            if scope == "one":
                return (r, n) == (rank, k)
            same = ins.op is chosen.op and ins.layers == chosen.layers and ins.microbatch == chosen.microbatch
            return same and (scope == "always" or ins.step == chosen.step)

        rows = tuple(
            tuple(change(ins, Random(seed)) if meant(r, n, ins) else ins for n, ins in enumerate(mine))
            for r, mine in enumerate(self.program.ranks)
        )
        return f"{name} of {scope} {rank}:{k} `{chosen}`", replace(self.program, ranks=rows)

    def of_axes(self) -> tuple[str, Program]:
        """A change that all ranks make alike: of a group, a form, a peer along an axis, or of what is promised."""
        random, program = self.random, self.program
        kind = random.choice(("group", "form", "form", "chain", "chain", "peer", "promise"))
        rank = random.randrange(len(program.ranks))
        axes = tuple(axis for axis in program.sharing_axes if random.random() < 0.5)
        if kind == "promise":
            return self.promise()
        if kind == "peer":
            kinds = random.choice((MOVED, MOVED[:1], MOVED[1:]))
            where = {r: self.neighbour(r, axes) for r in range(len(program.ranks))}

            def changed(ins: Instruction, r: int) -> Instruction:
                moved = ins.op in TRANSFERS and (ins.reads or ins.writes)[0].kind in kinds
                return ins._replace(peer=where.get(ins.peer, ins.peer)) if moved else ins

            return f"peers of {kinds} along {axes}", self.everywhere(changed)
        if kind == "chain":
            pairs = [
                (a, b) for a in program.ranks[rank] for b in program.ranks[rank]
                if repartitions(a) and repartitions(b) and a.writes == b.reads
            ]  # fmt: skip
            if pairs:
                return self.chain(*random.choice(pairs))
        joined = [ins for ins in program.ranks[rank] if ins.group and (kind == "group" or repartitions(ins))]
        if not joined:
            return self.of_order()
        chosen = random.choice(joined)

        def same(ins: Instruction) -> bool:
            return ins[:7] == chosen[:7]

        if kind == "group":
            return f"groups of `{chosen}` along {axes}", self.everywhere(
                lambda ins, r: ins._replace(group=program.sharers(r, axes)) if same(ins) else ins
            )
        value = random.choice((chosen.reads[0], chosen.writes[0]))
        other = value._replace(form=self.form(value.form))
        op = random.choice((chosen.op, Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL))
        everywhere = random.random() < 0.7

        def renamed(ins: Instruction, r: int) -> Instruction:
            if not (everywhere or same(ins)):
                return ins
            lists = (tuple(other if v == value else v for v in values) for values in (ins.reads, ins.writes, ins.frees))
            reads, writes, frees = lists
            return ins._replace(op=op if same(ins) else ins.op, reads=reads, writes=writes, frees=frees)

        return f"{value} as [{other.form}] by {op.value}, everywhere={everywhere}", self.everywhere(renamed)

    def everywhere(self, changed: Callable[[Instruction, int], Instruction]) -> Program:
        rows = tuple(tuple(changed(ins, r) for ins in row) for r, row in enumerate(self.program.ranks))
        return replace(self.program, ranks=rows)

    def neighbour(self, rank: int, axes: Sequence[str]) -> int:
        """The rank in the next place on these axes."""
        for axis in axes:
            along = self.program.sharers(rank, (axis,))
            rank = along[(along.index(rank) + 1) % len(along)]
        return rank

    def form(self, form: str) -> str:
        """A form with another part of a letter."""
        random = self.random
        letters = [letter.split("/") for letter in (form or "R").split(",")]
        parts = random.choice(letters)
        parts += ["R"] * (len(self.program.sharing_axes) - len(parts))
        parts[random.randrange(len(parts))] = random.choice(("R", "P", "S0", "S1", "S2", "M", "N", "U0", "U1", "S1:2r"))
        return self.written(letters)

    def written(self, letters: Sequence[Sequence[str]]) -> str:
        """The text of a form: what is whole at the end is left out."""
        found = ["/".join(parts) for parts in letters]
        found = [re.sub("(/R)+$", "", letter) for letter in found]
        return "" if set(found) == {"R"} else ",".join(found)

    def chain(self, first: Instruction, then: Instruction) -> tuple[str, Program]:
        """Two collectives of a value, one after the other, in the other order."""
        forms = [(ins.form or "R").split(",") for ins in (first.reads[0], first.writes[0], then.writes[0])]
        wide, many = max(map(len, forms)), len(self.program.sharing_axes)
        parts = [
            [(letter.split("/") + ["R"] * many)[:many] for letter in (form * wide if form == ["R"] else form)]
            for form in forms
        ]
        between = [[z if x == y else x for x, y, z in zip(*each, strict=True)] for each in zip(*parts, strict=True)]
        value = first.writes[0]._replace(form=self.written(between))
        turned = {
            first[:7]: then._replace(reads=first.reads, writes=(value,), frees=first.reads),
            then[:7]: first._replace(reads=(value,), writes=then.writes, frees=(value,)),
        }

        def changed(ins: Instruction, r: int) -> Instruction:
            other = turned.get(ins[:7])
            twin = (then if ins[:7] == first[:7] else first)[:7]
            own = next((old for old in self.program.ranks[r] if old[:7] == twin), None)
            if other is None or own is None:  # (a rank of another stage may have one of the two alone)
                return ins
            return other._replace(group=own.group, stream=own.stream)

        return f"`{then}` before `{first}`", self.everywhere(changed)

    def promise(self) -> tuple[str, Program]:
        """Another form of a parameter group, or of a value that a layer takes or gives."""
        random, program = self.random, self.program
        if random.random() < 0.5:
            groups = list(program.groups)
            g = random.randrange(len(groups))
            parts = (groups[g].form.split("/") + [""] * len(program.sharing_axes))[: len(program.sharing_axes)]
            parts[random.randrange(len(parts))] = random.choice(("", "S", "P"))
            groups[g] = groups[g]._replace(form="/".join(parts))
            return f"group {g} of form {groups[g].form}", replace(program, groups=tuple(groups))
        forms, layer = list(program.forms), random.randrange(len(program.forms))
        name = random.choice(Forms._fields)
        form = self.form(getattr(forms[layer], name))
        forms[layer] = forms[layer]._replace(**{name: form})
        return f"{name} of layer {layer}: {form}", replace(program, forms=tuple(forms))

    def of_order(self) -> tuple[str, Program]:
        random, program = self.random, self.program
        rank = random.choice([r for r, row in enumerate(program.ranks) if row])
        kind, size = random.choice(("swap", "drop", "double", "move", "ranks")), len(program.ranks[rank])
        a = random.randrange(size)
        b = random.choice((random.randrange(size), min(a + 1, size - 1)))
        if kind == "ranks":
            rows = list(program.ranks)
            other = random.randrange(len(rows))
            rows[rank], rows[other] = rows[other], rows[rank]
            return f"ranks {rank} and {other} swapped", replace(program, ranks=tuple(rows))
        pipeline = max(1, len(program.ranks) // max(1, program.replicas))
        everywhere = random.random() < 0.5
        for r in range(rank % pipeline, len(program.ranks), pipeline) if everywhere else [rank]:
            row = list(program.ranks[r])
            if max(a, b) >= len(row):
                continue
            if kind == "swap":
                row[a], row[b] = row[b], row[a]
            elif kind == "drop":
                del row[a]
            elif kind == "double":
                row.insert(b, row[a])
            else:
                row.insert(b, row.pop(a))
            program = program.with_rank(r, row)
        return f"{kind} {a}, {b} of rank {rank}{' and its like' if everywhere else ''}", program

    def of_program(self) -> tuple[str, Program]:
        random, program = self.random, self.program
        name = random.choice(list(program.__dataclass_fields__))
        old = getattr(program, name)
        if random.random() < 0.08:
            new: Any = random.choice(ODD)
        elif name == "ranks":
            new = random.choice((program.ranks[:-1], (*program.ranks, ()), program.ranks[::-1], ()))
        elif name in ("layers", "microbatches", "steps", "receives_ahead"):
            new = random.choice((old + 1, old - 1, 0, -1, 7))
        elif name == "groups":
            new = self.groups()
        elif name == "mesh":
            new = random.choice(((("dp", 2), ("pp", 1)), (("pp", 2), ("dp", 1)), old[::-1], (), (*old, ("tp", 2)),
                                 (("dp", 0), ("pp", 2)), tuple((axis, size + 1) for axis, size in old)))  # fmt: skip
        elif name in ("state", "final"):
            new = self.state(name)
        elif name == "contract":
            new = random.choice((Synchronous(), Local(0), Local(1), Local(2), Staleness(), Staleness(0),
                                 Staleness(1, 2), Staleness(1, 1, 1, False), Staleness(None, None, 1),
                                 Staleness(9, 9, 2)))  # fmt: skip
        elif name == "serving":
            new = random.choice(
                (None, Serving(), Serving(2), Serving(1, "async"), Serving(9), Serving(0), Serving(1, "x"),
                 Serving(1, "k-of-n:1/2"))
            )  # fmt: skip
        elif name in ("clip", "room", "in_flight"):
            new = random.choice((None, 0, 1, 2, -1, float("nan")))
        elif name == "slices":
            new = random.choice((1, 2, 3, 0, -1, (1, 2), (2,), ()))
        elif name == "carries":
            new = random.choice(((), (0,), (1, 2), (2, 1), (1, 1), (9,), tuple(range(max(1, program.layers)))))
        elif name == "edges":
            new = random.choice(
                ((), tuple(reversed(old)), ((0, 1), (1, 2)), ((0, 2), (0, 1), (1, 2), (2, 3)), ((1, 0),))
            )
        elif name == "chunks":
            new = random.choice(((), (8,), _other(old, random)))
        elif name in ("precision", "compress", "folder", "name"):
            new = random.choice(("", "float32", "bf16", "none", "fp16", "topk:0.5", "powersgd:1", "topk:7", "text"))
        else:
            new = not old
        return f"{name}={new!r}"[:150], replace(program, **{name: new})

    def groups(self) -> Any:
        random, groups = self.random, list(self.program.groups)
        if not groups or random.random() < 0.3:
            return _other(groups, random)
        k = random.randrange(len(groups))
        layers = _other(groups[k].layers, random)
        groups[k] = random.choice((groups[k]._replace(layers=layers), groups[k]._replace(tensors=()),
                                   groups[k]._replace(tensors=(16,)), groups[k]._replace(frozen=-1)))  # fmt: skip
        return tuple(groups)

    def state(self, name: str) -> Any:
        random, held = self.random, list(getattr(self.program, name) or self.program.state)
        if not held or random.random() < 0.2:
            return _other(held, random)
        k = random.randrange(len(held))
        found, kind = sorted(held[k]), random.randrange(3)
        if kind == 0 and found:
            found.remove(random.choice(found))
        elif kind == 1:
            found.append(random.choice(self.values))
        elif found:
            found.append(self.value(found.pop(random.randrange(len(found))), random))
        held[k] = frozenset(found)
        return tuple(held)


def mutants(seed: int, count: int, programs: Sequence[Program] = ()) -> Iterator[tuple[str, Program]]:
    """`count` mutants of these programs (by default of all), each with what was changed in words."""
    random = Random(seed)
    for _ in range(count):
        program = random.choice(programs or valid())
        words = [program.name]
        for _ in range(random.choice((1, 1, 1, 1, 2, 3))):
            try:
                word, program = _Mutator(program, random).change()
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
                break  # what was changed before is too odd to be changed again
            words.append(word)
        yield " | ".join(words), program


# the campaign --------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What came of one mutant: what verify says, and what is wrong with it; "" is nothing."""

    words: str
    program: Program
    refusal: str
    wrong: str

    @property
    def crashed(self) -> bool:
        return self.refusal.startswith("!")

    @property
    def missed(self) -> bool:
        return not self.refusal and bool(self.wrong)


def try_out(words: str, program: Program) -> Found:
    """A mutant, verified and judged."""
    try:
        verify(program)
        refusal = ""
    except ProgramError as error:
        refusal = error.reason or "! no reason"
    except Exception as error:
        refusal = f"! {type(error).__name__}: {error}"
    return Found(words, program, refusal, judge(program))


@dataclass
class Outcome:
    """The counts of a campaign, and what must not be."""

    count: int = 0
    accepted: int = 0
    crashes: list[Found] = field(default_factory=list)
    missed: list[Found] = field(default_factory=list)
    stricter: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> None:
        self.count += 1
        self.accepted += not found.refusal
        if found.crashed:
            self.crashes.append(found)
        elif found.missed:
            self.missed.append(found)
        elif found.refusal and not found.wrong:
            self.stricter.append(found)


def campaign(seed: int, count: int, programs: Sequence[Program] = ()) -> Outcome:
    outcome = Outcome()
    for words, program in mutants(seed, count, programs):
        outcome.add(try_out(words, program))
    return outcome


def _pattern(text: str) -> str:
    """A message without its numbers and names, so that alike ones are counted together."""
    return re.sub(r"`[^`]*`|\d+", "#", text)[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--axes", action="store_true", help="only programs that share layers along several axes")
    chosen = parser.parse_args(arguments)
    begin = time.perf_counter()
    programs = on_axes() if chosen.axes else valid()
    outcome = campaign(chosen.seed, chosen.count, programs)
    seconds = time.perf_counter() - begin
    print(f"seed {chosen.seed}: {outcome.count} mutants of {len(programs)} programs in {seconds:.0f} s")
    print(f"  accepted {outcome.accepted}, of them wrong {len(outcome.missed)}; verify crashed {len(outcome.crashes)}")
    print(f"  refused although the executor would do right: {len(outcome.stricter)}")
    for title, found in (("wrong, but accepted", outcome.missed), ("verify crashed", outcome.crashes)):
        for one in found[:200]:
            print(f"{title}: {one.words}\n    {one.refusal or one.wrong}")
    for pattern, number in Counter(_pattern(one.refusal) for one in outcome.stricter).most_common():
        example = next(one for one in outcome.stricter if _pattern(one.refusal) == pattern)
        print(f"stricter {number:5d}  {pattern}\n               such as {example.words}")
    return bool(outcome.missed or outcome.crashes)


if __name__ == "__main__":
    sys.exit(main())
