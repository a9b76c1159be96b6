"""Two small readers of programs, written for the tests from the rule of execution alone, and sources of programs.

    brute_force(program, costs)    start and end of every instruction: the least solution of the rule's inequalities
    judge(program)                 the lists run on symbols; "" if every gradient comes out right, or what is wrong
    mutations(program, seed, n)    n programs with a few random changes (swap, drop, double, move, relabel)
    programs()                     hypothesis: programs of every plan and model

None of them shares code or ideas with `minipar.simulator` and `minipar.verifier`, which they are there to check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from minipar import Plan, Program
from minipar.costs.shapes import Shape
from minipar.program import (
    COPIES,
    Group,
    Instruction,
    Local,
    Op,
    Value,
    grad,
    grad_output,
    grad_shard,
    norm,
    optimizer_shard,
    optimizer_state,
    output,
    param,
    param_shard,
    saved,
    saved_weight,
)
from minipar.strategies import find, schedules

# programs ------------------------------------------------------------------------------------------------------------

JOINED = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.NORM)
BUCKETS = ["none", "flat", 25, 12 / 2**20, "2x", "3x", "auto", "0,"]
COPIED = ("chimera", "dualpipe")  # two copies of every stage
BUILT_IN = [  # those with a flush after every step
    schedule.name
    for schedule in schedules()
    if schedule.generate.__module__.startswith("minipar.") and schedule.asynchronous is None
]

# Those of one chunk a rank, of whole backwards and whole sequences.
SIMPLE = [
    name
    for name in BUILT_IN
    if find(name).chunks == 1 and "slices" not in find(name).options and not Plan(schedule=name, microbatches=9).splits
]


def stages_of(schedule: str, pp: int) -> int:
    """How many stages a schedule has on so many ranks."""
    return 1 + max(map(max, Plan(pp=pp, schedule=schedule).placement()))


def enough(schedule: str, pp: int, microbatches: int) -> int:
    """The least number of micro-batches, from `microbatches` on, that a schedule takes."""
    multiple, two_each = -(-microbatches // pp) * pp, max(microbatches, 2 * pp)
    least = {"interleaved": multiple, "chimera": multiple, "zb-h2": max(microbatches, 2 * pp - 1)}
    least |= {"dualpipe": two_each + two_each % 2, "dualpipe-v": two_each}
    return least.get(schedule, microbatches)


def even(schedule: str, pp: int) -> int:
    """`pp` for most schedules; for those in both directions the next even number."""
    return pp + pp % 2 if schedule in COPIED else pp


def fitted(words: str, schedule: str, layers: int) -> str:
    """A plan in words, with a schedule: of no more stages than layers, split evenly if stages are not ranks."""
    keys = dict(word.split("=") for word in words.split()) | {"schedule": schedule}
    if find(schedule).chunks > 1:
        keys.pop("split", None)
        pp = int(keys.get("pp", 1))
        keys["pp"] = str(even(schedule, pp) if schedule in COPIED else min(pp, layers // find(schedule).chunks))
    keys["microbatches"] = str(enough(schedule, int(keys.get("pp", 1)), int(keys.get("microbatches", 1))))
    return " ".join(f"{key}={value}" for key, value in keys.items())


def shape(
    layers: int,
    tied: Iterable[tuple[int, ...]] = (),
    frozen: Iterable[int] = (),
    frozen_sets: Iterable = (),
    size: int = 4,
) -> Shape:
    """A model with tied sets and frozen layers; a layer's own parameters come first, then one group per tied set.

    A trainable layer has two tensors of `size` bytes, a trainable tied set has one.
    """
    fixed = set(frozen)
    own = tuple(Group((k,), (), size) if k in fixed else Group((k,), (size, size)) for k in range(layers))
    sets = tuple(Group(tuple(held), (size,)) for held in tied)
    return Shape(layers, own + sets + tuple(Group(tuple(held), (), size) for held in frozen_sets), f"{layers} layers")


def compiled(plan: str, model: Shape | int = 4, steps: int = 1) -> Program:
    """The program of a plan in words, not yet verified."""
    return Plan.parse(plan).compile(shape(model) if isinstance(model, int) else model, steps=steps, check=False)


@st.composite
def shapes(draw: st.DrawFn, layers: int, size: int = 4) -> Shape:
    """Models of so many layers: any of them frozen, some of them tied."""
    any_layers = st.sets(st.integers(0, layers - 1), max_size=layers)
    sets = [tuple(sorted(held)) for held in draw(st.lists(any_layers, max_size=2)) if len(held) > 1]
    frozen = draw(st.just(set()) | any_layers)
    return shape(layers, sets, frozen, (), size) if draw(st.integers(0, 4)) else shape(layers, (), frozen, sets, size)


@st.composite
def programs(draw: st.DrawFn, most_microbatches: int = 5, most_steps: int = 3) -> Program:
    """Programs of every built-in schedule, composed with everything that a plan can choose."""
    schedule = draw(st.sampled_from(BUILT_IN))
    pp, dp = even(schedule, draw(st.integers(1, 4))), draw(st.integers(1, 3))
    priority = draw(st.integers(0, 3)) == 0
    local = draw(st.sampled_from([0, 0, 1, 2])) if pp == 1 and not priority else 0
    count = stages_of(schedule, pp)
    split = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    zero = 0 if priority or local or schedule in COPIED else draw(st.sampled_from([0, 0, 1, 2, 3]))
    plan = Plan(
        dp=dp,
        pp=pp,
        schedule=schedule,
        microbatches=enough(schedule, pp, draw(st.integers(1, most_microbatches))),
        accumulate=draw(st.sampled_from([1, 1, 2])),
        split=split,
        # (12 bytes: two layers a bucket; 8: two pieces of a layer with 16)
        bucket=draw(st.sampled_from(["none", 25, 8 / 2**20] if priority else BUCKETS)),
        overlap="priority" if priority else draw(st.sampled_from(["none", "backward"])),
        zero=zero,
        reduce=draw(st.sampled_from(["microbatch", "step"])) if zero >= 2 else "microbatch",
        prefetch=draw(st.integers(0, 2)) if zero == 3 else 1,
        local_steps=local,
        clip=None if priority or local else draw(st.sampled_from([None, None, 1.0])),
    )
    return plan.compile(
        draw(shapes(sum(split), 8 if priority else 4)), steps=draw(st.integers(1, most_steps)), check=False
    )


# time ----------------------------------------------------------------------------------------------------------------


class RandomCosts:
    """A cost for every single instruction, drawn from its name: whole eighths, so that sums are exact."""

    def __init__(self, seed: int, longest: int = 24) -> None:
        self.seed = seed
        self.longest = longest
        self.drawn: dict[tuple, float] = {}

    def draw(self, *name: object) -> float:
        if name not in self.drawn:
            self.drawn[name] = Random(f"{self.seed} {name}").randrange(self.longest + 1) / 8
        return self.drawn[name]

    def compute(self, rank: int, ins: Instruction) -> float:
        return self.draw("compute", rank, str(ins), ins.step)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return self.draw("bandwidth", rank, str(ins), ins.step), self.draw("latency", rank, ins.peer)

    def collective(self, ins: Instruction) -> float:
        name = f"NORM over {ins.group}" if ins.op is Op.NORM else str(ins)  # (each rank has other groups in a norm)
        return self.draw("collective", name, ins.step)

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
    lanes: dict[tuple[int, str], list[int]] = {}  # copies, per rank and direction
    awaits: list[list[list[int]]] = []  # per rank and instruction: the communications whose results it reads
    for rank, row in enumerate(rows):
        writer: dict[Value, int] = {}
        awaits.append([])
        for k, ins in enumerate(row):
            sources = [writer[v] for v in ins.reads if v in writer]
            awaits[rank].append([w for w in sources if row[w].op in (Op.RECV, *JOINED, *COPIES)])
            writer |= dict.fromkeys(ins.writes, k)
            if ins.op is Op.SEND:
                sends.setdefault((rank, ins.peer), []).append((rank, k))
            elif ins.op is Op.RECV:
                receives.setdefault((ins.peer, rank), []).append((rank, k))
            elif ins.op in COPIES:
                lanes.setdefault((rank, ins.stream), []).append(k)
            elif ins.op in JOINED:
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
                if ins.op not in (Op.SEND, Op.RECV, *JOINED, *COPIES):
                    starts[rank][k] = clock
                    clock = ends[rank][k] = clock + costs.compute(rank, ins)
        for (rank, _), copies in lanes.items():
            busy = 0.0
            for k in copies:
                occupied, delay = costs.transfer(rank, rows[rank][k])
                starts[rank][k] = max(free[rank][k], busy)
                busy = starts[rank][k] + occupied
                ends[rank][k] = busy + delay
        for link, messages in sends.items():
            busy = 0.0
            for n, (rank, k) in enumerate(messages):
                occupied, delay = costs.transfer(rank, rows[rank][k])
                starts[rank][k] = max(free[rank][k], busy)
                busy = ends[rank][k] = starts[rank][k] + occupied
                target, place = receives[link][n]
                posted = n - program.receives_ahead
                starts[target][place] = reached[target][receives[link][posted][1]] if posted >= 0 else 0.0
                ends[target][place] = max(busy + delay, starts[target][place])
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


def _initial(value: Value) -> object:
    return Counter() if value.kind in ("grad", "grad_shard") else (value.kind, value.index, 0)


def _frozen(contributions: Counter) -> frozenset:
    return frozenset(contributions.items())


class _Machine:
    """All ranks' memories, links and groups; a memory maps a value's name to the term that it holds."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.terms: dict[tuple, int] = {}
        self.losses: Counter = Counter()
        # of replicas that train by themselves: updates between averages
        self.every = program.contract.steps if isinstance(program.contract, Local) and program.replicas > 1 else 0
        everyone = range(program.replicas)
        whole = [self.contributions(step, everyone) for step in range(program.steps)]
        self.right = dict.fromkeys(everyone, whole)  # what every replica's updates must use
        if self.every:
            self.losses.clear()
            self.right = {r: [self.contributions(step, [r]) for step in range(program.steps)] for r in everyone}
        self.memory = [{value: _initial(value) for value in held} for held in program.state]
        self.place = [0 for _ in program.ranks]
        # per rank: values received or reduced but not awaited, each with its link or group and its turn there
        self.underway: list[dict[Value, tuple[tuple, int]]] = [{} for _ in program.ranks]
        self.sent: dict[tuple[int, int], list[object]] = {}
        self.received: Counter = Counter()
        self.before: dict[tuple, Counter] = {}  # what a slice of a gradient held when more of it was on its way
        self.pieces: dict[tuple[int, int], list[tuple]] = {}  # of a gradient that is summed in pieces: their turns
        # per group and turn, per rank: what it is, and what the rank brings for each parameter group
        self.joined: dict[tuple[int, ...], list[dict[int, tuple[tuple, dict[int, object]]]]] = {}

    def term(self, *parts: object) -> int:
        """A number for a term: equal terms get equal numbers."""
        return self.terms.setdefault(parts, len(self.terms))

    # what one device would compute

    def params_at(self, g: int, step: int, replica: int) -> tuple:
        """The parameters that a step must use: those after as many updates, or the replica's own."""
        name = ("param", g, step if self.program.groups[g].trainable else 0)
        own = self.every and step % self.every and self.program.groups[g].trainable
        return (*name, f"of replica {replica}") if own else name

    def contributions(self, step: int, replicas: Iterable[int]) -> list[Counter]:
        """For each parameter group the contributions of all rows of a step. (Counts their losses as yet to come.)"""
        program = self.program
        found: list[Counter] = [Counter() for _ in program.groups]
        for replica in replicas:
            for i in range(program.microbatches):
                rows = ("rows", replica, i, step)
                params = [tuple(self.params_at(g, step, replica) for g in groups) for groups in program.groups_of_layer]
                sources: list[object] = [rows]
                for layer in range(program.layers):
                    sources.append(self.forward_term(layer, sources[-1], params[layer], rows))
                incoming = sources[-1]
                self.losses[incoming] -= 1
                for layer in reversed(range(program.first_trainable, program.layers)):
                    kept = self.term("saved", layer, sources[layer], params[layer])
                    back = self.term("backward", layer, kept, sources[layer], incoming, params[layer])
                    incoming = self.term("input gradient", back)
                    for g in program.groups_of_layer[layer]:
                        found[g][self.term("weight gradient", g, back)] += 1
        return found

    def forward_term(self, layer: int, source: object, params: tuple, rows: tuple) -> int:
        result = self.term("forward", layer, source, params)
        return self.term("loss", result, rows) if layer == self.program.layers - 1 else result

    # running

    def run(self) -> None:
        """One instruction of each rank in turn, until none can go on."""
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.program.ranks):
                if self.place[rank] < len(row) and self.await_reads(rank, row[self.place[rank]]):
                    self.execute(rank, row[self.place[rank]])
                    self.place[rank] += 1
                    moved = True
        for rank, row in enumerate(self.program.ranks):
            if self.place[rank] < len(row):
                raise Wrong(f"rank {rank} is stuck at `{row[self.place[rank]]}`")
        self.check_end()

    def check_end(self) -> None:
        program = self.program
        if any(self.losses.values()):
            raise Wrong("a loss is missing, doubled or not that of its rows")
        if any(len(messages) != self.received[link] for link, messages in self.sent.items()):
            raise Wrong("a message was never received")
        if any(len(turn) < len(group) for group, turns in self.joined.items() for turn in turns):
            raise Wrong("a collective was never joined by all its ranks")
        for rank, memory in enumerate(self.memory):
            for value, source in list(self.underway[rank].items()):
                if value.kind == "param" and value in program.state[rank]:  # the end waits for it
                    memory[value] = self.arrival(rank, value, *source)
                    del self.underway[rank][value]
            if self.underway[rank]:
                raise Wrong(f"rank {rank} ends before {next(iter(self.underway[rank]))} was awaited")
            if memory.keys() != program.state[rank]:
                raise Wrong(f"rank {rank} ends with other values than it began with")
            for value, term in memory.items():
                if value.kind in ("grad", "grad_shard") and term:
                    raise Wrong(f"{value} of rank {rank} holds contributions that no update used")
                updates = program.steps if program.groups[value.index].trainable else 0
                if value.kind in ("param", "param_shard") and term != (value.kind, value.index, updates):
                    raise Wrong(f"{value} of rank {rank} has seen the wrong number of updates")

    def await_reads(self, rank: int, ins: Instruction) -> bool:
        """Whether all that the instruction reads has arrived. What has is put into memory."""
        for value in ins.reads:
            if value in self.underway[rank]:
                found = self.arrival(rank, value, *self.underway[rank][value])
                if found is None:
                    return False
                self.memory[rank][value] = found
                del self.underway[rank][value]
        return True

    def arrival(self, rank: int, value: Value, source: tuple, turn: int) -> object:
        """The term that the n-th message of a link or the n-th sum of a group brings, or None if it is not there."""
        if source[0] == "pieces":
            found = [self.arrival(rank, value, where, n) for where, n, _, _ in source[1]]
            if None in found:
                return None
            covered = [byte for _, _, a, b in source[1] for byte in range(a, b)]
            if sorted(covered) != list(range(sum(self.program.groups[value.index].tensors))):
                raise Wrong(f"{value} of rank {rank} is not summed byte by byte")
            if any(other != found[0] for other in found):
                raise Wrong(f"pieces of {value} of rank {rank} hold different contributions")
            return found[0]
        if source[0] == "link":
            messages = self.sent.get(source[1], [])
            if len(messages) > turn and len(messages[turn]) <= source[2]:
                raise Wrong(f"a message of {source[1]} has less than its receiver expects")
            return messages[turn][source[2]] if len(messages) > turn else None
        joined = self.joined[source[1]][turn]
        if len(joined) < len(source[1]):
            return None
        what = next(iter(joined.values()))[0]
        if any(other != what for other, _ in joined.values()):
            raise Wrong(f"ranks {source[1]} sum gradients of different parameters")
        if value.kind == "norm":
            return ("norm", [found for _, brought in joined.values() for found in brought.items()])
        if value.kind == "param" and what[0] is Op.ALL_REDUCE:
            if len({brought[value.index][:3] for _, brought in joined.values()}) > 1:
                raise Wrong(f"ranks {source[1]} average {value} of different versions")
            if len({self.program.replica(r) for r in joined}) < self.program.replicas:
                raise Wrong(f"ranks {source[1]} average {value} without some replica")
            return next(iter(joined.values()))[1][value.index][:3]
        if value.kind == "param":
            versions = {brought[value.index][2] for _, brought in joined.values()}
            if len(versions) > 1:
                raise Wrong(f"ranks {source[1]} gather slices of {value} of different versions")
            return ("param", value.index, versions.pop())
        total = Counter(self.before.get((rank, value, *source, turn), ()))
        for _, brought in joined.values():
            total += brought[value.index]
        return total

    def execute(self, rank: int, ins: Instruction) -> None:
        memory, underway = self.memory[rank], self.underway[rank]
        for value in ins.reads:
            if value not in memory:
                raise Wrong(f"rank {rank} `{ins}` reads {value}, which is not there")
        for value in (*ins.writes, *ins.frees):
            if value in underway:
                raise Wrong(f"rank {rank} `{ins}` touches {value} while it is underway")
        if ins.op in (Op.FORWARD, Op.RECOMPUTE):
            self.forward(rank, ins)
        elif ins.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            self.backward(rank, ins)
        elif ins.op is Op.BACKWARD_WEIGHT:
            self.weights(rank, ins)
        elif ins.op is Op.STEP:
            self.update(rank, ins)
        elif ins.op is Op.SEND:
            self.sent.setdefault((rank, ins.peer), []).append([memory[value] for value in ins.reads])
        elif ins.op is Op.RECV:
            link = (ins.peer, rank)
            for k, value in enumerate(ins.writes):
                underway[value] = (("link", link, k), self.received[link])
            self.received[link] += 1
        elif ins.op is Op.ALL_REDUCE:
            self.reduce(rank, ins)
        else:
            self.join(rank, ins)
        for value in ins.frees:
            if value not in memory:
                raise Wrong(f"rank {rank} `{ins}` frees {value}, which is not there")
            del memory[value]

    def forward(self, rank: int, ins: Instruction) -> None:
        i, step, rows = ins.microbatch, ins.step, self.rows(rank, ins)
        inside: dict[Value, object] = {}
        for layer in sorted(ins.layers):
            source = self.take(rank, ins, output(layer - 1, i, step), inside) if layer else rows
            params = self.params(rank, ins, layer)
            result = self.forward_term(layer, source, params, rows)
            inside[output(layer, i, step)] = result
            inside[saved(layer, i, step)] = self.term("saved", layer, source, params)
            if layer == self.program.layers - 1 and ins.op is Op.FORWARD:
                self.losses[result] += 1
        self.put(rank, ins, inside)

    def backward(self, rank: int, ins: Instruction) -> None:
        i, step = ins.microbatch, ins.step
        inside: dict[Value, object] = {}
        added: dict[Value, Counter] = {}
        for layer in sorted(ins.layers, reverse=True):
            given = output if layer == self.program.layers - 1 else grad_output
            incoming = self.take(rank, ins, given(layer, i, step), inside)
            source = self.take(rank, ins, output(layer - 1, i, step), inside) if layer else self.rows(rank, ins)
            kept = self.take(rank, ins, saved(layer, i, step), inside)
            back = self.term("backward", layer, kept, source, incoming, self.params(rank, ins, layer))
            inside[grad_output(layer - 1, i, step)] = self.term("input gradient", back)
            if ins.op is Op.BACKWARD_INPUT:
                inside[saved_weight(layer, i, step)] = back
            else:
                self.contribute(layer, back, added)
        self.add(rank, ins, added, inside)

    def weights(self, rank: int, ins: Instruction) -> None:
        added: dict[Value, Counter] = {}
        for layer in ins.layers:
            self.params(rank, ins, layer)
            back = self.take(rank, ins, saved_weight(layer, ins.microbatch, ins.step), {})
            self.contribute(layer, back, added)
        self.add(rank, ins, added, {})

    def contribute(self, layer: int, back: object, added: dict[Value, Counter]) -> None:
        for g in self.program.groups_of_layer[layer]:
            if self.program.groups[g].trainable:
                added.setdefault(grad(g), Counter())[self.term("weight gradient", g, back)] += 1

    def add(self, rank: int, ins: Instruction, added: dict[Value, Counter], inside: dict[Value, object]) -> None:
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
            whole = optimizer_shard(g) not in self.program.state[rank]
            held = param_shard(g) if param_shard(g) in self.program.state[rank] else param(g)
            state, gradient = (optimizer_state(g), grad(g)) if whole else (optimizer_shard(g), grad_shard(g))
            name, _, version, *apart = self.take(rank, ins, held, {})
            if self.take(rank, ins, state, {})[2] != version:
                raise Wrong(f"rank {rank} `{ins}` has an optimizer state of another version")
            known = self.right[self.program.replica(rank)]
            right = known[version][g] if version < len(known) else None
            if apart and version % self.every == 0:
                raise Wrong(f"rank {rank} `{ins}` comes before an average that is due")
            if self.take(rank, ins, gradient, {}) != right:
                raise Wrong(f"rank {rank} `{ins}` applies a wrong gradient of group {g} at version {version}")
            if self.program.clip is not None:
                self.check_norm(rank, ins, version)
            inside[held] = (name if whole or held == param_shard(g) else "param, my slice", g, version + 1)
            if self.every:
                inside[held] = (*inside[held], f"of replica {self.program.replica(rank)}")
            inside[state] = (state.kind, g, version + 1)
            self.memory[rank][gradient] = Counter()
        self.put(rank, ins, inside)

    def check_norm(self, rank: int, ins: Instruction, version: int) -> None:
        """The norm counts every gradient, right and complete, on each rank that holds it or a slice of it."""
        program = self.program
        wanted: Counter = Counter()
        for held in program.state:
            groups = [v.index for v in held if v.kind in ("optimizer_state", "optimizer_shard")]
            wanted += Counter((g, _frozen(self.right[0][version][g])) for g in groups)
        _, found = self.take(rank, ins, norm(), {})
        if Counter((g, _frozen(gradient)) for g, gradient in found) != wanted:
            raise Wrong(f"rank {rank} `{ins}` scales gradients by a wrong norm")

    def reduce(self, rank: int, ins: Instruction) -> None:
        if ins.parts[0].start >= 0:
            return self.reduce_piece(rank, ins)
        if self.every and ins.reads and ins.reads[0].kind == "param":
            if rank not in ins.group or not {param(g) for g in ins.layers} == {*ins.reads} == {*ins.writes}:
                raise Wrong(f"rank {rank} `{ins}` is malformed")
            turn = self.turn(rank, ins, {g: self.memory[rank].pop(param(g)) for g in ins.layers})
            self.underway[rank] |= dict.fromkeys(ins.writes, (("group", ins.group), turn))
            return None
        gradients = {v for v in ins.reads if v.kind != "residual"}
        if rank not in ins.group or {*ins.reads} != {*ins.writes} or gradients != {grad(g) for g in ins.layers}:
            raise Wrong(f"rank {rank} `{ins}` is malformed")
        turn = self.turn(rank, ins, {g: self.memory[rank].pop(grad(g)) for g in ins.layers})
        self.underway[rank] |= dict.fromkeys(gradients, (("group", ins.group), turn))

    def reduce_piece(self, rank: int, ins: Instruction) -> None:
        """A part of one gradient, in bytes; the last one makes the whole of what the parts have become."""
        (g,), (part,) = ins.layers, ins.parts
        if rank not in ins.group or ins.reads != (grad(g),) or ins.writes not in ((), (grad(g),)):
            raise Wrong(f"rank {rank} `{ins}` is malformed")
        turn = self.turn(rank, ins, {g: self.memory[rank][grad(g)]})
        pieces = self.pieces.setdefault((rank, g), [])
        pieces.append((("group", ins.group), turn, part.start, part.start + part.bytes))
        if ins.writes:
            del self.memory[rank][grad(g)], self.pieces[rank, g]
            self.underway[rank][grad(g)] = (("pieces", pieces), 0)

    def turn(self, rank: int, ins: Instruction, brought: dict[int, object]) -> int:
        """Which of its group's collectives this rank joins."""
        turns = self.joined.setdefault(ins.group, [])
        turn = sum(rank in joined for joined in turns)
        if turn == len(turns):
            turns.append({})
        same = (ins.op,) if ins.op is Op.NORM else (ins.op, ins.layers, ins.parts, ins.reads[0].kind)
        turns[turn][rank] = (same, brought)
        return turn

    def join(self, rank: int, ins: Instruction) -> None:
        """The collectives of which a rank brings one thing and gets another."""
        memory, program = self.memory[rank], self.program
        if ins.op is Op.REDUCE_SCATTER:
            sources, made = [grad(g) for g in ins.layers], [grad_shard(g) for g in ins.layers]
        elif ins.op is Op.NORM:
            sharded = {g for g in ins.layers if optimizer_shard(g) in program.state[rank]}
            sources, made = [grad_shard(g) if g in sharded else grad(g) for g in ins.layers], [norm()]
        else:
            sources = [param_shard(g) if param_shard(g) in program.state[rank] else param(g) for g in ins.layers]
            made = [param(g) for g in ins.layers]
        if rank not in ins.group or not {*sources} <= {*ins.reads} or not {*made} <= {*ins.writes}:
            raise Wrong(f"rank {rank} `{ins}` is malformed")
        where = ("group", ins.group)
        turn = self.turn(rank, ins, {g: memory[v] for g, v in zip(ins.layers, sources, strict=True)})
        for value in made:
            if value.kind == "grad_shard" and value in ins.reads:
                self.before[(rank, value, *where, turn)] = memory[value]
            memory.pop(value, None)
            self.underway[rank][value] = (where, turn)
        memory.update({v: None for v in ins.writes if v.kind == "buffer"})

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


# mutants -------------------------------------------------------------------------------------------------------------


def mutations(program: Program, seed: int, n: int, most: int = 3) -> Iterator[tuple[str, Program]]:
    """`n` times what was changed, in words, and the program with these 1 to `most` random changes.

    A change is one of: swap two instructions of a rank (neighbours, as often as not), drop one, double one, move one,
    give one another micro-batch (its label only, or with the values it names) or another peer. In a program with
    several replicas a change is made, as often as not, in all of them, which keeps their collectives matched.
    """
    random = Random(f"{seed} {program.name}")
    for _ in range(n):
        mutant, words = program, []
        for _ in range(random.choice((1, 1, 1, *range(1, most + 1)))):
            word, mutant = _mutate(mutant, random)
            words.append(word)
        yield ", ".join(words), replace(mutant, name=f"{program.name} ({', '.join(words)})")


def _mutate(program: Program, random: Random) -> tuple[str, Program]:
    if not len(program):
        return "nothing left", program
    rank = random.choice([r for r, row in enumerate(program.ranks) if row])
    size = len(program.ranks[rank])
    a = random.randrange(size)
    b = random.choice((random.randrange(size), min(a + 1, size - 1)))
    kind = random.choice(("swap", "swap", "drop", "double", "move", "move", "label", "rename", "peer"))
    if kind == "peer":
        a = random.choice([k for k, ins in enumerate(program.ranks[rank]) if ins.peer >= 0] or [a])
    elif kind in ("label", "rename"):
        a = random.choice([k for k, ins in enumerate(program.ranks[rank]) if ins.microbatch >= 0] or [a])
    peer, i = random.randrange(-1, len(program.ranks) + 1), random.randrange(program.microbatches + 1)
    everywhere = program.replicas > 1 and random.random() < 0.5
    stages = len(program.ranks) // program.replicas
    for r in range(rank % stages, len(program.ranks), stages) if everywhere else [rank]:
        if max(a, b) < len(program.ranks[r]):
            program = program.with_rank(r, _changed(list(program.ranks[r]), kind, a, b, peer, i))
    where = f"rank {rank}{' and its like' if everywhere else ''}"
    detail = {"swap": f"{a}, {b}", "move": f"{a} to {b}", "double": f"{a} at {b}", "peer": f"{a} {peer}"}
    return f"{kind} {detail.get(kind, f'{a} mb{i}' if kind in ('label', 'rename') else a)} of {where}", program


def _changed(row: list[Instruction], kind: str, a: int, b: int, peer: int, i: int) -> list[Instruction]:
    ins = row[a]
    if kind == "swap":
        row[a], row[b] = row[b], row[a]
    elif kind == "drop":
        del row[a]
    elif kind == "double":
        row.insert(b, ins)
    elif kind == "move":
        row.insert(b, row.pop(a))
    elif kind == "peer":
        row[a] = ins._replace(peer=peer)
    elif kind == "label":
        row[a] = ins._replace(microbatch=i)
    else:
        row[a] = renamed(ins, i)
    return row


def renamed(ins: Instruction, i: int) -> Instruction:
    """The same work on another micro-batch: the label and all values of a micro-batch."""

    def values(old: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(v._replace(microbatch=i) if v.microbatch >= 0 else v for v in old)

    return ins._replace(microbatch=i, reads=values(ins.reads), writes=values(ins.writes), frees=values(ins.frees))
