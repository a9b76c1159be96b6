"""ZeRO on real ranks: optimizers equal plain torch's, memory and messages what the formulas say."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import cloudpickle
import pytest
import torch

from minipar import Plan, PlanError, data, models, program, train
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.updating import check_elementwise
from minipar.models.parameter_groups import shape_of
from minipar.prediction.on_paper import per_rank
from minipar.program import Op
from minipar.training.training import Run
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse, cross_entropy = torch.nn.functional.mse_loss, torch.nn.functional.cross_entropy
everything = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))


# optimizers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory", [partial(torch.optim.SGD, momentum=0.9, nesterov=True), torch.optim.AdamW, torch.optim.RMSprop]
)
def test_elementwise_optimizers_pass(factory):
    check_elementwise(factory, "zero=1")


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),
    ],
)
def test_other_optimizers_are_refused_by_name(clusters, factory, name):
    with pytest.raises(PlanError, match=f"optimizer {name}: .*'dp=2 pp=1 zero=1'") as caught:
        train(everything, rows(8), "dp=2 zero=1", cluster=clusters(2), optimizer=factory, loss=mse, progress=False)
    assert "\n" not in str(caught.value)


def test_an_optimizer_for_matrices_only_is_refused_by_name(clusters):
    """Whether the model has other parameters, or slices of matrices would be updated."""
    muon = partial(torch.optim.Muon, lr=0.1)
    go = partial(train, data=rows(8), cluster=clusters(2), optimizer=muon, loss=mse, progress=False)
    with pytest.raises(PlanError, match="optimizer Muon: cannot be made of this model's parameters: .*2D"):
        go(everything, plan="dp=2")
    with pytest.raises(PlanError, match="optimizer Muon: .*'dp=2 pp=1 zero=1'"):
        go(torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False)), plan="dp=2 zero=1")


# mixed precision ------------------------------------------------------------------------------------------------------


def _small_steps(words: str, precision: str = "bf16") -> float:
    """In a rank: how far 64 steps moved a parameter, each too small for a type of 16 bits to see."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    model[0].weight.data.fill_(1.0)
    built = replace(Plan.parse(words).compile(shape_of(list(model))), precision=precision)
    executor = Executor(built, communicator.create(), model, _sum, partial(torch.optim.SGD, lr=2**-12))
    for step in range(64):
        executor.run(lambda _: (torch.ones(2, 1), torch.ones(2, 1)), step)
    assert model[0].weight.dtype is getattr(torch, program.PRECISIONS[precision])
    with executor.all_here():
        return 1.0 - float(executor.state.lines[0].trained[0][0].detach())


def _sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).mean()


@pytest.mark.parametrize("words", ["dp=2 precision=bf16", "dp=2 zero=1 precision=bf16"])
def test_the_optimizer_keeps_float32(clusters, words):
    assert clusters(Plan.parse(words).ranks).run(_small_steps, words)[0] == pytest.approx(64 / 2**12)


def _with_another_type(words: str) -> float:
    program.PRECISIONS["fp16"] = "float16"
    try:
        return _small_steps(words, "fp16")
    finally:
        del program.PRECISIONS["fp16"]


@pytest.mark.parametrize(
    "more", ["", "zero=1 clip=10", "zero=3", "offload=optimizer", "zero=3 offload=optimizer,parameters offload_to=disk"]
)
def test_another_type_is_one_row_of_the_table(clusters, more):
    assert clusters(2).run(_with_another_type, f"dp=2 precision=bf16 {more}")[0] == pytest.approx(64 / 2**12)


def test_bytes_of_mixed_precision_are_the_papers(clusters):
    """Parameters 2, gradients 2, optimizer 12 with its float32 parameters, which ZeRO-3 counts as parameters."""
    for level, (parameters, optimizer) in enumerate([(2, 12), (2, 12 / 2), (2, 12 / 2), (4 / 2, 8 / 2)]):
        run = run_stack(clusters, f"dp=2 zero={level} bucket=none precision=bf16", torch.optim.Adam)
        for trace in (run.trace, run.predicted):
            kinds = trace.memory(0).kinds
            assert kinds["parameters"][0] / PARAMETERS == pytest.approx(parameters, rel=1e-3)
            assert kinds["optimizer"][0] / PARAMETERS == pytest.approx(optimizer, rel=2e-3)
            if level == 0:
                assert max(kinds["gradients"]) / PARAMETERS == pytest.approx(2, rel=1e-3)


# bytes ---------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 256, 12
PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH)


def stack() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def run_stack(clusters, words: str, optimizer) -> Run:
    plan = Plan.parse(words)
    x, y = (t.float() for t in rows(8, WIDTH))
    return train(
        stack, (x, y), plan, cluster=clusters(plan.ranks), steps=3, loss=mse, optimizer=optimizer,
        dtype=torch.float32, progress=False,
    )  # fmt: skip


def test_memory_per_parameter_is_zeros_formula(clusters):
    """Float32: 4 bytes a parameter, 4 a gradient, 8 for Adam; sharded ones divided by N."""
    n = 4
    for level in range(4):
        # (with zero=1 the gradients of all micro-batches but the last one add up whole)
        parts = 2 if level == 1 else 1
        run = run_stack(clusters, f"dp={n} zero={level} bucket=none microbatches={parts}", torch.optim.Adam)
        for trace, rank in product((run.trace, run.predicted), range(n)):
            kinds = trace.memory(rank).kinds
            parameters, optimizer = 4 / (n if level == 3 else 1), 8 / (n if level else 1)
            assert kinds["parameters"][0] / PARAMETERS == pytest.approx(parameters, rel=1e-3)
            assert kinds["optimizer"][0] / PARAMETERS == pytest.approx(optimizer, rel=2e-3)  # (Adam counts its steps)
            # the peak of the gradients: whole; or the slices so far, a layer on its way, and the next one
            most = max(kinds["gradients"]) / PARAMETERS
            if level < 2:
                assert 4 <= most <= 4 * (1 + 1.01 / n)
            else:
                assert 4 / n <= most <= 4 / n + 2.01 * 4 / DEPTH


@pytest.mark.parametrize("zero", range(4))
def test_the_formulas_of_the_command_line_are_what_is_measured(clusters, zero):
    """`minipar memory` beside a run: model states of every rank, by kind, at the peak of each."""
    text, model = f"dp=2 zero={zero} bucket=none microbatches={2 if zero == 1 else 1}", "gpt-tiny"
    run = train(
        partial(models.build, model), data.for_model(model), text, cluster=clusters(2), steps=3, batch=4, memory=True,
        optimizer=partial(torch.optim.Adam, lr=1e-3), progress=False,
    )  # fmt: skip
    for peak, formula in zip(run.memory, per_rank(Plan.parse(text), model, 4), strict=True):
        gathered = peak.by_kind["parameters"] - formula.parameters  # which the formula counts as buffers
        assert -0.01 * formula.parameters <= gathered <= (formula.buffers if zero == 3 else 0.01 * formula.parameters)
        assert peak.by_kind["optimizer"] == pytest.approx(formula.optimizer, rel=0.01)
        assert peak.by_kind["gradients"] <= formula.gradients * (1 if zero < 2 else 2) * 1.01
        assert peak.bytes == pytest.approx(formula.total, rel=0.25)


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        ("zero=1", 2),
        ("zero=2 microbatches=2", 3),
        ("zero=2 microbatches=2 reduce=step", 2),
        ("zero=3 microbatches=2 prefetch=0", 6 - 3 / DEPTH),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_table(clusters, words, parameters):
    """Counted by the kernel: what each rank has written to its sockets, headers included. (Memory counts nothing.)"""
    n, program = 2, f"dp=2 bucket=none {words}"
    sent = clusters(n).run(_sent, program)
    expected = parameters * 4 * PARAMETERS * (n - 1) / n
    assert sum(sent) / n == pytest.approx(expected, rel=0.02)
    run = run_stack(clusters, program, torch.optim.SGD)
    assert run.bytes_sent == [pytest.approx(expected)] * n
    assert run.predicted.bytes_sent() == run.bytes_sent


def _sent(words: str) -> int:
    comm = communicator.create()
    model = stack()
    program = Plan.parse(words).compile(shape_of(list(model)))
    executor = Executor(program, comm, model, mse, torch.optim.SGD)
    x, y = (t.float() for t in rows(8, WIDTH))
    group = comm.group()
    arena, group.arena = group.arena, None  # from here on through gloo
    try:
        executor.run(lambda _: (x, y), 0)
        comm.barrier()
        before = _written()
        for step in (1, 2, 3):
            executor.run(lambda _: (x, y), step)
        return (_written() - before) // 3
    finally:
        group.arena = arena


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))


def test_parameters_are_really_gone_between_uses(clusters):
    assert clusters(2).run(_storages) == [[0] * DEPTH] * 2


def _storages() -> list[int]:
    """In a rank: bytes of the storage of each layer's weight after a step."""
    model = stack()
    program = Plan.parse("dp=2 zero=3").compile(shape_of(list(model)))
    executor = Executor(program, communicator.create(), model, mse, torch.optim.SGD)
    x, y = (t.float() for t in rows(8, WIDTH))
    executor.run(lambda _: (x, y), 0)
    return [layer.weight.untyped_storage().nbytes() for layer in model]


@pytest.mark.parametrize("zero", [1, 3])
def test_overlap_is_visible_in_the_trace(clusters, zero):
    """A sum of gradients starts before the backward is over. A gather starts before its layer's turn, or beside the
    update of other layers."""
    run = run_stack(clusters, f"dp=2 zero={zero} bucket=none", torch.optim.SGD)
    events = [event for event in run.trace.events if event.rank == 0]
    last = {op: max(event.start for event in events if event.instruction.op is op) for op in (Op.BACKWARD, Op.STEP)}
    sums = [event for event in events if event.instruction.op is Op.REDUCE_SCATTER]
    gathers = [event for event in events if event.instruction.op is Op.ALL_GATHER]
    assert len([event for event in sums if event.start < last[Op.BACKWARD]]) == DEPTH - 1
    if zero < 3:
        assert len([event for event in gathers if event.start < last[Op.STEP]]) == DEPTH - 1
    for event in gathers:
        assert event.end >= event.start > 0 or event.index == 0


def test_parameters_of_two_types_are_refused(clusters):
    with pytest.raises(
        PlanError, match=r"zero: weight of layer 0 is of torch.float32, bias of layer 0 of torch.float64"
    ):
        clusters(2).run(_two_types)


def _two_types() -> None:
    layer = torch.nn.Linear(4, 4)
    layer.bias = torch.nn.Parameter(layer.bias.detach().double())
    program = Plan.parse("dp=2 zero=1").compile(shape_of([layer]))
    Executor(program, communicator.create(), torch.nn.Sequential(layer), mse, torch.optim.SGD)
