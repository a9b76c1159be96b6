"""Pictures of ideas, drawn by code as SVG: who sends what to whom, and who holds what. They need no torch.

    ring(4)     zero(4, stage=2)     server(3, servers=1)     memory_tiers()
    mesh(dp=2, tp=4)     matmul_forms()     decision_chart()

Each returns a `Diagram`. A notebook shows it by itself, in the colours of a light or a dark screen. `.text` says the
same in words, for a reader who does not see the picture. `.svg` is a file of its own.
"""

from __future__ import annotations

import base64
import math
import textwrap
from html import escape
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program.mesh import Mesh

MOST = 16  # ranks in one picture
WIDTH = 88  # characters of a line, where the words stand in place of the picture
KINDS = (("parameters", 2), ("gradients", 2), ("optimizer states", 12))  # and their bytes for each parameter

_STYLE = """
.paper{fill:#ffffff}.ink{fill:#1a1a1a}.soft{fill:#5c5c5c}.line{stroke:#5c5c5c;fill:none;stroke-width:1.5}
.plain{fill:#f3f3f3;stroke:#5c5c5c}.blue{fill:#0072B2;stroke:#004a75}.orange{fill:#E69F00;stroke:#7a5300}
.green{fill:#009E73;stroke:#00664a}.pink{fill:#CC79A7;stroke:#8f3f6c}.on{fill:#fefefe}.dark{fill:#201400}
.away{fill:none;stroke:#8a8a8a;stroke-dasharray:3 3}.tip{fill:#5c5c5c}
@media (prefers-color-scheme:dark){.paper{fill:#161616}.ink{fill:#ececec}.soft,.tip{fill:#b4b4b4}
.line{stroke:#b4b4b4}.plain{fill:#2b2b2b;stroke:#9a9a9a}}
"""
_INK = {"plain": "ink", "blue": "on", "green": "on", "orange": "dark", "pink": "dark", "away": "soft", "": "ink"}


class Diagram(NamedTuple):
    """A picture: its SVG, and the same in words."""

    svg: str
    text: str

    def __repr__(self) -> str:
        return textwrap.fill(self.text, WIDTH, break_on_hyphens=False)

    def _repr_html_(self) -> str:
        """As an image, which a notebook shows even if it is not trusted yet."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.text)}" src="data:image/svg+xml;base64,{data}">'


class _Drawing:
    """Shapes, one after another. Lengths are pixels, from the upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height, self.parts = width, height, list[str]()

    def box(self, x: float, y: float, w: float, h: float, look: str, *lines: str, size: int = 13) -> None:
        """A rectangle with lines of text in its middle."""
        self.parts.append(f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>')
        for k, line in enumerate(lines):
            below = (k - (len(lines) - 1) / 2) * (size + 4) + size * 0.36
            self.write(x + w / 2, y + h / 2 + below, line, ink=_INK[look], size=size)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        ink: str = "ink",
        size: int = 13,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text class="{ink}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        length = math.hypot(to_x - x, to_y - y)
        dx, dy = (to_x - x) / length, (to_y - y) / length
        back_x, back_y = to_x - 9 * dx, to_y - 9 * dy
        corners = ((to_x, to_y), (back_x - 4 * dy, back_y + 4 * dx), (back_x + 4 * dy, back_y - 4 * dx))
        self.parts.append(f'<path class="line" d="M{x:.1f} {y:.1f}L{back_x:.1f} {back_y:.1f}"/>')
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self.parts.append(f'<polygon class="tip" points="{points}"/>')

    def done(self, title: str, text: str) -> Diagram:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(text)}" font-family="DejaVu Sans,Arial,sans-serif">'
        )
        paper = f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>'
        body = "\n".join((f"<title>{escape(title)}</title><style>{_STYLE}</style>", paper, *self.parts))
        return Diagram(f"{head}\n{body}\n</svg>", f"{title}. {text}")


def ring(ranks: int = 4) -> Diagram:
    """A ring of ranks, and the chunk that each sends in the first step of a ring all-reduce."""
    _within("ranks", ranks, 2)
    size = 150 + 26 * ranks if ranks > 4 else 290
    radius, middle = size / 2 - 50, size / 2
    drawing = _Drawing(size + 260, size)
    places = [
        (middle + radius * math.sin(2 * math.pi * r / ranks), middle - radius * math.cos(2 * math.pi * r / ranks))
        for r in range(ranks)
    ]
    for r, (x, y) in enumerate(places):
        to_x, to_y = places[(r + 1) % ranks]
        length = math.hypot(to_x - x, to_y - y)
        part, aside = 30 / length, (6 if ranks == 2 else 0)
        begin = x + (to_x - x) * part + aside * (to_y - y) / length, y + (to_y - y) * part
        end = to_x - (to_x - x) * part + aside * (to_y - y) / length, to_y - (to_y - y) * part
        drawing.arrow(*begin, *end)
    for r, (x, y) in enumerate(places):
        drawing.box(x - 29, y - 16, 58, 32, "blue", f"rank {r}", size=12)
    drawing.write(size, 40, "In the first step", "soft", anchor="start", bold=True)
    first = [f"rank {r} sends chunk {(r - 1) % ranks} to rank {(r + 1) % ranks}" for r in range(ranks)]
    for r, line in enumerate(first):
        drawing.write(size, 64 + 21 * r, line, anchor="start", size=12)
    title = f"A ring of {ranks} ranks"
    rest = f"2 × {ranks - 1} such steps: each rank sends one chunk to its right neighbour, and gets one from its left."
    drawing.write(size, 74 + 21 * ranks, f"and so on, 2 × {ranks - 1} steps", "soft", anchor="start", size=12)
    return drawing.done(title, f"In the first step {', '.join(first)}. The all-reduce has {rest}")


def zero(ranks: int = 4, stage: int = 1) -> Diagram:
    """Who holds what with ZeRO's stage 0, 1, 2 or 3, in mixed precision: 2 + 2 + 12 bytes for each parameter."""
    _within("ranks", ranks, 2)
    if stage not in range(4):
        raise PlanError(f"stage={stage}: possible are 0, 1, 2, 3")
    wide, left, looks = 64 if ranks <= 8 else 44, 190, ("blue", "orange", "green")
    drawing = _Drawing(left + (wide + 14) * ranks + 20, 288)
    shared = KINDS[len(KINDS) - stage :]
    for r in range(ranks):
        drawing.write(left + (wide + 14) * r + wide / 2, 28, f"rank {r}", size=12, bold=True)
    top = 40.0
    for (name, size), look in zip(KINDS, looks, strict=True):
        high = 11.0 * size
        drawing.write(left - 16, top + high / 2 + 1, name, anchor="end")
        drawing.write(left - 16, top + high / 2 + 15, f"{size} bytes each", "soft", 11, "end")
        for r in range(ranks):
            x = left + (wide + 14) * r
            if (name, size) in shared:
                drawing.box(x, top, wide, high, "away")
                drawing.box(x, top + high * r / ranks, wide, high / ranks, look)
            else:
                drawing.box(x, top, wide, high, look)
        top += high + 10
    held = sum(size / ranks if (name, size) in shared else size for name, size in KINDS)
    total = f"{held:.3g} bytes for each parameter on every rank, of 16"
    drawing.write(16, top + 18, total, anchor="start")
    whole = [name for name, size in KINDS if (name, size) not in shared]
    parts = [name for name, _ in shared]
    words = f"Every rank holds all {', '.join(whole)}. " if whole else ""
    words += f"Of {', '.join(parts)} each rank holds only its own part, 1/{ranks}. " if parts else ""
    return drawing.done(f"ZeRO stage {stage} on {ranks} ranks", f"{words}That is {total}.")


def server(workers: int = 3, servers: int = 1) -> Diagram:
    """Workers that push gradients to servers, and pull parameters from them."""
    _within("workers", workers, 1)
    _within("servers", servers, 1)
    step = 130
    drawing = _Drawing(40 + step * max(workers, servers), 250)
    places = {n: [drawing.width * (k + 0.5) / n for k in range(n)] for n in (workers, servers)}
    for k, x in enumerate(places[workers]):
        for to in places[servers]:
            drawing.arrow(x - 8, 184, to - 8, 72)
            drawing.arrow(to + 8, 72, x + 8, 184)
        drawing.box(x - 50, 186, 100, 44, "blue", f"worker {k}", "own rows", size=12)
    part = "the parameters" if servers == 1 else f"1/{servers} of them"
    for k, x in enumerate(places[servers]):
        drawing.box(x - 58, 26, 116, 44, "green", f"server {k}", part, size=12)
    drawing.box(drawing.width / 2 - 112, 114, 224, 24, "plain", "push: gradients ↑   pull: parameters ↓", size=11)
    text = f"Each of {workers} workers has rows of its own. It pulls the parameters from "
    text += "the server and pushes" if servers == 1 else f"{servers} servers, which share them out, and pushes"
    return drawing.done("A parameter server", f"{text} gradients back. Workers do not know of each other.")


def memory_tiers() -> Diagram:
    """Device, host and disk: how much each holds, and how fast it is. (Round numbers of a machine of today.)"""
    tiers = (
        ("device memory", "80 GB", "2000 GB/s", "what is computed with now", "blue"),
        ("host memory", "1 TB", "30 GB/s to the device", "optimizer states, parameters, activations", "orange"),
        ("disk", "10 TB", "5 GB/s to the host", "what is needed once a step", "green"),
    )
    drawing = _Drawing(660, 270)
    for k, (name, size, speed, what, look) in enumerate(tiers):
        wide, top = 170 + 60 * k, 20 + 88 * k
        drawing.box(180 - wide / 2, top, wide, 50, look, name, size)
        drawing.write(360, top + 20, speed, anchor="start", bold=True)
        drawing.write(360, top + 40, what, "soft", 12, "start")
        if k:
            drawing.arrow(150, top - 36, 150, top - 3)
            drawing.arrow(210, top - 3, 210, top - 36)
            drawing.write(143, top - 13, "OFFLOAD", "soft", 11, "end")
            drawing.write(217, top - 13, "FETCH", "soft", 11, "start")
    rows = "; ".join(f"{name}: {size}, {speed}, holds {what}" for name, size, speed, what, _ in tiers)
    return drawing.done("Three tiers of memory", f"{rows}. OFFLOAD moves a value down, FETCH brings it back up.")


def mesh(**axes: int) -> Diagram:
    """The ranks of a mesh of one to three named axes, the slowest first: mesh(dp=2, tp=4).

    The last axis goes to the right, the one before it down, and the first of three from block to block.
    """
    if not 1 <= len(axes) <= 3:
        raise PlanError(f"a mesh of {len(axes)} axes: a picture has room for 1 to 3")
    ranks = Mesh(axes)
    _within("ranks", ranks.size, 1)
    names = (*[""] * (3 - len(axes)), *axes)
    blocks, rows, columns = (ranks.length(name) if name else 1 for name in names)
    wide, high = 62 * columns + 44, 46 * rows
    drawing = _Drawing(70 + blocks * (wide + 24), high + 98)
    for rank in range(ranks.size):
        at = ranks.coordinates(rank)
        block, row, column = (at.get(name, 0) for name in names)
        x, y = 74 + block * (wide + 24) + 62 * column, 62 + 46 * row
        drawing.box(x, y, 52, 34, ("blue", "green", "orange", "pink")[row % 4], f"{rank}")
    for block in range(blocks):
        left = 74 + block * (wide + 24)
        if names[0]:
            drawing.write(left + 31 * columns, 22, f"{names[0]}={block}", bold=True)
        drawing.arrow(left, 48, left + 62 * columns - 10, 48)
        drawing.write(left + 31 * columns - 5, 42, names[2], size=12)
        if names[1]:
            drawing.arrow(left - 14, 62, left - 14, 50 + high)
            drawing.write(left - 22, 66 + high / 2, names[1], size=12, anchor="end")
    groups = {name: f"{ranks.group(0, name)}".replace(",)", ")") for name in axes}
    words = "; ".join(f"along {name} rank 0 works with {group}" for name, group in groups.items())
    drawing.write(24, high + 88, "one colour: a group along " + names[2], "soft", 12, "start")
    title = "A mesh " + " × ".join(f"{name}={size}" for name, size in axes.items())
    return drawing.done(title, f"{ranks.size} ranks, numbered from 0; neighbours along {names[2]} come first. {words}.")


def matmul_forms() -> Diagram:
    """Y = X W on two ranks: how X and W may be cut, what form Y then has, and what must be sent."""
    ways = (
        ("rows of X", "S0", "R", "S0", "nothing forward; dW is a partial sum: all-reduce", "data parallel"),
        ("columns of W", "R", "S1", "S1", "nothing forward; dX is a partial sum: all-reduce", "column parallel"),
        ("columns of X, rows of W", "S1", "S0", "P", "Y is a partial sum: all-reduce", "row parallel"),
    )
    drawing = _Drawing(740, 404)
    drawing.write(
        24, 28, "Y = X W on two ranks: blue is on rank 0, orange on rank 1, green on both", "soft", 12, "start"
    )
    for k, (cut, x, w, y, sent, name) in enumerate(ways):
        top = 62 + 116 * k
        for at, form, letter in ((24, x, "X"), (134, w, "W"), (244, y, "Y")):
            _matrix(drawing, at, top, form)
            drawing.write(at + 35, top - 7, f"{letter}: {form}", size=12)
        drawing.write(114, top + 40, "×", size=18)
        drawing.write(224, top + 40, "=", size=18)
        drawing.write(342, top + 18, name, anchor="start", bold=True)
        drawing.write(342, top + 38, f"cut: {cut}", anchor="start", size=12)
        drawing.write(342, top + 58, sent, "soft", 12, "start")
    lines = "; ".join(f"{name} cuts {cut}: X {x}, W {w}, Y {y}, {sent}" for cut, x, w, y, sent, name in ways)
    return drawing.done("Three ways to cut Y = X W", f"{lines}. R is whole, S0 in rows, S1 in columns, P a sum.")


def _matrix(drawing: _Drawing, x: float, y: float, form: str) -> None:
    if form == "S0":
        drawing.box(x, y, 70, 35, "blue", "0")
        drawing.box(x, y + 35, 70, 35, "orange", "1")
    elif form == "S1":
        drawing.box(x, y, 35, 70, "blue", "0")
        drawing.box(x + 35, y, 35, 70, "orange", "1")
    elif form == "P":
        drawing.box(x + 8, y + 8, 62, 62, "orange")
        drawing.box(x, y, 56, 56, "blue", "0 + 1")
    else:
        drawing.box(x, y, 70, 70, "green", "0, 1")


def decision_chart() -> Diagram:
    """From memory, links and batch to a strategy, as questions; numbers in brackets are lessons."""
    questions = (
        ("Do parameters, gradients and states", "(16 bytes each) fit one device?"),
        ("Do the activations of the", "smallest micro-batch fit, too?"),
        ("Does a single layer fit one device?", ""),
        ("Are the links between the", "devices fast?"),
    )
    answers = (
        ("Data parallel, buckets, overlap (06)", "few rows a device: larger batch or fewer devices"),
        ("More micro-batches (04), recompute (03)", "then data parallel (06)"),
        ("ZeRO 1, 2, then 3 (08)", "and recompute (03) for activations"),
        ("Pipeline, 1F1B (10), stages of equal time (13)", "many micro-batches; if the batch is small, see 11"),
        ("Cut the layer: operator-level, experts (14, 15)", "inside a machine, where links are fastest"),
    )
    drawing = _Drawing(780, 464)

    def ask(k: int, x: float, y: float) -> None:
        drawing.box(x, y, 270, 52, "plain", *(line for line in questions[k] if line))

    def take(k: int, x: float, y: float, look: str) -> None:
        drawing.box(x, y, 340, 50, look, *answers[k], size=12)

    def go(x: float, y: float, to_x: float, to_y: float, word: str) -> None:
        drawing.arrow(x, y, to_x, to_y)
        beside = (8, (to_y - y) / 2 + 4) if x == to_x else ((to_x - x) / 2 - 4, min(to_y - y, 0) / 2 - 6)
        drawing.write(x + beside[0], y + beside[1], word, size=12, anchor="start" if x == to_x else "middle", bold=True)

    ask(0, 20, 20)
    go(290, 46, 396, 46, "yes")
    ask(1, 400, 20)
    go(440, 72, 440, 100, "yes")
    take(0, 400, 104, "blue")
    drawing.parts.append('<path class="line" d="M670 46L758 46L758 201L750 201"/>')
    drawing.arrow(758, 201, 743, 201)
    drawing.write(714, 40, "no", size=12, bold=True)
    take(1, 400, 176, "blue")
    go(155, 72, 155, 196, "no")
    ask(2, 20, 200)
    go(155, 252, 155, 296, "yes")
    go(40, 252, 40, 396, "no")
    ask(3, 70, 300)
    go(340, 314, 396, 290, "yes")
    take(2, 400, 262, "green")
    go(340, 340, 396, 358, "no")
    take(3, 400, 332, "orange")
    take(4, 20, 400, "pink")
    drawing.write(400, 424, "Nothing fits on all devices together? Offload to", "soft", 12, "start")
    drawing.write(400, 442, "the host or the disk (09). All of these combine (17).", "soft", 12, "start")
    text = (
        "Do parameters, gradients and states fit one device, and the activations of a small micro-batch, too? Then "
        "data parallel. Only the activations do not fit: more micro-batches and recomputation, then data parallel. The "
        "states do not fit: ZeRO where links are fast, a pipeline where they are slow. A single layer does not fit: "
        "operator-level parallelism or experts, inside a machine. Nothing fits on all devices together: offload."
    )
    return drawing.done("Which strategy?", text)


def _within(name: str, value: int, least: int) -> None:
    if not least <= value <= MOST:
        raise PlanError(f"{name}={value}: a picture has room for {least} to {MOST}")
