"""What a rank may conclude from a message: which of its own are surely done."""

from __future__ import annotations

import pytest

from minipar import Plan
from minipar.comm.links import acknowledgements


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
