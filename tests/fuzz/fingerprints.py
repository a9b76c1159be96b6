"""What a program computes, found with numbers of 61 bits in place of tensors, to compare the verdicts of verify with.

    judge(program)    "" if the parameters after the steps are the right ones, or what goes wrong

Every rank walks its list as in the executor. A layer hashes what it is given, and a backward adds a hash to a gradient;
sums, means and updates are linear, modulo a prime. `reference` computes the same as one rank that has all layers, rows
and parameters. At the end the numbers must be equal, which those of different computations are with a probability of
about 2**-61. So there are no rules about instructions here: a program is wrong if its numbers are, if it uses what is
not there or still under way, or if ranks wait for each other for ever.

A parameter group has a number for each of its slices. A shard of it has them times a factor of its place; a part of an
output has its number plus one of its place. What changes a form is
read from `minipar.program.forms`.

Which parameters a micro-batch used, and which micro-batches went into an update, the reference takes from the run; that
both are as the contract promises is checked beside it. Where ranks decide their order as they run, that of the lists is
judged. A program whose servers have not decided yet is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from minipar import MiniparError
from minipar.program import MOVED, PARTNERS, Instruction, Op, Program, Staleness, Value
from minipar.program.edges import wiring
from minipar.program.forms import axis_within, changed_axis, collective_of, letters, needed, pairs, parts_of
from minipar.program.instructions import COMPUTE, piece_of, repartitions
from minipar.program.values import grad, grad_shard, home, norm, param, param_shard, tier

M = (1 << 61) - 1
PARAMS = ("param", "param_shard", "served")
GRADS = ("grad", "grad_shard", "pushed")
STATES = ("optimizer_state", "optimizer_shard", "served_state")
SLICES = ("param_shard", "grad_shard", "optimizer_shard", "served", "served_state")  # of these a rank has one slice

Numbers = tuple[Any, ...]  # of a parameter group, one for each slice; None: it is not here, or out of date
Place = tuple[int, ...]  # of a rank on each axis along which ranks share layers
Rows = tuple[int, int, int]  # replica, micro-batch, step
Values = dict[Value, Any]


def judge(program: Program) -> str:
    """Nothing if the lists give the parameters that one rank with everything would have, or what is wrong."""
    try:
        if program.chunks:  # a collective: it has no model
            program = replace(program, layers=0, edges=(), groups=(), mesh=(("dp", len(program.ranks)),), serving=None)
        if not program.undecided:
            Machine(program).run()
    except (MiniparError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fingerprint(*of: object) -> int:
    return hash(of) % M


def combined(*weighted: tuple[int, Numbers]) -> Numbers:
    """The sum of some numbers of a group, each with its weight."""
    columns = zip(*(numbers for _, numbers in weighted), strict=True)
    return tuple(None if None in x else sum(w * y for (w, _), y in zip(weighted, x, strict=True)) % M for x in columns)


class Model:
    """The layers and parameter groups of a program, the places of its ranks, and the numbers that they give."""

    def __init__(self, program: Program) -> None:
        self.program, self.last, groups = program, program.layers - 1, program.groups
        self.inputs, self.into, self.out, _ = wiring(program.edges, program.layers)
        self.groups_of = [[g for g, group in enumerate(groups) if k in group.layers] for k in range(program.layers)]
        sizes = [size for _, size in program.sharing_mesh]
        self.axes, self.places = range(len(sizes)), list(product(*map(range, sizes)))
        self.place = [tuple(k for k, _ in program.places(rank)) for rank in range(program.workers)]
        self.place += [(0,) * len(sizes)] * (len(program.ranks) - program.workers)
        own, first = (
            parts_of(program.inputs or "R", len(sizes)),
            self.cut(self.form(0, "reads")) if self.last >= 0 else [],
        )
        self.apart = [k for k in self.axes if own[k] != "R" and k not in first]  # ranks have rows of their own
        homes = [{home(value)[:2] for value in held} for held in program.state]
        pieces = [(g, piece_of(ins) or ()) for row in program.ranks for ins in row if ins.group for g in ins.layers]
        self.owners, self.ends, self.count = [], [], []  # of each group: ranks with slices, bytes where pieces end
        for g, group in enumerate(groups):
            sliced = {("optimizer_shard", g), ("param_shard", g), ("served_state", g)}
            ranks = [r for r, mine in enumerate(homes) if mine & sliced]
            self.owners.append({q: [r for r in ranks if self.place[r] == q] for q in self.places})
            self.ends.append(sorted({0, sum(group.tensors)}.union(*(piece for k, piece in pieces if k == g))))
            self.count.append(max(1, len(self.ends[g]) - 1, *map(len, self.owners[g].values())))

    def own(self, rank: int, value: Value) -> Sequence[int]:
        """The slices of a group that a rank has where it holds a value."""
        ranks = self.owners[value.index][self.place[rank]]
        sliced = home(value).kind in SLICES
        return [k for k, r in enumerate(ranks) if r == rank] if sliced else range(self.count[value.index])

    def rows(self, rows: Rows, place: Place) -> int:
        return fingerprint("rows", *rows, *(place[k] for k in self.apart))

    def carries(self, layer: int, i: int) -> bool:
        """Whether a layer keeps something of a slice of a sequence for the next one."""
        return layer in self.program.carries and (i + 1) % self.program.slice_count > 0

    def spread(self, g: int, letter: str) -> list[int]:
        """The axes along which ranks have shards of a group, "S", or make parts of its gradient, "P"."""
        return [k for k, part in zip(self.axes, self.program.groups[g].form.split("/"), strict=False) if part == letter]

    def shard(self, g: int, place: Place) -> int:
        axes = self.spread(g, "S")
        return fingerprint("shard", g, *((k, place[k]) for k in axes)) if axes else 1

    def numbers(self, g: int, place: Place, *of: object) -> Numbers:
        """What a rank has of a group's numbers that are made of something: its shard of each."""
        return tuple(fingerprint(*of, g, k) * self.shard(g, place) % M for k in range(self.count[g]))

    def used(self, g: int, numbers: Numbers, place: Place) -> Numbers:
        """The parameters that a layer computes with: the same on each rank that has a shard."""
        return tuple(x * pow(self.shard(g, place), -1, M) % M for x in numbers)

    def weights(self, g: int, back: int, place: Place) -> Numbers:
        """What a backward adds to a gradient."""
        return self.numbers(g, place, "weights", back, *(place[k] for k in self.spread(g, "P")))

    def form(self, layer: int, which: str) -> str:
        return needed(getattr(self.program.forms[layer], which)) if self.program.forms else ""

    def cut(self, form: str) -> list[int]:
        """The axes on which a value is not whole."""
        parts = [parts_of(letter, len(self.axes)) for letter in letters(form)]
        return [k for k in self.axes if any(of_tensor[k] != "R" for of_tensor in parts)]

    def mask(self, form: str, place: Place) -> int:
        """What is added to a value where a rank has a part of it."""
        axes = self.cut(form)
        return fingerprint(form, *(place[k] for k in axes)) if axes else 0


def updated(parts: Sequence[Numbers], *of: object) -> tuple[Numbers, ...]:
    """The parameters and the optimizer state after an update; `parts`: parameters, gradient and state before."""
    both = ("param", "state")
    return tuple(combined(*((fingerprint(what, n, *of), x) for n, x in enumerate(parts))) for what in both)


def mean(of_replicas: dict[int, Numbers], step: int) -> Numbers:
    """Of the parameters of replicas that train alone: weighted by the rows of a step."""
    return combined(*((fingerprint("weight", r, step), numbers) for r, numbers in of_replicas.items()))


def square(g: int, numbers: Numbers, slices: Sequence[int]) -> int:
    return sum(fingerprint("square", g, k, numbers[k]) for k in slices if numbers[k] is not None)


def reference(model: Model, versions: dict[Any, Any], taken: dict[Any, set[Rows]]) -> tuple[Callable[..., Any], ...]:
    """The same training on one rank. It computes what it is asked for, and what that needs: of an asynchronous program
    one micro-batch may use parameters of many versions.

    versions   (layer, rows, forward or not) -> those of its parameter groups
    taken      (group, update) -> the rows that are in it
    """
    program = model.program

    @cache
    def state(g: int, version: int, replica: int, place: Place) -> tuple[Numbers, ...]:
        """The parameters and the optimizer state after so many updates."""
        if version == 0:
            return model.numbers(g, place, "param"), model.numbers(g, place, "state")
        for earlier in range(version - 1):  # (from the first one on, for Python's stack)
            state(g, earlier, replica, place)
        scale = length(version - 1) if program.clip is not None and not program.serving else None

        def after(r: int) -> tuple[Numbers, ...]:
            param, optimizer = state(g, version - 1, r, place)
            return updated((param, total(g, version - 1, r, place), optimizer), version - 1, scale)

        every = program.local_steps
        if every and (version % every == 0 or version == program.steps):
            return mean({r: after(r)[0] for r in range(program.replicas)}, version - 1), after(replica)[1]
        return after(replica)

    def total(g: int, version: int, replica: int, place: Place) -> Numbers:
        """The gradient: the sum over the micro-batches of an update, and over the places that make parts of it."""
        summed, found = model.spread(g, "P"), (0,) * model.count[g]
        places = [q for q in model.places if all(k in summed or q[k] == place[k] for k in model.axes)]
        every = [rows for rows in taken[g, version] if rows[0] == replica or not program.local_steps]
        for layer, rows, q in product(program.groups[g].layers, every, places):
            found = combined((1, found), (1, model.weights(g, backward(layer, rows, q), q)))
        return found

    @cache
    def length(version: int) -> int:
        """The norm of all gradients, as often as ranks have them or slices of them."""
        found = 0
        for rank, value in ((r, v) for r, held in enumerate(program.state) for v in held if home(v).kind in STATES):
            numbers = total(value.index, version, program.replica(rank), model.place[rank])
            found += square(value.index, numbers, model.own(rank, value))
        return found % M

    def params(layer: int, rows: Rows, place: Place, there: bool) -> list[Numbers]:
        both = zip(model.groups_of[layer], versions[layer, rows, there], strict=True)
        return [model.used(g, state(g, version, rows[0], place)[0], place) for g, version in both]

    @cache
    def forward(layer: int, rows: Rows, place: Place) -> int:
        r, i, step = rows
        sources = [forward(a, rows, place) for a in model.inputs[layer]] if layer else [model.rows(rows, place)]
        carry = forward(layer, (r, i - 1, step), place) if model.carries(layer, i - 1) else None
        return fingerprint(layer, *sources, carry, *params(layer, rows, place, True))

    @cache
    def backward(layer: int, rows: Rows, place: Place) -> int:
        r, i, step = rows
        output = forward(layer, rows, place)
        incoming = [output, model.rows(rows, place)] if layer == model.last else []
        for e in model.out[layer]:
            above = next(b for b, into in enumerate(model.into) if e in into)
            incoming.append(fingerprint(backward(above, rows, place), model.into[above].index(e)))
        carried = fingerprint(backward(layer, (r, i + 1, step), place), "carry") if model.carries(layer, i) else None
        return fingerprint(layer, fingerprint(output, *incoming, carried), *params(layer, rows, place, False))

    return state, forward


class Pending(NamedTuple):
    """A value under way: what brings it, or None before it is there; and what must not change until then."""

    arrive: Callable[[], Any]
    source: Value | None = None


class Machine:
    """All ranks' memories, the messages between them, and which parameters and micro-batches were used."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, Model(program)
        self.versions: dict[Any, list[int]] = {}  # as `reference` takes them
        self.taken: dict[tuple[int, int], set[Rows]] = defaultdict(set)
        self.state, self.output = reference(self.model, self.versions, self.taken)
        self.memory = [{value: self.right(rank, value, 0) for value in held} for rank, held in enumerate(program.state)]
        self.sent: dict[Any, list[dict[Any, Any]]] = defaultdict(list)
        self.received: Counter[Any] = Counter()
        self.turns: dict[tuple[int, ...], list[dict[int, Any]]] = defaultdict(list)
        self.losses: Counter[int] = Counter()
        self.version: dict[int, int] = {}  # of a parameter's number
        self.since: dict[tuple[int, int], set[Rows]] = defaultdict(set)  # what went into a gradient since an update
        kinds: dict[Callable[[int, Instruction, Values], None], tuple[Op, ...]] = {
            self.forward: (Op.FORWARD, Op.RECOMPUTE), self.backward: (Op.BACKWARD, Op.BACKWARD_INPUT),
            self.backward_weight: (Op.BACKWARD_WEIGHT,), self.update: (Op.STEP, Op.APPLY), self.reduce: (Op.REDUCE,),
            self.send: tuple(PARTNERS), self.receive: tuple(PARTNERS.values()), self.copy: (Op.OFFLOAD, Op.FETCH),
            self.join: (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.NORM),
        }  # fmt: skip
        self.do = {op: done for done, ops in kinds.items() for op in ops}

    def right(self, rank: int, value: Value, updates: int) -> Any:
        """What a rank should have of a value of the state, after so many updates of its group."""
        program, kind, g = self.program, home(value).kind, value.index
        if kind not in (*PARAMS, *GRADS, *STATES):
            return fingerprint(value, rank)
        replica = program.replica(rank) if program.local_steps else 0
        numbers: Numbers = (0,) * self.model.count[g]
        if kind not in GRADS:
            numbers = self.state(g, updates, replica, self.model.place[rank])[kind in STATES]
        return tuple(x if k in self.model.own(rank, value) else None for k, x in enumerate(numbers))

    def run(self) -> None:
        waiting = [list(row) for row in self.program.ranks]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(waiting):
                while row and self.arrived(rank, row[0]):
                    self.execute(rank, row.pop(0))
                    moved = True
        if any(waiting):
            raise ValueError(f"ranks wait for ever at {[str(row[0]) for row in waiting if row]}")
        self.check_end()

    def arrived(self, rank: int, ins: Instruction) -> bool:
        """Whether all that an instruction needs is there. What is goes into memory."""
        memory = self.memory[rank]
        for value in (*ins.reads, *(ins.writes if ins.op is Op.PULL else ())):  # (a group may come in several parts)
            if isinstance(memory.get(value), Pending):
                found = memory[value].arrive()
                if found is None:
                    return False
                memory[value] = found
        return True

    def execute(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        copied = {pending.source for pending in memory.values() if isinstance(pending, Pending)}
        for value in ins.reads:
            if memory.get(value) is None:
                raise ValueError(f"rank {rank} `{ins}` reads {value}, which is not there")
        for value in (*ins.writes, *ins.frees):
            if isinstance(memory.get(value), Pending) or value in copied:
                raise ValueError(f"rank {rank} `{ins}` changes {value}, which is under way")
        where = "host" if ins.stream == "host" and ins.op is not Op.REDUCE else "device"
        reads = sorted(ins.reads, key=lambda value: value.step)  # (of several versions the newest counts)
        has = {plain(value): memory[value] for value in reads if tier(value) == where}
        self.do[ins.op](rank, ins, has)
        for value in ins.writes if ins.op in (*COMPUTE, Op.APPLY) else ():
            memory[value] = has[plain(value)]
        for value in ins.frees:
            del memory[value]

    # What follows does an instruction. `has`: what it reads, by plain names, and then what it makes.

    def rows(self, rank: int, ins: Instruction) -> Rows:
        return self.program.replica(rank), ins.microbatch, ins.step

    def params(self, rank: int, ins: Instruction, layer: int, has: Values) -> list[Numbers]:
        """The parameters that a layer uses. Which versions these are is recorded."""
        numbers = {g: has[param(g)] for g in self.model.groups_of[layer]}
        versions = [self.version.get(x[0], 0) for x in numbers.values()]
        key = (layer, self.rows(rank, ins), ins.op is Op.FORWARD)
        if ins.op not in (Op.RECOMPUTE, Op.BACKWARD_WEIGHT) and self.versions.setdefault(key, versions) != versions:
            raise ValueError(f"rank {rank} `{ins}` uses other versions than another rank, or than before")
        return [self.model.used(g, x, self.model.place[rank]) for g, x in numbers.items()]

    def whole(self, rank: int, ins: Instruction, has: Values, kind: str, index: int, form: str) -> int:
        """The output of a layer, or the gradient of one, of which a rank has its part."""
        return (
            has[Value(kind, index, ins.microbatch, ins.step, form)] - self.model.mask(form, self.model.place[rank])
        ) % M

    def forward(self, rank: int, ins: Instruction, has: Values) -> None:
        model, i, step, place = self.model, ins.microbatch, ins.step, self.model.place[rank]
        rows, get = model.rows(self.rows(rank, ins), place), partial(self.whole, rank, ins, has)
        for layer in ins.layers:
            sources = [get("output", a, model.form(layer, "reads")) for a in model.inputs[layer]] if layer else [rows]
            carry = has[Value("carry", layer, i - 1, step)] if model.carries(layer, i - 1) else None
            output = fingerprint(layer, *sources, carry, *self.params(rank, ins, layer, has))
            form = model.form(layer, "writes")
            has[Value("output", layer, i, step, form)] = (output + model.mask(form, place)) % M
            has[Value("saved", layer, i, step)] = has[Value("carry", layer, i, step)] = output
            if layer == model.last and ins.op is Op.FORWARD:
                self.losses[fingerprint(output, rows)] += 1

    def backward(self, rank: int, ins: Instruction, has: Values) -> None:
        model, i, step, place = self.model, ins.microbatch, ins.step, self.model.place[rank]
        get = partial(self.whole, rank, ins, has)
        for layer in reversed(ins.layers):
            for a in model.inputs[layer]:
                get("output", a, model.form(layer, "reads"))  # (autograd needs it)
            incoming = [get("grad_output", e, model.form(layer, "grad_reads")) for e in model.out[layer]]
            if layer == model.last:
                incoming = [get("output", layer, model.form(layer, "writes")), model.rows(self.rows(rank, ins), place)]
            carried = has[Value("grad_carry", layer, i, step)] if model.carries(layer, i) else None
            rest = fingerprint(has[Value("saved", layer, i, step)], *incoming, carried)
            back = fingerprint(layer, rest, *self.params(rank, ins, layer, has))
            form = model.form(layer, "grad_writes")
            for k, e in enumerate(model.into[layer]):
                has[Value("grad_output", e, i, step, form)] = (fingerprint(back, k) + model.mask(form, place)) % M
            has[Value("grad_carry", layer, i - 1, step)] = fingerprint(back, "carry")
            has[Value("saved_weight", layer, i, step)] = rest
            if ins.op is Op.BACKWARD:
                self.add(rank, ins, layer, back, has)

    def backward_weight(self, rank: int, ins: Instruction, has: Values) -> None:
        for layer in reversed(ins.layers):
            rest = has[Value("saved_weight", layer, ins.microbatch, ins.step)]
            self.add(rank, ins, layer, fingerprint(layer, rest, *self.params(rank, ins, layer, has)), has)

    def add(self, rank: int, ins: Instruction, layer: int, back: int, has: Values) -> None:
        """A backward's part of the gradients of a layer."""
        for g in self.model.groups_of[layer]:
            there = next((self.memory[rank].get(v) for v in ins.writes if plain(v) == grad(g)), None)
            before = has.get(grad(g), there) or (0,) * self.model.count[g]
            has[grad(g)] = combined((1, before), (1, self.model.weights(g, back, self.model.place[rank])))
            self.since[rank, g].add(self.rows(rank, ins))

    def update(self, rank: int, ins: Instruction, has: Values) -> None:
        """Takes a group's gradient, or those that workers have pushed. What went into it is recorded."""
        program, made = self.program, [plain(value) for value in ins.writes]
        scale = has[norm()] if program.clip is not None and ins.op is Op.STEP else None
        for g in ins.layers:
            name, state = ([v for v in made if v.index == g and v.kind in kinds].pop() for kinds in (PARAMS, STATES))
            gradients = [v for v in has if v[:2] == ("pushed", g)]
            taken = {(program.replica(v.microbatch), i, v.step) for v in gradients for i in range(program.microbatches)}
            if ins.op is Op.STEP:
                gradients = [grad_shard(g) if state.kind == "optimizer_shard" else grad(g)]
                taken = {(r, i, step) for _, i, step in self.since.pop((rank, g), ()) for r in range(program.replicas)}
            self.taken[g, ins.step] |= taken
            total = combined(*((1, has[value]) for value in gradients))
            has[name], has[state] = updated((has[name], total, has[state]), ins.step, scale)
            self.version.update((x, ins.step + 1) for x in has[name] if x is not None)
            for value in (v for v in ins.reads if plain(v) in gradients):
                self.memory[rank][value] = (0,) * self.model.count[g]

    def reduce(self, rank: int, ins: Instruction, has: Values) -> None:
        for c in ins.layers:
            (other,) = (value for value in has if value[:2] == ("incoming", c))
            has[Value("chunk", c)] = (has[Value("chunk", c)] + has[other]) % M

    def copy(self, rank: int, ins: Instruction, has: Values) -> None:
        memory, source, (target,) = self.memory[rank], ins.reads[0], ins.writes
        if home(source) not in (home(target), param_shard(target.index)):
            raise ValueError(f"rank {rank} `{ins}` copies {source} to another value")
        content, leaves = memory[source], ins.op is Op.OFFLOAD or source.microbatch >= 0  # (the source is let go)
        if leaves:
            memory[source] = (0,) * len(content) if home(source).kind in GRADS else None
        memory[target] = Pending(lambda: content, None if leaves or source in ins.frees else source)

    def send(self, rank: int, ins: Instruction, has: Values) -> None:
        self.sent[ins.op, rank, ins.peer].append({named(ins, value): self.memory[rank][value] for value in ins.reads})

    def receive(self, rank: int, ins: Instruction, has: Values) -> None:
        link = (next(op for op, other in PARTNERS.items() if other is ins.op), ins.peer, rank)
        for value in dict.fromkeys(ins.writes):
            others = self.memory[rank].get(value) if ins.op is Op.PULL else None
            arrive = partial(self.message, link, self.received[link], named(ins, value), others)
            self.memory[rank][value] = Pending(arrive)
        self.received[link] += 1

    def message(self, link: Any, n: int, name: Any, others: Any) -> Any:
        """A value of the n-th message of a link; of parameters that are pulled, with the slices of other servers."""
        if len(self.sent[link]) <= n:
            return None
        found = self.sent[link][n][name]
        return tuple(a if b is None else b for a, b in zip(others, found, strict=True)) if others else found

    def join(self, rank: int, ins: Instruction, has: Values) -> None:
        memory, turns = self.memory[rank], self.turns[ins.group]
        if all(rank in turn for turn in turns):
            turns.append({})
        turn = next(turn for turn in turns if rank not in turn)
        turn[rank] = (ins, has)
        for value in ins.writes or (map(grad, ins.layers) if piece_of(ins) else ()):
            memory[value] = Pending(partial(self.collected, rank, turn, value))
        if ins.op is Op.REDUCE_SCATTER and not repartitions(ins):
            memory.update((grad(g), (0,) * self.model.count[g]) for g in ins.layers)

    def collected(self, rank: int, turn: dict[int, tuple[Instruction, Values]], value: Value) -> Any:
        """What a collective leaves on a rank, of what all ranks of the group have brought."""
        model, program, (ins, mine), g = self.model, self.program, turn[rank], value.index
        if set(turn) != set(ins.group):
            return None
        if len({what_meets(other) for other, _ in turn.values()}) > 1:
            raise ValueError(f"ranks {ins.group} meet in different collectives")
        brought = {r: turn[r][1] for r in ins.group}
        if repartitions(ins):
            return self.repartitioned(rank, ins, {r: has[ins.reads[0]] for r, has in brought.items()})
        if ins.op is Op.NORM:
            every = [
                (v, has[v]) for other, has in turn.values() for v in has if v.kind in GRADS and v.index in other.layers
            ]
            return sum(square(v.index, numbers, range(model.count[v.index])) for v, numbers in every) % M
        if value.kind in ("buffer", "residual"):
            return mine.get(value, 0)
        if ins.op is Op.ALL_GATHER:
            name = param_shard(g) if param_shard(g) in mine else param(g)
            return tuple(brought[ins.group[k]][name][k] for k in range(model.count[g]))
        if value.kind == "param":
            average = mean({program.replica(r): has[value] for r, has in brought.items()}, ins.step)
            self.version.update(dict.fromkeys(average, ins.step + 1))
            return average
        if ins.op is Op.REDUCE_SCATTER:
            before = [(1, mine[value])] if value in mine else []
            total = combined(*before, *((1, has[grad(g)]) for has in brought.values()))
            return tuple(x if r == rank else None for r, x in zip(ins.group, total, strict=True))
        piece = piece_of(ins)
        summed = range(*map(model.ends[g].index, piece)) if piece else range(model.count[g])
        total = combined(*((1, has[value]) for has in brought.values()))
        return tuple(total[k] if k in summed else x for k, x in enumerate(mine[value]))

    def repartitioned(self, rank: int, ins: Instruction, brought: dict[int, int]) -> int:
        """The ranks along one axis give a value another form: all have brought parts of the same one."""
        model, place, (source,), (target,) = self.model, self.model.place, ins.reads, ins.writes
        axis, whole = changed_axis(source.form, target.form), source._replace(form="") == target._replace(form="")
        if axis is None or not whole or ins.group != self.program.sharers(rank, (self.program.sharing_axes[axis],)):
            raise ValueError(f"rank {rank} `{ins}` makes another value, or is not of the ranks along one axis")
        both = ([parts_of(letter, axis + 1)[axis] for letter in pair] for pair in pairs(source.form, target.form))
        fits = all(collective_of(old, new) is ins.op for old, new in both if old != new)
        if not fits or axis_within(source.form, target.form, axis) is not None:
            raise ValueError(f"rank {rank} `{ins}` cannot make {target} now")
        values = {(x - model.mask(source.form, place[r])) % M for r, x in brought.items()}
        return ((values.pop() if len(values) == 1 else fingerprint(*values)) + model.mask(target.form, place[rank])) % M

    def check_end(self) -> None:
        program, model = self.program, self.model
        if any(len(messages) != self.received[link] for link, messages in self.sent.items()):
            raise ValueError("a message is never received")
        if any(set(turn) != set(group) for group, turns in self.turns.items() for turn in turns):
            raise ValueError("a collective is never joined by all its ranks")
        runs = list(product(range(program.replicas), range(program.microbatches), range(program.steps)))
        if program.serving and program.serving.mode != "sync":  # (a worker that is too late leaves steps out)
            runs = [rows for rows in runs if (model.last, rows, True) in self.versions]
        if program.layers:
            self.check_contract(len(runs))
            every = product(runs, model.places)
            if self.losses != Counter(fingerprint(self.output(model.last, *run), model.rows(*run)) for run in every):
                raise ValueError("a loss is missing, doubled, or not the one of its rows")
        updates = Counter(g for g, _ in self.taken)
        for rank, held in enumerate(program.final or program.state):
            found = {}
            for value, content in self.memory[rank].items():
                newest = value.step >= 0 and home(value).kind in PARAMS and value.step == updates[value.index]
                arrived = content.arrive() if isinstance(content, Pending) else content
                found[value._replace(step=0) if newest else value] = arrived
            if found.keys() != held:
                raise ValueError(f"rank {rank} ends with {min(found.keys() ^ held)}, or without it")
            for value, content in found.items():
                right = content
                if value.kind == "chunk":
                    right = sum(fingerprint(value, r) for r, mine in enumerate(program.state) if value in mine) % M
                elif home(value).kind in (*PARAMS, *GRADS, *STATES) and not (program.serving and value.kind == "param"):
                    right = self.right(rank, value, updates[value.index])
                if content != right:
                    raise ValueError(f"rank {rank} ends with another {value} than one rank that has everything")

    def check_contract(self, count: int) -> None:
        """Each update is of as many micro-batches as promised, and of none that is too old."""
        program, contract = self.program, self.program.contract
        stale = contract if isinstance(contract, Staleness) else Staleness(0)
        decided = program.serving is not None and isinstance(contract, Staleness)
        most = (stale.every or program.microbatches) * program.replicas
        for g in {value.index for held in program.state for value in held if home(value).kind in STATES}:
            updates = {version: taken for (k, version), taken in self.taken.items() if k == g}
            if len(set().union(*updates.values())) < sum(map(len, updates.values())):
                raise ValueError(f"two updates of group {g} take the same micro-batch")
            if not decided and (sum(map(len, updates.values())) != count or len(updates) != -(-count // most)):
                raise ValueError(f"the updates of group {g} leave a micro-batch out, or there are too many")
            for version, taken in updates.items():
                if not decided and stale.every is None and {step for _, _, step in taken} != {version}:
                    raise ValueError(f"update {version} of group {g} takes a micro-batch of another step")
                for rows, layer in product(taken, program.groups[g].layers):
                    k = self.model.groups_of[layer].index(g)
                    there, back = (self.versions[layer, rows, which][k] for which in (True, False))
                    if (stale.bound is not None and version - there > stale.bound) or (stale.stashed and there != back):
                        raise ValueError(
                            f"update {version} of group {g} takes a gradient of versions {there} and {back}"
                        )


def plain(value: Value) -> Value:
    """The name of a value wherever it lies; of parameters, whatever version they are."""
    return home(value) if value.microbatch >= 0 else home(value)._replace(step=-1)


def named(ins: Instruction, value: Value) -> Any:
    """What a message calls a value: its name, or the number of a chunk, or of a group with the step."""
    return (
        value if value.kind in (*MOVED, "residual") else (value.index, -1 if ins.op in (Op.SEND, Op.RECV) else ins.step)
    )


def what_meets(ins: Instruction) -> Any:
    """What the ranks of a collective must agree on."""
    if ins.op is Op.NORM:
        return ins.op
    return ins.op, (ins.reads, ins.writes) if repartitions(ins) else (ins.layers, piece_of(ins))
