"""Seeded mistakes in programs with tensor parallelism: verify refuses each, and says which node, value and collective.

Programs are those of Megatron's block, norm | attention | norm | perceptron | sum, on two layers: its values are whole
or partial sums. In the sequence-parallel ones each rank has a part of the tokens outside of the second and the fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from minipar import Plan, Program, ProgramError, verify
from minipar.program import Forms, Instruction, Op, Value, grad
from minipar.program.shape import Shape, divided, uniform

Row = list[Instruction]


def shape(sequence: bool, form: str) -> Shape:
    """Two of Megatron's blocks; their norms have parameters of this form."""
    found = divided(uniform(2), 2, sequence)
    names = [name.partition(".")[2] for name in found.names]
    groups = [
        group._replace(tensors=(8,), form=form) if names[k] == "norm" else group for k, group in enumerate(found.groups)
    ]
    return replace(found, groups=tuple(groups))


def megatron(words: str = "tp=2 microbatches=2") -> Program:
    return Plan.parse(words).compile(shape(False, ""))


def sequence(words: str = "tp=2 microbatches=2") -> Program:
    return Plan.parse(f"{words} sequence_parallel=true").compile(shape(True, "P"))


# how programs are changed ---------------------------------------------------------------------------------------------


def place(row: Sequence[Instruction], text: str) -> int:
    """Where the only instruction stands whose text begins so."""
    (found,) = [k for k, ins in enumerate(row) if str(ins).startswith(text)]
    return found


def on(program: Program, ranks: Sequence[int], change: Callable[[Row], None]) -> Program:
    for rank in ranks:
        row = list(program.ranks[rank])
        change(row)
        program = program.with_rank(rank, row)
    return program


def all_of(program: Program) -> range:
    return range(len(program.ranks))


def without(text: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        del row[place(row, text)]

    return change


def without_last(text: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        del row[max(k for k, ins in enumerate(row) if str(ins).startswith(text))]

    return change


def twice(text: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        at = place(row, text)
        row.insert(at, row[at])

    return change


def changed(text: str, **fields: object) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        at = place(row, text)
        row[at] = row[at]._replace(**fields)  # type: ignore[arg-type]

    return change


def reformed(text: str, kind: str, node: int, form: str, *lists: str) -> Callable[[Row], None]:
    """An instruction that names a value in another form, in some of its lists."""

    def change(row: Row) -> None:
        at = place(row, text)
        ins = row[at]
        for name in lists:
            values = tuple(
                value._replace(form=form) if (value.kind, value.index) == (kind, node) else value
                for value in getattr(ins, name)
            )
            assert values != getattr(ins, name)
            ins = ins._replace(**{name: values})
        row[at] = ins

    return change


def bypassed(text: str, reader: str) -> Callable[[Row], None]:
    """A collective is taken away, and the reader takes the value as it was written."""

    def change(row: Row) -> None:
        (source,), (target,) = row[place(row, text)].reads, row[place(row, text)].writes
        del row[place(row, text)]
        for k, ins in enumerate(row):
            row[k] = ins._replace(
                reads=tuple(source if value == target else value for value in ins.reads),
                frees=tuple(source if value == target else value for value in ins.frees),
            )
        assert any(source in ins.reads for ins in row if str(ins).startswith(reader))

    return change


def freed(text: str, value: Value) -> Callable[[Row], None]:
    """An instruction also frees this value."""

    def change(row: Row) -> None:
        at = place(row, text)
        row[at] = row[at]._replace(frees=(*row[at].frees, value))

    return change


def unsummed(group: int, *ranks: tuple[int, ...]) -> Callable[[Row], None]:
    """The sum of a gradient over one of these groups of ranks is taken away."""

    def change(row: Row) -> None:
        (at,) = [
            k for k, ins in enumerate(row) if ins.op is Op.ALL_REDUCE and group in ins.layers and ins.group in ranks
        ]
        del row[at]

    return change


def summed(group: int, ranks: tuple[int, ...]) -> Callable[[Row], None]:
    """A gradient is summed over these ranks before the first STEP, whatever was done before."""

    def change(row: Row) -> None:
        at = next(k for k, ins in enumerate(row) if ins.op is Op.STEP)
        value = (grad(group),)
        like = next((ins.parts for ins in row if ins.layers == (group,) and ins.op is Op.ALL_REDUCE), ())
        row.insert(at, Instruction(Op.ALL_REDUCE, (group,), -1, 0, value, value, (), "tp", -1, ranks, like))

    return change


def taken(program: Program, node: int, forms: Forms) -> Program:
    """The same instructions of nodes of which one takes or gives values in other forms."""
    return replace(program, forms=tuple(forms if k == node else own for k, own in enumerate(program.forms)))


# the table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """What is wrong, how it is made, and what the refusal has to name."""

    title: str
    make: Callable[[], Program]
    says: tuple[str, ...]


def _edit(program: Callable[[], Program], change: Callable[[Row], None], ranks: Sequence[int] | None = None) -> Program:
    found = program()
    return on(found, all_of(found) if ranks is None else ranks, change)


def _case(
    title: str,
    change: Callable[[Row], None],
    *says: str,
    program: Callable[[], Program] = megatron,
    ranks: Sequence[int] | None = None,
) -> Mistake:
    return Mistake(title, lambda: _edit(program, change, ranks), says)


MB1 = "output(3)[P] mb1"
TABLE = (
    _case(
        "a partial sum of activations is read as whole: the sum is missing on all ranks",
        without(f"ALL_REDUCE {MB1}"),
        "(0.sum to 1.attention)", "output(3) mb1", "a partial sum", "ALL_REDUCE is missing",
    ),
    _case(
        "the sum is missing on one rank only",
        without(f"ALL_REDUCE {MB1}"),
        "(0.perceptron)", "output(3)[P] mb1", "ALL_REDUCE is missing there", "rank 1 never joins",
        ranks=(1,),
    ),
    _case(
        "what is whole is summed once more",
        lambda row: row.insert(
            place(row, f"ALL_REDUCE {MB1}") + 1,
            (ins := row[place(row, f"ALL_REDUCE {MB1}")])._replace(reads=ins.writes, frees=ins.writes),
        ),
        "output(3) mb1", "(0.perceptron)", "ALL_REDUCE", "superfluous", "whole",
    ),
    _case(
        "the gradient is read as a partial sum",
        bypassed("ALL_REDUCE grad_output(7)[P] mb0", "B 6:8"),
        "(1.norm)", "grad_output(7)[P] mb0", "a partial sum", "ALL_REDUCE is missing",
    ),
    _case(
        "a sum over another group",
        changed(f"ALL_REDUCE {MB1}", group=(0, 2)),
        "output(3)[P] mb1", "(0.perceptron)", "ALL_REDUCE", "0,1",
        program=lambda: megatron("tp=2 dp=2 microbatches=2"), ranks=(0, 2),
    ),
    _case(
        "parts of a sum are joined end to end",
        changed(f"ALL_REDUCE {MB1}", op=Op.ALL_GATHER),
        "output(3)[P] mb1", "(0.perceptron)", "ALL_GATHER", "a partial sum", "whole", "ALL_REDUCE",
    ),
    _case(
        "a sum is scattered along another dimension than its reader takes",
        reformed("REDUCE_SCATTER output(3)[P] mb1", "output", 3, "S0", "writes"),
        "(0.sum to 1.norm)", "output(3)[S1] mb1", "a shard of dimension 0", "ALL_TO_ALL is missing",
        program=sequence,
    ),
    _case(
        "the output of a node of partial sums is taken to be whole where it is written",
        reformed("F 2:4 mb1", "output", 3, "", "writes"),
        "(0.perceptron)", "output(3) mb1", "whole", "a partial sum",
    ),
    Mistake(
        "a node writes a partial sum where the program has it whole",
        lambda: taken(megatron(), 4, Forms(writes="P")),
        ("(0.sum)", "output(4)", "whole", "a partial sum"),
    ),
    _case(
        "the gradient of a shard is summed, although each rank has another shard",
        summed(6, (0, 1)),
        "grad(6)", "(1.attention)", "ALL_REDUCE", "superfluous", "shard",
    ),
    _case(
        "a norm's gradient is summed over replicas and all that have it whole",
        summed(5, (0, 1, 2, 3)),
        "grad(5)", "(1.norm)", "ALL_REDUCE", "superfluous",
        program=lambda: megatron("tp=2 dp=2"),
    ),
    _case(
        "a sequence-parallel norm's gradient is not summed",
        unsummed(5, (0, 1)),
        "grad(5)", "part ", "(1.norm)", "ALL_REDUCE", "missing",
        program=lambda: sequence("tp=2 bucket=none"),
    ),
    _case(
        "a sequence-parallel norm's gradient is summed twice",
        summed(5, (0, 1)),
        "grad(5)", "(1.norm)", "ALL_REDUCE", "twice", "superfluous",
        program=sequence,
    ),
    _case(
        "a sequence-parallel norm's gradient is summed over the sharing ranks only",
        unsummed(5, (0, 2), (1, 3)),
        "lacks", "of replica ", "ALL_REDUCE", "over replicas is missing",
        program=lambda: sequence("tp=2 dp=2"),
    ),
    _case(
        "a gradient is read in another form than its collective gives",
        reformed("B 6:8 mb0", "grad_output", 7, "S1", "reads", "frees"),
        "(1.norm)", "grad_output(7)[S1] mb0", "whole",
    ),
    _case(
        "a reader frees a value that another one has freed",
        freed("B 3:6 mb1", Value("output", 3, 1, 0, "P")),
        "output(3)[P] mb1", "(0.perceptron to 1.norm)", "not there",
    ),
    _case(
        "a collective makes a value of another micro-batch",
        lambda row: row.__setitem__(
            at := place(row, f"ALL_REDUCE {MB1}"),
            row[at]._replace(writes=(row[at].writes[0]._replace(microbatch=0),)),
        ),
        "output(3)[P] mb1", "output(3) mb0", "(0.perceptron)",
    ),
    _case(
        "a shard is received as if it were whole",
        reformed("RECV output(4)[S1] mb0", "output", 4, "", "writes"),
        "output(4)[S1] mb0", "RECV output(4) mb0", "a shard of dimension 1", "whole", "ALL_GATHER is missing",
        program=lambda: sequence("tp=2 pp=2"), ranks=(2, 3),
    ),
    _case(
        "a collective keeps the value that it was to replace",
        changed(f"ALL_REDUCE {MB1}", frees=()),
        "output(3)[P] mb1", "(0.perceptron)", "frees",
    ),
    _case(
        "what runs again is not summed again",
        without_last("ALL_REDUCE output(1)[P]"),
        "output(1) mb0", "(0.norm to 0.perceptron)", "a partial sum", "ALL_REDUCE is missing",
        program=lambda: megatron("tp=2 checkpoint=1"),
    ),
)  # fmt: skip


def test_programs_are_right_before() -> None:
    for program in (megatron, sequence):
        for words in ("tp=2 microbatches=2", "tp=2 dp=2", "tp=2 pp=2", "tp=2 microbatches=2 schedule=gpipe"):
            verify(program(words))


def test_there_are_enough() -> None:
    assert len({mistake.title for mistake in TABLE}) == len(TABLE) >= 20


@pytest.mark.parametrize("mistake", TABLE, ids=lambda mistake: mistake.title)
def test_each_is_refused_with_its_node_value_and_collective(mistake: Mistake) -> None:
    program = mistake.make()
    with pytest.raises(ProgramError) as caught:
        verify(program)
    told = caught.value.reason
    for words in mistake.says:
        assert words in told
