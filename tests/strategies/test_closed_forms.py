"""Papers' formulas for a schedule's time, compared with the simulator, also with unequal times and with latency."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest

from minipar import Plan, simulate
from minipar.program import Op
from minipar.strategies import schedules
from minipar.strategies.schedules.registry import Times, find
from minipar.trace import Trace

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 1.5, 0.5), (0.5, 3.0, 2.5), (1.0, 2.0, 0.0), (3.0, 1.0, 1.0)]


def predict(name: str, p: int, m: int, times=(1.0, 1.0, 1.0), latency: float = 0.0, **keys) -> Trace:
    plan = Plan(pp=p, microbatches=m, schedule=name, **keys)
    program = plan.compile(layers=(1 + max(map(max, plan.placement()))) * 2, check=False)
    f, i, w = times
    return simulate(program, forward=f, backward=i + w, input_gradient=i, weight_gradient=w, latency=latency)


def check(trace: Trace, p: int, m: int, times, time: float | None = None, window: float | None = None) -> None:
    """The makespan, the bubble that follows from it, and the window bubble."""
    work = m * sum(times)
    if time is not None:
        assert trace.time == pytest.approx(time)
        assert trace.bubble_of_total() == pytest.approx(1 - work / time)
        assert trace.bubble_of_ideal() == pytest.approx(time / work - 1)
    if window is not None:
        assert trace.window_bubble() == pytest.approx(window, abs=1e-9)


def test_zb_v_at_other_times_has_gaps():
    assert predict("zb-v", 8, 16, (1, 1.2, 0.8)).window_bubble() == pytest.approx(2.8)
    assert predict("zb-v", 8, 16, (1, 1.5, 0.5)).window_bubble() == pytest.approx(7.0)
    for p, m, time in ((4, 4, 15), (8, 8, 31)):
        trace = predict("zb-v", p, m)
        assert (trace.time, max(trace.in_flight())) == (time, p)


def moved(trace):
    """Values that travel in a step."""
    return sum(len(ins.reads) for row in trace.program.ranks for ins in row if ins.op is Op.SEND)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 6), (4, 8), (4, 14), (6, 12), (8, 16), (8, 32)])
def test_dualpipe_at_equal_times(p, m):
    trace = predict("dualpipe", p, m)
    check(trace, p, m, (1, 1, 1), 3 * m + (p / 2 - 1) * 2)
    assert trace.in_flight() == [p + 1] * p
    assert moved(trace) == 2 * (p - 1) * m
    assert trace.messages_per_microbatch() < 2 * (p - 1) or p == 2  # what goes the same way at once is one message
    trace = predict("dualpipe-v", p, m)
    check(trace, p, m, (1, 1, 1), 3 * m + (p - 1))
    assert trace.in_flight() == [p + 1 / 2] * p
    assert moved(trace) == 4 * (p - 1) * m
    assert trace.messages_per_microbatch() < 4 * (p - 1)


def test_dualpipe_at_other_times():
    """As a simulator of pairs, written apart, has it; the first pair at the turn is none."""
    for name, rows in {"dualpipe": (2.5, 7.5, 7.5), "dualpipe-v": (3.75, 9.125, 9.125)}.items():
        for (p, m), bubble in zip([(4, 8), (8, 16), (8, 32)], rows, strict=True):
            check(predict(name, p, m, (1, 1.25, 0.75)), p, m, (1, 1.25, 0.75), 3 * m + bubble)
    assert predict("dualpipe", 2, 4, latency=1).time == 12 + 2  # one hop there, and one back


ROWS = {  # time and the most activations, at tF = tI = tW = 1, for (p, m) = (4, 4) (4, 8) (8, 8) (8, 16) (8, 32)
    "gpipe": [(21, 4), (33, 8), (45, 8), (69, 16), (117, 32)],
    "1f1b": [(21, 4), (33, 4), (45, 8), (69, 8), (117, 8)],
    "interleaved": [(16.5, 4), (28.5, 5.5), (34.5, 8), (58.5, 11.5), (106.5, 11.5)],
    "interleaved chunks=4": [(14.25, 4), (26.25, 4.75), (29.25, 8), (53.25, 9.75), (101.25, 9.75)],
    "looped-bfs": [(16.5, 4), (28.5, 8), (34.5, 8), (58.5, 16), (106.5, 32)],
    "zb-h1": [(15, 4), (27, 4), (31, 8), (55, 8), (103, 8)],
    "zb-h2": [None, (27, 7), None, (55, 15), (103, 15)],
    "zb-v": [(15, 4), (25.5, 4), (31, 8), (51.5, 8), (99.5, 8)],
    "chimera": [(16, 4), (30, 4), (36, 8), (66, 8), (126, 8)],
    "dualpipe": [None, (26, 5), None, (54, 9), (102, 9)],
    "dualpipe-v": [None, (27, 4.5), None, (55, 8.5), (103, 8.5)],
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_the_reference(name):
    name, _, chunks = name.partition(" chunks=")
    for (p, m), row in zip([(4, 4), (4, 8), (8, 8), (8, 16), (8, 32)], ROWS[name + _ + chunks], strict=True):
        if row is not None:
            trace = predict(name, p, m, **({"chunks": int(chunks)} if chunks else {}))
            assert (trace.time, max(trace.in_flight())) == row


@pytest.mark.parametrize(
    ("words", "messages"),
    [("interleaved chunks=3", 2 * 11), ("looped-bfs chunks=2", 2 * 7), ("zb-h2", 6), ("zb-v", 12), ("chimera", 6)],
)
def test_messages_of_a_micro_batch(words, messages):
    program = Plan.parse(f"pp=4 microbatches=8 schedule={words}").compile(layers=24, check=False)
    assert simulate(program).messages_per_microbatch() == messages


LATENCY = {  # p=4, m=8; a hop takes 0, 0.25, 0.5, 1
    "gpipe": [33, 34.5, 36, 39],
    "1f1b": [33, 37, 41, 49],
    "eager-1f1b": [33, 34.5, 36, 39],
    "interleaved": [28.5, 32, 35.5, 46],
    "zb-h1": [27, 30, 33, 41],
}


@pytest.mark.parametrize("name", LATENCY)
def test_latency(name):
    assert [predict(name, 4, 8, latency=c).time for c in (0, 0.25, 0.5, 1)] == LATENCY[name]


@pytest.mark.parametrize(("p", "m", "v"), list(product((2, 4, 8), (8, 16), (1, 2))))
def test_groups_need_not_be_of_p(p, m, v):
    """A larger group keeps more activations and takes no longer; the last one may be smaller."""
    classic = predict("interleaved", p, m, chunks=v)
    for group in range(p, m + 1):
        if m % group == 0 or m % group >= p:
            trace = predict("interleaved", p, m, chunks=v, group=group)
            assert trace.time == pytest.approx(classic.time)
            assert max(trace.in_flight()) >= max(classic.in_flight())


# What `minipar schedules` prints, taken at its word -------------------------------------------------------------------

TOKENS = re.compile(r"t[FBIW]|max|min|[a-z]|\d+|[-+*/(),]")
EQUAL = [(1.0, 1.0, 1.0), (2.5, 2.5, 2.5)]
ANY = [*TIMES, (1.0, 1.0, 1.5), (1.0, 3.0, 2.0), (1.0, 0.25, 2.0), (0.5, 1.0, 4.0)]


def value(text: str, **names: float) -> float:
    """A formula as people write it: `2p-1`, `m(tF+tB)`, `(p-1)max(tF, w)`, `m p (tF+tB)`."""
    tokens = TOKENS.findall(text)
    assert "".join(tokens) == text.replace(" ", ""), text
    made: list[str] = []
    for token in tokens:
        begins = token == "(" or token[0].isalnum()
        if made and begins and made[-1] not in ("max", "min") and (made[-1] == ")" or made[-1][0].isalnum()):
            made.append("*")
        made.append(token)
    return eval(" ".join(made), {"max": max, "min": min, **names})


@dataclass(frozen=True)
class Printed:
    """Where the formulas of a schedule hold: times, (p, m), what more is given; and the formulas in their text."""

    times: list[tuple[float, float, float]]
    sizes: list[tuple[int, int]]
    keys: tuple[dict[str, int | bool], ...] = ({},)
    part: Callable[[str], str] = lambda text: re.split(r"; doubling| where | at |, window", text)[0]
    time_needs: Callable[[dict], bool] = lambda keys: True


def sizes(most: int = 12, first: int = 1, step: int = 1, fits: Callable[[int, int], bool] = lambda p, m: True):
    found = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in range(first, most + 1, step) if fits(p, m)]
    return found[:: 1 + len(found) // 24]  # (so many are enough)


def doubled(text: str) -> str:
    return re.split(" where ", text.split("; doubling: ")[1])[0]


PRINTED = {
    "naive": Printed(ANY, sizes()),
    "gpipe": Printed(ANY, sizes()),
    "1f1b": Printed(ANY, sizes()),
    "eager-1f1b": Printed(ANY, sizes()),
    "interleaved": Printed(
        ANY[:4],
        sizes(12, fits=lambda p, m: m >= p and m % p == 0),
        tuple({"chunks": v, "group": g} for v in (1, 2, 3) for g in (0, 5, 8)),
        time_needs=lambda keys: keys["g"] == keys["p"],
    ),
    "looped-bfs": Printed(ANY[:4], sizes(fits=lambda p, m: m >= p), ({"chunks": 2}, {"chunks": 3})),
    "zb-h1": Printed(ANY, sizes(16)),
    "zb-h2": Printed(ANY, sizes(18, fits=lambda p, m: m >= 2 * p - 1)),
    "zb-v": Printed(EQUAL, sizes(18, fits=lambda p, m: m >= 2 * p - 1)),
    "chimera": Printed([t for t in ANY if t[1] + t[2] >= t[0]], sizes(24, 2, fits=lambda p, m: p % 2 == m % p == 0)),
    "chimera doubling": Printed(
        [(f, b / 2, b / 2) for f, b in ((1, 1), (1, 1.5), (2, 4))],
        [(p, m) for p in (2, 4, 6, 8) for m in (2 * p, 4 * p) if m % 4 == 0],
        ({"doubling": True},),
        doubled,
    ),
    "dualpipe": Printed(EQUAL, sizes(20, 2, 2, lambda p, m: p % 2 == 0 and m >= 2 * p)),
    "dualpipe-v": Printed(EQUAL, sizes(20, fits=lambda p, m: m >= 2 * p)),
}
ELSEWHERE = {"terapipe", "seq1f1b", "pipedream", "pipedream-2bw", "pipedream-vertical", "ampnet"}  # (elsewhere)


def test_every_printed_formula_is_tried() -> None:
    built_in = {s.name for s in schedules() if s.generate.__module__.startswith("minipar.")}
    assert {name.split()[0] for name in PRINTED} | ELSEWHERE == built_in


@pytest.mark.parametrize("name", PRINTED)
def test_the_printed_formulas(name: str, pytestconfig: pytest.Config) -> None:
    """Of all sizes at all times every third, so that each size and each time occurs; all of them in `make thorough`."""
    every = 1 if pytestconfig.getoption("--thorough") else 3
    printed, chosen = PRINTED[name], find(name.split()[0])
    time, peak = printed.part(chosen.time), printed.part(chosen.peak)
    window = chosen.time.partition("window w=")[2]
    for n, ((p, m), given) in enumerate(product(printed.sizes, printed.keys)):
        keys = {key: x for key, x in given.items() if x}
        g = int(keys.get("group", p))
        if name == "interleaved" and not (p <= g <= m and (m % g == 0 or m % g >= p)):
            continue
        for k, (f, i, w) in enumerate(printed.times):
            if (n + k) % every:
                continue
            trace = predict(chosen.name, p, m, (f, i, w), **keys)
            names = {"p": p, "m": m, "g": g, "v": int(keys.get("chunks", chosen.chunks))}
            spans = {"tF": f, "tB": i + w, "tI": i, "tW": w}
            if window:
                spans["w"] = value(window, **names, **spans)
                assert trace.window_bubble() == pytest.approx((p - 1) * spans["w"], abs=1e-9)
            if printed.time_needs(names):
                assert trace.time == pytest.approx(value(time, **names, **spans)), (p, m, f, i, w)
            if k == 0 and not (keys.get("doubling") and m > 2 * p):
                wanted = [value(peak, **names, d=d) for d in range(p)]
                assert trace.in_flight() == pytest.approx(wanted), (p, m)
                if name in ("naive", "gpipe", "1f1b", "eager-1f1b"):
                    assert trace.peak_memory() == wanted  # from lifetimes in time, where in_flight counts along lists


# The forms beside the generators, which searches take -----------------------------------------------------------------

SEARCHED = [one.name for one in schedules() if one.form is not None]
ONES = Times(1.0, 1.0, 1.0)
OTHERS = (Times(1.0, 1.25, 0.75), Times(2.0, 1.5, 1.0), Times(1.0, 2.0, 1.0))
CASES = ((2, 4), (2, 6), (4, 8), (4, 12))


def run(name: str, p: int, m: int, times: Times, v: int) -> float:
    chunks = {"chunks": v} if "chunks" in find(name).options else {}
    return predict(name, p, m, times[:3], times.message, **chunks).time


@pytest.mark.parametrize("name", SEARCHED)
def test_times_are_those_of_the_simulator(name: str) -> None:
    """Also with short messages."""
    form = find(name).form
    assert form is not None
    for (p, m), v in product(CASES, (2, 3) if "chunks" in find(name).options else (1,)):
        for times in (ONES, *OTHERS, ONES._replace(message=0.01)):
            assert form(times, p, m, v) == pytest.approx(run(name, p, m, times, v))
