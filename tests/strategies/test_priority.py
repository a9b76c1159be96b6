"""Priority: the order of messages, the gain in time, what verify refuses, and that training stays exact."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, resume, simulate, train, verify
from minipar.errors import ProgramError
from minipar.program import Group, Op, grad
from minipar.program.shape import Shape
from minipar.strategies.passes.priority import in_order
from tests.fuzz.fingerprints import judge
from tests.toys import rows, toy

pytestmark = pytest.mark.many(3)

MiB = 1 << 20
TEXT = f"dp=2 overlap=priority bucket={16 / MiB}"


class ByHand:
    """Times of layers, and of a byte of a message."""

    def __init__(self, forward, backward, byte):
        self.times, self.byte = {Op.FORWARD: forward, Op.BACKWARD: backward}, byte

    def compute(self, rank, ins):
        return sum(self.times[ins.op][layer] for layer in ins.layers) if ins.op in self.times else 0.0

    def transfer(self, rank, ins):
        return 0.0, 0.0

    def collective(self, ins):
        return sum(part.bytes for part in ins.parts) * self.byte

    def size(self, rank, value):
        return 0.0


def model(*sizes):
    return Shape(len(sizes), tuple(Group((k,), (size,)) for k, size in enumerate(sizes)))


def compiled(text, shape, steps=2, costs=None):
    return Plan.parse(text).compile(shape, steps=steps, costs_of=None if costs is None else lambda program: costs)


def a_step_more(text, shape, costs):
    """How much longer one step more takes."""
    few, more = (simulate(compiled(text, shape, n, costs), costs).time for n in (6, 7))
    return more - few


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=8))
def test_the_link_never_waits_and_takes_the_most_urgent(messages):
    ready, seconds, urgent = zip(*messages, strict=True) if messages else ((), (), ())
    order, now, left = in_order(ready, seconds, urgent), 0, set(range(len(messages)))
    for k in order:
        now = max(now, min(ready[j] for j in left))
        assert (urgent[k], k) == min((urgent[j], j) for j in left if ready[j] <= now)
        now += seconds[k]
        left.remove(k)
    assert not left


def test_a_piece_of_a_layer_that_is_needed_later_is_overtaken():
    costs = ByHand([1] * 3, [1] * 3, 1 / 16)  # 3 pieces a layer, each as long as a layer's backward
    program = compiled(TEXT, model(48, 48, 48), 2, costs)
    assert [str(ins).removeprefix("ALL_REDUCE ").removesuffix(" over 0,1") for ins in program.ranks[0]] == [
        "F 0:3 mb0", "B 2 mb0", "2[0:16]", "B 1 mb0", "1[0:16]", "B 0 mb0", "0[0:16]", "0[16:32]", "0[32:48]",
        "1[16:32]", "1[32:48]", "2[16:32]", "2[32:48]", "STEP 0", "F 0 mb0", "STEP 1", "F 1 mb0", "STEP 2", "F 2 mb0",
        "B 2 mb0", "2[0:16]", "B 1 mb0", "1[0:16]", "B 0 mb0", "0[0:16]", "0[16:32]", "0[32:48]",
        "1[16:32]", "1[32:48]", "2[16:32]", "2[32:48]", "STEP 0", "STEP 1", "STEP 2",
    ]  # fmt: skip
    assert sum(grad(2) in ins.writes for ins in program.ranks[0] if ins.op is Op.ALL_REDUCE) == 2  # the last of a step


def test_the_gain_of_order_and_of_pieces_in_closed_form():
    """Messages of 1, 2 and 4 units: first come, first served 1 + 7 + 5; by priority 1 + 7 + 1, which is 44 % faster.

    The link begins after the first backward and never rests; what is left is the forward of the last layer, or of all.
    """
    shape, costs = model(16, 32, 64), ByHand([2, 2, 1], [1, 1, 1], 1 / 16)
    assert a_step_more("dp=2 bucket=none", shape, costs) == 13
    assert a_step_more(TEXT, shape, costs) == 9
    assert a_step_more("dp=2 bucket=none overlap=priority", shape, costs) == 11  # whole: 0 waits for all of 2
    assert a_step_more("dp=2 bucket=flat", shape, costs) == 5 + 3 + 7


def broken(program, change):
    for rank in (0, 1):
        row = list(program.ranks[rank])
        change(row)
        program = program.with_rank(rank, row)
    return program


def place(row, text):
    return next(k for k, ins in enumerate(row) if str(ins).startswith(text))


def test_what_is_wrong_with_pieces_is_refused():
    program = compiled(TEXT, model(48, 48))
    verify(program)

    def drop(row):
        del row[place(row, "ALL_REDUCE 1[0:16]")]

    def double(row):
        row.insert(place(row, "ALL_REDUCE 1[32:48]"), row[place(row, "ALL_REDUCE 1[0:16]")])

    def early(row):
        row.insert(0, row.pop(place(row, "STEP 1")))

    def late(row):  # the forward of the next step, before its parameters are updated
        row.insert(place(row, "STEP 0"), row.pop(place(row, "F 0 mb0")))

    def unfinished(row):
        del row[place(row, "ALL_REDUCE 1[32:48]")]

    for change, says in [
        (drop, "is the last piece of grad(1), of which 32 of 48 bytes were summed"),
        (double, "sums bytes of grad(1) that were summed before"),
        (early, "comes before its gradients are complete"),
        (late, "of step 1 uses param(0) after 0 updates; a synchronous program promises 1"),
        (unfinished, "comes before its gradients are complete: grad(1) lacks micro-batch 0 of replica"),
    ]:
        mutant = broken(program, change)
        with pytest.raises(ProgramError) as caught:
            verify(mutant)
        assert says in str(caught.value)
        assert judge(mutant)


def test_as_many_steps_in_a_program_as_divide_what_is_saved():
    plan = Plan.parse(TEXT)
    assert [plan.block(20), plan.block(5), plan.block(20, 6), plan.block(20, 7), plan.block(20, 11)] == [8, 5, 6, 7, 1]
    assert Plan(dp=2).block(20) == 1


# on ranks -------------------------------------------------------------------------------------------------------------

MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
SGD, ADAMW = partial(torch.optim.SGD, lr=0.3, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)


def run(plan, cluster, steps, optimizer, **options):
    return train(
        MODEL, rows(17), plan, cluster=cluster, steps=steps, optimizer=optimizer, dtype=torch.float64,
        loss=torch.nn.functional.mse_loss, progress=False, **options,
    )  # fmt: skip


def test_steps_that_overlap_equal_those_of_one_device(clusters):
    """11 steps: a program of 8 and one of 3; ties, frozen layers, uneven rows, several micro-batches."""
    plan = Plan.parse("dp=2 pp=2 microbatches=3 bucket=0.00005 overlap=priority")
    found = run(plan, clusters(plan.ranks), 11, ADAMW, check=True)
    assert found.program.steps == 8
    assert found.max_error() <= 1e-12
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-12)
    assert len(found.losses) == len(found.step_times) == 11


def test_a_run_is_saved_between_programs_and_goes_on(clusters, tmp_path):
    plan = Plan.parse("dp=2 bucket=0.00005 overlap=priority")
    whole = run(plan, clusters(2), 10, ADAMW)
    first = run(plan, clusters(2), 6, ADAMW, save=tmp_path / "run", save_every=3)
    assert first.program.steps == 3
    rest = resume(
        tmp_path / "run", MODEL, rows(17), steps=4, cluster=clusters(2), optimizer=ADAMW, progress=False,
        loss=torch.nn.functional.mse_loss,
    )  # fmt: skip
    assert rest.plan == plan
    assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, rel=1e-12)


def test_memory_of_several_steps_is_predicted_and_measured(clusters):
    found = run("dp=2 overlap=priority", clusters(2), 4, SGD, memory=True)
    assert found.program.steps == 4
    for rank in (0, 1):
        predicted, measured = (trace.peak_by_kind(rank) for trace in (found.predicted, found.trace))
        assert [predicted[kind] for kind in ("parameters", "gradients", "data")] == [
            measured[kind] for kind in ("parameters", "gradients", "data")
        ]
        assert found.predicted.peak_memory()[rank] == pytest.approx(found.trace.peak_memory()[rank], rel=0.2)
