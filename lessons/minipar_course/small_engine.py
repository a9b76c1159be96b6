"""The engine, small: pipelines, data parallel, ZeRO-1 and recomputation in plain torch and `torch.distributed`.

Lesson 18 writes it cell by cell; its cells are the parts of this file. A program is a list of tuples for each rank:

    ("F", i)  ("B", i)                    forward and backward of micro-batch i through the rank's stage
    ("F0", i)  ("R", i)                   a forward that keeps only its input; the same forward again, with a graph
    ("SEND", what, i, peer)               what: "output", to the next stage; "gradient", to the stage before
    ("RECV", what, i, peer)
    ("SUM", ranks)  ("STEP",)             gradients are summed over these ranks; the optimizer updates everything
    ("SCATTER", ranks)                    each of these ranks gets the sum of one slice of the gradients
    ("STEP", ranks)  ("GATHER", ranks)    the optimizer updates that slice of the weights; slices are collected

`minipar_course.tuples` turns such lists into a minipar program, and clock readings into a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Forward(NamedTuple):
    microbatch: int


class Backward(NamedTuple):
    microbatch: int


def gpipe(rank: int, stages: int, microbatches: int) -> Iterator[Any]:
    for i in range(microbatches):
        yield Forward(i)
    for i in range(microbatches):
        yield Backward(i)


def one_f_one_b(rank: int, stages: int, microbatches: int) -> Iterator[Any]:
    warm_up = min(stages - 1 - rank, microbatches)
    for i in range(warm_up):
        yield Forward(i)
    for i in range(warm_up, microbatches):
        yield Forward(i)
        yield Backward(i - warm_up)
    for i in range(microbatches - warm_up, microbatches):
        yield Backward(i)


Row = list[tuple[Any, ...]]  # what one rank does, in order


def compiled(schedule: Callable[..., Any], stages: int, microbatches: int) -> list[Row]:
    """One pipeline: for each rank, the schedule's actions with the messages that they need."""
    rows: list[Row] = []
    for rank in range(stages):
        row: Row = []
        for action in schedule(rank, stages, microbatches):
            i = action.microbatch
            forward = type(action).__name__ == "Forward"
            before, after = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            what = "output" if forward else "gradient"
            if 0 <= before < stages:
                row.append(("RECV", what, i, before))
            row.append(("F" if forward else "B", i))
            if 0 <= after < stages:
                row.append(("SEND", what, i, after))
        rows.append([*row, ("STEP",)])
    return rows


def data_parallel(rows: list[Row], replicas: int) -> list[Row]:
    """Several pipelines: ranks with the same stage sum their gradients before the STEP."""
    stages = len(rows)

    def moved(ins: tuple[Any, ...], replica: int) -> tuple[Any, ...]:
        return (*ins[:3], ins[3] + replica * stages) if ins[0] in ("SEND", "RECV") else ins

    found: list[Row] = []
    for replica in range(replicas):
        for stage, row in enumerate(rows):
            same_stage = tuple(range(stage, replicas * stages, stages))
            *work, step = [moved(ins, replica) for ins in row]
            found.append([*work, ("SUM", same_stage), step])
    return found


def zero_1(rows: list[Row]) -> list[Row]:
    """Each rank of a SUM keeps the states of one slice, updates it, and collects the others."""
    found: list[Row] = []
    for row in rows:
        new: Row = []
        for ins in row:
            if ins[0] == "SUM":
                ranks = ins[1]
                new.append(("SCATTER", ranks))
            elif ins[0] == "STEP":
                new += [("STEP", ranks), ("GATHER", ranks)]
            else:
                new.append(ins)
        found.append(new)
    return found


def recomputed(rows: list[Row]) -> list[Row]:
    """Forwards keep only their input, and run again while the gradient is on its way."""
    found: list[Row] = []
    for row in rows:
        work = [ins for ins in row if ins[0] in ("F", "B")]
        at_once = {ins[1] for ins, after in pairwise(work) if after == ("B", ins[1])}
        new, again = [], set(at_once)  # (what B follows at once is left as it is)
        for ins in row:
            i = ins[1] if ins[0] == "B" else ins[2] if ins[:2] == ("RECV", "gradient") else None
            if i is not None and i not in again:
                new.append(("R", i))
                again.add(i)
            new.append(("F0", ins[1]) if ins[0] == "F" and ins[1] not in at_once else ins)
        found.append(new)
    return found


class Stage:
    """A rank's layers. All weights are one line of numbers, and so are all gradients."""

    def __init__(self, model: nn.Sequential, k: int, stages: int, example: Tensor, make: Any):
        size, larger = divmod(len(model), stages)  # (the first stages have one layer more)
        first, end = (j * size + min(j, larger) for j in (k, k + 1))
        self.first, self.last = k == 0, k == stages - 1
        with torch.no_grad():  # one row tells the shapes of what comes in and of what goes out
            before, self.layers = model[:first], model[first:end]
            into = before(example[:1])
            self.shapes = {"output": into.shape[1:], "gradient": self.layers(into).shape[1:]}
        parameters = list(self.layers.parameters())
        length = sum(p.numel() for p in parameters)
        padding = -length % dist.get_world_size()  # (so that it can be cut into equal slices)
        self.weights = torch.zeros(length + padding, dtype=parameters[0].dtype)
        self.gradients = torch.zeros_like(self.weights)
        start = 0
        for p in parameters:
            here = slice(start, start + p.numel())
            self.weights[here] = p.data.flatten()
            p.data, p.grad = self.weights[here].view_as(p), self.gradients[here].view_as(p)
            start += p.numel()
        self.optimizer: Any = None
        self.make_optimizer, self.states = make, 0

    def slices(self, line: Tensor, ranks: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """All slices of a line, one for each of the ranks, and this rank's own."""
        found = list(line.chunk(len(ranks)))
        return found, found[ranks.index(dist.get_rank())]

    def step(self, ranks: Sequence[int]) -> None:
        """Update this rank's slice: with one rank, everything."""
        if self.optimizer is None:
            mine = nn.Parameter(self.slices(self.weights, ranks)[1])
            mine.grad = self.slices(self.gradients, ranks)[1]
            self.optimizer = self.make_optimizer([mine])
        self.optimizer.step()
        self.gradients.zero_()
        kept = [t for of_one in self.optimizer.state.values() for t in of_one.values()]
        self.states = sum(t.nbytes for t in kept if isinstance(t, Tensor))


class Held:
    """The bytes that a rank holds for backwards: each piece of memory once, no weights."""

    def __init__(self, stage: Stage):
        self.weights = stage.weights.untyped_storage().data_ptr()
        self.of: dict[int, dict[int, int]] = {}  # of a micro-batch: address -> bytes
        self.most = 0

    def keep(self, i: int, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() != self.weights:
            self.of.setdefault(i, {})[memory.data_ptr()] = memory.nbytes()
            self.most = max(self.most, sum(sum(each.values()) for each in self.of.values()))
        return tensor

    def by(self, i: int) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: self.keep(i, t), lambda t: t)


AHEAD = 2  # so many receives are posted before the walk reaches them


class Done(NamedTuple):
    """What a rank tells of a step."""

    loss: float  # its part of the mean over all rows
    gradients: Tensor  # as the STEP used them
    times: list[tuple[float, float]]  # when each tuple began and ended
    held: int  # the most bytes that were held for backwards
    states: int  # bytes of the optimizer's states


def interpret(
    row: Row, stage: Stage, xs: Sequence[Tensor], ys: Sequence[Tensor], rows: int, loss: Any,
    groups: Mapping[Any, Any], pace: Mapping[str, float],
) -> Done:  # fmt: skip
    """Walk one rank's list. xs, ys: its micro-batches; rows: of all replicas together."""
    live: dict[Any, Any] = {}  # what came, and what is to be sent
    inputs: dict[int, Tensor] = {}
    graphs: dict[int, tuple[Tensor, Tensor]] = {}
    arriving: dict[Any, tuple[Tensor, Any]] = {}
    sent: list[tuple[Any, Tensor]] = []
    times: list[tuple[float, float]] = []
    total = 0.0
    held, gradients = Held(stage), stage.gradients
    receives = iter([ins for ins in row if ins[0] == "RECV"])

    def post(count: int) -> None:
        for _, what, i, peer in islice(receives, count):
            buffer = torch.empty(len(xs[i]), *stage.shapes[what], dtype=stage.weights.dtype)
            message = dist.irecv(buffer, peer, tag=2 * i + (what == "gradient"))
            arriving[what, i] = buffer, message

    def forward(i: int, graph: bool) -> Tensor:
        if stage.first:
            inputs[i] = xs[i]
        elif i not in inputs:
            inputs[i] = held.keep(i, live.pop(("output", i)).requires_grad_())
        with torch.set_grad_enabled(graph), held.by(i):
            out = stage.layers(inputs[i])
            if stage.last:  # the step's loss is the mean over all rows of all replicas
                out = loss(out, ys[i]) * (len(ys[i]) / rows)
        if graph:
            graphs[i] = inputs.pop(i), out
        return out.detach()

    post(AHEAD)
    for ins in row:
        start = time.perf_counter()
        match ins:
            case ("RECV", what, i, _):
                live[what, i], message = arriving.pop((what, i))
                message.wait()
                post(1)
            case ("F" | "F0", i):
                out = forward(i, graph=ins[0] == "F")
                if stage.last:
                    total += out.item()
                else:
                    live["output", i] = out
            case ("R", i):
                forward(i, graph=True)
            case ("B", i):
                x, out = graphs.pop(i)
                out.backward(live.pop(("gradient", i), None))
                if not stage.first:
                    live["gradient", i] = x.grad
                del x, out, held.of[i]  # the graph goes, and with it what it held
            case ("SEND", what, i, peer):
                tensor = live.pop((what, i))
                message = dist.isend(tensor, peer, tag=2 * i + (what == "gradient"))
                sent.append((message, tensor))
            case ("SUM", ranks):
                dist.all_reduce(gradients, group=groups[ranks])
            case ("SCATTER", ranks):
                parts, mine = stage.slices(gradients, ranks)
                dist.reduce_scatter(mine, [part.clone() for part in parts], group=groups[ranks])
            case ("STEP", *ranks):
                used = gradients.clone()
                stage.step(ranks[0] if ranks else (dist.get_rank(),))
            case ("GATHER", ranks):
                parts, mine = stage.slices(stage.weights, ranks)
                dist.all_gather(parts, mine.clone(), group=groups[ranks])
            case _:
                raise ValueError(f"{ins} is no instruction")
        while time.perf_counter() < start + pace.get(ins[0], 0.0):
            time.sleep(1e-4)  # as slow as another device would be
        times.append((start, time.perf_counter()))
    for message, _ in sent:
        message.wait()
    return Done(total, used, times, held.most, stage.states)


def train(
    program: list[Row], stages: int, model: nn.Sequential, batches: Sequence[Any], loss: Any,
    optimizer: Any, pace: Mapping[str, float] | None = None,
) -> list[Done]:  # fmt: skip
    """What each rank calls, with the same arguments: one step for each batch."""
    rank, replicas = dist.get_rank(), len(program) // stages
    row = program[rank]
    microbatches = sum(ins[0] in ("F", "F0") for ins in row)
    used = {ins[1] for each in program for ins in each if ins[0] in ("SUM", "SCATTER")}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(used)}  # by all ranks
    stage = Stage(model, rank % stages, stages, batches[0][0], optimizer)

    def own(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.tensor_split(replicas)[rank // stages].tensor_split(microbatches)

    done = []
    for x, y in batches:
        done.append(interpret(row, stage, own(x), own(y), len(x), loss, groups, pace or {}))
    return done
