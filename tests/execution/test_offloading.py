"""Offload on real ranks: layers on the host, memory that is really freed, a link's speed, and failures."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Cluster, DeviceSpec, Plan, PlanError, RankError, train
from minipar.cli import main
from minipar.comm import communicator
from minipar.errors import DeviceOutOfMemory, StoreError
from minipar.execution.executor import Executor
from minipar.execution.saving.keeping import model_in
from minipar.models.parameter_groups import shape_of
from minipar.program import Op
from tests.comparing import check
from tests.toys import rows, toy

pytestmark = pytest.mark.many(2)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss
MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
ALL = "offload=activations,optimizer,parameters"


def first_without_parameters():
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), *(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)), nn.Linear(6, 6))


def test_a_checkpoint_inside_of_a_fused_forward(clusters):
    """Layers 0 and 1 go forward together; the second is recomputed from the first one's output, which goes away."""
    plan = Plan.parse("pp=2 schedule=looped-bfs microbatches=4 checkpoint=2 offload=activations")
    check(clusters, plan, first_without_parameters, rows(9))


def test_layers_on_the_host(clusters):
    model = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), frozen=(1,))
    check(clusters, Plan.parse("host_layers=2,3 microbatches=2 checkpoint=2 clip=0.1"), model, rows(17))


def test_tied_layers_on_the_host(clusters):
    check(clusters, Plan.parse("host_layers=0,8 microbatches=2"), MODEL, rows(17))


def named():
    from collections import OrderedDict

    layers = [("embed", nn.Linear(6, 6)), ("act", nn.Tanh()), ("head", nn.Linear(6, 6))]
    return nn.Sequential(OrderedDict(layers))


def test_layers_on_the_host_by_name(clusters):
    run = check(clusters, Plan(host_layers="embed"), named, rows(8))
    assert [ins.layers for ins in run.program.ranks[0] if ins.op is Op.FORWARD and ins.stream == "host"] == [(0,)]
    with pytest.raises(PlanError, match=r"host_layers=tail: .*; possible are embed, act, head"):
        train(named, rows(8), "host_layers=tail", cluster=clusters(1), loss=mse, dtype=torch.float64, progress=False)


# Adam, and a device that is too small --------------------------------------------------------------------------------


def blocks(layers: int = 8, width: int = 128) -> nn.Sequential:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*[block() for _ in range(layers)])


def pairs(count: int = 32, width: int = 128):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.randn(count, width, generator=generator)


def adam(cluster, text, model=blocks, **options):
    return train(
        model, pairs(), text, cluster=cluster, steps=3, loss=mse, optimizer=partial(torch.optim.AdamW, lr=1e-3),
        progress=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_model_of_four_times_the_device_trains_to_the_same_losses(clusters, to):
    """Parameters, gradients, two moments: 16 bytes each; and the largest weight makes temporaries, too."""
    states = 16 * sum(p.numel() for p in blocks().parameters())
    capacity = states // 4
    fits = adam(clusters(1), "microbatches=1")
    with Cluster(1, device=DeviceSpec(memory=capacity)) as small:
        with pytest.raises(DeviceOutOfMemory):
            adam(small, "microbatches=1")
        run = adam(small, f"{ALL} offload_to={to}", memory=True)
    assert run.losses == fits.losses
    assert run.peak_memory[0] <= capacity
    assert states >= 4 * run.peak_memory[0]


@pytest.mark.parametrize("text", ["offload=optimizer", ALL])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_device_holds_what_the_prediction_says(clusters, text, precision):
    """However long a copy takes: what is copied away is let go at a place that the program names."""
    run = adam(clusters(2), f"dp=2 zero=3 {text} microbatches=2 precision={precision}", memory=True)
    for measured, predicted in zip(run.peak_memory, run.predicted.peak_memory(), strict=True):
        assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("base", ["dp=2 zero=3", "pp=2"])
def test_bf16_is_the_same_bit_by_bit_wherever_things_wait(clusters, base):
    model, texts = partial(blocks, 4), ["offload=optimizer,activations offload_to=disk", ALL]
    words = f"{base} microbatches=2 precision=bf16"
    expected = adam(clusters(2), words, model).losses
    for text in texts:
        assert adam(clusters(2), f"{words} {text}", model).losses == expected


def test_what_it_costs_on_the_device_by_kind(clusters):
    plain, away = (adam(clusters(1), text, memory=True).trace.peak_by_kind(0) for text in ("microbatches=1", ALL))
    assert away["optimizer"] == 0 < plain["optimizer"]
    assert away["parameters"] <= plain["parameters"] / 8 * 2
    assert away["gradients"] < plain["gradients"]


def wide(vocab: int = 4096, width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))


def test_a_wide_embedding_on_the_host_is_not_on_the_device(clusters):
    tokens = torch.arange(64).reshape(16, 4) * 61 % 4096
    target = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(1))
    table = 4 * 4096 * 32
    runs = [
        train(wide, (tokens, target), text, cluster=clusters(1), steps=2, loss=mse, progress=False, memory=True)
        for text in ("microbatches=2", "microbatches=2 host_layers=0")
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].peak_memory[0] > 2 * table
    assert runs[1].peak_memory[0] < table / 10
    crossed = [ins for ins in runs[1].program.ranks[0] if ins.op in (Op.OFFLOAD, Op.FETCH)]
    assert {str(ins.writes[0]) for ins in crossed} == {
        "output(0) mb0", "output(0) mb1", "host grad_output(0) mb0", "host grad_output(0) mb1",
    }  # fmt: skip


# an emulated link ----------------------------------------------------------------------------------------------------


def copies_take_their_time(run, rate: float) -> bool:
    """Whether each copy ends as late as an emulated link of this rate ends it."""
    free: dict[str, float] = {}
    copies = [(k, ins) for k, ins in enumerate(run.program.ranks[0]) if ins.op in (Op.OFFLOAD, Op.FETCH)]
    for k, ins in copies:
        begin = max(run.trace.starts[0][k], free.get(ins.stream, 0.0))
        free[ins.stream] = begin + run.trace.size(0, ins.reads[0]) / rate
        if run.trace.ends[0][k] < free[ins.stream] - 2e-3:
            return False
    return len(copies) > 8


@pytest.mark.parametrize("text", ["offload=activations", "offload=optimizer", "offload=parameters offload_to=disk"])
def test_a_copy_takes_the_time_of_the_emulated_link(text):
    rate = 50e6
    with Cluster(1, device=DeviceSpec(host_bandwidth=rate, disk_bandwidth=rate)) as cluster:
        # (A rank that loses its core between two instructions writes down a late beginning: one run has none.)
        run = next((run for _ in range(8) if copies_take_their_time(run := adam(cluster, text), rate)), None)
    assert run is not None
    for k, ins in enumerate(run.program.ranks[0]):
        if ins.op in (Op.OFFLOAD, Op.FETCH):
            predicted = run.predicted.ends[0][k] - run.predicted.starts[0][k]
            assert predicted == pytest.approx(run.trace.size(0, ins.reads[0]) / rate, rel=0.05)
    copies = {e.stream for e in run.predicted.events if e.instruction.op in (Op.OFFLOAD, Op.FETCH)}
    assert copies == {ins.stream for ins in run.program.ranks[0] if ins.op in (Op.OFFLOAD, Op.FETCH)}


# what goes wrong -----------------------------------------------------------------------------------------------------


def single(text: str, model=blocks) -> Executor:
    """In a rank: its executor."""
    torch.manual_seed(0)
    built = model()
    program = Plan.parse(text).compile(shape_of(list(built)))
    return Executor(program, communicator.create(), built, mse, partial(torch.optim.AdamW, lr=1e-3))


def losses(executor: Executor, first: int, count: int) -> list[float]:
    return [executor.run(lambda s: pairs(), k).losses[0] for k in range(first, first + count)]


def test_the_limit_of_a_plan_holds(clusters):
    with pytest.raises(StoreError, match=r"host: .* bytes, but"):
        adam(clusters(1), "offload=optimizer offload_limit=1MiB")
    with pytest.raises(StoreError, match=r"possible is one that can be written"):
        adam(clusters(1), "offload=optimizer offload_to=disk offload_folder=/proc/none")


@pytest.mark.parametrize(
    "words", ["offload=optimizer offload_to=disk", "dp=2 zero=1 offload=optimizer offload_to=disk"]
)
def test_states_that_an_optimizer_has_before_its_first_step(clusters, words):
    """As Adagrad has. The copy on the disk is there when it is fetched for that step."""
    plan = Plan.parse(words)
    x, y = rows(16)
    expected, plain = [], first_without_parameters().double()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected.append(mse(plain(x), y))
        expected[-1].backward()
        optimizer.step()
    run = train(
        first_without_parameters, (x, y), plan, cluster=clusters(plan.ranks), steps=3, loss=mse, dtype=torch.float64,
        optimizer=partial(torch.optim.Adagrad, lr=0.1), progress=False,
    )  # fmt: skip
    assert run.losses == pytest.approx([loss.item() for loss in expected], rel=1e-12)


def test_a_folder_that_cannot_be_is_one_line_on_the_command_line(capsys):
    words = "offload=optimizer offload_to=disk offload_folder=/proc/none"
    assert main(["run", words, "--model", "mlp-tiny", "--steps", "1"]) == 2
    assert capsys.readouterr().err == (
        "minipar: offload folder '/proc/none': No such file or directory; possible is one that can be written\n"
    )


def with_memory_that_stays_as_large(text: str) -> tuple[list[float], list[float]]:
    """Losses where copies on the host cannot be resized, as pinned memory beside a GPU; and where nothing is copied."""

    def pinned(tensor, pinned=True):
        if not pinned:
            return tensor.clone()
        return torch.frombuffer(bytearray(tensor.clone().numpy().tobytes()), dtype=tensor.dtype).view(tensor.shape)

    def model():
        made = blocks(4)
        made[1][0].weight.requires_grad_(False)
        return made

    with pytest.MonkeyPatch.context() as patch:
        for module in ("lines", "copies"):
            patch.setattr(f"minipar.execution.{module}.on_host", pinned)
        found = losses(executor := single(text, model), 0, 3)
        executor.close()
    return found, losses(single("microbatches=1", model), 0, 3)


@pytest.mark.parametrize("to", ["host", "disk"])
def test_copies_on_the_host_that_cannot_be_resized(clusters, to):
    found, plain = clusters(1).run(with_memory_that_stays_as_large, f"{ALL} microbatches=2 offload_to={to}")[0]
    assert found == pytest.approx(plain, rel=1e-6)


def full_disk(text: str, folder: str) -> tuple[str, list[str]]:
    """Two steps; and one on a disk that takes no more than 4 KiB a file."""
    import resource

    executor, error = single(f"{text} offload_to=disk offload_folder={folder}", partial(blocks, 4)), ""
    losses(executor, 0, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        losses(executor, 2, 1)
    except StoreError as full:
        error = str(full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    executor.close()
    return error, os.listdir(folder)


@pytest.mark.parametrize("what", ["activations", "optimizer,parameters"])
def test_a_full_disk_is_reported(clusters, what, tmp_path):
    error, left = clusters(1).run(full_disk, f"offload={what}", str(tmp_path))[0]
    assert "could not be written" in error
    assert "free some room" in error
    assert left == []


def test_parameters_that_are_not_here_are_not_read(clusters):
    """Where a program frees what it reads again, and does not fetch it: torch would end the process."""
    with pytest.raises(RankError, match=r"F 1 mb0: param\(1\) was freed, and was not brought back"):
        clusters(1).run(without_a_fetch)


def without_a_fetch() -> None:
    torch.manual_seed(0)
    built = blocks(2)
    program = Plan.parse("offload=parameters prefetch=0").compile(shape_of(list(built)))
    (row,) = program.ranks
    first = next(k for k, ins in enumerate(row) if ins.op is Op.FETCH and ins.layers == (1,))
    program = replace(program, ranks=((*row[:first], *row[first + 1 :]),))
    Executor(program, communicator.create(), built, mse, partial(torch.optim.SGD, lr=0.1)).run(lambda s: pairs())


@pytest.mark.parametrize(
    "text",
    ["host_layers=0", "offload=parameters", "dp=2 zero=3 offload=optimizer,parameters offload_to=disk"],
)
def test_what_is_away_is_saved_and_comes_back_under_another_plan(clusters, text, tmp_path):
    plain = [*adam(clusters(1), "microbatches=1", resume=None).losses]
    ranks = clusters(Plan.parse(text).ranks)
    saved = adam(ranks, text, save=tmp_path)
    saved.save(tmp_path / "driver")
    assert saved.losses == pytest.approx(plain, rel=1e-6)
    by_ranks, by_driver = model_in(tmp_path), model_in(tmp_path / "driver")
    assert all(torch.equal(by_ranks[name], by_driver[name]) for name in by_ranks)
    there, here = adam(ranks, text, resume=tmp_path).losses, adam(clusters(1), "microbatches=1", resume=tmp_path).losses
    assert there == pytest.approx(here, rel=1e-6)
    assert here[0] < saved.losses[-1]
