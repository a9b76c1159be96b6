"""The timeline's data and static picture show the trace; the picture is compared with brute force pixel by pixel."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
import subprocess
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minipar import Plan, PlanError, Trace, simulate
from minipar.program import Instruction, Op, Program
from minipar.trace import labels
from minipar.trace.critical_path import messages
from minipar.trace.idleness import idle_times
from minipar_widgets import Timeline
from minipar_widgets.columns import KINDS, columns
from minipar_widgets.details import coarse, details
from minipar_widgets.inline import SOURCES
from minipar_widgets.raster import FAINT, STRONG, cells

PLANS = [
    "pp=4 microbatches=8",
    "pp=2 dp=2 microbatches=4 zero=1 bucket=none",
    "pp=4 schedule=zb-h1 microbatches=6",
    "dp=4 zero=3 checkpoint=sqrt",
    "pp=4 schedule=pipedream microbatches=6",
    "dp=2 zero=2 offload=optimizer,activations",
    "pp=2 schedule=terapipe slices=4",
]
FOUR = simulate(Plan(pp=4, microbatches=8).compile(layers=8), latency=0.25)

EMPTY = dataclasses.replace(FOUR, program=Program(((),), 1, 1, ()), starts=[[]], ends=[[]])


def _trace(plan: str) -> Trace:
    parsed = Plan.parse(plan)
    return simulate(parsed.compile(layers=8, steps=2 if parsed.asynchronous else 1), latency=0.25)


@pytest.mark.parametrize("plan", PLANS)
def test_columns_are_the_trace(plan: str) -> None:
    trace = _trace(plan)
    found = columns([trace])
    seen = set()
    for lane in found.lanes:
        row = trace.program.ranks[lane.rank]
        previous = -1.0
        for k in range(lane.first, lane.last):
            index = int(found.index[k])
            ins = row[index]
            seen.add((lane.rank, index))
            assert found.text(k) == str(ins)
            assert lane.stream.split(" (")[0] == ins.stream
            end = trace.ends[lane.rank][index]
            start = end if ins.op is Op.RECV else trace.starts[lane.rank][index]
            assert found.start[k] == pytest.approx(start)
            assert found.length[k] == pytest.approx(end - start, abs=1e-5)
            assert found.start[k] >= previous - 1e-9  # sorted, and apart
            previous = found.start[k] + found.length[k] if ins.op is not Op.RECV else found.start[k]
            assert found.places[0][lane.rank][index] == k
    assert len(seen) == len(found) == len(trace.program)


def test_overlapping_events_get_lanes_of_their_own() -> None:
    copy = Instruction(Op.FETCH, (), -1, 0, stream="copy", name="c")
    program = Program(((copy,) * 4,), 1, 1, ())
    trace = Trace(program, [[0.0, 1.0, 2.0, 2.5]], [[2.0, 3.0, 4.0, 2.6]], lambda rank, value: 0)
    found = columns([trace])
    assert [lane.stream for lane in found.lanes] == ["compute", "copy", "copy (2)", "copy (3)"]
    for lane in found.lanes:
        here = slice(lane.first, lane.last)
        ends = map(add, found.start[here], found.length[here])
        assert all(end <= start + 1e-9 for end, start in zip(ends, found.start[here][1:], strict=False))


@pytest.mark.parametrize("plan", PLANS)
def test_details_are_the_engines(plan: str) -> None:
    trace = _trace(plan)
    found = columns([trace])
    packed, facts = details(found)
    arrays = {name: np.asarray(column) for name, column in packed.items()}
    assert [str(facts["names"][k]) for k in arrays["name"][:3]]
    sent = {(found.places[0][a[0]][a[1]], found.places[0][b[0]][b[1]]) for a, b in messages(trace.program)}
    before, of = arrays["before"], arrays["before_of"]
    pairs = {(of[i], k) for k in range(len(found)) for i in range(before[k], before[k + 1])}
    assert sent <= pairs
    for early, late in pairs:  # nothing is read before it is there
        assert found.start[early] <= found.start[late] + found.length[late] + 1e-9
    path = [(e.rank, e.index) for e in trace.critical_path()]
    assert [found.places[0][r][k] for r, k in path] == arrays["path"].tolist()
    for _, rank, first, last in facts["idle"]:
        assert arrays["idle_start"][first:last].tolist() == [p.start for p in idle_times(trace, rank)]
    for _, rank, first, last in facts["memory"]:
        assert float(arrays["memory_total"][first:last].max()) == pytest.approx(trace.memory(rank).peak)
        sums = sum(arrays[f"memory_{kind}"][first:last] for kind in facts["memory_kinds"])
        np.testing.assert_allclose(sums, arrays["memory_total"][first:last], atol=1e-4)
    for _, rank, first, last in facts["live"]:
        curve = trace.memory(rank)
        for k in range(0, len(curve.times) - 1, 3):
            time, total = (curve.times[k] + curve.times[k + 1]) / 2, curve.total[k]
            if curve.times[k + 1] - curve.times[k] < 1e-6:
                continue
            now = slice(first, last)
            live = (arrays["live_start"][now] <= time) & (time < arrays["live_end"][now])
            assert arrays["live_size"][now][live].sum() == pytest.approx(total, abs=1e-4)


def test_long_curves_keep_their_peaks() -> None:
    total = np.random.default_rng(1).random(50_000)
    total[[0, 31_234]] = 3.0, 9.0
    kept = coarse(total)
    assert 31_234 in kept
    assert kept[0] == 0
    assert kept[-1] == len(total) - 1
    assert len(kept) <= 4096
    assert (np.diff(kept) > 0).all()


# level of detail ------------------------------------------------------------------------------------------------------

moments = st.lists(
    st.tuples(st.floats(0, 3), st.one_of(st.just(0.0), st.floats(0, 4)), st.integers(0, 4)), min_size=1, max_size=60
)


def _lane(drawn: list[tuple[float, float, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gaps, lengths, kinds = (np.array(column, float) for column in zip(*drawn, strict=True))
    lengths = lengths.astype(np.float32).astype(float)
    start = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return start, lengths.astype(np.float32), kinds.astype(np.uint8)


@given(moments, st.floats(0, 20), st.floats(0.1, 100), st.integers(1, 60))
def test_cells_follow_the_rule(drawn: list[tuple[float, float, int]], begin: float, size: float, width: int) -> None:
    start, length, kind = _lane(drawn)
    row = cells(start, length, kind, begin, begin + size, width)
    step = size / width
    for x in range(width):
        a, b = begin + x * step, begin + (x + 1) * step
        inside = np.clip(np.minimum(b, start + length) - np.maximum(a, start), 0, None) / step
        shares = np.bincount(kind, inside, 5)
        slack = 1e-5 + 1e-9 * (start[-1] + size) / step
        if row[x] == 0:
            assert shares.sum() <= slack
            continue
        code, strength = (row[x] >> 4) - 1, row[x] & 15
        assert shares[code] >= shares.max() - slack
        exact = shares.sum() * STRONG
        assert strength >= min(STRONG, max(FAINT, exact - 16 * slack))
        assert strength <= max(FAINT, exact + 1 + 16 * slack)


def in_node(script: str, cases: list[dict[str, Any]]) -> str:
    """What a script prints, which reads the cases."""
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="no node (18 or newer) on this machine")
def test_browser_and_static_picture_follow_one_rule() -> None:
    random = np.random.default_rng(5)
    cases: list[dict[str, Any]] = []
    for _ in range(60):
        n = int(random.integers(1, 200))
        parts = random.random(n), random.choice([0, 0.01, 1, 5], n) * random.random(n), random.integers(0, 5, n)
        drawn = list(zip(*parts, strict=True))
        start, length, kind = _lane(drawn)
        begin, end = float(random.random() * start[-1] * 0.5), float(start[-1] + 2)
        width = int(random.integers(1, 300))
        mine = cells(start, length, kind, begin, end, width).tolist()
        lists = {"s": start.tolist(), "l": length.tolist(), "k": kind.tolist(), "mine": mine}
        cases.append({**lists, "b": begin, "e": end, "w": width})
    script = f"""
      import {{ cells }} from "{(SOURCES / "lod.js").as_uri()}";
      let text = ""; for await (const part of process.stdin) text += part;
      let pixels = 0, wrong = 0;
      for (const c of JSON.parse(text)) {{
        const columns = [Float64Array.from(c.s), Float32Array.from(c.l), Uint8Array.from(c.k)];
        const row = cells(...columns, 0, c.s.length, c.b, c.e, c.w);
        c.mine.forEach((cell, x) => {{ pixels++; wrong += cell !== row[x]; }});
      }}
      console.log(pixels, wrong);"""
    pixels, wrong = map(int, in_node(script, cases).split())
    assert pixels > 3000
    assert wrong <= pixels // 1000  # (an event on the very edge of a pixel may round to either side)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node (18 or newer) on this machine")
def test_browser_and_static_picture_choose_the_same_words() -> None:
    random = np.random.default_rng(6)
    kinds = [[("0:8 mb1", "1"), ("0:8 mb12", "12")], [("3 mb0", "3"), ("0:2",)], [("7",), ("11",)]]
    collectives = [("AG 0", "AG", "G"), ("AR norm", "AR", "R")]
    cases: list[dict[str, Any]] = []
    for k in range(80):
        group, n = k % 4 == 3, int(random.integers(1, 12))
        drawn = collectives if group else kinds[k % 4]
        words = [drawn[int(random.integers(len(drawn)))] for _ in range(n)]
        rooms, free = (random.choice([3, 8, 16, 50, 90]) * random.random(n) for _ in range(2))
        sizes = [11, 9.5, 8, 7][k % 3 :]
        mine = labels.fitted(words, rooms.tolist(), sizes, 0.62, free.tolist() if group else ())
        bars = [{"texts": t, "room": a, "free": b} for t, a, b in zip(words, rooms, free, strict=True)]
        cases.append(
            {"bars": bars, "sizes": sizes, "group": group, "mine": [one if one.text else None for one in mine]}
        )
    script = f"""
      import assert from "node:assert/strict";
      import {{ fitted }} from "{(SOURCES / "lanes.js").as_uri()}";
      let text = ""; for await (const part of process.stdin) text += part;
      for (const c of JSON.parse(text)) assert.deepEqual(fitted(c.bars, c.sizes, c.group), c.mine);"""
    in_node(script, cases)
    shown = [one for case in cases for one in case["mine"]]
    assert {True, False, None} == {one.beside if one else None for one in shown}


# the widget -----------------------------------------------------------------------------------------------------------


def test_picture_shows_the_bars() -> None:
    image = np.asarray(Image.open(io.BytesIO(Timeline(FOUR).picture())).convert("RGB")).astype(int)
    blue = (abs(image - [0x00, 0x72, 0xB2]).sum(2) < 24).mean()
    orange = (abs(image - [0xE6, 0x9F, 0x00]).sum(2) < 24).mean()
    assert 0.02 < blue < orange  # backwards take twice as long
    dark = np.asarray(Image.open(io.BytesIO(Timeline(FOUR).picture(dark=True))).convert("L"))
    assert np.median(dark) < 40


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(PlanError, match="^capactiy=3: no argument of Timeline; possible are predicted, capacity"):
        Timeline(FOUR, capactiy=3)
    assert Timeline(FOUR, layout={"width": "50%"}).layout.width == "50%"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Timeline("text"), "Timeline shows a Trace, not str"),  # type: ignore[arg-type]
        (lambda: Timeline(EMPTY), "is empty"),
        (lambda: Timeline(dataclasses.replace(FOUR, starts=[[9.9] * len(r) for r in FOUR.starts])), "runs from"),
        (lambda: Timeline(dataclasses.replace(FOUR, starts=FOUR.starts[:2])), "times of 2 ranks"),
        (lambda: Timeline(FOUR, _trace("dp=2")), "2 and 4 ranks"),
        (lambda: Timeline(_many(5_000_000)), "5,000,000 events are more"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said_in_words(make: Any, words: str) -> None:
    widget = make()
    assert words in widget.problem
    assert widget.problem in repr(widget)
    data, _ = widget._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert json.dumps(widget.problem)[1:-1] in widget.to_html()


@pytest.mark.parametrize("plan", PLANS)
def test_idle_times_name_who_holds_them_up(plan: str) -> None:
    trace = _trace(plan)
    found = columns([trace])
    arrays, facts = details(found)
    for _, rank, first, last in facts["idle"]:
        for k in range(first, last):
            then, awaited, by = (int(arrays[f"idle_{key}"][k]) for key in ("then", "awaited", "by"))
            end = arrays["idle_start"][k] + arrays["idle_length"][k]
            if then >= 0:
                assert found.start[then] == pytest.approx(end, abs=1e-5)
                assert found.places[0][rank][found.index[then]] == then
            if awaited >= 0:
                assert found.start[awaited] + found.length[awaited] == pytest.approx(end, abs=1e-5)
            if by >= 0 and then >= 0:  # it ended before, and on another rank
                assert found.start[by] + found.length[by] <= end + 1e-5
                assert by not in found.places[0][rank]


def test_a_run_or_a_comparison_is_shown_whole() -> None:
    slower = simulate(FOUR.program, forward=1.5, backward=2.0)

    class Run:
        trace, predicted = slower, FOUR

    for widget in (Timeline(Run()), Timeline(slower.compare(FOUR)), Timeline(slower, FOUR)):  # type: ignore[arg-type]
        assert widget.traces == [FOUR, slower]
        assert widget.problem == ""
    assert Timeline(Run(), predicted=slower).traces == [slower, slower]  # type: ignore[arg-type]
    other = Timeline(_trace("pp=4 microbatches=4"), FOUR)  # of another program
    assert not other.about["same"]
    assert not other.problem


def test_a_comparison_of_many_ranks_is_folded() -> None:
    program = Plan(pp=8, microbatches=4).compile(layers=8)
    first, second = simulate(program), simulate(program, stage_factors=(1, 2, 0.9, 1.1, 1, 1, 1, 1))
    widget = Timeline(second, first)
    assert widget.about["folded"]
    assert not Timeline(second).about["folded"]
    assert not Timeline(simulate(FOUR.program), FOUR).about["folded"]
    for lane in widget.columns.lanes:
        if lane.trace and lane.stream == "compute":
            busy = np.asarray(widget.columns.length)[lane.first : lane.last] > 0
            expected = {1: 4, 2: 1, 3: 3}.get(lane.rank, 2)
            assert set(np.asarray(widget.levels)[lane.first : lane.last][busy].tolist()) == {expected}
    assert widget.busier(1) == pytest.approx(1.0)
    assert len(widget.picture()) > 1000


def test_shades_numbers_and_labels_reach_the_page() -> None:
    chunks = Timeline(_trace("pp=2 schedule=interleaved chunks=2 microbatches=4"))
    assert chunks.about["shades"] == ["chunk 0", "chunk 1"]
    kinds = {KINDS[k] for k in chunks.columns.kind}
    assert {"forward", "forward 1", "backward", "backward 1"} <= kinds
    assert chunks.about["shown"][:2] == ["forward", "backward"]
    stepped = Timeline(_trace("pp=4 schedule=pipedream microbatches=6"))
    assert {int(k) for k in stepped.columns.number} == {-1, *range(12)}
    summed = Timeline(_trace("dp=2 zero=3"))
    assert {("AG 0", "AG", "G"), ("RS 0:8", "RS", "S")} <= {*summed.more["labels"]}
    assert {"all-gather", "reduce-scatter"} <= {*summed.about["shown"]}
    served = Timeline(simulate(Plan.parse("dp=2 sync=ps").compile(layers=2), latency=0.1))
    assert served.about["names"] == ["worker 0", "worker 1", "server 0 (rank 2)"]


def _many(count: int) -> Trace:
    class Long(tuple):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return count

    return Trace(Program((Long(),), 1, 1, ()), [[]], [[]], lambda rank, value: 0)


def test_large_traces_get_their_details_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "at_once", 10)
    widget = Timeline(FOUR)
    assert widget.more == {}
    assert widget.about["later"]
    widget._asked(None, {"want": "details"}, None)
    assert widget.more["names"]
    assert "peak memory 4 activations" in widget.summary()

    monkeypatch.setattr("minipar_widgets.timeline.LARGE", 15)
    large = Timeline(FOUR)
    assert large.rows()[0] == ["trace", "rank", "busy", "idle"]
    line, picture = large.summary(), large.picture()
    assert line.endswith("164 instructions, time 37, bubble 35.1% of total (54.2% of ideal)")
    large.find_details()
    assert len(large.table[0]) == 8  # with why ranks are idle, and their memory
    assert (large.summary(), large.picture()) == (line, picture)  # whether or not the page has asked

    monkeypatch.setattr("minipar_widgets.timeline.MANY", 20)
    light = Timeline(FOUR)
    light.find_details()
    assert light.more == {}
    assert "164 events: texts" in light.caption()
    assert Image.open(io.BytesIO(light.picture())).width == 2000


def test_traces_of_other_tools_come_in_and_go_out(tmp_path: Path) -> None:
    Timeline(FOUR).to_perfetto(tmp_path / "four.json")
    assert (tmp_path / "four.json").read_text() == FOUR.to_perfetto()
    events = [
        {"ph": "X", "name": f"aten::{n}", "cat": "cpu_op", "ts": k, "dur": 1} for k, n in enumerate(("mm", "add"))
    ]
    again = Timeline(Trace.from_kineto({"traceEvents": events}))
    assert again.problem == ""
    assert not again.about["memory"]  # the file names no values
    assert [again.columns.text(k) for k in range(len(again.columns))] == ["aten::mm", "aten::add"]
    assert Image.open(io.BytesIO(again.picture())).width == 2000


def test_ranks_that_share_layers_have_places_and_their_collectives_lanes() -> None:
    view = Timeline(simulate(Plan.parse("dp=2 tp=2").compile(layers=4), latency=0.1))
    assert view.about["places"] == ["dp 0, tp 0", "dp 0, tp 1", "dp 1, tp 0", "dp 1, tp 1"]
    assert Timeline(FOUR).about["places"] == []
    streams = {stream for _, rank, stream, *_ in view.about["lanes"] if rank == 0}
    assert len([stream for stream in streams if stream != "compute"]) == 2  # sums over tp, and of gradients over dp
    named = Image.open(io.BytesIO(view.picture())).convert("L").crop((0, 80, 140, 180))
    assert np.asarray(named).min() < 150
