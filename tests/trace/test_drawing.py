"""Pictures show what ran: bars are counted, colours compared, texts measured, SVG and HTML parsed."""

import base64
import io
import itertools
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image

from minipar import MiniparError, Plan, simulate
from minipar.program import Instruction, Op
from minipar.trace import drawing, labels
from minipar.trace.figure import DIFFERENCES, LOOKS
from minipar.trace.shades import Shades

MiB = 2**20


class Costs:
    """Milliseconds and mebibytes. `slow` tells a "measured" run from the prediction."""

    def __init__(self, slow=1.0):
        self.slow = slow

    def compute(self, rank, ins):
        time = {Op.FORWARD: 0.010, Op.BACKWARD: 0.020, Op.STEP: 0.003}[ins.op]
        return time * len(ins.layers) * (1 + (self.slow - 1) * (1 + (ins.microbatch * 7 + rank) % 3))

    def transfer(self, rank, ins):
        return 0.001 * self.slow, 0.0005

    def collective(self, ins):
        return 0.006 * self.slow

    def size(self, rank, value):
        return {"param": 3 * MiB, "grad": 3 * MiB, "saved": 2 * MiB}.get(value.kind, MiB / 4)


def unit(**plan):
    program = Plan(**plan).compile(layers=plan.get("pp", 1))
    return simulate(program, forward=1.0, backward=2.0)


def pair(layers=None, **plan):
    """A prediction, and what is drawn as its measurement: other times, another origin."""
    program = Plan(**plan).compile(layers=layers or plan.get("pp", 1))
    predicted = replace(simulate(program, Costs()), note="predicted from round numbers")
    other = simulate(program, Costs(1.1))
    starts, ends = ([[1000 + t for t in row] for row in rows] for rows in (other.starts, other.ends))
    return predicted, replace(other, kind="measured", starts=starts, ends=ends, data=[MiB] * len(starts))


def collections(figure):
    return {c.get_gid(): c for c in figure.axes[0].collections if c.get_gid()}


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def corners(collection):
    """(start, end, top, bottom) of each bar."""
    boxes = [path.get_extents() for path in collection.get_paths()]
    return [(box.x0, box.x1, box.y0, box.y1) for box in boxes]


# bars -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("pm", [(1, 1), (2, 3), (4, 8)])
def test_every_compute_instruction_is_one_bar_at_its_place(schedule, pm):
    trace = unit(pp=pm[0], microbatches=pm[1], schedule=schedule)
    figure = drawing.draw([trace])
    found = collections(figure)
    for kind, op in {"forward": Op.FORWARD, "backward": Op.BACKWARD, "optimizer-step": Op.STEP}.items():
        ran = [(e.rank, e.start, e.end) for e in trace.events if e.instruction.op is op]
        drawn = corners(found[f"predicted-{kind}"])
        assert len(drawn) == len(ran)
        for (rank, start, end), (x0, x1, top, bottom) in zip(ran, drawn, strict=True):
            assert x0 == pytest.approx(start)
            assert x1 == pytest.approx(end, abs=0.1 if op is Op.STEP else 1e-9)  # what takes no time is a thin line
            assert rank < top < bottom < rank + 1
    assert not figure.axes[0].patches  # one collection a kind, not one patch a bar
    assert figure.axes[0].yaxis_inverted()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [f"rank {r}" for r in range(pm[0])]


def test_communication_is_drawn_where_it_takes_time():
    program = Plan(pp=2, dp=2, microbatches=4).compile(layers=2)
    ops = Counter(ins.op for row in program.ranks for ins in row)
    found = collections(drawing.draw([simulate(program, Costs())]))
    drawn = {gid: len(c.get_paths()) for gid, c in found.items()}
    assert drawn == {
        "predicted-forward": ops[Op.FORWARD], "predicted-backward": ops[Op.BACKWARD],
        "predicted-optimizer-step": ops[Op.STEP], "predicted-message": ops[Op.SEND],
        "predicted-receive": ops[Op.RECV], "predicted-all-reduce": ops[Op.ALL_REDUCE],
    }  # fmt: skip
    for kind in ("message", "all-reduce"):
        assert found[f"predicted-{kind}"].get_hatch()
    lowest_bar = max(c[3] % 1 for c in corners(found["predicted-forward"]))
    assert all(c[2] % 1 > lowest_bar for c in corners(found["predicted-message"]))
    assert set(collections(drawing.draw([simulate(program)]))) == {
        "predicted-forward", "predicted-backward", "predicted-optimizer-step",
    }  # fmt: skip
    latency_only = set(collections(drawing.draw([simulate(program, latency=0.5)])))
    assert {"predicted-message", "predicted-receive"} < latency_only
    assert "predicted-all-reduce" not in latency_only


def test_colours_are_those_of_the_design():
    found = collections(drawing.draw([simulate(Plan(pp=2, dp=2, microbatches=4).compile(layers=2), Costs())]))
    faces = {gid: to_hex(c.get_facecolor()[0]) for gid, c in found.items() if gid != "predicted-receive"}
    assert faces == {
        "predicted-forward": "#0072b2", "predicted-backward": "#e69f00", "predicted-optimizer-step": "#009e73",
        "predicted-message": "#cc79a7", "predicted-all-reduce": "#cc79a7",
    }  # fmt: skip
    assert sum(found["predicted-backward"].get_edgecolor()[0][:3]) < 1  # a dark edge
    assert LOOKS["recompute"].face == "#56B4E9"


def test_every_kind_of_compute_has_its_own_look():
    trace = unit(pp=2, microbatches=4)
    swap = {Op.FORWARD: Op.RECOMPUTE, Op.BACKWARD: Op.BACKWARD_WEIGHT, Op.STEP: Op.BACKWARD_INPUT}
    rows = [tuple(ins._replace(op=swap.get(ins.op, ins.op)) for ins in trace.program.ranks[0]), trace.program.ranks[1]]
    figure = drawing.draw([replace(trace, program=replace(trace.program, ranks=tuple(rows)))])
    kinds = ["forward", "backward", "input gradient", "weight gradient", "recompute", "optimizer step"]
    assert legend(figure) == kinds
    faces = [to_hex(collections(figure)[f"predicted-{kind.replace(' ', '-')}"].get_facecolor()[0]) for kind in kinds]
    assert len(set(faces)) == len(kinds)


def test_micro_batch_numbers():
    figure = drawing.draw([unit(pp=2, microbatches=3)])
    numbers = [t for t in texts(figure) if t.isdigit()]
    assert Counter(numbers) == {"0": 4, "1": 4, "2": 4}
    inks = {to_hex(t.get_color()) for t in figure.axes[0].texts if t.get_text().isdigit()}
    assert inks == {"#fefefe", "#201400"}  # light on dark, dark on light
    assert not [t for t in texts(drawing.draw([unit(pp=2, microbatches=3)], numbers=False)) if t.isdigit()]
    assert not [t for t in texts(drawing.draw([unit(pp=2, microbatches=300)])) if t.isdigit()]  # no room
    both_digits = [t for t in texts(drawing.draw([unit(pp=2, microbatches=16)])) if t.isdigit()]
    assert Counter(both_digits) == dict.fromkeys(map(str, range(16)), 4)


def test_idle_time_stands_beside_each_lane():
    assert [t for t in texts(drawing.draw([unit(pp=4, microbatches=8)])) if "idle" in t] == ["27% idle"] * 4


# two traces -----------------------------------------------------------------------------------------------------------


def test_predicted_outlined_over_measured_filled():
    predicted, measured = pair(pp=2, microbatches=4)
    figure = drawing.draw([predicted, measured])
    found = collections(figure)
    for kind, colour in {"forward": "#0072b2", "backward": "#e69f00"}.items():
        outlined, filled = found[f"predicted-{kind}"], found[f"measured-{kind}"]
        assert to_hex(outlined.get_edgecolor()[0]) == to_hex(filled.get_facecolor()[0]) == colour
        assert outlined.get_facecolor()[0][3] < 0.3  # nearly the background
        assert filled.get_facecolor()[0][3] == 1
        for above, below in zip(corners(outlined), corners(filled), strict=True):
            assert above[3] < below[2] < above[2] + 1.5  # the same rank, one lane further down
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0 predicted", "measured", "rank 1 predicted", "measured"]
    assert legend(figure)[-2:] == ["predicted (outlined)", "measured (filled)"]
    assert figure.axes[0].get_xlim()[1] == pytest.approx(max(predicted.time, measured.time) * 1e3, rel=0.01)


def test_comparison_draws_the_prediction_first():
    predicted, measured = pair(pp=2, microbatches=4)
    comparison = measured.compare(predicted)
    labels = [t.get_text() for t in comparison.plot().axes[0].get_yticklabels()]
    assert labels[:2] == ["rank 0 predicted", "measured"]


# words ----------------------------------------------------------------------------------------------------------------


def test_legend_has_only_what_occurs():
    assert legend(drawing.draw([unit(pp=2, microbatches=4)])) == ["forward", "backward", "optimizer step"]
    with_messages = ["forward", "backward", "optimizer step", "message", "receive"]
    predicted, measured = pair(pp=2, microbatches=4)
    assert legend(drawing.draw([predicted])) == with_messages
    assert legend(drawing.draw([predicted, measured]))[:-2] == with_messages
    assert legend(drawing.draw([pair(dp=2)[0]])) == ["forward", "backward", "optimizer step", "all-reduce (AR)"]


def test_axes_name_their_units():
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in drawing.draw([unit(pp=2)]).axes]
    assert labels == [("", ""), ("time (units of the forward)", "activations")]
    for trace in pair(pp=2):
        labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in drawing.draw([trace]).axes]
        assert labels == [("", ""), ("time (ms)", "memory (MiB)")]
    (timeline,) = drawing.draw([unit(pp=2)], memory=False).axes
    assert timeline.get_xlabel() == "time (units of the forward)"


def test_a_header_has_two_lines_and_the_rest_stands_below():
    predicted, measured = pair(pp=2, microbatches=4)
    words = [text.get_text() for text in drawing.draw([predicted, measured]).texts]
    assert words[0] == predicted.program.name
    assert words[1].startswith(
        f"predicted → measured: time {predicted.time * 1e3:.1f} ms → {measured.time * 1e3:.1f} ms · "
        f"bubble {predicted.bubble_of_total():.1%} of total"
    )
    assert words[-1] == "predicted from round numbers"
    assert drawing.draw([predicted], title="My title").texts[0].get_text() == "My title"
    narrow = drawing.draw([predicted, measured], width=5, title="a long title " * 20)
    lines = [text.get_text() for text in narrow.texts]
    assert lines[0].endswith("…")
    below = " ".join(lines[2:])
    assert "a long title a long title" in below
    assert f"bubble {predicted.bubble_of_total():.1%} of total" in below
    heights = [text.get_window_extent().y0 for text in narrow.texts]
    legend_top = narrow.legends[0].get_window_extent().y1
    assert sum(height > legend_top for height in heights) == 2
    assert narrow.axes[-1].get_window_extent().y0 > max(heights[2:])


# chunks, directions, collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "layers", "names", "turns"),
    [
        ("pp=4 schedule=interleaved chunks=2 microbatches=4", 8, ["chunk 0", "chunk 1"], False),
        ("pp=2 schedule=interleaved chunks=2 microbatches=4", 8, ["chunk 0", "chunk 1"], False),
        ("pp=4 schedule=zb-v microbatches=4", 18, ["chunk 0", "chunk 1"], True),
        ("dp=2 pp=4 schedule=chimera microbatches=4", 4, ["down", "up"], False),
        ("pp=4 microbatches=4", 8, [], False),
        ("dp=2 zero=3", 4, [], False),
    ],
)
def test_shades_are_chunks_or_directions(plan, layers, names, turns):
    program = Plan.parse(plan).compile(layers=layers)
    shades = Shades(program)
    assert list(shades.names) == names
    stages = len(program.ranks) // program.replicas
    for rank, row in enumerate(program.ranks):
        for ins in row:
            if not names or labels.kind_of(ins) not in ("forward", "backward", "input gradient", "weight gradient"):
                assert shades.of(rank, ins) == 0
            elif names[0] == "down":  # the first half of the micro-batches goes down
                assert shades.of(rank, ins) == (ins.microbatch >= program.microbatches // 2)
            elif not turns:  # layers go round the ranks
                assert shades.of(rank, ins) == ins.layers[0] * len(names) * stages // layers // stages
            elif len(ins.layers) < 6:  # (the last rank runs both chunks forward as one)
                assert shades.of(rank, ins) == (ins.layers[0] >= 10)


def test_collectives_are_told_apart_and_labelled():
    trace = simulate(Plan.parse("dp=2 zero=3").compile(layers=4), Costs())
    figure = drawing.draw([trace])
    assert legend(figure)[3:] == ["reduce-scatter (RS)", "all-gather (AG)"]
    hatches = {collections(figure)[f"predicted-{kind}"].get_hatch() for kind in ("reduce-scatter", "all-gather")}
    assert len({look.hatch for look in LOOKS.values() if look.hatch}) == 6
    assert len(hatches) == 2
    words = texts(figure)
    assert {"AG 0", "AG 1", "AG 2", "AG 3", "RS 0:4"} <= {*words}
    assert {"0", "1", "2:4", "3", "0:4"} <= {*words}  # bars carry layers where every number would be 0
    norm = Instruction(Op.NORM, (0,), -1, 0, stream="group", group=(0, 1))
    assert labels.words_of(trace.program, norm, "first") == ("AR norm", "AR", "R")


@pytest.mark.parametrize(
    ("plan", "shown"),
    [
        ("dp=2 zero=3 microbatches=2", {"0 mb0", "0 mb1", "3 mb1", "4:6 mb0"}),  # layers run one by one
        ("dp=2 microbatches=4", {f"0:6 mb{k}" for k in range(4)}),  # whole models
        ("pp=2 dp=2 zero=3 microbatches=2", {"0 mb0", "1:3 mb1", "3 mb1", "4:6 mb0"}),
        ("pp=2 microbatches=2", {"0", "1"}),  # a stage is one bar
        ("pp=2 schedule=interleaved chunks=2 microbatches=2", {"0", "1"}),  # shades tell chunks apart
    ],
)
def test_bars_carry_layers_and_the_microbatch_where_a_number_says_too_little(plan, shown):
    program = Plan.parse(plan).compile(layers=6)
    layers = labels.by_layers(program)
    forwards = [ins for row in program.ranks for ins in row if ins.op is Op.FORWARD]
    assert shown <= {labels.words_of(program, ins, layers)[0] for ins in forwards}
    wide = drawing.draw([simulate(program)], width=40)
    assert shown <= {*texts(wide)}
    narrow = {*texts(drawing.draw([simulate(program)], width=4.5, memory=False))}
    shorter = {word for ins in forwards if len(word := labels.words_of(program, ins, layers)[-1]) == 1}
    assert shorter <= narrow
    assert not any("mb" in word for word in narrow)


def test_workers_and_servers_are_called_so():
    served = Plan.parse("dp=2 sync=ps").compile(layers=2)
    figure = simulate(served, latency=0.1).plot()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["worker 0", "worker 1", "server 0"]


def test_a_comparison_of_many_ranks_has_one_lane_a_rank_and_the_difference():
    predicted, measured = pair(pp=8, microbatches=4)
    figure = drawing.draw([predicted, measured])
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [f"rank {r}" for r in range(8)]
    found = collections(figure)
    compute = sum(e.instruction.stream == "compute" for e in measured.events)
    strips = {word: len(found[f"difference-{word}".replace(" ", "-")].get_paths()) for word, _ in DIFFERENCES}
    assert sum(strips.values()) == compute
    slower = [b.duration / a.duration for a, b in zip(predicted.events, measured.events, strict=True)
              if b.instruction.stream == "compute"]  # fmt: skip
    assert strips["much longer"] == sum(ratio > 1.25 for ratio in slower) > 0
    assert not [gid for gid in found if gid.startswith("predicted")]
    assert legend(figure)[-5:] == ["much shorter", "shorter", "as predicted", "longer", "much longer"]
    assert [t for t in texts(figure) if "busy +" in t]
    both = drawing.draw([predicted, measured], unfold=True)
    assert [t.get_text() for t in both.axes[0].get_yticklabels()][:2] == ["rank 0 predicted", "measured"]


def shown_texts(figure):
    """Every text on the sheet. Ticks outside the view exist, but are not drawn."""
    yield from figure.texts
    for legend in figure.legends:
        yield from legend.get_texts()
    for axes in figure.axes:
        yield from (text for text in axes.texts if not text.get_clip_on())  # numbers in bars are judged by their bars
        for axis in (axes.xaxis, axes.yaxis):
            yield axis.label
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def overlapping(figure):
    """Pairs of texts that meet, and texts that leave the sheet."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [text for text in shown_texts(figure) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-0.5)) for text in texts]
    cut = [
        (a, box)
        for a, box in boxes
        if not (box.x0 >= 0 <= box.y0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1)
    ]
    return cut + [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]


@pytest.mark.many(2)
@pytest.mark.parametrize("options", [{}, {"width": 5.0}, {"width": 16.0, "memory": False}])
@pytest.mark.parametrize("pm", [(1, 1), (8, 8), (40, 2)])
def test_no_text_meets_another_or_is_cut(pm, options):
    p, m = pm
    trace = replace(unit(pp=p, microbatches=m), note="a remark that is long enough to need a second line " * 3)
    assert overlapping(drawing.draw([trace], **options)) == []
    assert overlapping(drawing.draw(list(pair(pp=p, microbatches=m)), **options)) == []


@pytest.mark.parametrize("width", [5, 11])
def test_numbers_stay_inside_their_bars(width):
    for traces in ([unit(pp=4, microbatches=12)], list(pair(pp=4, microbatches=6))):
        figure = drawing.draw(traces, width=width)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        renderer = FigureCanvasAgg(figure).get_renderer()
        bars = [axes.transData.transform(path.vertices) for c in collections(figure).values() for path in c.get_paths()]
        bars = np.array([[*bar.min(0), *bar.max(0)] for bar in bars])
        for text in axes.texts:
            if text.get_text().isdigit():
                x0, y0, x1, y1 = text.get_window_extent(renderer).padded(-1).extents
                inside = (bars[:, 0] <= x0) & (bars[:, 1] <= y0) & (bars[:, 2] >= x1) & (bars[:, 3] >= y1)
                assert inside.any(), text


# memory ---------------------------------------------------------------------------------------------------------------


def test_memory_curves_are_the_traces():
    trace = unit(pp=4, microbatches=8)
    figure = drawing.draw([trace])
    curves = {line.get_label(): line for line in figure.axes[1].lines if not line.get_label().startswith("_")}
    assert list(curves) == [f"predicted rank {r}" for r in range(4)]
    for rank in range(4):
        line = curves[f"predicted rank {rank}"]
        assert line.get_drawstyle() == "steps-post"
        memory = trace.memory(rank)
        at = dict(zip(memory.times, memory.total, strict=True))
        drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert all(drawn[time] == total for time, total in at.items())
        assert max(line.get_xdata()) == trace.span[1]
    key = [t.get_text() for t in figure.axes[1].texts]
    assert key == ["peak", "rank 0  4", "rank 1  3", "rank 2  2", "rank 3  1"]
    assert len({line.get_color() for line in curves.values()}) == 4
    peaks = [
        line
        for line in figure.axes[1].lines
        if line.get_transform() == figure.axes[1].transData and len(line.get_xdata()) == 1
    ]
    assert [line.get_ydata()[0] for line in peaks] == [4, 3, 2, 1]
    assert len({line.get_marker() for line in peaks}) == 4


def test_many_ranks_have_one_curve_of_the_highest():
    trace = unit(pp=12, microbatches=20)
    axes = drawing.draw([trace]).axes[1]
    (line,) = (line for line in axes.lines if not line.get_label().startswith("_"))
    for moment, value in list(zip(line.get_xdata(), line.get_ydata(), strict=True))[:-1]:
        held = []
        for rank in range(12):
            memory = trace.memory(rank)
            k = np.searchsorted(memory.times, moment, "right") - 1
            held.append(memory.total[k] if k >= 0 else 0)
        assert value == max(held)
    assert [t.get_text() for t in axes.texts] == ["peak", "highest  12"]


# options --------------------------------------------------------------------------------------------------------------


def test_window_shows_only_a_part():
    trace = unit(pp=2, microbatches=4)
    figure = drawing.draw([trace], window=(3.5, 6))
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == (3.5, 6)
    drawn = corners(collections(figure)["predicted-backward"])
    ran = [e for e in trace.events if e.instruction.op is Op.BACKWARD and e.end >= 3.5 and e.start <= 6]
    assert len(drawn) == len(ran) < 8
    assert all(3.5 <= c[0] <= c[1] <= 6 for c in drawn)


@pytest.mark.parametrize(
    ("traces", "options", "says"),
    [
        ((), {}, "shows one trace or two .* but there are 0"),
        ("aaa", {}, "but there are 3"),
        ("ab", {}, "have 2 and 3 ranks; only traces of the same ranks"),
        ("am", {}, "one trace is in seconds, the other in units of the forward"),
        ("e", {}, "the predicted trace is empty"),
        ("n", {}, r"rank 1 instruction 1 `F 1 mb0` .* from 1.0 to 0.0: a duration must be"),
        ("i", {}, r"from nan to 1.0: a duration must be a finite number"),
        ("s", {}, "rank 0 of the predicted trace has .* instructions, but 0 starts"),
        ("a", {"window": (4, 4)}, "from below to"),
        ("a", {"width": 1}, "width=1: must be from 4 to 100 inches"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(traces, options, says):
    a = unit(pp=2)
    ends = [list(row) for row in a.ends]
    ends[1][1] = 0.0
    made = {
        "a": a, "b": unit(pp=3), "m": pair(pp=2)[1], "n": replace(a, ends=ends),
        "e": replace(a, program=replace(a.program, ranks=((), ())), starts=[[], []], ends=[[], []]),
        "i": replace(a, starts=[[float("nan"), *a.starts[0][1:]], a.starts[1]]),
        "s": replace(a, starts=[[], a.starts[1]]),
    }  # fmt: skip
    with pytest.raises(MiniparError, match=says):
        drawing.draw([made[name] for name in traces], **options)


# in a notebook --------------------------------------------------------------------------------------------------------


def test_a_figure_shows_itself_and_touches_nothing_global():
    before = dict(matplotlib.rcParams)
    figure = drawing.draw([unit(pp=2, microbatches=4)])
    data, metadata = figure._repr_mimebundle_()
    assert dict(matplotlib.rcParams) == before
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == metadata["image/png"]["alt"]
    assert "Predicted timeline of 2 ranks: time 15 · bubble 20.0% of total" in data["text/plain"]
    assert "rank 1 20%" in data["text/plain"]


def test_a_shown_figure_suits_light_and_dark_pages_and_is_twice_as_fine():
    figure = drawing.draw(list(pair(pp=2, microbatches=4)))
    data, about = figure._repr_mimebundle_()
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert image.width == 2 * about["image/png"]["width"]
    pixels = np.asarray(image.convert("RGBA")).astype(int)
    assert (pixels[:, :, 3] == 0).mean() > 0.4  # the page's own colour
    solid = pixels[pixels[:, :, 3] > 250][:, :3]
    grey = solid[np.ptp(solid, axis=1) < 8]
    assert 0x68 < np.median(grey) < 0x88  # ink that can be read on white and on black
    assert len(grey[grey.max(1) < 0x40]) < 0.02 * len(grey)  # (none of the words is left dark)
    assert to_hex(figure.texts[0].get_color()) == "#1a1a1a"  # what is saved to a file has white paper, as before
    assert to_hex(figure.get_facecolor()) == "#ffffff"


def test_matplotlib_loads_late_and_pyplot_never():
    code = (
        "import sys, minipar.trace.drawing as d; assert 'matplotlib' not in sys.modules; "
        "from minipar import Plan, simulate; t = simulate(Plan(pp=2).compile(layers=2)); "
        "d.text(t); assert 'matplotlib' not in sys.modules; "
        "t.plot(); assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# text -----------------------------------------------------------------------------------------------------------------


def test_text_picture():
    assert drawing.text(unit(pp=2, microbatches=3), width=40).splitlines() == [
        "rank 0  0011....aaaa22bbbb..cccc",
        "rank 1  ..00aaaa11bbbb22cccc....",
        "        0   2   4   6   8   10   units of the forward",
        "0-9 forward of that micro-batch; a-z",
        "backward (a = 0); # optimizer step; .",
        "idle",
        "predicted: time 12 · bubble 25.0% of",
        "total, 33.3% of ideal · peak memory 2",
        "activations (rank 0)",
    ]


def test_ranks_that_share_layers_say_where_they_are() -> None:
    trace = simulate(Plan.parse("tp=2 pp=2 microbatches=2").compile(layers=4), latency=0.1)
    named = [f"rank {rank} (pp {rank // 2}, tp {rank % 2})" for rank in range(4)]
    (lanes, *_) = trace.plot().axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == named
    inside = lanes.get_tightbbox()
    assert inside is not None
    assert inside.x0 >= 0, "a name sticks out of the picture"
    two = drawing.draw([trace, trace]).axes[0]
    assert [label.get_text() for label in two.get_yticklabels()][:2] == ["rank 0 first", "(pp 0, tp 0) second"]
    assert [line.partition("  ")[0] for line in drawing.text(trace).splitlines()[:4]] == named
    assert "rank 3 (pp 1, tp 1)" in labels.description([trace])
    assert labels.narrow("dp 1, pp 1, tp 1") == "dp1,pp1,tp1"
    plain = simulate(Plan(pp=2, dp=2, microbatches=2).compile(layers=4))
    assert labels.rank_name(plain.program, 3) == "rank 3"
    served = Plan.parse("dp=3 sync=ps").compile(layers=2)
    assert [labels.place(served, rank) for rank in range(4)] == [""] * 4
