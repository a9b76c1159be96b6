"""Compressed sums: what is sent, what is left out and sent later, the same in plain torch, and convergence."""

from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan, Program, train, verify
from minipar.comm import communicator
from minipar.comm.compression import Compressor
from minipar.errors import PlanError, SaveError
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.program import Op, Part, residual
from minipar.strategies.passes.compress import low_rank, parse, row_bytes, top
from tests.comparing import check
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, shape
from tests.toys import rows, toy

pytestmark = pytest.mark.many(2)

CHOICES = ["bf16", "fp16", "topk:0.1", "topk:1.0", "powersgd:2"]
MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))


def sums(program, rank=0):
    return [ins for ins in program.ranks[rank] if ins.op is Op.ALL_REDUCE]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "words",
    ["dp=2 bucket=none", "dp=2 pp=2 microbatches=2", "dp=3 overlap=none clip=1", "dp=2 accumulate=2"],
)  # fmt: skip
def test_programs_verify_and_mean_the_same(choice, words):
    model = shape_of(list(MODEL()))
    program = Plan.parse(f"{words} compress={choice}").compile(model, steps=2)
    assert judge(program) == ""
    assert Program.from_json(program.to_json()) == program
    kept = {value for held in program.state for value in held if value.kind == "residual"}
    assert bool(kept) == choice.startswith(("topk", "powersgd"))


def test_what_a_message_carries():
    model = shape_of(list(wide()))  # 24 x 32 + 32, 32 x 16 + 16: 1328 numbers

    def parts(words):
        return [part for ins in sums(Plan.parse(f"dp=2 {words}").compile(model)) for part in ins.parts]

    assert parts("") == [Part(Op.ALL_REDUCE, -1, 1328 * 4)]
    assert parts("compress=bf16") == [Part(Op.ALL_REDUCE, -1, 1328 * 2)]
    assert top(1328, "topk:0.01") == 14
    assert parts("compress=topk:0.01") == [Part(Op.ALL_GATHER, -1, 2 * 14 * 8)]
    left, right = 32 * 2 + 32 + 16 * 2 + 16, 24 * 2 + 32 * 2  # two factors, and what has one dimension, whole
    assert parts("compress=powersgd:2") == [Part(Op.ALL_REDUCE, -1, left * 4), Part(Op.ALL_REDUCE, -1, right * 4)]
    assert len(parts("compress=powersgd:2 bucket=none")) == 2 + 2 + 1 + 1
    assert low_rank((4, 4), 2) is None  # not smaller
    assert row_bytes(3, 4) == 24
    assert row_bytes(3, 8) == 40
    with pytest.raises(PlanError, match="needs the shapes of all tensors"):
        compiled("dp=2 compress=powersgd:1", shape(2))


@pytest.mark.parametrize("word", ["topk", "topk:0", "topk:2", "topk:x", "powersgd:0", "powersgd:1.5", "int8", "bf16:2"])
def test_what_is_no_compression_is_refused(word):
    with pytest.raises(PlanError, match=f"compress={word}: must be none, bf16, fp16, topk:R .* or powersgd:R"):
        parse(word)


# on ranks -------------------------------------------------------------------------------------------------------------


def run(plan, cluster, steps=3, model=MODEL, data=None, **options):
    options = {"dtype": torch.float64, "loss": nn.functional.mse_loss, "check": True, **options}
    return train(
        model, data or rows(17), plan, cluster=cluster, steps=steps, progress=False,
        optimizer=partial(torch.optim.SGD, lr=0.3), **options,
    )  # fmt: skip


def test_all_numbers_sent_are_no_compression(clusters):
    plan = Plan.parse("dp=2 pp=2 microbatches=3 bucket=0.0001 compress=topk:1.0")
    check(clusters, plan, MODEL, rows(17), steps=3)


def test_a_gradient_of_low_rank_comes_through_low_rank_messages(clusters):
    """4 rows: no gradient has a rank above 4. The first step is exact, and leaves nothing for the next one."""
    data = torch.randn(4, 24, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)
    found = run("dp=2 compress=powersgd:4", clusters(2), 3, wide, data)
    assert found.max_error() <= 1e-10
    rough = run("dp=2 compress=powersgd:1", clusters(2), 1, wide, data)
    assert 1e-3 < rough.max_error() < 1


def test_16_bits_are_those_of_plain_torch(clusters):
    """Each replica's gradient rounded, and their sum rounded."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 24), torch.randn(8, 16)
    program = Plan.parse("dp=2 compress=bf16").compile(shape_of(list(wide())))
    assert judge(program) == ""
    done = execute(program, Job(wide, (x, y), loss=nn.functional.mse_loss), cluster=clusters(2))
    halves = []
    for part in (slice(0, 4), slice(4, 8)):
        model = wide()
        (nn.functional.mse_loss(model(x[part]), y[part]) / 2).backward()
        halves.append({name: p.grad.to(torch.bfloat16) for name, p in model.named_parameters()})
    for name, gradient in done.gradients[0].items():
        assert torch.equal(gradient, (halves[0][name] + halves[1][name]).float())


def _two_steps(choice, shapes, steps):
    """In a rank: sums of random gradients; their residuals, and what was really sent."""
    comm = communicator.create()
    compressor, sent = Compressor(comm, choice), []
    plain_sum, plain_gather = comm.iallreduce, comm.iall_gather

    def counted_sum(tensor, *rest):
        sent.append(("sum", tensor.numel() * tensor.element_size()))
        return plain_sum(tensor, *rest)

    def counted_gather(part, into, ranks):
        sent.append(("gather", into.numel()))
        return plain_gather(part, into, ranks)

    comm.iallreduce, comm.iall_gather = counted_sum, counted_gather
    found = []
    try:
        generator = torch.Generator().manual_seed(comm.rank)
        flat = torch.empty(sum(s.numel() for s in shapes))
        compressor.prepare((0,), flat)
        for _ in range(steps):
            own = torch.randn(len(flat), generator=generator)
            flat.copy_(own)
            for handle in compressor.all_reduce((0,), flat, shapes, tuple(range(comm.size)), "test"):
                handle.wait()
            found.append((own, flat.clone(), compressor.residuals[0,].clone()))
    finally:
        del comm.iallreduce, comm.iall_gather
    return found, sent


@pytest.mark.parametrize("choice", ["topk:0.05", "topk:0.5", "powersgd:1", "powersgd:3"])
def test_what_was_sent_and_what_waits_is_what_there_was(clusters, choice):
    shapes = [torch.Size((12, 20)), torch.Size((20,)), torch.Size((8, 5, 2))]
    runs = clusters(2).run(_two_steps, choice, shapes, 4)
    sent = torch.zeros(340)
    given_ = torch.zeros(340)
    for step in range(4):
        both = [found[step] for found, _ in runs]
        assert torch.equal(both[0][1], both[1][1])  # the same bits on both ranks
        sent += both[0][1]
        given_ += both[0][0] + both[1][0]
        waiting = both[0][2] + both[1][2]
        assert torch.allclose(sent + waiting, given_, atol=1e-4)
        assert waiting.norm() > 0.1
    if choice.startswith("topk"):
        count = top(340, choice)
        assert runs[0][1][0] == ("gather", 2 * row_bytes(count, 4))
        assert int((runs[0][0][0][2] == 0).sum()) == count
    else:
        r = int(choice[-1])
        assert runs[0][1][:2] == [("sum", 4 * (12 * r + 20 + 8 * r)), ("sum", 4 * (20 * r + 10 * r))]


def test_low_rank_is_the_power_iteration_of_the_paper(clusters):
    """The same steps written plainly: two matrices, factors kept from step to step."""
    runs = clusters(2).run(_two_steps, "powersgd:2", [torch.Size((12, 20))], 3)
    q = torch.randn(40, generator=torch.Generator().manual_seed(0)).view(20, 2)
    left_out = [torch.zeros(12, 20), torch.zeros(12, 20)]
    for step in range(3):
        m = [found[step][0].view(12, 20) + e for (found, _), e in zip(runs, left_out, strict=True)]
        p = torch.linalg.qr(m[0] @ q + m[1] @ q).Q
        q = m[0].T @ p + m[1].T @ p
        left_out = [each - p @ q.T / 2 for each in m]
        assert torch.allclose(runs[0][0][step][1].view(12, 20), p @ q.T, atol=1e-4)
        assert torch.allclose(runs[1][0][step][2].view(12, 20), left_out[1], atol=1e-4)


def test_bytes_and_memory_are_predicted_and_measured(clusters):
    for choice in ("none", "bf16", "topk:0.05", "powersgd:1"):
        found = run(
            f"dp=2 compress={choice}", clusters(2), 3, wide, (torch.randn(8, 24), torch.randn(8, 16)), memory=True,
            dtype=torch.float32, check=False,
        )  # fmt: skip
        bytes_ = {
            "none": 5312,
            "bf16": 2656,
            "topk:0.05": 67 * 8,
            "powersgd:1": 4 * (32 + 32 + 16 + 16 + 24 + 32),
        }
        assert found.bytes_sent == found.predicted.bytes_sent() == [bytes_[choice]] * 2
        kinds = [trace.peak_by_kind(0)["buffers"] for trace in (found.predicted, found.trace)]
        assert kinds[0] == (5312 if ":" in choice else 0)
        assert kinds[1] >= kinds[0]
        verify(found.program)
        assert (residual(0) in found.program.state[0]) == (":" in choice)


def test_what_is_left_out_is_not_saved(clusters, tmp_path):
    with pytest.raises(SaveError, match=r"compress=topk:0.5 has left out .* possible are compress=none, bf16, fp16"):
        run("dp=2 compress=topk:0.5", clusters(2), 2).save(tmp_path / "a")
    run("dp=2 compress=bf16", clusters(2), 2).save(tmp_path / "b")
