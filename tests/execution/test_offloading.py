"""Offload on real ranks: layers on the host, memory that is really freed, a link's speed, and failures."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Cluster, DeviceSpec, Plan, PlanError, train
from minipar.cli import main
from minipar.comm import communicator
from minipar.errors import DeviceOutOfMemory, StoreError
from minipar.execution.executor import Executor
from minipar.models.parameter_groups import shape_of
from minipar.program import Op
from tests.comparing import check
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

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


@pytest.mark.parametrize(
    "text",
    [
        "host_layers=0",
        "host_layers=2,3 microbatches=2 checkpoint=2 clip=0.1",
    ],
)
def test_layers_on_the_host(clusters, text):
    model = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), frozen=(1,))
    check(clusters, Plan.parse(text), model, rows(17))


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


@pytest.mark.parametrize("text", ["offload=optimizer", "offload=parameters", "offload=activations", ALL])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_device_holds_what_the_prediction_says(clusters, text, precision):
    """However long a copy takes: what is copied away is let go at a place that the program names."""
    run = adam(clusters(2), f"dp=2 zero=3 {text} microbatches=2 precision={precision}", memory=True)
    for measured, predicted in zip(run.peak_memory, run.predicted.peak_memory(), strict=True):
        assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("base", ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "pp=2"])
def test_bf16_is_the_same_bit_by_bit_wherever_things_wait(clusters, base):
    model = partial(blocks, 4)
    texts = ["offload=activations", "offload=optimizer", "offload=optimizer,activations offload_to=disk"]
    if base not in ("dp=2 zero=1", "dp=2 zero=2"):
        texts.append(ALL)
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


def no_room(text: str) -> tuple[list[str], list[float], list[float]]:
    """A step without enough room, and two more with it; the same steps without offload."""
    executor, said = single(text), []
    for store in executor.offloading.stores.values():
        store._ledger.capacity = store.bytes + 1000
    try:
        losses(executor, 0, 1)
    except StoreError as error:
        said.append(str(error))
    for store in executor.offloading.stores.values():
        store._ledger.capacity = None
    rest = losses(executor, 1, 3)
    executor.close()
    return said, rest, losses(single("microbatches=1"), 0, 4)


@pytest.mark.parametrize(
    "text",
    ["offload=activations", "offload=activations checkpoint=1", "offload=activations offload_to=disk"],
)
def test_a_tier_without_room_is_told_and_the_run_goes_on(clusters, text):
    said, rest, plain = clusters(1).run(no_room, text)[0]
    assert len(said) == 1
    assert "bytes, but" in said[0]
    assert "possible: offload less" in said[0]
    assert rest == plain[1:]


def test_the_limit_of_a_plan_holds(clusters):
    with pytest.raises(StoreError, match=r"host: .* bytes, but"):
        adam(clusters(1), "offload=optimizer offload_limit=1MiB")
    with pytest.raises(StoreError, match=r"possible is one that can be written"):
        adam(clusters(1), "offload=optimizer offload_to=disk offload_folder=/proc/none")


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
        for module in ("owners", "offloading"):
            patch.setattr(f"minipar.execution.{module}.on_host", pinned)
        found = losses(executor := single(text, model), 0, 3)
        executor.close()
    return found, losses(single("microbatches=1", model), 0, 3)


@pytest.mark.parametrize("text", ["offload=optimizer", "offload=optimizer,parameters", f"{ALL} microbatches=2"])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_copies_on_the_host_that_cannot_be_resized(clusters, text, to):
    found, plain = clusters(1).run(with_memory_that_stays_as_large, f"{text} offload_to={to}")[0]
    assert found == pytest.approx(plain, rel=1e-6)


def full_disk(text: str, folder: str) -> tuple[list[str], list[float], list[float], list[str]]:
    """Two steps; one on a disk that takes no more than 4 KiB a file; two more."""
    import resource

    model = partial(blocks, 4)
    executor, said = single(f"{text} offload_to=disk offload_folder={folder}", model), []
    found = losses(executor, 0, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        losses(executor, 2, 1)
    except StoreError as error:
        said.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found += losses(executor, 3, 3)
    executor.close()
    return said, found, losses(single("microbatches=1", model), 0, 6), os.listdir(folder)


@pytest.mark.parametrize("what", ["activations", "optimizer", "optimizer,parameters", "parameters"])
def test_a_full_disk_is_told_and_the_run_goes_on_from_there(clusters, what, tmp_path):
    """The step itself is done: what could not be written stayed in memory."""
    said, found, plain, left = clusters(1).run(full_disk, f"offload={what}", str(tmp_path))[0]
    assert len(said) == 1
    assert "could not be written" in said[0]
    assert "free some room" in said[0]
    assert found == plain[:2] + plain[3:]
    assert left == []


def damaged(folder: str) -> str:
    executor = single(f"offload=optimizer offload_to=disk offload_folder={folder}", partial(blocks, 4))
    losses(executor, 0, 1)
    time.sleep(0.1)
    store = executor.offloading.stores["disk"]
    file = os.open(f"/proc/self/fd/{store.file}", os.O_RDWR)
    for place in store._places.values():
        at = place.start + 4096
        os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 1]), at)
    os.close(file)
    try:
        losses(executor, 1, 1)
    except StoreError as error:
        return str(error)
    finally:
        executor.close()
    return "nothing"


def test_a_damaged_file_is_told(clusters, tmp_path):
    assert "its checksum is another one" in clusters(1).run(damaged, str(tmp_path))[0]


CHILD = """
    import sys
    import torch
    from minipar import Cluster, train
    from tests.execution.test_offloading import adam

    if __name__ == "__main__":
        with Cluster(1) as cluster:
            print(cluster.run(__import__("os").getpid)[0], flush=True)
            for _ in range(1000):
                adam(cluster, "offload=optimizer,activations offload_to=disk offload_folder=" + sys.argv[1])
"""


def test_a_killed_process_leaves_nothing_on_the_disk(clusters, tmp_path):
    """Its file has no name, so the system frees it; the next run is not disturbed."""
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    folder = tmp_path / "offload"
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert child.stdout is not None
    rank = int(child.stdout.readline())
    until = time.monotonic() + 60
    held = 0
    while not held and time.monotonic() < until:  # a run closes its file when it ends: stop the rank inside one
        time.sleep(0.01)
        os.kill(rank, signal.SIGSTOP)
        held = sum(one.st_size for one in open_files(rank) if not one.st_nlink)
        if not held:
            os.kill(rank, signal.SIGCONT)
    child.send_signal(signal.SIGSTOP)  # so that it cannot clear up
    os.kill(rank, signal.SIGKILL)
    child.kill()
    child.wait()
    assert held
    assert not list(folder.iterdir())
    run = adam(clusters(1), f"offload=optimizer,activations offload_to=disk offload_folder={folder}")
    assert run.losses == adam(clusters(1), "microbatches=1").losses
    assert not list(folder.iterdir())


def open_files(pid: int) -> list[os.stat_result]:
    """The files in the offload folder, by whatever name, that a process has open."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "minipar-offload-" in os.readlink(descriptor):
                found.append(descriptor.stat())
    return found


def leftovers() -> list[int]:
    """What is still held after steps of offload: storages that were kept for backward, and copies."""
    executor = single("offload=activations")
    gc.collect()
    gc.disable()  # so that nothing is only found by the collector
    try:
        seen: list[weakref.ref] = []
        run = executor.offloading.start

        def start(ins, live):
            copy = run(ins, live)
            kept = executor.compute.kept.get((ins.reads[0].index, 0, 0))
            seen.extend(weakref.ref(slot) for slot in (kept.slots if kept is not None else ()))
            return copy

        executor.offloading.start = start
        losses(executor, 0, 2)
        return [len(seen), sum(ref() is not None for ref in seen), len(executor.compute.kept)]
    finally:
        gc.enable()
        executor.close()


def test_nothing_is_left_of_a_step(clusters):
    seen, alive, kept = clusters(1).run(leftovers)[0]
    assert seen > 10
    assert alive == kept == 0


@pytest.mark.parametrize(
    "text",
    [
        "host_layers=0",
        "offload=parameters",
        "offload=optimizer,parameters offload_to=disk",
        "dp=2 zero=3 offload=optimizer,parameters offload_to=disk",
    ],
)
def test_what_is_away_is_saved_and_comes_back_under_another_plan(clusters, text, tmp_path):
    plain = [*adam(clusters(1), "microbatches=1", resume=None).losses]
    ranks = clusters(Plan.parse(text).ranks)
    saved = adam(ranks, text, save=tmp_path)
    assert saved.losses == pytest.approx(plain, rel=1e-6)
    there, here = adam(ranks, text, resume=tmp_path).losses, adam(clusters(1), "microbatches=1", resume=tmp_path).losses
    assert there == pytest.approx(here, rel=1e-6)
    assert here[0] < saved.losses[-1]


def test_no_files_are_left_after_an_error(clusters, tmp_path):
    words = f"offload=optimizer,activations offload_to=disk offload_folder={tmp_path}"
    with pytest.raises(StoreError):
        adam(clusters(1), f"{words} offload_limit=12MiB")
    with pytest.raises(Exception, match="must be a scalar"):
        train(blocks, pairs(), words, cluster=clusters(1), loss=partial(mse, reduction="none"), progress=False)
    assert not list(tmp_path.iterdir())
