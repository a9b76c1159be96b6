"""Two small readers of a program, written for the tests from the rule of execution alone, and a source of mutants.

    brute_force(program, costs)    start and end of every instruction: the least solution of the rule's inequalities
    judge(program)                 the ranks' lists run on symbols; "" if every gradient comes out right, or what is wrong
    mutations(program, seed, n)    n programs with a few random changes (swap, drop, duplicate, move, relabel)

None of them shares code or ideas with `minipar.simulator` and `minipar.verifier`, which they are there to check.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from minipar import Plan, Program
from minipar.costs.shapes import Shape
from minipar.program import (
    Group,
    Instruction,
    Op,
    Value,
    grad,
    grad_output,
    optimizer_state,
    output,
    param,
    saved,
)

# shapes --------------------------------------------------------------------------------------------------------------


def shape(layers: int, tied: Iterable[tuple[int, ...]] = (), frozen: Iterable[int] = (), size: int = 4) -> Shape:
    """A model with tied sets and frozen layers; a layer's own parameters come first, then one group per tied set."""
    fixed = set(frozen)
    own = tuple(Group((k,), (), size) if k in fixed else Group((k,), (size, size)) for k in range(layers))
    return Shape(layers, own + tuple(Group(tuple(held), (size,)) for held in tied), f"{layers} layers")


# time ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RandomCosts:
    """A cost for every single instruction, drawn from its name: whole eighths, so that sums are exact."""

    seed: int
    longest: int = 24

    def _draw(self, *name: object) -> float:
        return Random(f"{self.seed} {name}").randrange(self.longest + 1) / 8

    def compute(self, rank: int, ins: Instruction) -> float:
        return self._draw("compute", rank, str(ins), ins.step)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return self._draw("bandwidth", rank, str(ins), ins.step), self._draw("latency", rank, ins.peer)

    def collective(self, ins: Instruction) -> float:
        return self._draw("collective", str(ins), ins.step)

    def size(self, rank: int, value: Value) -> float:
        return 1.0


def brute_force(program: Program, costs) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every instruction of a program that can run.

    Every instruction starts at time 0 and is pushed later, again and again over the whole program, until nothing
    violates the rule any more.
    """
    rows = program.ranks
    sends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[int, int]]] = {}
    calls: dict[tuple[int, ...], list[dict[int, int]]] = {}
    awaits: list[list[list[int]]] = []  # per rank and instruction: the communications whose results it reads
    for rank, row in enumerate(rows):
        writer: dict[Value, int] = {}
        awaits.append([])
        for k, ins in enumerate(row):
            sources = [writer[v] for v in ins.reads if v in writer]
            awaits[rank].append([w for w in sources if row[w].op in (Op.RECV, Op.ALL_REDUCE)])
            writer |= dict.fromkeys(ins.writes, k)
            if ins.op is Op.SEND:
                sends.setdefault((rank, ins.peer), []).append((rank, k))
            elif ins.op is Op.RECV:
                receives.setdefault((ins.peer, rank), []).append((rank, k))
            elif ins.op is Op.ALL_REDUCE:
                turns = calls.setdefault(ins.group, [])
                mine = sum(rank in turn for turn in turns)
                if mine == len(turns):
                    turns.append({})
                turns[mine][rank] = k

    reached = [[0.0] * len(row) for row in rows]  # when the rank's loop gets to the instruction
    free = [[0.0] * len(row) for row in rows]  # when everything it waits for on its own rank is there
    starts = [[0.0] * len(row) for row in rows]
    ends = [[0.0] * len(row) for row in rows]
    changed = True
    while changed:
        before = ([*map(list, starts)], [*map(list, ends)])
        for rank, row in enumerate(rows):
            clock = 0.0
            for k, ins in enumerate(row):
                reached[rank][k] = clock
                clock = free[rank][k] = max([clock, *(ends[rank][w] for w in awaits[rank][k])])
                if ins.op not in (Op.SEND, Op.RECV, Op.ALL_REDUCE):
                    starts[rank][k] = clock
                    clock = ends[rank][k] = clock + costs.compute(rank, ins)
        for link, messages in sends.items():
            busy = 0.0
            for n, (rank, k) in enumerate(messages):
                occupied, delay = costs.transfer(rank, rows[rank][k])
                starts[rank][k] = max(free[rank][k], busy)
                busy = ends[rank][k] = starts[rank][k] + occupied
                target, place = receives[link][n]
                ends[target][place] = busy + delay
                posted = n - program.receives_ahead
                starts[target][place] = reached[target][receives[link][posted][1]] if posted >= 0 else 0.0
        for turns in calls.values():
            busy = 0.0
            for turn in turns:
                everyone = max([busy, *(free[rank][k] for rank, k in turn.items())])
                for rank, k in turn.items():
                    starts[rank][k] = max(free[rank][k], busy)
                    ends[rank][k] = everyone + costs.collective(rows[rank][k])
                busy = everyone + costs.collective(rows[rank][k])
        changed = before != (starts, ends)
    return starts, ends


# meaning -------------------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What the symbolic machine found wrong with a program."""


def judge(program: Program) -> str:
    """Nothing if running the program's lists gives exactly the gradients of the whole batch, or what goes wrong.

    Right means: the loss of every micro-batch is computed once, every update of every parameter uses every
    contribution (layer, replica, micro-batch, version of the parameters) once and nothing else, nothing is read while
    it is on its way, and in the end each rank holds what it held before.
    """
    try:
        _Machine(program).run()
    except Wrong as reason:
        return str(reason)
    return ""


@dataclass
class _Machine:
    """All ranks' memories, links and groups; a memory maps a value's name to the term that it holds."""

    program: Program
    terms: dict[tuple, int] = field(default_factory=dict)
    losses: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        ranks = range(len(self.program.ranks))
        self.memory: list[dict[Value, object]] = [{v: self.initial(v) for v in self.program.state[r]} for r in ranks]
        self.place = [0 for _ in ranks]
        # values that were received or reduced but not awaited: to (link, n) or (group, n)
        self.underway: list[dict[Value, tuple[tuple, int]]] = [{} for _ in ranks]
        self.links: dict[tuple[int, int], deque] = {}
        self.taken: Counter = Counter()
        self.turns: dict[tuple[tuple[int, ...], int], dict[int, tuple[tuple[int, ...], list[Counter]]]] = {}
        self.joined: Counter = Counter()
        self.expected: dict[tuple[int, int], Counter] = {}

    def term(self, *parts: object) -> int:
        """A number for a term: equal terms get equal numbers."""
        return self.terms.setdefault(parts, len(self.terms))

    @staticmethod
    def initial(value: Value) -> object:
        return Counter() if value.kind == "grad" else (value.kind, value.index, 0)

    # the mathematics of one layer

    def forward_term(self, layer: int, source: object, params: tuple, replica: int, i: int, step: int) -> int:
        result = self.term("forward", layer, source, params)
        if layer == self.program.layers - 1:
            result = self.term("loss", result, ("targets", replica, i, step))
        return result

    def saved_term(self, layer: int, source: object, params: tuple) -> int:
        return self.term("saved", layer, source, params)

    def params_of(self, layer: int, version: int) -> tuple:
        groups = self.program.groups_of_layer[layer]
        return tuple(("param", g, version if self.program.groups[g].trainable else 0) for g in groups)

    def right_contributions(self, step: int) -> dict[int, Counter]:
        """What one device would compute: for each group, its contributions from all rows of the step."""
        found: dict[int, Counter] = {g: Counter() for g in range(len(self.program.groups))}
        for replica in range(self.program.replicas):
            for i in range(self.program.microbatches):
                sources: list[object] = [("rows", replica, i, step)]
                for layer in range(self.program.layers):
                    params = self.params_of(layer, step)
                    sources.append(self.forward_term(layer, sources[-1], params, replica, i, step))
                self.losses[sources[-1]] -= 1  # the run must compute it once
                incoming = sources[-1]
                for layer in reversed(range(self.program.first_trainable, self.program.layers)):
                    params = self.params_of(layer, step)
                    kept = self.saved_term(layer, sources[layer], params)
                    back = self.term("backward", layer, kept, sources[layer], incoming, params)
                    incoming = self.term("input gradient", back)
                    for g in self.program.groups_of_layer[layer]:
                        found[g][self.term("weight gradient", g, back)] += 1
        return found

    # running

    def run(self) -> None:
        program = self.program
        right = [self.right_contributions(step) for step in range(program.steps)]
        self.expected = {(g, step): found[g] for step in range(program.steps) for g in found[step]} if (
            found := {step: right[step] for step in range(program.steps)}
        ) else {}
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(program.ranks):
                if self.place[rank] < len(row) and self.arrived(rank, row[self.place[rank]]):
                    self.execute(rank, row[self.place[rank]])
                    self.place[rank] += 1
                    moved = True
        for rank, row in enumerate(program.ranks):
            if self.place[rank] < len(row):
                raise Wrong(f"rank {rank} is stuck at `{row[self.place[rank]]}`")
        self.check_end()

    def check_end(self) -> None:
        program = self.program
        if any(self.losses.values()):
            raise Wrong("a loss is missing, doubled or not that of its rows")
        if any(self.links.values()):
            raise Wrong("a message was never received")
        if any(len(turn) < len(group) for (group, _), turn in self.turns.items()):
            raise Wrong("a collective was never joined by all its ranks")
        for rank, memory in enumerate(self.memory):
            for value, (source, n) in self.underway[rank].items():
                if not self.there(source, n):
                    raise Wrong(f"{value} never arrives at rank {rank}")
            held = memory.keys() | self.underway[rank].keys()
            if held != program.state[rank]:
                raise Wrong(f"rank {rank} ends with other values than it began with")
            for value in held:
                if value.kind == "grad" and (value in self.underway[rank] or memory[value]):
                    raise Wrong(f"{value} of rank {rank} holds contributions that no update used")
                trainable = program.groups[value.index].trainable
                if value.kind == "param" and memory[value] != ("param", value.index, program.steps * trainable):
                    raise Wrong(f"{value} of rank {rank} has seen the wrong number of updates")

    def there(self, source: tuple, n: int) -> bool:
        if source[0] == "link":
            return len(self.links.get(source[1:], ())) > 0 and self.taken[source] <= n
        return len(self.turns.get((source[1], n), ())) == len(source[1])

    def arrived(self, rank: int, ins: Instruction) -> bool:
        """Whether everything that the instruction reads is there; what was underway is put into memory."""
        underway = self.underway[rank]
        wanted = [v for v in ins.reads if v in underway]
        if not all(self.ready(*underway[v]) for v in wanted):
            return False
        for value in wanted:
            self.memory[rank][value] = self.fetch(rank, value, *underway.pop(value))
        return True

    def ready(self, source: tuple, n: int) -> bool:
        if source[0] == "link":
            return len(self.links.get(source[1:], ())) > n
        return len(self.turns[source[1], n]) == len(source[1])

    def fetch(self, rank: int, value: Value, source: tuple, n: int) -> object:
        if source[0] == "link":
            return self.links[source[1:]][n]
        turn = self.turns[source[1], n]
        groups = turn[rank][0]
        if any(other != groups for other, _ in turn.values()):
            raise Wrong(f"ranks {source[1]} sum gradients of different parameters")
        total: Counter = Counter()
        for _, sums in turn.values():
            total += sums[groups.index(value.index)]
        return total

    def execute(self, rank: int, ins: Instruction) -> None:
        memory, underway = self.memory[rank], self.underway[rank]
        for value in ins.reads:
            if value not in memory:
                raise Wrong(f"rank {rank} `{ins}` reads {value}, which is not there")
        for value in (*ins.writes, *ins.frees):
            if value in underway:
                raise Wrong(f"rank {rank} `{ins}` touches {value} while it is underway")
        if ins.op is Op.FORWARD:
            self.forward(rank, ins)
        elif ins.op is Op.BACKWARD:
            self.backward(rank, ins)
        elif ins.op is Op.STEP:
            self.update(rank, ins)
        elif ins.op is Op.SEND:
            self.links.setdefault((rank, ins.peer), deque()).append(memory[ins.reads[0]])
        elif ins.op is Op.RECV:
            source = ("link", ins.peer, rank)
            underway[ins.writes[0]] = (source, self.taken[source])
            self.taken[source] += 1
        else:
            self.reduce(rank, ins)
        for value in ins.frees:
            if value not in memory:
                raise Wrong(f"rank {rank} `{ins}` frees {value}, which is not there")
            del memory[value]

    def forward(self, rank: int, ins: Instruction) -> None:
        replica, i, step = self.program.replica(rank), ins.microbatch, ins.step
        inside: dict[Value, object] = {}
        for layer in sorted(ins.layers):
            source = self.take(rank, ins, output(layer - 1, i, step), inside) if layer else ("rows", replica, i, step)
            params = self.params(rank, ins, layer)
            result = self.forward_term(layer, source, params, replica, i, step)
            inside[output(layer, i, step)] = result
            inside[saved(layer, i, step)] = self.saved_term(layer, source, params)
            if layer == self.program.layers - 1:
                self.losses[result] += 1
        self.put(rank, ins, inside)

    def backward(self, rank: int, ins: Instruction) -> None:
        i, step, last = ins.microbatch, ins.step, self.program.layers - 1
        inside: dict[Value, object] = {}
        added: dict[Value, Counter] = {}
        for layer in sorted(ins.layers, reverse=True):
            kept = self.take(rank, ins, saved(layer, i, step), inside)
            source = self.take(rank, ins, output(layer - 1, i, step), inside) if layer else self.rows(rank, ins)
            given = output(layer, i, step) if layer == last else grad_output(layer, i, step)
            incoming = self.take(rank, ins, given, inside)
            back = self.term("backward", layer, kept, source, incoming, self.params(rank, ins, layer))
            inside[grad_output(layer - 1, i, step)] = self.term("input gradient", back)
            for g in self.program.groups_of_layer[layer]:
                if self.program.groups[g].trainable:
                    added.setdefault(grad(g), Counter())[self.term("weight gradient", g, back)] += 1
        for value, contributions in added.items():
            if value not in ins.writes:
                raise Wrong(f"rank {rank} `{ins}` loses its contribution to {value}")
            inside[value] = self.memory[rank].get(value, Counter()) + contributions
        self.put(rank, ins, inside)

    def rows(self, rank: int, ins: Instruction) -> tuple:
        return ("rows", self.program.replica(rank), ins.microbatch, ins.step)

    def update(self, rank: int, ins: Instruction) -> None:
        inside: dict[Value, object] = {}
        for g in ins.layers:
            name, _, version = self.take(rank, ins, param(g), {})
            if self.take(rank, ins, optimizer_state(g), {})[2] != version:
                raise Wrong(f"rank {rank} `{ins}` has an optimizer state of another version")
            if self.take(rank, ins, grad(g), {}) != self.expected.get((g, version)):
                raise Wrong(f"rank {rank} `{ins}` applies a wrong gradient of group {g} at version {version}")
            inside[param(g)] = (name, g, version + 1)
            inside[optimizer_state(g)] = ("optimizer_state", g, version + 1)
        self.put(rank, ins, inside)
        self.memory[rank].update({grad(g): Counter() for g in ins.layers})

    def reduce(self, rank: int, ins: Instruction) -> None:
        if rank not in ins.group or {*ins.reads} != {*ins.writes} != {grad(g) for g in ins.layers}:
            raise Wrong(f"rank {rank} `{ins}` is malformed")
        n = self.joined[rank, ins.group]
        self.joined[rank, ins.group] += 1
        mine = [self.memory[rank].pop(grad(g)) for g in ins.layers]
        self.turns.setdefault((ins.group, n), {})[rank] = (ins.layers, mine)
        self.underway[rank] |= dict.fromkeys(ins.writes, (("group", ins.group), n))

    def take(self, rank: int, ins: Instruction, value: Value, inside: dict[Value, object]):
        if value in inside:
            return inside[value]
        if value not in ins.reads:
            raise Wrong(f"rank {rank} `{ins}` needs {value}, but does not read it")
        return self.memory[rank][value]

    def params(self, rank: int, ins: Instruction, layer: int) -> tuple:
        return tuple(self.take(rank, ins, param(g), {}) for g in self.program.groups_of_layer[layer])

    def put(self, rank: int, ins: Instruction, inside: dict[Value, object]) -> None:
        for value in ins.writes:
            if value not in inside:
                raise Wrong(f"rank {rank} `{ins}` writes {value}, which it does not compute")
            self.memory[rank][value] = inside[value]
