"""The order in which a device works on a chain of layers: a generator of (op, layer), judged as a program.

    F, B, R            forward; backward; forward again. Autograd keeps what it needs only of the last run before B
    STEP               the optimizer's update of one layer; layers without one are updated together, at the end
    GATHER, SCATTER    for a layer whose parameters are sharded: all-gather, and reduce-scatter of its gradient
    OFFLOAD, FETCH     what autograd keeps of a layer is copied to the host, and back

    def mine(layers):                                   F 0 | F 1 | B 1 | B 0 | STEP 0:2
        for l in range(layers): yield F, l              writes output(0), saved(0); output(1), saved(1)
        for l in reversed(range(layers)): yield B, l    frees them, the last ones first

What each instruction reads, writes and frees follows from the order: the last reader of a value frees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minipar.costs.recomputation import LayerCosts
from minipar.errors import MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import (
    Group,
    Instruction,
    Op,
    Part,
    Program,
    Value,
    buffer,
    grad,
    grad_output,
    grad_shard,
    host,
    optimizer_shard,
    optimizer_state,
    output,
    param,
    param_shard,
    saved,
)
from minipar.program.verify.verifier import verify
from minipar.trace import Trace
from minipar_course.exercises.kinds.verdict import Verdict, raised

F, B, R, STEP = Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE, Op.STEP
GATHER, SCATTER, OFFLOAD, FETCH = Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.OFFLOAD, Op.FETCH
NAMES = {F: "F", B: "B", R: "R", STEP: "STEP", GATHER: "GATHER", SCATTER: "SCATTER", OFFLOAD: "OFFLOAD", FETCH: "FETCH"}
MOST = 100  # instructions for each layer; if there are more, a loop does not end
MiB, ms = 2**20, 1e-3


@dataclass(frozen=True)
class Device:
    """What a chain of layers costs, in seconds and bytes: the costs of the programs that `program_of` makes.

    layers       times, outputs and what is saved, layer by layer
    parameters   bytes of each layer's parameters; gradients take as much
    optimizer    bytes of the optimizer's state for each byte of parameters
    ranks        devices over which parameters and states are sharded
    link         bytes a second to the host, and from it
    network      bytes a second between the ranks
    """

    layers: LayerCosts
    parameters: tuple[int, ...] = ()
    optimizer: float = 0.0
    ranks: int = 1
    link: float = math.inf
    network: float = math.inf

    def compute(self, rank: int, ins: Instruction) -> float:
        if ins.op is STEP:
            return 0.0
        times = self.layers.backward if ins.op is B else self.layers.forward
        return sum(times[layer] for layer in ins.layers)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return self.size(rank, saved(ins.layers[0], 0)) / self.link, 0.0

    def collective(self, ins: Instruction) -> float:
        n = len(ins.group)
        return sum(part.bytes for part in ins.parts) * (n - 1) / n / self.network

    def size(self, rank: int, value: Value) -> float:
        tables = {"output": self.layers.output, "saved": self.layers.saved, "grad_output": self.layers.gradient}
        if value.kind in tables:
            return tables[value.kind][value.index]
        whole = self.parameters[value.index] if self.parameters else 0
        part = whole / self.ranks if value.kind.endswith("shard") else whole
        return part * self.optimizer if value.kind.startswith("optimizer") else part


def program_of(order: Iterable[tuple[Op, int]], device: Device, name: str = "by hand") -> Program:
    """The program of an order, the same on all ranks of the device. It may be wrong: `verify` says what is wrong."""
    layers, sharded = len(device.layers.forward), device.ranks > 1
    kinds = (param_shard, optimizer_shard) if sharded else (param, optimizer_state)
    state = frozenset(kind(layer) for kind in kinds for layer in range(layers))
    sizes = device.parameters or (0,) * layers
    groups = tuple(Group((layer,), (sizes[layer],)) for layer in range(layers))
    drafts = [_draft(op, layer, device, groups) for op, layer in order]
    updated = {layer for ins in drafts if ins.op is STEP for layer in ins.layers}
    if rest := tuple(layer for layer in range(layers) if layer not in updated):
        drafts.append(_step(rest, sharded))
    ranks = (_with_frees(drafts, state, output(layers - 1, 0)),) * device.ranks
    mesh = (("dp", device.ranks), ("pp", 1))
    return Program(ranks, layers, 1, groups, mesh, (state,) * device.ranks, name=name)


def _draft(op: Op, layer: int, device: Device, groups: tuple[Group, ...]) -> Instruction:
    """One instruction, with everything that it could write; it frees nothing yet."""
    last, one = len(groups) - 1, (layer,)
    before = (output(layer - 1, 0),) if layer else ()
    kept, ranks = saved(layer, 0), tuple(range(device.ranks))
    if op is STEP:
        return _step(one, device.ranks > 1)
    if op is F or op is R:
        return Instruction(op, one, 0, 0, (*before, param(layer)), (output(layer, 0), kept))
    if op is B:
        arrived = output(layer, 0) if layer == last else grad_output(layer, 0)
        given = (grad_output(layer - 1, 0),) if layer else ()
        return Instruction(op, one, 0, 0, (kept, arrived, *before, param(layer)), (*given, grad(layer)))
    if op is OFFLOAD:
        return Instruction(op, one, 0, 0, (kept,), (host(kept),), (kept,), "to host")
    if op is FETCH:
        return Instruction(op, one, 0, 0, (host(kept),), (kept,), (), "from host")
    size, stream = sum(groups[layer].tensors), "group " + ",".join(map(str, ranks))
    if op is GATHER:
        reads, writes, frees = (param_shard(layer),), (param(layer),), ()
        return Instruction(op, one, -1, 0, reads, writes, frees, stream, -1, ranks, (Part(op, layer, size),))
    made = (grad_shard(layer), buffer(layer))
    parts = (Part(op, -1, size),)
    return Instruction(op, one, -1, 0, (grad(layer),), made, made[1:], stream, -1, ranks, parts)


def _step(layers: tuple[int, ...], sharded: bool) -> Instruction:
    of = (grad_shard, param_shard, optimizer_shard) if sharded else (grad, param, optimizer_state)
    gradients, params, states = (tuple(map(kind, layers)) for kind in of)
    return Instruction(STEP, layers, -1, 0, gradients + params + states, params + states)


def _with_frees(drafts: list[Instruction], state: frozenset[Value], loss: Value) -> tuple[Instruction, ...]:
    """Add the frees, from the end to the beginning: the last reader of a value frees it, and a forward that runs again
    does not keep it."""
    wanted, result = set(state), []
    for ins in reversed(drafts):
        writes = ins.writes
        if ins.op is F or ins.op is R:
            # (the loss is kept from the forward on)
            keeps = [v in wanted if v.kind == "saved" or ins.op is R else True for v in writes]
            writes = tuple(v for v, keep in zip(writes, keeps, strict=True) if keep and (ins.op is F or v != loss))
        wanted.difference_update(writes if ins.op is not STEP else ())
        frees = tuple(v for v in ins.reads if v not in wanted and v not in state and v not in ins.frees)
        wanted.update(ins.reads)
        result.append(ins._replace(writes=writes, frees=ins.frees + frees))
    return tuple(reversed(result))


# judging --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One size: the arguments of the function, the device, and the targets in seconds and bytes."""

    arguments: tuple[Any, ...]
    device: Device
    time: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Order:
    """A generator of (op, layer) that must give a program that can run, within the targets of every case.

    signature   how it is called, such as "mine(layers)"
    problem     says what else is wrong with a trace; "" if nothing
    hint        what to say about an order that takes too long
    """

    signature: str
    cases: tuple[Case, ...]
    problem: Callable[[Trace, Case], str] | None = None
    hint: str = ""

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", f"def {self.signature}: ...")
        traces = []
        for case in self.cases:
            verdict, trace = self._try(answer, case)
            if trace is None:
                return verdict
            traces.append(trace)
        first = traces[0]
        sizes = f" (and {len(traces) - 1} other sizes)" if len(traces) > 1 else ""
        peak = max(first.peak_memory())
        return Verdict(True, f"it can run: {_ms(first.time)}, at most {_mib(peak)}{sizes}")

    def _try(self, answer: Callable[..., Any], case: Case) -> tuple[Verdict, Trace | None]:
        name = self.signature.partition("(")[0]
        call = f"{name}({', '.join(_short(argument) for argument in case.arguments)})"
        layers = len(case.device.layers.forward)
        try:
            found = answer(*case.arguments)
            order = list(islice(found, MOST * layers + 1)) if isinstance(found, Iterable) else None
        except Exception as error:
            return raised(error, call), None
        if not order:
            what = f"gives {found!r}" if order is None else "yields nothing"
            return Verdict(False, f"{call} {what}", "it must yield pairs of an op and a layer: `yield F, 0`"), None
        if len(order) > MOST * layers:
            return Verdict(False, f"{call} yields more than {MOST * layers} pairs", "does a loop end?"), None
        for k, pair in enumerate(order):
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Op) and pair[0] in NAMES):
                known = ", ".join(NAMES.values())
                return Verdict(False, f"{call}: pair {k} is {pair!r}", f"a pair is (op, layer); ops are {known}"), None
            if isinstance(pair[1], bool) or not isinstance(pair[1], int) or not 0 <= pair[1] < layers:
                hint = f"layers count from 0 to {layers - 1}"
                return Verdict(False, f"{call}: pair {k} is ({NAMES[pair[0]]}, {pair[1]!r})", hint), None
        program = program_of(order, case.device)
        try:
            verify(program)
        except MiniparError as error:
            return Verdict(False, f"{call} cannot run: {error.reason}", _hint(order, layers), error.details), None
        trace = simulate(program, case.device)
        verdict = self._within(trace, case, call)
        return verdict, trace if verdict else None

    def _within(self, trace: Trace, case: Case, call: str) -> Verdict:
        peak = max(trace.peak_memory())
        if case.memory is not None and peak > case.memory * (1 + 1e-9):
            kinds = ", ".join(f"{kind} {_mib(size)}" for kind, size in trace.peak_by_kind(0).items() if size)
            reason = f"{call} can run, but needs {_mib(peak)}; the target is {_mib(case.memory)}"
            return Verdict(False, reason, f"most is held during `{_busiest(trace)}`: {kinds}")
        if case.time is not None and trace.time > case.time * (1 + 1e-9):
            reason = f"{call} can run, but takes {_ms(trace.time)}; the target is {_ms(case.time)}"
            return Verdict(False, reason, _lost(trace, self.hint or "could what it waits for begin earlier?"))
        text = self.problem(trace, case) if self.problem is not None else ""
        return Verdict(not text, f"{call} {text}")


def _hint(order: list[tuple[Op, int]], layers: int) -> str:
    """What the list lacks, whatever its order is; general advice if it lacks nothing."""
    for op in (F, B):
        count = [sum(pair == (op, layer) for pair in order) for layer in range(layers)]
        for layer, times in enumerate(count):
            if times != 1:
                again = "; to run it again is R" if op is F and times else ""
                return f"({NAMES[op]}, {layer}) comes {times} times; every layer needs it once{again}"
    for layer in range(layers):
        out, back = order.count((OFFLOAD, layer)), order.count((FETCH, layer))
        if out != back:
            return f"layer {layer} goes to the host {out} times, and comes back {back} times"
    return "read the line that is marked: what does it need, and who should have made it before?"


def _busiest(trace: Trace) -> str:
    """The compute instruction during which most is held."""
    curve = trace.memory(0)
    when = curve.times[max(range(len(curve.total)), key=curve.total.__getitem__)]
    row, starts = trace.program.ranks[0], trace.starts[0]
    begun = [ins for ins, start in zip(row, starts, strict=True) if ins.stream == "compute" and start <= when + 1e-12]
    return str(begun[-1]) if begun else "the first instruction"


def _lost(trace: Trace, hint: str) -> str:
    """What takes time besides the necessary forwards and backwards."""
    row, starts, ends = trace.program.ranks[0], trace.starts[0], trace.ends[0]
    again = sum(e - s for ins, s, e in zip(row, starts, ends, strict=True) if ins.op is R)
    words = [f"{_ms(again)} are forwards that run again"] if again else []
    longest, before, end = 0.0, "", trace.span[0]
    for ins, s, e in zip(row, starts, ends, strict=True):
        if ins.stream == "compute":
            if s - end > longest:
                longest, before = s - end, str(ins)
            end = e
    if longest > 1e-12:
        words.append(f"the longest wait is {_ms(longest)}, before `{before}`")
    return "; ".join([*words, hint])


def _ms(seconds: float) -> str:
    return f"{seconds / ms:g} ms"


def _mib(size: float) -> str:
    return f"{size / MiB:g} MiB"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:36] + " ..."
