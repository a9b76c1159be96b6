"""Time and memory of a training step as a pure function of numbers: `closed_form(numbers, model, machine)`.

    machine   what a device, its memory and its links can do        plain data: costs/hardware.py
    model     numbers of a transformer, or of a chain of layers     plain data: models/sizes.py
    numbers   a plan's numbers                                      plain data: plan_numbers.py

No program is made and nothing is simulated: one call takes a small part of a millisecond, so that a search can try
every plan.

Time. Each operator takes its operations / FLOP/s or its bytes / bandwidth, whichever is longer (a roofline). How close
a matrix product comes to the peak depends on its smallest dimension (`Efficiency`). Collectives of ranks in one node
use its links; those of ranks in several nodes are done inside the nodes and between them, by rings. The schedule's own
formula (`Form`, beside its generator) makes a step of this. Last come the sums of gradients, and the optimizer at
the speed of the memory.

Memory is that of the rank that needs most (rank_memory.py).

Ranks are counted so that tp is the fastest axis, then cp, ep, dp, and pp the slowest. So ranks that share a layer are
in one node if they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import ceil
from operator import mul
from typing import Any, NamedTuple

from minipar.costs.analytic import Division
from minipar.costs.hardware import Hardware
from minipar.costs.links import Line
from minipar.costs.stacks import STACKS, reached
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes, Transformer
from minipar.prediction.plan_numbers import (
    FLOAT,
    PRECISIONS,
    Chunk,
    PlanNumbers,
    copies_of,
    placement_of,
    split_of,
)
from minipar.prediction.rank_memory import KINDS, Part, fullest, of_kinds, parameters_of
from minipar.strategies.schedules.registry import Times, find
from minipar.strategies.segments import INSIDE

MESSAGE = 25 * 2**20  # bytes of a bucket of gradients
MASK = 1  # byte of a dropout mask's element
STATISTIC = 4  # bytes of a number that a norm or an attention row keeps


class Cost(NamedTuple):
    """What a plan costs.

    time        seconds of a step
    memory      bytes on the fullest rank
    seconds     where the time goes, by name: the parts add up to `time`
    bytes       what the fullest rank holds, by name: the parts add up to `memory`
    flops       operations of all ranks in a step, those that run again included
    model_flops operations of all ranks in a step, without those that run again
    host        bytes that the fullest rank keeps on the host
    """

    time: float
    memory: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    flops: float
    model_flops: float
    host: int = 0


class Work(NamedTuple):
    """What one block (or other layer), or several of them, take of one rank for one micro-batch.

    matrix, memory, sent   seconds of the forward: in matrix products, in other operators, in collectives of ranks that
                           share the layer
    back_matrix, back_memory, back_sent   the same of the backward
    weight                 the part of the backward that only the gradients of weights need
    summed                 the part of back_sent that sums over the ranks of tp: it can go on beside that of weights
    inner                  seconds of what runs forward again inside the layer: the core of attention, or operators
    again                  seconds of collectives when the layer runs forward again
    flops, inner_flops     operations of all ranks that share the layer, forward; a causal kernel does half of the pairs
    """

    matrix: float
    memory: float
    sent: float
    back_matrix: float
    back_memory: float
    back_sent: float
    weight: float
    summed: float
    inner: float
    again: float
    flops: float
    inner_flops: float

    @property
    def forward(self) -> float:
        """Seconds of the forward."""
        return self.matrix + self.memory + self.sent

    @property
    def backward(self) -> float:
        """Seconds of the backward, without what runs again."""
        return self.back_matrix + self.back_memory + self.back_sent


class Links(NamedTuple):
    """The ranks of one axis: how many there are, and how many of them are in one node."""

    ranks: int
    near: int


def links(machine: Hardware, ranks: int, stride: int) -> Links:
    """The links of an axis of `ranks` ranks, neighbours on which are `stride` ranks apart."""
    inside = max(1, min(ranks, machine.per_node // stride))
    # (An axis that fills no whole number of nodes has fewer of its ranks in each.)
    return Links(ranks, next(near for near in range(inside, 0, -1) if ranks % near == 0))


def wires(machine: Hardware) -> tuple[Line, Line]:
    """The links of a device inside its node, and to others, at what is reached of their bandwidth."""
    share = machine.rates
    return Line(machine.near_latency, machine.near * share.near), Line(machine.far_latency, machine.far * share.far)


def gather(machine: Hardware, axis: Links, size: float) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of `size` bytes in all: rings that go on inside nodes and between
    them at the same time.

    Where an axis has several ranks in each node, each of them has its own link to the other nodes, and its own part.
    """
    n, inside = axis
    if n == 1 or not size:
        return 0.0
    nodes, (near, far) = n // inside, wires(machine)
    around = near.ring(inside, size)
    if nodes == 1:
        return around
    return max(around, far.occupied(size * (nodes - 1) / nodes / inside)) + (nodes - 1) * far.latency


def exchange(machine: Hardware, axis: Links, size: float) -> float:
    """Seconds of an all-to-all in which each rank has `size` bytes: what goes to ranks of other nodes is slower."""
    n, inside = axis
    if n == 1:
        return 0.0
    near, far = wires(machine)
    within = near.occupied(size * (inside - 1) / n) + near.latency
    return max(within, far.occupied(size * (n - inside) / n) + far.latency) if n > inside else within


CASTS = {"fp8": 4, "mxfp8": 5, "nvfp4": 7}  # bytes read and written for each number that is made shorter
SHORT = 128  # tokens at which a row's attention reaches half of what long rows do
BACKWARD = 2.5  # operations of the backward of attention as one kernel, in forwards: it makes the scores again


class Kernels(NamedTuple):
    """How long operators take on one device, with numbers of `element` bytes.

    peak, wide   FLOP/s that large matrix products reach: those of blocks, and those of 16-bit numbers
    half         the smallest dimension of a product that reaches half of them
    flash        FLOP/s that attention as one kernel reaches
    casts        bytes moved for each number that is made shorter before a product
    routing      seconds of a mixture's layer
    """

    peak: float
    wide: float
    half: float
    flash: float
    bandwidth: float
    least: float
    element: int
    casts: int
    routing: float

    def product(self, m: float, n: float, k: float, count: float = 1, short: bool = False) -> float:
        """Seconds of `count` matrix products (m, k) x (k, n); `short`: of 8 or 4 bits, if the plan has any."""
        peak = self.peak if short else self.wide
        work = 2 * m * n * k * count / peak * (1 + self.half * peak / self.wide / min(m, n, k))
        return max(work, self.element * (m * k + k * n + m * n) * count / self.bandwidth, self.least)

    def stream(self, size: float) -> float:
        """Seconds of an operator that reads and writes `size` bytes."""
        return max(size / self.bandwidth, self.least) if size else 0.0


@lru_cache(256)
def kernels(machine: Hardware, precision: str) -> Kernels:
    """The kernels of a machine for a plan's numbers. Errors: PlanError for numbers that it has no units for."""
    share = machine.rates
    element, casts = PRECISIONS[precision].activation, CASTS.get(precision, 0)
    peak = wide = machine.flops if element < FLOAT else machine.flops32
    if casts:
        peak = share.narrow * (machine.flops4 if precision == "nvfp4" else machine.flops8)
        if not peak:
            raise PlanError(f"precision={precision}: {machine.name} has no units for such numbers; possible is bf16")
    return Kernels(
        peak * share.matmul, wide * share.matmul, share.half, wide * share.flash,
        machine.memory_bandwidth * share.memory, share.kernel, element, casts, share.routing,
    )  # fmt: skip


@lru_cache(4096)
def works(
    model: Sizes, machine: Hardware, precision: str, rows: float, division: Division, checkpoint: Any = 0
) -> tuple[Work, ...]:
    """The work on one rank of every layer of a chain, which cannot be shared; or of a transformer's embedding, one of
    its blocks, and of its head with the loss. A word of `segments.INSIDE` says what runs again inside of a block."""
    run = kernels(machine, precision)
    if isinstance(model, Transformer):
        embed, head = _ends(model, machine, run, rows, division)
        return embed, _block(model, machine, run, rows, division, checkpoint), head
    found = []
    for layer in model.chain:
        flops = layer.flops * rows
        matrix = flops / run.wide * (1 + run.half / min(layer.size, max(1.0, rows * layer.size))) if flops else 0.0
        memory = run.stream(run.element * layer.moved * rows)
        found.append(Work(matrix, memory, 0.0, 2 * matrix, 2 * memory, 0.0, matrix, 0.0, 0.0, 0.0, flops, 0.0))
    return tuple(found)


def _block(
    model: Transformer, machine: Hardware, run: Kernels, rows: float, division: Division, checkpoint: Any
) -> Work:
    tp, cp, ep = division.tp, division.cp, division.ep
    e, s, h, f = run.element, model.sequence, model.hidden, model.ffn
    tokens, mask = rows * s / cp / ep, MASK * model.dropout
    size = tokens * h
    outside = size / (tp if division.sequence else 1)  # numbers between the divided operators

    products = sum(run.product(tokens, b / (tp if cut else 1), a, short=True)
                   for a, b, cut in model.attention_matrices[:-1])  # fmt: skip
    products += run.product(tokens, h, model.mixed / tp, short=True)
    scores, local = tokens * s * model.heads / tp, rows / ep * model.heads / tp  # matrices of scores on this rank
    work = 2 * tokens * s * (model.queries + model.mixed) / tp * model.pairs
    softmax = softmax_back = 0.0
    if model.flash:  # half of the pairs; scores stay inside the kernel
        core = max((1 / 2 if division.even else 1 - 1 / cp / 2) * work / run.flash * (1 + SHORT / s), run.least)
        core_back = BACKWARD * core
    else:
        core = run.product(s / cp, s, model.head_dim, local) + run.product(s / cp, model.head_dim, s, local)
        core_back = 2 * core
        softmax = run.stream(scores * (4 * e + mask if mask else 2 * e))
        softmax_back = run.stream(scores * (5 * e + mask if mask else 3 * e))

    routed = tokens * model.top * model.capacity if model.experts else tokens
    queues = max(1.0, model.experts / ep) if model.experts else 1.0
    first = (2 if model.gated else 1) * f / tp
    between = e * routed * (first + f / tp) + 2 * e * tokens * model.queries / tp
    widths = h + model.mixed / tp  # of the inputs of matrices, for each token
    inner = routed * (h + f / tp)
    products += run.product(routed / queues, first, h, queues, True)
    products += run.product(routed / queues, h, f / tp, queues, True)
    if model.experts:
        products += run.product(tokens, model.experts, h)
    if model.shared:
        products += run.product(tokens, first / f * model.shared, h, 1, True)
        products += run.product(tokens, h, model.shared / tp, 1, True)
        between += e * tokens * (first / f + 1 / tp) * model.shared
        inner += tokens * (h + model.shared / tp)

    norms = run.stream(2 * e * outside) * 2
    sums = run.stream((3 * e + mask) * outside) * 2
    rotation = 0.0 if model.learned else run.stream(2 * e * tokens * (model.queries + model.keys) / tp)
    copies = run.stream(2 * e * routed * h) * 2 if model.experts else 0.0
    casts = run.stream(run.casts * (tokens * widths + inner))
    routing = run.routing * (model.experts > 0)
    memory = routing + norms + sums + run.stream(between) + rotation + copies + softmax + casts
    memory_back = (
        2 * routing + run.stream(3 * e * outside) * 4 + run.stream((2 * e + mask) * outside) * 2 * model.dropout
    )
    memory_back += run.stream(between + e * routed * first) + rotation + copies + softmax_back + casts

    part = 4 * gather(machine, links(machine, tp, 1), e * size)  # two sums of activations, each way
    kept = e * tokens * (model.latent + model.rope if model.latent else model.keys + model.values) / tp
    ring = _ring(machine, links(machine, cp, tp), kept, core + softmax)
    to_experts = 0.0
    if model.experts and ep > 1:  # a token is sent once to each rank that has some of its experts, by one of tp's ranks
        reached = ep * (1 - (1 - 1 / ep) ** model.top) * model.capacity
        to_experts = 2 * exchange(machine, links(machine, ep, tp * cp), e * tokens * reached * h / tp)
    sent = part + ring + to_experts

    matrix, flops = products + core, model.core_flops * rows
    done = flops / 2 if model.flash else flops  # (what the kernel computes)
    inner = inner_flops = 0.0
    if checkpoint == "selective":
        inner, inner_flops = core + softmax, done
    elif checkpoint == "operators":  # (sums over tp are kept, too: gathers run again)
        inner = memory + part / 2
        for k, (a, b, cut_here, cut_there) in enumerate(model.products):
            if k % 2:
                inner += run.product(tokens, b / (tp if cut_there else 1), a / (tp if cut_here else 1), 1, True)
                inner_flops += 2 * model.sequence * a * b * rows
    return Work(
        matrix, memory, sent, 2 * products + core_back, memory_back, sent + ring, products, part, inner, sent,
        model.block_flops * rows - flops + done, inner_flops,
    )  # fmt: skip


def _ring(machine: Hardware, axis: Links, size: float, core: float) -> float:
    """Seconds that ring attention waits: each rank passes its keys and values on while it works on those before."""
    n, inside = axis
    if n == 1:
        return 0.0
    return (n - 1) * max(0.0, sum(wires(machine)[inside < n].message(size)) - core / n)


def _ends(model: Transformer, machine: Hardware, run: Kernels, rows: float, division: Division) -> tuple[Work, Work]:
    e, h, v, tp, mask = run.element, model.hidden, model.vocabulary, division.tp, MASK * model.dropout
    tokens = rows * model.sequence / division.cp / division.ep
    size = tokens * h
    outside = size / (tp if division.sequence else 1)
    summed = 2 * gather(machine, links(machine, tp, 1), e * size)
    lookup = run.stream(2 * e * size) + run.stream((2 * e + mask) * outside) * model.dropout
    embed = Work(0.0, lookup, summed, 0.0, lookup, summed / 2, 0.0, 0.0, 0.0, summed, 0.0, 0.0)
    logits = tokens * v / tp
    product = run.product(tokens, v / tp, h)
    loss = run.stream((e + 3 * STATISTIC) * logits) + run.stream(2 * e * outside)
    loss_back = run.stream((e + 2 * STATISTIC) * logits) + run.stream(3 * e * outside)
    flops = model.head_flops * rows
    head = Work(product, loss, summed / 2, 2 * product, loss_back, summed, product, summed, 0.0, 0.0, flops, 0.0)
    return embed, head


class Stage(NamedTuple):
    """The layers of one rank of the pipeline, or of one of its chunks, added up, for one micro-batch.

    work                    seconds and operations of forward and backward
    again, extra            seconds and operations of what runs forward again
    parameters, experts     of this rank: those that all replicas have, and those of its experts
    saved                   bytes kept from forward to backward
    """

    layers: int
    work: Work
    again: float
    extra: float
    parameters: int
    experts: int
    saved: float

    @property
    def backward(self) -> float:
        """Seconds of the backward, with what runs again."""
        return self.work.backward + self.again


@lru_cache(8192)
def stages(n: PlanNumbers, model: Sizes, machine: Hardware) -> tuple[tuple[Stage, int], ...]:
    """The different ranks of a pipeline (`PlanNumbers.pipeline`) in order, and how many neighbours are alike."""
    given = model, machine, n.precision, n.rows, n.division, n.checkpoint
    kinds = {one.kind: one for one in of_kinds(n, model)}
    return tuple((_stage(*given, kind.chunks, one.parts, one.copies), kind.alike) for kind, one in kinds.items())


@lru_cache(8192)
def _stage(
    model: Sizes, machine: Hardware, precision: str, rows: float, division: Division, checkpoint: Any,
    chunks: tuple[Chunk, ...], parts: tuple[Part, ...], copies: int = 1,
) -> Stage:  # fmt: skip
    """Chunks of one rank for one micro-batch. Of stages with copies the rank has one of so many micro-batches each."""
    found = works(model, machine, precision, rows, division, checkpoint if checkpoint in INSIDE else 0)
    counts = [[0.0] * len(found), [0.0] * len(found)]
    for chunk, part in zip(chunks, parts, strict=True):
        for count, layers in zip(counts, (range(chunk.start, chunk.stop), part.again), strict=True):
            for layer in layers:
                kind = layer if isinstance(model, Chain) else (layer > 0) + (layer > model.layers)
                count[kind] += 1 / copies
    once, twice = (Work(*(sum(map(mul, count, column)) for column in zip(*found, strict=True))) for count in counts)
    return Stage(
        sum(chunk.stop - chunk.start for chunk in chunks), once,
        twice.matrix + twice.memory + twice.again + once.inner, twice.flops + once.inner_flops,
        *parameters_of(model, division, chunks), sum(part.held for part in parts),
    )  # fmt: skip


class Pace(NamedTuple):
    """Seconds of one micro-batch on some layers, and what of them the breakdown names.

    hidden   collectives of the backward that go on beside it; `times` are without them
    added    of float32 sums of gradients
    waits    for parameters, sums of gradients, and copies
    """

    times: Times
    hidden: float
    added: float
    waits: float


def _pace(numbers: PlanNumbers, machine: Hardware, stage: Stage, axes: Replicas) -> Pace:
    """One micro-batch on a stage, or on a rank with several. An unfused gradient is read, and its float32 sum is read
    and written."""
    n, added, share = numbers, 0.0, machine.rates
    fused = STACKS[n.software].fused
    hidden = min(stage.work.summed, stage.work.weight) * share.beside * fused
    if not fused:
        moved = (stage.parameters + stage.experts) * (n.bytes.gradient + 8)
        added = moved / kernels(machine, n.precision).bandwidth
    waits, second = _waits(n, machine, stage, axes), stage.work.weight + added
    first = stage.backward - hidden + added + waits - second
    return Pace(Times(stage.work.forward, first, second), hidden, added, waits)


@lru_cache(1024)
def as_run(model: Sizes, machine: Hardware, stack: str) -> tuple[Sizes, Hardware]:
    """A model as a device and a stack run it: without a kernel for its attention, this is several operators. And the
    machine with what the stack reaches of its peaks, if it does not say so itself."""
    if isinstance(model, Transformer) and model.flash:
        there = machine.flash and STACKS[stack].flash and (machine.flops4 or not model.sinks)
        model = model if there else replace(model, flash=False)
    if machine.efficiency is None:
        machine = replace(machine, efficiency=reached(machine.like or machine.name, stack))
    return model, machine


Ends = Callable[[Sequence[Times]], Sequence[float]]


def stage_times(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> tuple[Times, ...]:
    """The times of each stage. Those of a rank are `stages`, in which its chunks are added up."""
    n, axes, placement, copies = numbers, replicas_of(numbers, machine), placement_of(numbers), copies_of(numbers)
    after, given = list(accumulate(split_of(n, model))), (model, machine, n.precision, n.rows, n.division)
    found: dict[int, Times] = {}
    for kind, facts in {one.kind: one for one in of_kinds(n.pipeline, model)}.items():
        for c, (chunk, part) in enumerate(zip(kind.chunks, facts.parts, strict=True)):
            one = _stage(*given, n.checkpoint, (chunk,), (part,))
            summed = _over_copies(n, machine, one.parameters + one.experts) if copies > 1 else 0.0
            times = _pace(n, machine, one, axes).times._replace(copies=summed)
            for stage in (mine[c] for mine in placement[kind.first : kind.first + kind.alike]):
                found[stage] = times._replace(message=_message(n, model, machine, after[stage]))
    return tuple(found[stage] for stage in range(len(after)))


def closed_form(numbers: PlanNumbers, model: Sizes, machine: Hardware, replica: Ends | None = None) -> Cost:
    """Time and memory of a step. It does not check whether the plan fits a device, or whether its schedule can work
    with so many micro-batches: `minipar.estimate` does.

    replica   when each rank of a pipeline ends, from the times of its stages (replica.py), in place of the schedule's
              formula. The formula takes ranks that are alike; of others it takes the mean, and the slowest one's pace
    Errors: PlanError for a model that cannot be cut so, and for a schedule without formulas.
    """
    model, machine = as_run(model, machine, numbers.software)
    form = find(numbers.schedule).form
    if form is None and replica is None:
        raise PlanError(
            f"schedule={numbers.schedule}: has no closed form; possible is minipar.estimate, which simulates"
        )
    n, p, m = numbers, numbers.pp, numbers.microbatches
    kinds = stages(numbers.pipeline, model, machine)
    axes = replicas_of(numbers, machine)
    each = [_pace(numbers, machine, one, axes) for one, _ in kinds]
    slow = max(range(len(kinds)), key=lambda k: each[k].times.both)
    backward = each[slow].times.both - each[slow].times.forward
    sums = [_sums(numbers, machine, one, axes, backward) for one, _ in kinds]
    steps = [optimizer_seconds(numbers, machine, _share(numbers, one)) for one, _ in kinds]
    count = _updates(numbers)
    summed, step = count * max(sums), count * max(steps)

    even, messages = m * each[slow].times.both, 0.0
    if p > 1 and replica is not None:
        there = stage_times(numbers, model, machine)
        without_messages = [times._replace(message=0.0) for times in there]
        held_by = [k for k, (_, alike) in enumerate(kinds) for _ in range(alike)]
        free, whole = (
            [end + count * (sums[k] + steps[k]) for end, k in zip(replica(given), held_by, strict=True)]
            for given in (without_messages, there)
        )
        slow = held_by[max(range(p), key=whole.__getitem__)]  # (the rank that ends last)
        summed, step = count * sums[slow], count * steps[slow]
        even, messages = max(free) - summed - step, max(whole) - max(free)
    elif p > 1 and form is not None:
        mean = Times(*(sum(x * count for x, (_, count) in zip(column, kinds, strict=True)) / p
                       for column in zip(*(found.times for found in each), strict=True)))  # fmt: skip
        waited = (m // n.rounds - 1) * (each[slow].times.both - mean.both)  # (the slowest one sets the pace)
        sent = mean._replace(message=_message(numbers, model, machine))
        # Between rounds the pipeline is empty.
        even, sending = (n.rounds * (form(times, p, m // n.rounds, n.chunks) + waited) for times in (mean, sent))
        messages = sending - even
    if p > 1 and isinstance(model, Transformer) and model.tied:
        summed += _over_copies(n, machine, model.vocabulary / n.tp * model.hidden)
    pace, work, again = each[slow], kinds[slow][0].work, kinds[slow][0].again
    seconds = {
        "matrix products": m * (work.matrix + work.back_matrix),
        "other operators": m * (work.memory + work.back_memory + pace.added),
        "recomputation": m * again,
        "collectives of shared layers": m * (work.sent + work.back_sent - pace.hidden),
        "parameters and copies": m * pace.waits,
        "bubble": max(0.0, even - m * pace.times.both),
        "messages": messages,
        "gradient sums": summed,
        "optimizer": step,
    }
    held = fullest(numbers, model)
    flops = n.dp * m * sum(one.work.flops * count for one, count in kinds)
    extra = n.dp * m * sum(one.extra * count for one, count in kinds)
    time = sum(seconds.values())
    return Cost(
        time, held.total, {k: x for k, x in seconds.items() if x}, {kind: getattr(held, kind) for kind in KINDS},
        3 * flops + extra, 3 * flops, held.host,
    )  # fmt: skip


class Replicas(NamedTuple):
    """The ranks that have the same parameters: those of `all` axes but tp and pp, and those that have the same
    experts."""

    all: Links
    experts: Links


def replicas_of(numbers: PlanNumbers, machine: Hardware) -> Replicas:
    """The ranks over which gradients are summed. Ranks of cp have the same experts, those of ep do not."""
    n = numbers
    tokens, rows = links(machine, n.cp, n.tp), links(machine, n.dp, n.tp * n.cp * n.ep)
    return Replicas(links(machine, n.cp * n.ep * n.dp, n.tp), Links(tokens.ranks * rows.ranks, tokens.near * rows.near))


def _waits(numbers: PlanNumbers, machine: Hardware, stage: Stage, axes: Replicas) -> float:
    """Seconds for which a micro-batch waits for parameters, sums of gradients, and copies, beside its work."""
    n, each, share = numbers, numbers.bytes, machine.rates
    waits, size, layers = 0.0, stage.parameters + stage.experts, max(1, stage.layers)
    if n.zero == 3 and axes.all.ranks > 1:
        gathered = _gathered(machine, stage, axes, each.parameter, layers)
        summed = _gathered(machine, stage, axes, each.gradient, layers) if n.every else 0.0
        waits = gathered - share.beside * min(gathered, stage.work.forward)
        waits += gathered + summed - share.beside * min(gathered + summed, stage.backward)
    elif n.zero == 2 and n.every and axes.all.ranks > 1:
        summed = _gathered(machine, stage, axes, each.gradient, layers) * (n.microbatches - 1) / n.microbatches
        waits = summed - share.beside * min(summed, stage.backward) * n.overlap
    copied = 2 * stage.saved * ("activations" in n.offload) + 2 * each.parameter * size * ("parameters" in n.offload)
    copying = copied / machine.copies
    return waits + copying - share.beside * min(copying, stage.work.forward + stage.backward)


def _gathered(machine: Hardware, stage: Stage, axes: Replicas, size: int, parts: int) -> float:
    """Seconds of gathering, or of summing in shards, all parameters of a stage in so many parts. A parameter has `size`
    bytes."""
    found = gather(machine, axes.all, size * stage.parameters / parts)
    return parts * (found + gather(machine, axes.experts, size * stage.experts / parts))


def _sums(numbers: PlanNumbers, machine: Hardware, stage: Stage, axes: Replicas, beside: float) -> float:
    """Seconds after the last backward in which gradients are summed, and shards of parameters come back.

    beside   seconds of the last backward. With `overlap` sums go on beside it, all but the last bucket
    """
    n, each = numbers, numbers.bytes
    if axes.all.ranks == 1 or (n.zero == 3 and n.every):
        return 0.0
    half = _gathered(machine, stage, axes, each.gradient, 1)
    summed = half if n.zero else 2 * half
    if n.overlap:
        hidden = machine.rates.beside * min(summed, beside)
        summed = max(summed - hidden, summed * min(1.0, MESSAGE / max(1.0, stage.parameters * each.gradient)))
    return summed + (half * each.parameter / each.gradient if n.zero in (1, 2) else 0.0)


def _updates(numbers: PlanNumbers) -> int:
    """How many updates a step has: one, but in a schedule without flushes perhaps one for each micro-batch."""
    rules, m = find(numbers.schedule).asynchronous, numbers.microbatches
    if rules is None:
        return 1
    keys = {"microbatches": m, "in_flight": numbers.pp, "update_every": 1, **dict(numbers.options)}
    return m // (rules.promise(numbers.pp, keys).every or m)


def _over_copies(numbers: PlanNumbers, machine: Hardware, parameters: float) -> float:
    """Seconds of the sum of so many gradients over two ranks of the pipeline: of a tied embedding, or of stages that a
    schedule has twice."""
    n = numbers
    return 2 * gather(machine, links(machine, 2, n.tp * n.cp * n.ep * n.dp), n.bytes.gradient * parameters)


def optimizer_seconds(numbers: PlanNumbers, machine: Hardware, updated: int) -> float:
    """Seconds of the optimizer over so many parameters.

    It reads a gradient, a float32 parameter and two moments, and writes the last three, and the 16-bit parameter.
    Before it the norm reads the gradients, and after it they are set to 0. All this in float32.
    """
    each = numbers.bytes
    moved = updated * (4 * (4 + 3 + 2) + each.parameter * (each.parameter < 4))
    if "optimizer" in numbers.offload:
        copied = updated * (each.gradient + each.parameter) / machine.copies
        return copied + moved / (machine.host_memory_bandwidth / machine.per_node)
    return moved / kernels(machine, numbers.precision).bandwidth


def _share(numbers: PlanNumbers, stage: Stage) -> int:
    """How many parameters a rank updates: with ZeRO, its share."""
    n = numbers
    if not n.zero:
        return stage.parameters + stage.experts
    replicas = n.dp * n.cp * copies_of(n)
    return ceil(stage.parameters / (replicas * n.ep)) + ceil(stage.experts / replicas)


def _message(numbers: PlanNumbers, model: Sizes, machine: Hardware, layer: int = 0) -> float:
    """Seconds of a message between neighbours in the pipeline. Ranks of tp each send a part, and gather it.

    layer   the layers before the message; 0: the largest message of all
    """
    n, element = numbers, numbers.bytes.activation
    if isinstance(model, Transformer):
        size = element * n.rows * model.sequence / n.cp / n.ep * model.hidden
    else:
        size = element * n.rows * (model.chain[layer - 1].output if layer else max(one.output for one in model.chain))
    sent = sum(line(numbers, machine).message(size / n.tp))
    whole = 0.0 if n.sequence_parallel else gather(machine, links(machine, n.tp, 1), size)
    return sent + whole


def line(numbers: PlanNumbers, machine: Hardware) -> Line:
    """The link between neighbours in the pipeline."""
    return wires(machine)[2 * numbers.ranks // numbers.pp > machine.per_node]
