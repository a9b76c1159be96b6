"""The tensors of one value as one message."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar.comm.packing import parts_of, places_for
from minipar.models.tensors import allocate, spec, tensors
from minipar.program.comm_volume import PACKING_LIMIT

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@st.composite
def values(draw):
    def tensor():
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        return torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))

    return tuple([tensor(), (tensor(), 3)] if draw(st.booleans()) else tensor() for _ in range(draw(st.integers(1, 3))))


@given(values())
def test_what_is_sent_is_what_is_received(value):
    sent = parts_of(value)
    content, places = places_for(allocate(spec(value), torch.device("meta")), torch.device("cpu"))
    assert len(sent) == len(places) == 1
    for part, place in zip(sent, places, strict=True):
        place.copy_(part)  # the wire
    assert spec(content) == spec(value)
    assert all(torch.equal(a, b) for a, b in zip(tensors(content), tensors(value), strict=True))


def test_one_tensor_goes_as_it_is_and_long_ones_alone():
    one = torch.randn(5)
    assert parts_of(one)[0] is one
    long = torch.zeros(PACKING_LIMIT // 4), torch.zeros(1)
    assert [part.numel() for part in parts_of(long)] == [PACKING_LIMIT // 4, 1]
    assert len(places_for(long, torch.device("cpu"))[1]) == 2
    turned = torch.randn(3, 4).T
    assert parts_of(turned)[0].is_contiguous()


@pytest.mark.parametrize("together", [True, False])
def test_messages_of_a_pipeline(clusters, monkeypatch, together):
    """A border that three tensors cross: one message forward, one backward for two gradients."""
    counts = clusters(2).run(_count_messages, together)
    assert counts == ([1, 1] if together else [3, 2])


def _count_messages(together):
    from functools import partial

    from torch import nn

    from minipar import Plan
    from minipar.comm import communicator
    from minipar.execution.executor import Executor
    from minipar.models.parameter_groups import shape_of
    from minipar.program import comm_volume
    from tests.toys import rows, toy

    comm, model = communicator.create(), toy(("tuples",)).double()
    limit, comm_volume.PACKING_LIMIT = comm_volume.PACKING_LIMIT, comm_volume.PACKING_LIMIT if together else 0
    plan = Plan.parse("pp=2 split=2,3").compile(shape_of(list(model)))
    executor = Executor(plan, comm, model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    executor.run(lambda step: rows(8))  # announces the form
    sent, send = [], comm.isend
    comm.isend = lambda tensor, peer, tag=0: sent.append(tensor) or send(tensor, peer, tag)
    try:
        executor.run(lambda step: rows(8))
    finally:
        del comm.isend
        comm_volume.PACKING_LIMIT = limit
    return len(sent)
