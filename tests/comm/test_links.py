"""Which of a rank's own messages an arriving message acknowledges; and messages that repeat an earlier one are not
posted."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch

from minipar import Plan
from minipar.comm import communicator
from minipar.comm.handles import Handle
from minipar.comm.links import Links, acknowledgements
from minipar.program import output

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_gradient_acknowledges_the_output_it_belongs_to():
    program = Plan(pp=2, schedule="1f1b", microbatches=4).compile(layers=2)
    # the last stage reads output i before it sends gradient i
    assert acknowledgements(program, 0) == {(1, 0): 1, (1, 1): 2, (1, 2): 3, (1, 3): 4}


def test_an_output_acknowledges_the_gradients_before_it():
    program = Plan(pp=2, schedule="1f1b", microbatches=4).compile(layers=2)
    # stage 0 runs F0 F1 B0 F2 B1 F3 B2 B3: it has read no gradient before it sends outputs 0 and 1, then one more each
    assert acknowledgements(program, 1) == {(0, 0): 0, (0, 1): 0, (0, 2): 1, (0, 3): 2}


def test_gpipe_acknowledges_everything_with_the_first_gradient():
    program = Plan(pp=2, schedule="gpipe", microbatches=3).compile(layers=2)
    assert acknowledgements(program, 0) == {(1, 0): 3, (1, 1): 3, (1, 2): 3}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_do_not_talk_say_nothing(rank):
    program = Plan(dp=3).compile(layers=2)
    assert acknowledgements(program, rank) == {}


def passes(rows: list[int]) -> list[tuple[list[float], int]]:
    """Output 0 of two micro-batches goes to rank 1, which waits for the second one first, in passes of so many rows.

    Of each pass the sums, and how many receives were made ready without being posted.
    """
    program = Plan(pp=2, schedule="gpipe", microbatches=2).compile(layers=2)
    comm = communicator.create()
    size = [0]
    links = Links(program, comm, lambda value: size[0])
    found = []
    for n in rows:
        size[0] = n
        links.start()
        if comm.rank == 0:
            for i in range(2):
                links.send((output(0, i, 0),), [torch.full((n, 3), i + 1.0)], 1)
            links.finish()
            continue
        for _ in range(2):
            links.reach(0)
        handles = [handle for received in links.inboxes[0].open.values() for handle in received.handles]
        contents = [links.receive((output(0, i, 0),), 0)[0][0] for i in (1, 0)]
        found.append(
            ([tensor.sum().item() for tensor in contents], sum(not isinstance(handle, Handle) for handle in handles))
        )
    return found


def test_a_message_that_has_crossed_before_is_not_posted(clusters):
    _, found = clusters(2).run(passes, [4, 4, 2, 2, 4])
    assert found == [([24, 12], 0), ([24, 12], 2), ([12, 6], 0), ([12, 6], 2), ([24, 12], 2)]
