"""Collectives by algorithm as programs: they verify, sum every rank once, match the cost formulas, can be drawn;
and collectives of one's own."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from minipar import PlanError, Program, ProgramError, simulate, verify
from minipar.costs.alpha_beta import AlphaBeta
from minipar.program import Op, chunk, collectives, incoming
from minipar.program.collectives import COLLECTIVES, PIECE, cost, direct, names, program, ring
from minipar.program.collectives.own import Copy, Reduce, Send, own_program
from minipar.program.verify.contributions import result
from minipar.trace import Trace
from minipar.trace.drawing import text

OFFERED = [(collective, algorithm) for collective in COLLECTIVES for algorithm in names(collective)]
RATES = [(1e-4, 1e-9, 3e-10), (1e-4, 1e-9, 3e-9, 1e-3), (1.0, 0.0, 0.0, 0.1), (0.0, 1e-9, 0.0), (0.0, 0.0, 1e-9)]
EVEN = 5040 * 16 * 64  # bytes that any number of ranks here divides, and any number of pieces


def roots(collective: str, ranks: int) -> list[int]:
    return sorted({0, ranks - 1}) if collective in ("broadcast", "reduce") else [0]


def node_counts(algorithm: str, ranks: int) -> list[int]:
    return [n for n in (2, 3, 4) if ranks % n == 0] or [1] if algorithm == "hierarchical" else [1]


def made(collective: str, algorithm: str, ranks: int, size: int, **more: int) -> list[Program]:
    """The programs for all roots and numbers of nodes."""
    variants = product(roots(collective, ranks), node_counts(algorithm, ranks))
    return [program(collective, algorithm, ranks, size, root=root, nodes=nodes, **more) for root, nodes in variants]


def predict(one: Program, rates: tuple[float, ...]) -> Trace:
    return simulate(one, AlphaBeta(one, *rates))


def test_what_is_offered():
    assert names("allreduce") == ("ring", "tree", "double-tree", "halving-doubling", "hierarchical", "direct")
    assert names("reduce_scatter") == names("all_gather") == ("ring", "halving-doubling", "hierarchical", "direct")
    assert names("broadcast") == names("reduce") == ("ring", "tree", "double-tree", "direct")
    assert names("all_to_all") == ("direct",)


@pytest.mark.many(3)
@pytest.mark.parametrize("ranks", [*range(1, 10), 16, 32])
@pytest.mark.parametrize(("collective", "algorithm"), OFFERED)
def test_every_rank_is_in_the_result_exactly_once(collective, algorithm, ranks):
    everyone = Counter(range(ranks))
    for size in (0, 1, ranks - 1, 3 * PIECE + 5) if ranks < 10 else (ranks - 1,):
        for one in made(collective, algorithm, ranks, size):
            verify(one)
            for rank, sums in enumerate(result(one)):
                assert set(sums) == {value.index for value in one.final[rank]}
                for index, found in sums.items():
                    if collective in ("allreduce", "reduce_scatter", "reduce"):
                        assert found == everyone
                    else:  # one rank had it at the beginning
                        (owner,) = (r for r in range(ranks) if chunk(index) in one.state[r])
                        assert found == Counter((owner,))


@pytest.mark.parametrize(("collective", "algorithm"), OFFERED)
def test_who_holds_what_at_the_end(collective, algorithm):
    for one in made(collective, algorithm, 4, 1000):
        held = [sum(one.chunks[value.index] for value in values) for values in one.final]
        root = next((r for r in range(4) if one.final[r]), 0)
        ends = {"reduce_scatter": [250] * 4, "reduce": [1000 if r == root else 0 for r in range(4)]}
        assert held == ends.get(collective, [1000] * 4)


EXACT = {"ring", "hierarchical", "direct"}


def exact(collective: str, algorithm: str, ranks: int) -> bool:
    power = ranks & ranks - 1 == 0
    return algorithm in EXACT or (algorithm == "halving-doubling" and (power or collective == "allreduce")) or (
        algorithm == "tree" and power
    )  # fmt: skip


@pytest.mark.many(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize(("collective", "algorithm"), OFFERED)
def test_the_closed_form_is_what_the_simulation_gives(collective, algorithm, ranks):
    for size in (EVEN, 2 * PIECE):  # the second in pieces where a tensor is pipelined
        if size % ranks:
            continue
        for root, nodes in product(roots(collective, ranks), node_counts(algorithm, ranks)):
            one = program(collective, algorithm, ranks, size, root=root, nodes=nodes)
            for rates in RATES:
                time, formula = predict(one, rates).time, cost(collective, algorithm, ranks, size, *rates, nodes=nodes)
                if exact(collective, algorithm, ranks):
                    assert time == pytest.approx(formula, rel=1e-9, abs=1e-15)
                else:
                    assert time <= formula * (1 + 1e-9)
                    assert time >= formula / 5  # a bound that says something


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_on_each_link_are_those_of_the_formula(ranks):
    n, part = EVEN, EVEN // ranks

    def links(collective: str, algorithm: str, **more: int) -> dict[tuple[int, object], int]:
        return dict(predict(program(collective, algorithm, ranks, n, **more), RATES[0]).bytes_by_link())

    right = [(r, (r + 1) % ranks) for r in range(ranks)]
    others = [(r, j) for r in range(ranks) for j in range(ranks) if j != r]
    assert links("allreduce", "ring") == dict.fromkeys(right, 2 * (ranks - 1) * part)
    assert links("reduce_scatter", "ring") == links("all_gather", "ring") == dict.fromkeys(right, (ranks - 1) * part)
    assert links("broadcast", "ring", root=1) == dict.fromkeys([link for link in right if link[1] != 1], n)
    assert links("reduce", "ring", root=1) == dict.fromkeys([link for link in right if link[0] != 1], n)
    assert links("allreduce", "direct") == dict.fromkeys(others, 2 * part)
    assert links("all_to_all", "direct") == links("all_gather", "direct") == dict.fromkeys(others, part)
    assert links("broadcast", "direct") == {(0, r): n for r in range(1, ranks)}
    trees = {(r & r - 1, r): n for r in range(1, ranks)}
    assert links("broadcast", "tree") == trees
    assert links("allreduce", "tree") == trees | {(b, a): n for a, b in trees}
    both = predict(program("allreduce", "double-tree", ranks, n), RATES[0])
    assert max(both.bytes_sent()) <= 2 * n
    assert sum(both.bytes_sent()) == 2 * (ranks - 1) * n
    if ranks in (2, 4, 8):
        halves = {(r, r ^ 1 << k): n >> (ranks.bit_length() - 1 - k) for r in range(ranks) for k in range(3)
                  if 1 << k < ranks}  # fmt: skip
        assert links("reduce_scatter", "halving-doubling") == halves
        assert links("allreduce", "halving-doubling") == {link: 2 * size for link, size in halves.items()}
    if ranks == 8:
        inside = 4
        by_node = links("allreduce", "hierarchical", nodes=2)
        assert sum(size for (a, b), size in by_node.items() if a // inside != b // inside) == 2 * n  # each node once
        ring = links("allreduce", "ring")
        assert sum(size for (a, b), size in ring.items() if a // inside != b // inside) == 4 * 7 * part


def test_two_trees_keep_every_port_busy():
    """A tree sends the whole tensor once a level; two trees in pieces once in all, however deep they are."""
    rates = (1e-6, 1e-9, 0.0)
    one, two = (predict(program("broadcast", name, 64, 64 << 20), rates).time for name in ("tree", "double-tree"))
    assert one > 5.9 * (64 << 20) * 1e-9
    assert two < 1.5 * (64 << 20) * 1e-9


def test_between_nodes_a_hierarchy_pays():
    far = (1e-4, 1e-8)  # ten times slower outside
    times = {}
    for name in ("ring", "hierarchical"):
        one = program("allreduce", name, 16, 1 << 20, nodes=4)
        times[name] = simulate(one, AlphaBeta(one, 1e-5, 1e-9, 0.0, nodes=4, far=far)).time
    assert times["hierarchical"] < 0.5 * times["ring"]


def test_chunks_are_of_whole_elements():
    one = program("allreduce", "ring", 4, 40, item=8)
    assert one.chunks == (8, 8, 8, 16)
    assert sum(program("allreduce", "ring", 3, 100).chunks) == 100


def test_a_program_reads_as_what_it_does():
    lines = program("allreduce", "ring", 4, 4096).text(0).splitlines()
    assert lines[0] == "program allreduce by ring, 4 ranks: 4 ranks, 60 instructions"
    assert [line.split(maxsplit=1)[1] for line in lines[2:5]] == [
        "SEND chunk(3) -> 1", "RECV incoming(2 of 3) <- 3", "REDUCE 2",
    ]  # fmt: skip
    halves = program("allreduce", "halving-doubling", 4, 4096).text(0)
    assert "SEND chunk(2:4) -> 2" in halves
    assert "RECV incoming(0:2) <- 2" in halves


def test_a_program_is_drawn():
    trace = predict(program("allreduce", "ring", 4, 1 << 20), RATES[1])
    assert "reduce" in [label.get_label() for label in trace.plot().axes[0].collections]
    lanes = text(trace).splitlines()
    assert "0-9 reduce of that chunk" in "\n".join(lanes)
    assert set("210") <= set(lanes[0])  # rank 0 reduces chunks 2, 1 and 0, in this order
    assert lanes[0].index("2") < lanes[0].index("1") < lanes[0].rindex("0")


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (("allreduce", "rang", 4, 8), {}, "algorithm 'rang' is unknown; possible are ring, tree, double-tree"),
        (("reduce_scatter", "tree", 4, 8), {}, "algorithm 'tree' makes no sense; possible are ring, halving-doubling"),
        (("all_to_all", "ring", 4, 8), {}, "all_to_all: algorithm 'ring' makes no sense; possible are direct"),
        (("gossip", "ring", 4, 8), {}, "collective 'gossip': unknown; possible are allreduce, reduce_scatter"),
        (
            ("allreduce", "hierarchical", 6, 8),
            {"nodes": 4},
            "nodes=4: does not divide 6 ranks; possible are 1, 2, 3, 6",
        ),
        (("broadcast", "tree", 4, 8), {"root": 4}, "root=4: there is no such rank; possible are 0 to 3"),
        (("allreduce", "ring", 0, 8), {}, "ranks=0"),
        (("allreduce", "ring", 2, -8), {}, "nbytes=-8"),
        (("allreduce", "ring", 2, 10), {"item": 4}, "nbytes=10: no whole number of elements of 4 bytes"),
        (("allreduce", "ring", 2, 8), {"op": "mean"}, "op='mean' is not known; possible are sum, max, min, avg"),
    ],
)
def test_what_cannot_be_is_refused(words, more, message):
    with pytest.raises(PlanError, match=message):
        program(*words, **more)


RING = program("allreduce", "ring", 3, 300)


def broken(change: str) -> Program:
    """The ring's allreduce with something wrong on rank 1."""
    row = list(RING.ranks[1])
    adds = [k for k, ins in enumerate(row) if ins.op is Op.REDUCE]
    if change == "not added":
        row[adds[0]] = row[adds[0]]._replace(op=Op.STEP)
    elif change == "added twice":  # sends its first sum again in place of the second
        sends = [k for k, ins in enumerate(row) if ins.op is Op.SEND]
        row[sends[0]], row[sends[1]] = row[sends[1]], row[sends[0]]
    elif change == "lost":
        del row[adds[0] - 1 : adds[0] + 1]
    elif change == "replaced":
        took, add = row[adds[0] - 1], row[adds[0]]
        row[adds[0] - 1] = took._replace(writes=add.writes)
        del row[adds[0]]
    elif change == "leak":
        row[adds[0]] = row[adds[0]]._replace(frees=())
    elif change == "unnamed":
        row[adds[0]] = row[adds[0]]._replace(reads=row[adds[0]].reads[1:])
    elif change == "elsewhere":
        row[adds[0]] = row[adds[0]]._replace(layers=(7,))
    elif change == "another source":
        took = row[adds[0] - 1]
        row[adds[0] - 1] = took._replace(writes=(incoming(took.layers[0], 2),))
    return RING.with_rank(1, row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("not added", "a collective is made of SEND, RECV and REDUCE"),
        ("added twice", "receive order differs from send order"),
        ("lost", "receive order differs from send order"),
        ("replaced", r"rank \d ends with a chunk\(\d\) that lacks rank 1's"),
        ("leak", r"incoming\(\d of 0\) is never freed"),
        ("unnamed", "does not name the chunks that it works on"),
        ("elsewhere", "works on a chunk that is not there"),
        ("another source", "does not name the chunks that it works on"),
    ],
)
def test_a_broken_collective_is_refused(change, message):
    with pytest.raises(ProgramError, match=message):
        verify(broken(change))


def test_a_sum_that_counts_a_rank_twice_is_refused():
    one = program("allreduce", "direct", 2, 2)
    rows = [row[:3] + row for row in one.ranks]  # send, receive and reduce, once more
    with pytest.raises(ProgramError, match=r"rank 0 ends with a chunk\(0\) that counts rank 1's 2 times"):
        verify(replace(one, ranks=tuple(rows)))


def test_ranks_that_all_wait_first_are_a_deadlock():
    rows = [tuple(sorted(row, key=lambda ins: ins.op is Op.SEND)) for row in RING.ranks]
    with pytest.raises(ProgramError, match="deadlock"):
        verify(replace(RING, ranks=tuple(rows)))


def test_costs_are_no_negative_numbers():
    with pytest.raises(PlanError, match="beta=-1"):
        AlphaBeta(RING, 0.0, -1.0)


# A user's own ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective", ["allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]
)
def test_it_is_what_the_engines_own_moves_make(collective):
    file = direct if collective == "all_to_all" else ring
    name = "direct" if collective == "all_to_all" else "ring"
    for ranks, root in ((1, 0), (4, 2), (5, 0)):
        known = collectives.program(collective, name, ranks, 1003, root=root)
        mine = own_program(collective, getattr(file, collective), ranks, 1003, root=root)
        assert (mine.ranks, mine.chunks, mine.state, mine.final) == (
            known.ranks,
            known.chunks,
            known.state,
            known.final,
        )
        verify(mine)


def test_another_number_of_chunks():
    def pieces(setting, rank):
        for piece in range(3):
            yield Send([piece], 1) if rank == 0 else Copy([piece], 0)

    verify(made := own_program("broadcast", pieces, 2, 100, chunks=3))
    assert made.chunks == (33, 33, 34)


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (lambda setting, rank: None, "rank 0: gave None"),
        (lambda setting, rank: ["send"], "rank 0: yields 'send', which is no move"),
        (lambda setting, rank: [Send(0, 1)], "needs a list of chunks, which count from 0 to 1"),
        (lambda setting, rank: [Send(None, 1)], "needs a list of chunks"),
        (lambda setting, rank: [Reduce([2], 1)], "needs a list of chunks"),
        (lambda setting, rank: [Reduce([0.5], 1)], "needs a list of chunks"),
        (lambda setting, rank: [Send([0], 0)], "needs another rank, and they count from 0 to 1"),
        (lambda setting, rank: [Send([0], 2)], "needs another rank"),
        (lambda setting, rank: [Send([0], "1")], "needs another rank"),
        (lambda setting, rank: itertools.repeat(Send([0], 1 - rank)), "does a loop end?"),
    ],
)  # fmt: skip
def test_what_is_no_move(moves, words):
    with pytest.raises(PlanError) as raised:
        own_program("allreduce", moves, 2, 100)
    assert words in str(raised.value)


def test_a_rank_that_is_forgotten_is_named():
    """It has no instruction that could have freed what it lacks."""

    def two_of_three(setting, rank):
        if rank < 2:
            yield Send([0], 1) if rank == 0 else Copy([0], 0)

    with pytest.raises(ProgramError, match=r"rank 2 must end with chunk\(0\), but never has it"):
        verify(own_program("broadcast", two_of_three, 3, 100))
