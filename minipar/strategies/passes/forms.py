"""Forms: a value that is read in another form than it was written in gets a collective.

    F 3 mb0 -> output(3)[P]                      F 3 mb0 | ALL_REDUCE output(3)[P] mb0 over 0,1 | F 4 mb0
    F 4 mb0 <- output(3)            becomes
    B 4 mb0 -> grad_output(3)[S1]                B 4 mb0 | ALL_GATHER grad_output(3)[S1] mb0 over 0,1 | B 3 mb0
    B 3 mb0 <- grad_output(3)

Source: Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021. It is to ranks that
share a layer what `transfers.py` is to those of a pipeline: nobody writes a collective down. Megatron's block (Shoeybi
et al., 2019) has one behind its attention and one behind its perceptron, forward, and one in front of each, backward.

The gradient of a parameter that every rank has whole, and of which each makes a part, is summed over these ranks, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from minipar.errors import PlanError
from minipar.program import MOVED, Instruction, Op, Value, grad
from minipar.program.forms import Forms, changed_axis, form_of, in_words, steps
from minipar.strategies.buckets import Bucket
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import all_reduce, in_buckets, insert, keep_gradients, last_writes


def change_forms(draft: Draft) -> Draft:
    """A value that is read in another form than it was written in gets a collective."""
    layout = draft.layout
    forms, axes = layout.shape.forms, layout.mesh.sharing

    def ranks(rank: int) -> list[tuple[int, ...]]:
        return [layout.sharers(rank, (axis,)) for axis in axes]

    return draft.each(lambda rank, row: _with_collectives(row, forms, ranks(rank)))


def _with_collectives(
    row: Sequence[Instruction], forms: Sequence[Forms], ranks: Sequence[tuple[int, ...]]
) -> list[Instruction]:
    """A row with its collectives. `ranks`: along each axis, those that share the layers with this one."""
    last = len(forms) - 1

    def named(value: Value, layers: Sequence[int], written: bool) -> Value:
        """The value in the form in which an instruction on these layers has it."""
        form = form_of(forms, value, layers, written=written) if value.kind in MOVED else ""
        return value._replace(form=form) if form else value

    result: list[Instruction] = []
    for ins in row:
        reads, writes, frees = (
            tuple([named(value, ins.layers, written) for value in values])
            for values, written in ((ins.reads, False), (ins.writes, True), (ins.frees, False))
        )
        result.append(ins._replace(reads=reads, writes=writes, frees=frees))
        for plain, value in zip(ins.writes, writes, strict=True):
            inner = value.kind == "output" and value.index == last  # (only the layer's own backward reads it)
            if value.kind in MOVED and plain not in ins.frees and not inner:
                wanted = form_of(forms, value, (value.index + 1,), written=False)
                result += repartition(value, wanted, ranks)
    return result


def repartition(value: Value, form: str, ranks: Sequence[tuple[int, ...]]) -> list[Instruction]:
    """The collectives that give a value another form, one after another. `ranks`: along each axis, those that share its
    layer. PlanError if there are none that can."""
    found = []
    for op, after in steps(value.form, form):
        axis = changed_axis(value.form, after)
        if op is None or axis is None:
            raise PlanError(f"{value}: is {in_words(value.form)}, and no collective makes it {in_words(form)}")
        target, group = value._replace(form=after), ranks[axis]
        moved = (value,), (target,), (value,)
        found.append(Instruction(op, (), value.microbatch, value.step, *moved, _stream(group), -1, group))
        value = target
    return found


def sum_parts(draft: Draft) -> Draft:
    """Gradients of which every sharing rank makes a part are summed over these ranks, before others use them.

    Those that nothing else sums go in buckets, as `data_parallel` sums gradients. Others lie in a buffer of that sum
    already, and have one message for each tensor.
    """
    layout = draft.layout
    axes = {g: _partial(group.form, layout) for g, group in enumerate(layout.shape.groups) if "P" in group.form}
    choice = draft.plan.compress
    if axes and choice.startswith(("topk", "powersgd")):
        raise PlanError(
            f"compress={choice}: ranks that share layers make parts of the gradient of parameter group {min(axes)}, "
            "and what is left out of a gradient is kept by ranks that have all of it; possible are compress=bf16, none"
        )
    partial = frozenset(axes)
    bucketed: list[frozenset[int]] = [frozenset()] * layout.pp
    if draft.bucket != "none":
        used = [{v.index for ins in row if ins.group for v in ins.reads if v.kind == "grad"} for row in draft.ranks]
        built = [set(last_writes(row, "grad")) for row in draft.ranks]
        bucketed = [partial & built[rank] - used[rank] for rank in range(layout.pp)]

    def rewrite(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        ranks = {g: layout.sharers(rank, found) for g, found in axes.items()}
        result = _in_buckets(row, bucketed[rank], draft, ranks)
        return _one_by_one(result, partial - bucketed[rank], layout, ranks)

    return keep_gradients(draft.each(rewrite), bucketed)


def _partial(form: str, layout: Layout) -> tuple[str, ...]:
    """The axes along which each rank makes a part of a gradient."""
    return tuple(axis for axis, part in zip(layout.mesh.sharing, form.split("/"), strict=False) if part == "P")


def _in_buckets(
    row: Sequence[Instruction], chosen: frozenset[int], draft: Draft, ranks: Mapping[int, tuple[int, ...]]
) -> list[Instruction]:
    """A row with sums of buckets. `ranks`: of each group, those that make parts of its gradient."""
    last = {g: k for g, k in last_writes(row, "grad").items() if g in chosen}
    end = len(row) - 1 if draft.plan.sums_at_the_end else None
    found = in_buckets(last, ranks, draft.layout, draft.bucket, end)
    return insert(
        row, after=[(k, _sum(own, draft.layout, ranks[own[0]], draft.step, draft.bucket)) for k, own in found]
    )


def _one_by_one(
    row: Sequence[Instruction], partial: frozenset[int], layout: Layout, ranks: Mapping[int, tuple[int, ...]]
) -> list[Instruction]:
    wanted = {grad(g) for g in partial}
    open_: dict[Value, int] = {}  # where each of them was last added to
    places: dict[int, list[int]] = {}

    def close(values: Iterable[Value]) -> None:
        for value in values:
            places.setdefault(open_.pop(value), []).append(value.index)

    for k, ins in enumerate(row):
        if ins.group or ins.op is Op.OFFLOAD:  # it uses the gradient as it is
            close([value for value in ins.reads if value in open_])
        else:
            open_.update({value: k for value in ins.writes if value in wanted})
    close(list(open_))
    sums: list[tuple[int, Instruction]] = []
    for k, found in places.items():
        for own in dict.fromkeys(ranks[g] for g in sorted(found)):
            alike = sorted(g for g in found if ranks[g] == own)
            sums.append((k, _sum(alike, layout, own, row[k].step, "none")))
    return insert(row, after=sums)


def _sum(groups: Sequence[int], layout: Layout, ranks: tuple[int, ...], step: int, bucket: Bucket) -> Instruction:
    return all_reduce(groups, layout, ranks, step, bucket)._replace(stream=_stream(ranks))


def _stream(ranks: tuple[int, ...]) -> str:
    return "tp " + ",".join(map(str, ranks))
