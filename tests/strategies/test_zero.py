"""Programs of ZeRO: what ranks hold, where the collectives are, and what they send."""

from __future__ import annotations

import pytest

from minipar import Plan, PlanError, simulate, verify
from minipar.costs.measured import Profile
from minipar.errors import ProgramError
from minipar.prediction.program_costs import ProgramCosts
from minipar.program import Op, buffer, grad, grad_shard, norm, optimizer_shard, optimizer_state, param, param_shard
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, shape


def listing(program, rank=0, ops=None) -> list[str]:
    """Short texts of a rank's instructions: AG, RS and AR for the collectives, without their ranks."""
    words = {"ALL_GATHER": "AG", "REDUCE_SCATTER": "RS", "ALL_REDUCE": "AR"}
    found = []
    for ins in program.ranks[rank]:
        if ops is None or ins.op in ops:
            text = str(ins).split(" over ")[0]
            found.append(" ".join(words.get(word, word) for word in text.split()))
    return found


def test_what_is_held_between_steps():
    whole = {f(g) for f in (param, optimizer_state) for g in (0, 1)}
    assert compiled("dp=2 bucket=none", 2).state[1] == whole
    for level in (1, 2):
        held = {f(g) for f in (param, optimizer_shard) for g in (0, 1)}
        assert compiled(f"dp=2 zero={level}", 2).state == (held, held)
    held = {f(g) for f in (param_shard, optimizer_shard) for g in (0, 1)}
    assert compiled("dp=2 zero=3", 2).state == (held, held)


def test_stage_1_sums_whole_gradients_beside_the_last_backward_and_gathers_beside_the_update():
    program = compiled("dp=2 zero=1 microbatches=2 bucket=none", 3)
    assert listing(program) == [
        "F 0:3 mb0", "B 0:3 mb0", "F 0:3 mb1", "B 2 mb1", "RS 2", "B 1 mb1", "RS 1", "B 0 mb1", "RS 0",
        "STEP 2", "AG 2", "STEP 1", "AG 1", "STEP 0", "AG 0",
    ]  # fmt: skip
    scatter = program.ranks[0][4]
    assert scatter.reads == (grad(2),)
    assert set(scatter.writes) == {grad_shard(2), buffer(2)}
    assert set(scatter.frees) == {grad(2), buffer(2)}
    assert program.ranks[0][6].reads == (grad(1),)  # it waits for no other bucket: the backward goes on
    step, gather = program.ranks[0][9:11]
    assert set(step.reads) == {f(2) for f in (grad_shard, param, optimizer_shard)}
    assert step.frees == (grad_shard(2),)
    assert (gather.reads, gather.writes) == ((param(2),), (param(2),))


@pytest.mark.parametrize("level", ["zero=1", "zero=2 reduce=step"])
def test_without_overlap_there_is_one_step_between_sums_and_gathers(level):
    program = compiled(f"dp=2 {level} microbatches=2 bucket=none overlap=none", 3)
    assert listing(program) == [
        "F 0:3 mb0", "B 0:3 mb0", "F 0:3 mb1", "B 0:3 mb1", "RS 2", "RS 1", "RS 0", "STEP 0:3", "AG 0", "AG 1", "AG 2",
    ]  # fmt: skip


def test_sums_run_beside_the_backward_and_gathers_beside_the_update():
    """A sum of one layer takes half of its backward, and a gather as long. Left are the last sum and all gathers."""
    each, step = 1.0, 1.0

    class Costs(ProgramCosts):
        def collective(self, ins):
            return (2 if ins.op is Op.ALL_REDUCE else 1) * each * len(ins.layers)

        def compute(self, rank, ins):
            return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.STEP: step / LAYERS}[ins.op] * len(ins.layers)

    def seconds(words):
        program = compiled(f"dp=2 bucket=none {words}", shape(LAYERS, size=SIZE // 2))
        return simulate(program, Costs(program, profile_of(SIZE, LAYERS), 2)).time

    compute = 3.0 * LAYERS
    assert seconds("zero=0") == pytest.approx(compute + 2 * each + step)
    assert seconds("zero=1 overlap=none") == pytest.approx(compute + LAYERS * each + step + LAYERS * each)
    assert seconds("zero=1") == pytest.approx(compute + each + LAYERS * each)


def test_stage_2_sums_during_backward_after_every_microbatch_or_once():
    each = compiled("dp=2 zero=2 microbatches=2 bucket=none", 2)
    assert listing(each) == [
        "F 0:2 mb0", "B 1 mb0", "RS 1 mb0", "B 0 mb0", "RS 0 mb0",
        "F 0:2 mb1", "B 1 mb1", "RS 1 mb1", "B 0 mb1", "RS 0 mb1", "STEP 1", "AG 1", "STEP 0", "AG 0",
    ]  # fmt: skip
    assert grad_shard(1) not in each.ranks[0][2].reads
    assert grad_shard(1) in each.ranks[0][7].reads  # added to what the first micro-batch left
    once = compiled("dp=2 zero=2 microbatches=2 bucket=none reduce=step", 2)
    assert listing(once) == [
        "F 0:2 mb0", "B 0:2 mb0", "F 0:2 mb1", "B 1 mb1", "RS 1", "B 0 mb1", "RS 0", "STEP 1", "AG 1", "STEP 0", "AG 0",
    ]  # fmt: skip


def test_stage_3_gathers_before_use_and_frees_after_it():
    program = compiled("dp=2 zero=3 prefetch=0 bucket=none", 3)
    assert listing(program) == [
        "AG 0", "F 0 mb0", "AG 1", "F 1 mb0", "AG 2", "F 2 mb0",
        "B 2 mb0", "AG 1", "RS 2 mb0", "B 1 mb0", "AG 0", "RS 1 mb0", "B 0 mb0", "RS 0 mb0", "STEP 0:3",
    ]  # fmt: skip
    rows = program.ranks[0]
    assert rows[1].frees == (param(0),)
    assert rows[5].frees == ()  # its backward comes next
    assert param(2) in rows[6].frees
    assert (rows[0].reads, rows[0].writes) == ((param_shard(0),), (param(0),))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("words", ["", "microbatches=3", "pp=2 microbatches=2 schedule=gpipe", "checkpoint=3"])
def test_no_more_than_prefetch_and_one_layers_are_whole(prefetch, words):
    """Counted at every forward and backward of a chain of 12 layers (fused ones at their parts)."""
    program = compiled(f"dp=2 zero=3 prefetch={prefetch} bucket=none {words}", 12)
    verify(program)
    for row in program.ranks:
        whole: set[int] = set()
        for ins in row:
            whole |= {v.index for v in ins.writes if v.kind == "param"}
            if ins.stream == "compute":
                assert len(whole) <= prefetch + 1
            whole -= {v.index for v in ins.frees if v.kind == "param"}
        assert not whole


def test_prefetch_places_gathers_earlier():
    program = compiled("dp=2 zero=3 prefetch=2 bucket=none", 5)
    assert listing(program)[:8] == ["AG 0", "AG 1", "AG 2", "F 0 mb0", "AG 3", "F 1 mb0", "AG 4", "F 2:5 mb0"]


def test_tied_groups_inside_a_stage_are_sharded_and_across_stages_are_not():
    model = shape(4, tied=[(0, 1), (0, 3)])
    program = compiled("dp=2 pp=2 zero=3 bucket=none", model)
    inside, across = 4, 5
    assert inside in program.sharded
    assert across not in program.sharded
    for rank in (0, 1, 2, 3):
        assert {
            param(across),
            optimizer_state(across),
        } <= program.state[rank]
        assert [ins.layers for ins in program.ranks[rank] if ins.op is Op.ALL_REDUCE] == [(across,)]
    assert judge(program) == ""


def test_one_replica_has_nothing_to_share():
    for words in ("", "pp=2 microbatches=2"):
        assert compiled(f"zero=3 {words}", 4).ranks == compiled(words, 4).ranks


# what is sent --------------------------------------------------------------------------------------------------------


def profile_of(bytes_: int, layers: int) -> Profile:
    ones = {1: (1.0,) * layers}
    sizes = {1: (10,) * layers}
    each = (bytes_,) * layers
    return Profile(ones, ones, sizes, sizes, sizes, each, each, tuple(2 * n for n in each), 1.0)


LAYERS, SIZE = 8, 4800


def predicted(words: str):
    plan = Plan.parse(words)
    program = compiled(words, shape(LAYERS, size=SIZE // 2))
    return simulate(program, ProgramCosts(program, profile_of(SIZE, LAYERS), plan.dp * plan.total_microbatches))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        ("zero=0", lambda a, skipped: 2),
        ("zero=1", lambda a, skipped: 2),
        ("zero=2", lambda a, skipped: a + 1),
        ("zero=2 reduce=step", lambda a, skipped: 2),
        ("zero=3 prefetch=0", lambda a, skipped: 3 * a - skipped),
        ("zero=3 prefetch=0 reduce=step", lambda a, skipped: 2 * a + 1 - skipped),
    ],
)
@pytest.mark.parametrize("a", [1, 3])
def test_bytes_sent_are_those_of_the_table(n, words, parameters, a):
    """In units of all parameters x (N - 1) / N; at each of the 2 A - 1 turns one layer's gather is spared."""
    trace = predicted(f"dp={n} microbatches={a} {words}")
    unit = LAYERS * SIZE * (n - 1) / n
    assert trace.bytes_sent() == [pytest.approx(unit * parameters(a, (2 * a - 1) / LAYERS))] * n


def test_every_layer_ahead_spares_another_gather_at_each_turn():
    unit = LAYERS * SIZE / 2
    for prefetch in (0, 1, 2):
        trace = predicted(f"dp=2 zero=3 prefetch={prefetch}")
        assert trace.bytes_sent()[0] == pytest.approx(unit * (3 - (prefetch + 1) / LAYERS))


def test_recomputation_gathers_once_more_for_all_but_the_last_layer_of_a_segment():
    plain, again = (predicted(f"dp=2 zero=3 prefetch=0 {words}") for words in ("", "checkpoint=4"))
    layer = SIZE // 2
    # the second segment is not recomputed: its backward follows at once
    assert again.bytes_sent()[0] - plain.bytes_sent()[0] == 3 * layer


@pytest.mark.parametrize("n", [2, 4])
def test_memory_is_that_of_the_formula(n):
    """Between steps P, G, Adam's two states of all parameters, of which N ranks hold a slice each."""
    whole = LAYERS * SIZE
    held = {}
    for level in range(4):
        # (with zero=1 and several micro-batches the gradients of all but the last one add up whole)
        trace = predicted(f"dp={n} zero={level} bucket=none" + " microbatches=2" * (level == 1))
        curve = trace.memory(0)
        held[level] = (curve.kinds["parameters"][0], curve.kinds["optimizer"][0], max(curve.kinds["gradients"]))
    assert held[0] == (whole, 2 * whole, whole)
    assert held[1] == (whole, 2 * whole / n, pytest.approx(whole * (1 + 1 / LAYERS / n), rel=0.13))
    assert held[2][:2] == (whole, 2 * whole / n)
    assert held[2][2] <= whole / n + 2 * SIZE  # the slices, a bucket on its way, and the next one
    assert held[3][:2] == (whole / n, 2 * whole / n)


# what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("zero=4", "zero=4: must be a whole number from 0 to 3"),
        ("zero=-1", "zero=-1: must be a whole number from 0 to 3"),
        ("zero=yes", "zero=yes: must be a whole number from 0 to 3"),
        ("prefetch=-1", "prefetch=-1: must be a whole number of at least 0"),
        ("reduce=always", "reduce=always: unknown; possible are microbatch, step"),
        ("clip=0", "clip=0: must be a number above 0, the norm that gradients may have, or none"),
        ("clip=nan", "clip=nan: must be a number above 0"),
    ],
)
def test_keys_are_checked(words, reason):
    with pytest.raises(PlanError, match=reason):
        Plan.parse(words)


def changed(program, op, **fields):
    """The program in which the last instruction of this kind of each rank is another one; `drop=True`: is not there."""
    drop = fields.pop("drop", False)
    for rank, row in enumerate(program.ranks):
        k = max(k for k, ins in enumerate(row) if ins.op is op)
        program = program.with_rank(rank, [*row[:k], *([] if drop else [row[k]._replace(**fields)]), *row[k + 1 :]])
    return program


def test_a_missing_gather_after_the_step_is_refused():
    program = compiled("dp=2 zero=1", 1)
    with pytest.raises(ProgramError, match=r"ends with param\(0\) of which it has updated its slice only"):
        verify(changed(program, Op.ALL_GATHER, drop=True))
    program = compiled("dp=2 zero=1", 1, steps=2)
    first = next(k for k, ins in enumerate(program.ranks[0]) if ins.op is Op.ALL_GATHER)
    for rank in (0, 1):
        row = program.ranks[rank]
        program = program.with_rank(rank, [*row[:first], *row[first + 1 :]])
    with pytest.raises(ProgramError, match=r"uses param\(0\) after 0 updates"):
        verify(program)


def test_a_missing_or_early_sum_is_refused():
    program = compiled("dp=2 zero=2 microbatches=2", 1)
    kept = changed(program, Op.REDUCE_SCATTER, drop=True)
    reason = r"STEP 0` comes before its gradients are complete: grad_shard\(0\) lacks micro-batch 1"
    with pytest.raises(ProgramError, match=reason):
        verify(kept)


def test_gathering_slices_of_different_versions_is_refused():
    program = compiled("dp=2 zero=1", 1)
    row = program.ranks[1]
    swapped = program.with_rank(1, [*row[:-2], row[-1], row[-2]])
    with pytest.raises(ProgramError, match="gathers slices after different numbers of updates|is under way|before"):
        verify(swapped)


def test_a_norm_must_count_every_gradient_on_every_holder():
    program = compiled("dp=2 pp=2 zero=2 clip=1", 4)
    k = next(k for k, ins in enumerate(program.ranks[0]) if ins.op is Op.NORM)
    row = list(program.ranks[0])
    row[k] = row[k]._replace(layers=(1,))
    with pytest.raises(ProgramError, match=r"counts grad\(0\) on ranks \[2\]; it is on \[0, 2\]"):
        verify(program.with_rank(0, row))
    early = list(program.ranks[0])
    step = next(k for k, ins in enumerate(early) if ins.op is Op.STEP)
    early[step] = early[step]._replace(reads=tuple(v for v in early[step].reads if v != norm()))
    with pytest.raises(ProgramError, match="needs norm"):
        verify(program.with_rank(0, early))
