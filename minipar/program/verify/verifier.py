"""verify(program): proof that a program can run, or the shortest explanation of why not.

It checks seven things, and begins with those whose failure explains most:
  0. the program's fields  They have the types and sizes that all readers of the program expect (fields.py).
  1. each instruction      It names the values that its work on these layers and this micro-batch needs. A rank can work
                           on its layers, groups and stream.
  2. each replica          Every layer runs every micro-batch forward and backward, exactly once.
  3. each link and group   The receives of a link match its sends, in order. All ranks of a group call the same
                           collectives.
  4. each rank alone       Every value that is read was written before. No value is written twice, or used after it was
                           freed.
  5. all ranks together    Walking the lists by the rule of execution ends (no deadlock). Nothing changes while it is
                           under way. Every STEP finds in its gradients the sum of all micro-batches of all replicas,
                           each exactly once. Every forward and backward uses the parameters that the contract promises.
  6. the end               No value is left over, and none is missing.
A collective has no layers. There the second check is another one: every chunk that a rank holds at the end is the sum
of that chunk over all ranks that had it at the beginning, each exactly once (contributions.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol

from minipar.errors import ProgramError
from minipar.program import (
    BACKWARDS,
    COLLECTIVES,
    COPIES,
    MOVED,
    SERVICE,
    TIERS,
    Instruction,
    Mesh,
    Op,
    Program,
    Staleness,
    Value,
    grad_shard,
    home,
    norm,
    optimizer_shard,
    order,
    param,
    piece_of,
    repartitions,
    tier,
)
from minipar.program.collector import paused
from minipar.program.diagnostics import at, refuse, wrong
from minipar.program.repeated import Repeated
from minipar.program.verify import fields, forms, service, slices
from minipar.program.verify.contents import Contents
from minipar.program.verify.contributions import check_contributions, check_moves, result
from minipar.program.verify.staleness import StaleContents, settled


class Planned(Protocol):
    """What has a program for each number of layers: a plan."""

    def sketch(self) -> Program:
        """The program with one layer in each stage."""


def verify(program: Program | Planned) -> None:
    """Check that the program can run. Errors: ProgramError (or its subclass for deadlocks), which says why it cannot.

    It takes about 6 microseconds for each instruction. Of ranks that do the same on other rows or shards it looks at
    one (`Program.representatives`). A plan has no instructions yet: its program is that of one layer in each stage, as
    `simulate` takes it; `Plan.compile` makes the one of a model, and verifies it.
    """
    if not isinstance(program, Program):
        if not hasattr(program, "sketch"):
            raise ProgramError(
                f"verify: takes a program or a Plan, and {type(program).__name__} is neither; "
                "Plan.parse('pp=4 microbatches=8').compile(layers=8) makes a program of words"
            )
        program = program.sketch()
    prove(program, whole=True)


def prove(program: Program, whole: bool = False) -> None:
    """As `verify`, for a program whose own fields are right, since a plan has made them; with `whole` these are checked
    as well. Errors: ProgramError."""
    with paused():
        try:
            if whole:
                fields.check_fields(program)
            _check(program)
        except fields.STUMBLES as error:
            raise fields.explain(program, error) from error


def _check(program: Program) -> None:
    everyone = range(len(program.ranks))
    ranks = _to_look_at(program)
    try:
        _verify(program, ranks)
    except ProgramError:
        if len(ranks) == len(everyone) or len(program) > _MOST_REPEATED:
            raise
        _verify(program, everyone)  # (it is refused in the same words as one that is written rank by rank)
        raise


_MOST_REPEATED = 1_000_000  # instructions of the largest program that is verified again, on all ranks, once refused


def _to_look_at(program: Program) -> Collection[int]:
    """The ranks to look at: those that stand for the others, if these have the same state and agree by collectives;
    otherwise all."""
    stand = program.representatives
    same = isinstance(program.ranks, Repeated) and program.ranks.mesh == program.mesh
    for held in (program.state, program.final):
        same = same and all(one is held[rank] or one == held[rank] for one, rank in zip(held, stand, strict=False))
    if not same or isinstance(program.contract, Staleness) or program.serving is not None or program.chunks:
        return range(len(program.ranks))
    return sorted(set(stand))


def _verify(program: Program, ranks: Collection[int]) -> None:
    if program.chunks:
        check_moves(program)
    else:
        _check_instructions(program, ranks)
        if program.slice_count > 1:
            slices.check_carries(program, ranks)
        if program.serving is not None:
            service.check_workers(program)
        mesh = Mesh(program.mesh)
        workers = [rank for rank in ranks if rank < mesh.size]
        pipelines = {mesh.group(rank, "pp") if mesh.length("pp") > 1 else (rank,) for rank in workers}
        for pipeline in sorted(pipelines):
            served = program.serving is not None
            steps = service.steps_of(program, pipeline[0]) if served else range(program.steps)
            _check_microbatches(program, pipeline, steps)
    turns = order(program, ranks)
    left = {rank: _check_rank(program, rank) for rank in ranks}
    stale = isinstance(program.contract, Staleness) and program.serving is None and not program.chunks
    if program.serving is not None:
        service.check_service(program, turns)
    elif not program.chunks:
        (StaleContents(program) if stale else Contents(program, ranks)).follow(turns)
    found = result(program, turns) if program.chunks else []
    for rank, live in left.items():
        _check_end(program, rank, settled(program, rank, live) if stale else live)
    if program.chunks:
        check_contributions(program, found)


# 1. each instruction ------------------------------------------------------------------------------------------------


_ON_LAYERS = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
_COPIED = ("saved", "param", "grad", "optimizer_state", "param_shard", "grad_shard", "optimizer_shard", *MOVED)


class _State:
    """Facts on which all instructions of one rank that work on parameter groups must agree.

    updated   group -> the groups that the same optimizer updates
    buffers   group -> the groups whose gradients lie in the same buffer
    held      the values that the rank holds between steps, in any tier
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.updated: dict[int, tuple[int, ...]] = {}
        self.buffers: dict[int, tuple[int, ...]] = {}
        self.program, self.rank = program, rank

    @cached_property
    def held(self) -> frozenset[Value]:
        return frozenset(map(home, self.program.state[self.rank])) if self.program.state else frozenset()

    @cached_property
    def places(self) -> dict[int, set[str]]:
        """For each group, the streams of its STEPs."""
        found: dict[int, set[str]] = {}
        for op, ins in zip(self.program.ops[self.rank], self.program.ranks[self.rank], strict=True):
            for g in ins.layers if op is Op.STEP else ():
                found.setdefault(g, set()).add(ins.stream)
        return found


def _check_instructions(program: Program, ranks: Collection[int]) -> None:
    known: dict[tuple[Op, tuple[int, ...]], _Names] = {}
    carried = slices.KINDS if program.slice_count > 1 else ()  # (slices.py checks these)
    for rank in ranks:
        instructions = program.ranks[rank]
        sent: set[int] = set()  # layers whose outputs are sent or copied
        again = False
        own = _State(program, rank)
        for index, ins in enumerate(instructions):
            op, layers, i, step, reads, writes, _, stream, _, group, _, name = ins
            if name or (group and op not in COLLECTIVES) or type(op) is not Op:
                _check_rest(program, rank, index)
            if op is Op.SEND or op is Op.RECV:
                moved, other = (reads, writes) if op is Op.SEND else (writes, reads)
                if not moved or other or len(set(moved)) < len(moved):
                    raise wrong(program, rank, index, f": {op.value} moves values, each once")
                if moved[0][2] != i or moved[0][3] != step:
                    raise _mislabelled(program, rank, index, moved[0])
                for value in moved:
                    if value[0] not in MOVED:
                        raise wrong(program, rank, index, f" moves {value}; outputs and their gradients travel")
                    if value[0] == "output" and op is Op.SEND:
                        sent.add(value[1])
                if stream == "host":
                    raise _not_on_host(program, rank, index)
                continue
            if op in COPIES:
                _check_copy(program, rank, index, own)
                if reads[0].kind == "output":
                    sent.add(reads[0].index)
                continue
            if op in SERVICE and program.serving is not None:
                continue  # (service.py checks these)
            if group and reads and reads[0][0] in MOVED:
                if stream == "host":
                    raise _not_on_host(program, rank, index)
                forms.check_repartition(program, rank, index)
                sent.add(reads[0].index)
                continue
            if (op, layers) not in known:
                _check_layers(program, rank, index)
                known[op, layers] = _needs(program, op, layers)
            names = known[op, layers]
            if op is Op.STEP or op in COLLECTIVES:
                names = _check_state_work(program, rank, index, names, own)
            elif op is Op.RECOMPUTE:
                again = True
            if stream == "host" or op is Op.NORM:
                reads, writes = _on_host(program, rank, index)
            missing = names.needed.difference([value[:2] for value in reads])
            if missing:
                kind, k = min(missing)
                raise wrong(program, rank, index, f" needs {kind}({k}), but does not read it")
            if names.changed and (lacking := names.changed.difference([value[:2] for value in writes])):
                kind, k = min(lacking)
                raise wrong(program, rank, index, f" changes {kind}({k}), but does not write it")
            for value in writes:
                if value[:2] not in names.built and value[0] not in carried:
                    raise wrong(program, rank, index, f" cannot make {value}")
            if layers and (program.forms or program.sharing > 1):
                forms.check_forms(program, rank, index)
            for value in reads + writes:
                if value[2] >= 0 and (value[2] != i or value[3] != step) and value[0] not in carried:
                    if stream == "compute" and " " in value[0] and value in reads:
                        continue  # it waits for a copy, perhaps one of the micro-batch before
                    raise _mislabelled(program, rank, index, value)
        if sent:
            _check_sent(program, rank, sent)
        if again:
            _check_graphs(program, rank)


def _check_rest(program: Program, rank: int, index: int) -> None:
    """Check the fields that few instructions have: a group, a name."""
    ins = program.ranks[rank][index]
    fields.check_instruction(rank, index, ins)
    if ins.group and ins.op not in COLLECTIVES:
        raise wrong(program, rank, index, f": {ins.op.value} is no collective, so that nobody joins it in a group; "
            "possible is group=()",
        )  # fmt: skip


def _check_layers(program: Program, rank: int, index: int) -> None:
    """The layers of a compute instruction follow each other. The groups of a collective or STEP exist, and each is
    named once."""
    ins = program.ranks[rank][index]
    op, layers = ins.op, ins.layers
    count = program.layers if op in _ON_LAYERS else len(program.groups)
    reason = ""
    if op not in _ON_LAYERS and op is not Op.STEP and op not in COLLECTIVES:
        reason = f": {op.value} is of collectives and servers, not of training"
    elif not layers or min(layers) < 0 or max(layers) >= count:
        reason = " works on a layer or parameter group that is not there"
    elif len(set(layers)) < len(layers):
        reason = f" names {_twice(layers)} twice; possible is each once"
    elif op not in _ON_LAYERS:
        return
    elif program.edges and not program.wiring.chained.issuperset(sorted(layers)[1:]):
        reason = ": its layers are no chain; possible is one instruction for each"
    elif layers != tuple(range(layers[0], layers[-1] + 1)):
        given, possible = (",".join(map(str, each)) for each in (layers, range(min(layers), max(layers) + 1)))
        reason = f": layers {given} do not follow each other; possible are neighbours, ascending, such as {possible}"
    if reason:
        raise refuse(program, rank, index, at(program, rank, index) + reason)
    if program.forms:
        forms.check_inside(program, rank, index)


def _twice(items: Iterable[int]) -> int:
    """The first item that comes a second time."""
    seen: set[int] = set()
    return next(item for item in items if item in seen or seen.add(item))  # type: ignore[func-returns-value]


def _not_on_host(program: Program, rank: int, index: int) -> ProgramError:
    what = " computes nothing, but is on the stream of the host"
    return wrong(program, rank, index, f"{what}; possible on stream host are layers and STEP")


def _check_sent(program: Program, rank: int, sent: set[int]) -> None:
    """A value that is sent is the output of some instruction. Only autograd has the outputs of layers inside an
    instruction, unless its graph is cut there."""
    row = program.ranks[rank]
    ends = {ins.layers[-1] for ins in row if ins.op in (Op.FORWARD, Op.RECOMPUTE)} | {program.first_trainable - 1}
    cut = {(ins.layers[0] - 1, ins.microbatch) for ins in row if ins.op in _ON_LAYERS}
    for index, ins in enumerate(row):
        for value in ins.reads if ins.op is Op.SEND or ins.op in COPIES else ():
            inside = value.kind == "output" and value.index in sent - ends and (value[1], value.microbatch) not in cut
            makers = _producers(program, rank, value) if inside else ()
            if makers and program.ranks[rank][makers[0]].op is Op.FORWARD:
                maker = at(program, rank, makers[0])
                what = f" moves {value}, which stays inside of {maker}; possible is to end"
                raise wrong(program, rank, index, f"{what} that instruction with layer {value.index}")


def _check_graphs(program: Program, rank: int) -> None:
    """Autograd keeps the graph of a run of layers as a whole, or not at all. A run ends where some instruction of the
    micro-batch begins. So a forward or recomputation must save all layers of a run, or none of them."""
    cuts: dict[int, set[int]] = {}
    for ins in program.ranks[rank]:
        if ins.op in _ON_LAYERS:
            cuts.setdefault(ins.microbatch, {program.first_trainable}).add(ins.layers[0])
    for index, ins in enumerate(program.ranks[rank]):
        if ins.op is not Op.FORWARD and ins.op is not Op.RECOMPUTE:
            continue
        kept = {value.index for value in ins.writes if home(value).kind == "saved"}
        graph = False
        for layer in ins.layers if kept else ():
            if layer == ins.layers[0] or layer in cuts[ins.microbatch]:
                graph = layer in kept
            elif (layer in kept) != graph:
                had, lacks = (layer - 1, layer) if graph else (layer, layer - 1)
                reason = (
                    f"{at(program, rank, index)} keeps what layer {had} saves, but not layer {lacks}; possible is both"
                )
                raise refuse(program, rank, index, f"{reason}, or two instructions")


def _mislabelled(program: Program, rank: int, index: int, value: Value) -> ProgramError:
    ins = program.ranks[rank][index]
    what = f"micro-batch {ins.microbatch} of step {ins.step}, but names {value} of step {value.step}"
    return wrong(program, rank, index, f" is of {what}")


def _check_copy(program: Program, rank: int, index: int, own: _State) -> None:
    """A copy moves one value, OFFLOAD to a slower tier and FETCH to a faster one."""
    ins = program.ranks[rank][index]
    if len(ins.writes) != 1 or not ins.reads:
        raise wrong(program, rank, index, f": {ins.op.value} copies one value")
    source, target = ins.reads[0], ins.writes[0]
    down = TIERS.index(tier(target)) - TIERS.index(tier(source))
    slice_of_it = home(source).kind == "param_shard" and target == param(source.index)
    if not (home(source) == home(target) or slice_of_it) or (down <= 0 if ins.op is Op.OFFLOAD else down >= 0):
        raise wrong(program, rank, index, f" cannot make {target} of {source}")
    if source.microbatch >= 0 and (source.microbatch, source.step) != (ins.microbatch, ins.step):
        raise _mislabelled(program, rank, index, source)
    if (target.microbatch, target.step) != (source.microbatch, source.step):
        raise _mislabelled(program, rank, index, target)
    if ins.layers != (source.index,):
        raise wrong(program, rank, index, f" copies {source}; possible is layers=({source.index},)")
    kind = home(source).kind
    if kind not in _COPIED:
        raise wrong(program, rank, index, f": {kind} is not copied between tiers")
    if ins.stream == "host":
        raise _not_on_host(program, rank, index)
    if kind in ("grad", "grad_shard"):
        if ins.op is not Op.OFFLOAD or own.places.get(source.index) != {"host"}:
            what = f": gradients go to the host for a STEP of the host; rank {rank} has none for {source}"
            raise wrong(program, rank, index, what)
    elif source not in ins.frees and (ins.op is Op.OFFLOAD or source.microbatch >= 0):
        raise wrong(program, rank, index, f" lets {source} go when it is copied; possible is frees with {source}")


def _check_state_work(program: Program, rank: int, index: int, names: _Names, own: _State) -> _Names:
    """Check what only instructions on parameter groups have. Returns the values that this one must name."""
    ins = program.ranks[rank][index]
    op, groups = ins.op, ins.layers
    if type(ins.microbatch) is not int or type(ins.step) is not int:
        fields.check_instruction(rank, index, ins)
    if ins.stream == "host" and op is not Op.STEP:
        raise _not_on_host(program, rank, index)
    if op is Op.ALL_REDUCE:
        return _check_sum(program, rank, index, own)
    if op is Op.STEP:
        frozen = [g for g in groups if not program.groups[g].trainable]
        if frozen:
            raise wrong(program, rank, index, f" updates param({frozen[0]}), which has nothing to train")
        for g in groups:
            if (other := own.updated.setdefault(g, groups)) != groups:
                words = ",".join(map(str, other))
                what = f": an optimizer has groups {words} together, as in an earlier STEP"
                raise wrong(program, rank, index, f"{what}; possible is that in every step")
    elif op is Op.NORM:
        if len(set(ins.reads)) < len(ins.reads):
            twice = sorted(ins.reads, key=ins.reads.count)[-1]
            raise wrong(program, rank, index, f" counts {twice} twice; possible is each gradient once")
    else:
        _check_slices(program, rank, index, own)
    if op is Op.REDUCE_SCATTER and (piece_of(ins) is not None or program.compress != "none"):
        reason = "slices are summed whole, as they are; possible are one part that begins at -1, and compress=none"
        raise wrong(program, rank, index, f": {reason}")
    return names


def _check_slices(program: Program, rank: int, index: int, own: _State) -> None:
    """The slices of a group lie on all ranks that hold it, in the order of these ranks."""
    ins = program.ranks[rank][index]
    for g in ins.layers:
        if optimizer_shard(g) not in own.held:
            raise wrong(program, rank, index, f": rank {rank} has no slice of parameter group {g}")
        if ins.group != (wanted := program.slicing(g, rank)):
            words = ",".join(map(str, wanted))
            reason = (
                f"{at(program, rank, index)}: the slices of group {g} are those of ranks {words}, one after the other"
            )
            raise refuse(program, rank, index, f"{reason}; possible is a group of these")


def _check_sum(program: Program, rank: int, index: int, own: _State) -> _Names:
    """An ALL_REDUCE reads and writes only the gradients of its groups, or the parameters of replicas that train alone.
    The groups of a buffer are the same in every step."""
    ins = program.ranks[rank][index]
    first = ins.reads[0].kind if ins.reads else ""
    summed = frozenset((first, g) for g in ins.layers)
    if program.sharing > 1:
        forms.check_shards(program, rank, index)
    rest: frozenset[tuple[str, int]] = frozenset()
    if first == "param":
        if not program.local_steps:
            raise wrong(program, rank, index, " sums parameters; possible with contract Local")
        if others := set(ins.reads) ^ set(ins.writes):
            raise wrong(program, rank, index, f" averages what it reads, but reads or writes {min(others)} only")
    elif first == "grad":
        rest = frozenset(("residual", g) for g in ins.layers)
    else:
        raise wrong(program, rank, index, " sums gradients, but reads none")
    piece = piece_of(ins)
    if piece is not None:
        _check_piece(program, rank, index, piece)
    if more := {value[:2] for value in ins.reads} - summed - rest:
        kind, k = min(more)
        raise wrong(program, rank, index, f" cannot read {kind}({k})")
    if ins.frees:
        raise wrong(program, rank, index, f" frees {ins.frees[0]}, which it changes; possible is frees=()")
    flat = any(part.layer < 0 for part in ins.parts)
    for g in ins.layers if flat and rest else ():
        if (other := own.buffers.setdefault(g, ins.layers)) != ins.layers:
            groups = ",".join(map(str, other))
            what = f": grad({g}) lies in the buffer of groups {groups}"
            raise wrong(program, rank, index, f"{what}; possible are the same groups in every step")
    needed = summed | rest if program.compress.startswith(("topk", "powersgd")) else summed
    last = piece is None or bool(ins.writes)  # (the last piece writes for all)
    return _Names(needed, summed | rest, needed if last else frozenset())


def _check_piece(program: Program, rank: int, index: int, piece: tuple[int, int]) -> None:
    """A piece of a gradient has some of its bytes, and all numbers of these as they are."""
    ins = program.ranks[rank][index]
    if len(ins.layers) > 1 or ins.parts[0].layer >= 0 or piece[1] <= piece[0] or program.compress != "none":
        what = ": a piece is of one gradient, with all its numbers, in a buffer (layer=-1), and has bytes"
        raise wrong(program, rank, index, what)


def _on_host(program: Program, rank: int, index: int) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """What an instruction of the host reads and writes, as if these values were on the device."""
    ins = program.ranks[rank][index]
    here = [value for value in ins.reads + ins.writes if tier(value) != "host" and value != norm()]
    if here and ins.op not in COLLECTIVES:
        raise wrong(program, rank, index, f" works on the host, where {here[0]} is not")
    whole = ins.op is Op.STEP  # with zero=1 or 2 it works on a slice of a parameter that the device holds whole

    def plain(value: Value) -> Value:
        own = home(value)
        return param(own.index) if whole and own.kind == "param_shard" and own.index not in program.scattered else own

    return tuple(map(plain, ins.reads)), tuple(map(plain, ins.writes))


class _Names(NamedTuple):
    """(kind, index) of the values that an instruction must read, of those that it can write, and of those that it must
    write."""

    needed: frozenset[tuple[str, int]]
    built: frozenset[tuple[str, int]]
    changed: frozenset[tuple[str, int]] = frozenset()


def _needs(program: Program, op: Op, layers: tuple[int, ...]) -> _Names:
    """The values that an instruction on these layers or parameter groups must name."""
    if op is Op.STEP or op in COLLECTIVES:
        return _needs_of_state(program, op, layers)
    params = {("param", g) for layer in layers for g in program.groups_of_layer[layer]}
    if op is Op.FORWARD or op is Op.RECOMPUTE:
        reads = params | {("output", a) for a in program.wiring.inputs[min(layers)]}
        return _Names(frozenset(reads), frozenset((kind, layer) for layer in layers for kind in ("output", "saved")))
    left = {("saved_weight", layer) for layer in layers}
    grads = {("grad", g) for _, g in params if program.groups[g].trainable}
    if op is Op.BACKWARD_WEIGHT:
        return _Names(frozenset(params | left), frozenset(grads))
    last, first = max(layers), program.first_trainable
    kept = {("saved", layer) for layer in layers} | {
        ("output", a) for layer in layers for a in program.wiring.inputs[layer]
    }
    given = {("grad_output", e) for e in program.wiring.out[last]} or {("output", last)}
    wires = program.wiring
    built = {
        ("grad_output", e)
        for layer in layers
        for e, source in zip(wires.into[layer], wires.inputs[layer], strict=True)
        if source >= first
    }
    return _Names(frozenset(params | kept | given), frozenset(built | (grads if op is Op.BACKWARD else left)))


def _needs_of_state(program: Program, op: Op, groups: tuple[int, ...]) -> _Names:
    """As `_needs`, for an instruction that works on parameter groups, whole or sharded, and changes all that it
    names. (What an ALL_REDUCE names, its first value says.)"""

    def named(*kinds: str) -> frozenset[tuple[str, int]]:
        """These values of all groups, or slices of what is sharded."""
        cut = {"grad": program.sharded, "optimizer_state": program.sharded, "param": program.scattered}
        shard = {"grad": "grad_shard", "optimizer_state": "optimizer_shard", "param": "param_shard"}
        return frozenset((shard[kind] if g in cut[kind] else kind, g) for kind in kinds for g in groups)

    length = frozenset({norm()[:2]})
    if op is Op.STEP:
        needed, built = named("param", "optimizer_state", "grad"), named("param", "optimizer_state")
        needed = needed | length if program.clip is not None else needed
    elif op is Op.ALL_GATHER:
        needed, built = named("param"), frozenset(("param", g) for g in groups)
    elif op is Op.NORM:
        needed, built = named("grad"), length
    else:
        needed = frozenset(("grad", g) for g in groups)
        built = frozenset((kind, g) for g in groups for kind in ("grad_shard", "buffer"))
    return _Names(needed, built, built)


# 2. each replica ----------------------------------------------------------------------------------------------------

_HALVES: dict[Op, tuple[str, ...]] = {
    Op.FORWARD: ("forward",),
    Op.BACKWARD: ("input gradient", "weight gradient"),
    Op.BACKWARD_INPUT: ("input gradient",),
    Op.BACKWARD_WEIGHT: ("weight gradient",),
    Op.RECOMPUTE: (),
}


def _check_microbatches(program: Program, ranks: Sequence[int], steps: Collection[int]) -> None:
    """Together these ranks run every layer on every micro-batch of these steps, forward and backward, exactly once."""
    back = range(program.first_trainable, program.layers)
    wanted = {"forward": range(program.layers), "input gradient": back, "weight gradient": back}
    microbatches = range(program.microbatches)
    seen: dict[tuple[str, int, int, int], tuple[int, int]] = {}
    for rank in ranks:
        for index, ins in enumerate(program.ranks[rank]):
            halves, i, step = _HALVES.get(ins.op), ins.microbatch, ins.step
            if halves is None:
                continue
            right = i in microbatches and step in steps
            for half in halves:
                for layer in ins.layers:
                    right = right and layer in wanted[half]
                    key = (half, step, i, layer)
                    if key in seen:
                        where = at(program, *seen[key])
                        reason = f"micro-batch {i} is doubled: the {half} of layer {layer} runs in"
                        raise refuse(program, rank, index, f"{reason} {where} and in {at(program, rank, index)}")
                    seen[key] = (rank, index)
            if not right:
                raise wrong(program, rank, index, " works on a layer, micro-batch or step that is not there")
    if len(seen) == len(steps) * program.microbatches * (program.layers + 2 * len(back)):
        return
    half, step, i, layer = next(
        key for half, layers in wanted.items() for key in product((half,), steps, microbatches, layers)
        if key not in seen
    )  # fmt: skip
    name = "forward" if half == "forward" else "backward"
    reason = f"micro-batch {i} is missing: no rank of replica {program.replica(ranks[0])} runs the {name} of layer"
    raise ProgramError(f"{reason} {layer} on it (step {step})")


# 3. each link and group ---------------------------------------------------------------------------------------------


def _check_rank(program: Program, rank: int) -> set[Value]:
    """Check one rank alone. Returns the values that are live after its last instruction."""
    live: set[Value] = set(program.state[rank]) if program.state else set()
    joined: dict[int, tuple[int, ...]] = {}  # group -> the groups of the REDUCE_SCATTER that made its slices
    for index, ins in enumerate(program.ranks[rank]):
        for value in ins.reads:
            if value not in live:
                raise _no_producer(program, rank, index, value)
        for value in ins.writes:
            if value in live and value.microbatch >= 0:
                raise _written_twice(program, rank, index, value)
        if ins.op is Op.REDUCE_SCATTER:
            for g in ins.layers:
                if grad_shard(g) in ins.reads and joined.get(g) != ins.layers:
                    reason = f"{at(program, rank, index)} adds to the slices of group {g}, which came with groups"
                    words = f"{reason} {joined.get(g, ())}; possible are the same groups in the same order"
                    raise refuse(program, rank, index, words)
            joined.update(dict.fromkeys(ins.layers, ins.layers))
        live.update(ins.writes)
        for value in ins.frees:
            if value not in live:
                raise wrong(program, rank, index, f" frees {value}, which is not there")
            if value[0] in _SUMS and not _takes_up(ins, value):
                reason = f"{at(program, rank, index)} frees {value}, but does not use it: what was summed would be lost"
                takers = ", ".join(op.value for op in _TAKERS)
                raise refuse(program, rank, index, f"{reason}; possible in what works on group {value.index}: {takers}")
            live.remove(value)
    return live


_SUMS = {kind for whole in ("grad", "grad_shard") for kind in (whole, f"host {whole}", f"disk {whole}")}
_TAKERS = (Op.STEP, Op.REDUCE_SCATTER, Op.OFFLOAD, Op.PUSH)


def _takes_up(ins: Instruction, value: Value) -> bool:
    """Whether an instruction uses the gradient that it frees, so that no sum is lost."""
    used = ins.reads[:1] if ins.op is Op.OFFLOAD else ins.reads
    return ins.op in _TAKERS and value.index in ins.layers and value in used


def _no_producer(program: Program, rank: int, index: int, value: Value) -> ProgramError:
    where = at(program, rank, index)
    writers = _producers(program, rank, value)
    freers = [k for k in range(index) if value in program.ranks[rank][k].frees]
    since = freers[-1] + 1 if freers else 0
    other = forms.in_another_form(program, rank, index, value, since) if value.kind in MOVED else ""
    if other and (freers or not writers):
        reason = f"{where} reads {value}, {other}"
    elif freers:
        reason = f"{where} reads {value} after {at(program, rank, freers[-1])} freed it"
        ins = program.ranks[rank][index]
        if repartitions(ins) and repartitions(program.ranks[rank][freers[-1]]):
            reason += f"; {ins.op.value} is superfluous"
    elif writers and value.kind == "saved":
        reason = f"backward before forward: {where} needs {value} of {at(program, rank, writers[0])}"
    elif writers and value.kind == "saved_weight":
        reason = f"weight half before input half: {where} needs {value} of {at(program, rank, writers[0])}"
    elif writers:
        reason = f"{where} reads {value} before {at(program, rank, writers[0])} writes it"
    elif value.kind == "saved_weight":
        reason = f"weight half before input half: {where} needs {value}, but rank {rank} does not run that input half"
    elif value.kind == "saved":
        reason = f"backward before forward: {where} needs {value}, but rank {rank} does not run that forward"
    else:
        own = program.replica(rank)
        others = [r for r in range(len(program.ranks)) if program.replica(r) == own and _producers(program, r, value)]
        hint = f"; rank {others[0]} has it, but does not send it here" if others else ""
        reason = f"{where} reads {value}, which has no producer{hint}"
    return refuse(program, rank, index, reason)


def _producers(program: Program, rank: int, value: Value) -> list[int]:
    """The instructions of a rank that make a value, not those that change it."""
    return [k for k, ins in enumerate(program.ranks[rank]) if value in ins.writes and value not in ins.reads]


def _written_twice(program: Program, rank: int, index: int, value: Value) -> ProgramError:
    first = next((k for k in range(index) if value in program.ranks[rank][k].writes), index)
    reason = f"{value} is written twice: by {at(program, rank, first)} and by {at(program, rank, index)}"
    return refuse(program, rank, index, reason)


# 6. the end ---------------------------------------------------------------------------------------------------------


def _check_end(program: Program, rank: int, live: set[Value]) -> None:
    if not program.state:
        return
    final = (program.final or program.state)[rank]
    for value in sorted(live - final):
        writer = max(k for k, ins in enumerate(program.ranks[rank]) if value in ins.writes)
        reason = f"{value} is never freed: written by {at(program, rank, writer)}"
        raise refuse(program, rank, writer, reason)
    for value in sorted(final - live):
        freers = [k for k, ins in enumerate(program.ranks[rank]) if value in ins.frees]
        if not freers:  # as in a collective that forgets a rank
            raise ProgramError(f"rank {rank} must end with {value}, but never has it")
        freer = freers[-1]
        reason = f"{value} must outlive the program, but {at(program, rank, freer)} frees it"
        raise refuse(program, rank, freer, reason)
