"""Derived sends and receives: their places in the program, what they free, and their order on each link."""

import pytest
from hypothesis import given

from minipar import Forward, Plan, PlanError
from minipar.program import Instruction, Op, output
from minipar.strategies.passes.transfers import beside, insert_transfers
from tests.interpreters import SIMPLE, compiled, programs, shape


def work(reads=(), writes=(), frees=(), microbatch=0):
    return Instruction(Op.FORWARD, (0,), microbatch, 0, tuple(reads), tuple(writes), tuple(frees))


def texts(row):
    return [str(ins) for ins in row]


X, Y = output(0, 0), output(0, 1)


def test_a_value_read_elsewhere_is_sent_and_received():
    make, use = work(writes=[X]), work(reads=[X], frees=[X])
    moved = insert_transfers({0: [make], 1: [use]})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1"]
    assert texts(moved[1]) == ["RECV output(0) mb0 <- 0", "F 0 mb0"]
    send, receive = moved[0][1], moved[1][0]
    assert (send.reads, send.writes, send.frees, send.stream) == ((X,), (), (X,), "send 1")
    assert (receive.reads, receive.writes, receive.frees, receive.stream) == ((), (X,), (), "recv 0")
    assert (send.microbatch, send.step, send.layers) == (0, 0, (0,))


def test_a_value_read_on_two_ranks_is_sent_to_each():
    moved = insert_transfers({0: [work(writes=[X])], 1: [work(reads=[X])], 2: [work(reads=[X])]})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1", "SEND output(0) mb0 -> 2"]
    assert [ins.frees for ins in moved[0][1:]] == [(), (X,)]


def test_what_is_made_beside_something_else_is_sent_after_it():
    other = output(1, 0)
    rows = {0: [work(writes=[X]), work(reads=[other]), work(reads=[other]), work()], 1: [work(reads=[X])]}
    assert texts(insert_transfers(rows, {X: other})[0]) == [*["F 0 mb0"] * 3, "SEND output(0) mb0 -> 1", "F 0 mb0"]
    assert texts(insert_transfers(rows, {X: Y})[0])[1] == "SEND output(0) mb0 -> 1"  # nobody reads that one here


def test_a_forward_beside_a_backward():
    """Both go to the same rank at once: one message, which is received before the first of its readers there."""
    program = compiled("pp=4 microbatches=8 schedule=dualpipe", 4)
    row = texts(program.ranks[1])
    k = row.index("F 1 mb3")
    assert row[k + 1 : k + 3] == ["B 2 mb5", "SEND output(1) mb3, grad_output(1) mb5 -> 2"]
    row = texts(program.ranks[2])
    k = row.index("RECV output(1) mb3, grad_output(1) mb5 <- 1")
    assert row[k + 1] in ("F 2 mb3", "B 1 mb5")
    layout = Plan(pp=2, microbatches=2).layout(shape(2))
    for after in (Forward(1), None):
        row = [Forward(0, beside=True), *([after] if after else [])]
        with pytest.raises(
            PlanError, match=r"chunk=0\) on rank 0: beside=True, but .* comes next; possible are Backward"
        ):
            beside([row, []], layout, 0)


def test_a_late_reader_does_not_change_the_order_of_the_link():
    makes = [work(writes=[X]), work(writes=[Y], microbatch=1)]
    uses = [work(reads=[Y], microbatch=1), work(reads=[X])]  # the other way round
    moved = insert_transfers({0: makes, 1: uses})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1", "F 0 mb1", "SEND output(0) mb1 -> 1"]
    assert texts(moved[1]) == ["RECV output(0) mb0 <- 0", "RECV output(0) mb1 <- 0", "F 0 mb1", "F 0 mb0"]


@given(programs())
def test_receive_order_is_send_order_on_every_link(program):
    sent, received = {}, {}
    for rank, row in enumerate(program.ranks):
        for ins in row:
            if ins.op is Op.SEND:
                sent.setdefault((rank, ins.peer), []).append(ins.reads)
                assert ins.stream == f"send {ins.peer}"
            elif ins.op is Op.RECV:
                received.setdefault((ins.peer, rank), []).append(ins.writes)
                assert ins.stream == f"recv {ins.peer}"
    assert sent == received
    for source, target in sent:
        if Plan.parse(program.name).schedule in SIMPLE:
            assert abs(source - target) == 1  # neighbours of one pipeline
        assert program.replica(source) == program.replica(target)
