"""Devices of limited memory: exact to the byte; the error names a reason and remedies; the cluster goes on."""

from __future__ import annotations

import gc
import pickle
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch

from minipar import Cluster, DeviceOutOfMemory, DeviceSpec, MiniparError, Plan, models, train
from minipar.cli import main
from minipar.comm import communicator
from minipar.execution.execution import Job, execute
from minipar.execution.executor import Executor
from minipar.execution.memory.tracker import Tracker, out_of_memory, ways_out
from minipar.models.parameter_groups import shape_of
from minipar.prediction.advice import advised

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADAM = partial(torch.optim.AdamW, lr=1e-3)
GPT = partial(models.gpt, layers=2, width=32, heads=2, context=16)


def job(batch: int = 16) -> Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (batch, 16), generator=generator)
    return Job(GPT, (x, x.roll(1, 1)), optimizer=ADAM)


def program(text: str):
    return Plan.parse(text).compile(shape_of(list(GPT())))


@pytest.fixture(scope="module")
def needed(clusters) -> int:
    """What the plan of these tests needs on its largest rank, in any of its steps."""
    trace = execute(program("pp=2 microbatches=4"), job(), cluster=clusters(2), passes=3, memory=True).trace
    return max(series.highest for series in trace.series)


def test_a_device_of_what_is_needed_is_enough_and_a_byte_less_is_not(needed):
    compiled = program("pp=2 microbatches=4")
    with Cluster(2, device=DeviceSpec(memory=needed)) as cluster:
        execute(compiled, job(), cluster=cluster, passes=3)
    with Cluster(2, device=DeviceSpec(memory=needed - 1)) as cluster:
        with pytest.raises(DeviceOutOfMemory) as caught:
            execute(compiled, job(), cluster=cluster, passes=3)
        assert caught.value.needed == needed
        assert caught.value.capacity == needed - 1


def test_the_cluster_survives_it(needed):
    spec = DeviceSpec(memory=needed // 2)
    with Cluster(2, device=spec) as cluster:
        before = cluster.run(lambda: 1)
        for _ in range(2):
            with pytest.raises(DeviceOutOfMemory):
                execute(program("pp=2 microbatches=4"), job(), cluster=cluster)
        assert cluster.run(lambda: 1) == before
        small = replace(job(4), optimizer=partial(torch.optim.SGD, lr=0.1))
        found = execute(program("pp=2 microbatches=4"), small, cluster=cluster)
        assert found.losses[0] > 0


def test_the_error_names_instruction_owners_and_ways_out(needed):
    with (
        Cluster(2, device=DeviceSpec(memory=needed // 2)) as cluster,
        pytest.raises(DeviceOutOfMemory) as caught,
    ):
        execute(program("pp=2 microbatches=4"), job(), cluster=cluster)
    error = caught.value
    compiled = program("pp=2 microbatches=4")
    assert error.instruction in {str(ins) for ins in compiled.ranks[error.rank]}
    assert str(error).startswith(f"rank {error.rank}: {error.instruction} needs ")
    assert "MiB that its device holds" in error.reason
    assert error.reason.count("\n") == 0
    assert len(error.ways_out) == 3
    assert all(way in error.reason for way in error.ways_out)
    assert " of layer " in error.details
    assert sum(error.by_kind.values()) == error.needed > error.capacity
    assert isinstance(error, MiniparError)
    assert isinstance(error, MemoryError)


def test_layers_that_do_not_fit_are_refused_before_the_first_instruction():
    with Cluster(1, device="memory=20KiB") as cluster, pytest.raises(DeviceOutOfMemory, match="holding its layers"):
        execute(program("microbatches=1"), job(), cluster=cluster)


def test_only_the_layers_of_the_rank_count(needed):
    """Every rank builds the whole model, and lets the rest go: a stage fits where the whole model would not."""
    shape = shape_of(list(GPT()))
    whole = sum(sum(group.tensors) for group in shape.groups)
    compiled = Plan.parse("pp=4 microbatches=4").compile(shape)
    with Cluster(4, device=DeviceSpec(memory=whole)) as cluster, pytest.raises(DeviceOutOfMemory) as caught:
        execute(compiled, job(64), cluster=cluster)
    assert caught.value.by_kind["parameters"] < whole / 2


def leaves(text: str, capacity: int) -> tuple[int, int, bool]:
    """In a rank: bytes live inside the `except`, bytes after it, and whether the same tracker sees a later run."""
    made = job()
    executor = Executor(program(text), communicator.create(), made.build(), made.loss, made.optimizer)
    tracker = Tracker(executor, capacity)
    held = tracker.live
    try:
        with tracker:
            executor.run(made.batches)
    except DeviceOutOfMemory:
        inside = tracker.live
    else:
        return -1, -1, False
    executor.live.clear()
    executor.compute.begin(made.batches, 0)
    for optimizer in executor.optimizers.values():
        optimizer.zero_grad()
    gc.collect()
    tracker.settle()
    left = tracker.live - held - tracker._data
    tracker.close()
    fits = executor.run(made.batches).losses[0] > 0
    return inside - held, left, fits


def test_nothing_is_left_of_what_did_not_fit(clusters):
    trace = execute(program("microbatches=2"), job(), cluster=clusters(1), memory=True).trace
    ((inside, left, fits),) = clusters(1).run(leaves, "microbatches=2", round(trace.series[0].highest * 0.5))
    assert inside > 0
    assert left == 0
    assert fits, "and the executor works"


def test_training_offers_plans_that_do_fit(needed):
    """What the error says is predicted to fit is then run on the very same devices."""
    spec = DeviceSpec(memory=needed * 2 // 3)
    options = {"loss": torch.nn.functional.cross_entropy, "optimizer": ADAM, "steps": 2, "progress": False}
    x, y = job().data
    with Cluster(2, device=spec) as cluster:
        with pytest.raises(DeviceOutOfMemory, match="predicted to fit") as caught:
            train(GPT, (x, y), "pp=2 microbatches=4", cluster=cluster, **options)
        assert caught.value.instruction
        plans = [way.split('"')[1] for way in caught.value.ways_out if way.startswith('"') and " ranks " not in way]
        assert plans
        for plan in plans:
            run = train(GPT, (x, y), plan, cluster=cluster, memory=True, **options)
            assert max(run.peak_memory) <= spec.memory


def test_what_a_rank_knew_when_it_failed_is_no_advice_where_there_is_a_prediction():
    held = {("parameters", 0): 5 << 20, ("optimizer", 0): 3 << 20}  # (a step would need more)
    error = out_of_memory(program("pp=2"), 1, "STEP 2:4", held, 1 << 20, 7 << 20)
    made = advised(error, [('"pp=4" on 4 ranks', 6 << 20)])
    assert made.ways_out == ('"pp=4" on 4 ranks (peak 6.00 MiB)',)
    assert "about" not in made.reason


def test_errors_travel():
    held = {("parameters", 0): 5 << 20, ("activations", 1): 3 << 20}
    error = out_of_memory(program("pp=2"), 1, "F 2:4 mb0", held, 1 << 20, 7 << 20)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.needed, again.capacity) == (1, 8 << 20, 7 << 20)
    assert again.ways_out == error.ways_out
    assert str(again) == str(error)
    assert "5.00 MiB  parameters of layer 0" in error.details


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        ({"parameters": 10, "activations": 900}, "micro-batches"),
        ({"parameters": 100, "gradients": 100, "optimizer": 800}, "zero"),
        ({"parameters": 900}, "larger pp"),
    ],
)
def test_ways_out_suit_what_is_large(kinds, word):
    ways = ways_out(program("microbatches=2"), kinds, sum(kinds.values()))
    assert len(ways) == 3
    assert any(word in way for way in ways)


def test_the_command_line_says_what_is_possible_in_one_line(capsys):
    arguments = ["run", "pp=2 microbatches=2", "--model", "mlp-tiny", "--steps", "1", "--batch", "64"]
    assert main([*arguments, "--emulate", "memory=150KiB"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "predicted to fit" in err
