"""What a program computes, found with numbers of 61 bits in place of tensors, to compare the verdicts of verify with.

    judge(program)    "" if the parameters after the steps are the right ones, or what goes wrong

Every rank walks its list as in the executor. A layer hashes what it is given, and a backward adds a hash to a gradient;
sums, means and updates are linear, modulo a prime. `reference` computes the same as one rank that has all layers, rows
and parameters. At the end the numbers must be equal, which those of different computations are with a probability of
about 2**-61. So there are no rules about instructions here: a program is wrong if its numbers are, if it uses what is
not there or still under way, or if ranks wait for each other for ever.

A parameter group has a number for each of its slices. A shard of it has them times a factor of its place; a part of an
output has its number plus one of its place. What forms are is not asked here, but read from `minipar.program.forms`.

Which parameters a micro-batch used, and which micro-batches went into an update, the reference takes from the run; that
both are as the contract promises is checked beside it. Where ranks decide their order as they run, that of the lists is
judged. A program whose servers have not decided yet is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from minipar import MiniparError
from minipar.program import (
    MOVED,
    PARTNERS,
    Instruction,
    Op,
    Program,
    Staleness,
    Value,
    grad,
    grad_shard,
    home,
    norm,
    param,
    param_shard,
    piece_of,
    repartitions,
    tier,
)
from minipar.program.edges import wiring
from minipar.program.forms import axis_within, changed_axis, collective_of, letters, needed, pairs, parts_of

M = (1 << 61) - 1
PARAMS = ("param", "param_shard", "served")
GRADS = ("grad", "grad_shard", "pushed")
STATES = ("optimizer_state", "optimizer_shard", "served_state")
SLICES = ("param_shard", "grad_shard", "optimizer_shard", "served", "served_state")  # of these a rank has one slice

Numbers = tuple[Any, ...]  # of a parameter group, one for each slice; None: it is not here, or out of date
Place = tuple[int, ...]  # of a rank on each axis along which ranks share layers
Rows = tuple[int, int, int]  # replica, micro-batch, step
Values = dict[Value, Any]


class Wrong(Exception):
    """What is wrong with a program."""


def judge(program: Program) -> str:
    """Nothing if the lists give the parameters that one rank with everything would have, or what is wrong."""
    try:
        if program.chunks:  # a collective: it has no model
            program = replace(program, layers=0, edges=(), groups=(), mesh=(("dp", len(program.ranks)),), serving=None)
        if not program.undecided:
            Machine(program).run()
    except (Wrong, MiniparError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
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


def forwarded(layer: int, *of: object) -> tuple[int, int]:
    """The output of a layer, and what is saved of it."""
    return fingerprint("output", layer, *of), fingerprint("saved", layer, *of)


def gradient(back: int, where: object) -> int:
    """What a backward gives to one of the layers before it, or to the slice before."""
    return fingerprint("gradient", back, where)


def reference(model: Model, versions: dict[Any, Any], taken: dict[Any, set[Rows]]) -> tuple[Callable[..., Any], ...]:
    """The same training on one rank. It computes what it is asked for, and what that needs: of an asynchronous program
    one micro-batch may use parameters of many versions.

    versions   (layer, rows, forward or not) -> those of its parameter groups
    taken      (group, update) -> the rows that are in it
    """
    program = model.program

    @cache
    def param(g: int, version: int, replica: int, place: Place) -> Numbers:
        """The parameters after so many updates."""
        every = program.local_steps
        if every and version and (version % every == 0 or version == program.steps):
            return mean({r: update(g, version, r, place)[0] for r in range(program.replicas)}, version - 1)
        return update(g, version, replica, place)[0]

    @cache
    def update(g: int, version: int, replica: int, place: Place) -> tuple[Numbers, ...]:
        """The same before the mean of replicas, and the optimizer state."""
        if version == 0:
            return model.numbers(g, place, "param"), model.numbers(g, place, "state")
        for earlier in range(version):  # (the first one first, for Python's stack)
            before = param(g, earlier, replica, place)
        parts = (before, total(g, version - 1, replica, place), update(g, version - 1, replica, place)[1])
        return updated(parts, version - 1, length(version - 1) if program.clip and not program.serving else None)

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
        return [model.used(g, param(g, version, rows[0], place), place) for g, version in both]

    @cache
    def forward(layer: int, rows: Rows, place: Place) -> tuple[int, int]:
        r, i, step = rows
        sources = [forward(a, rows, place)[0] for a in model.inputs[layer]] if layer else [model.rows(rows, place)]
        carry = forward(layer, (r, i - 1, step), place)[1] if model.carries(layer, i - 1) else None
        return forwarded(layer, *sources, carry, *params(layer, rows, place, True))

    @cache
    def backward(layer: int, rows: Rows, place: Place) -> int:
        r, i, step = rows
        output, saved = forward(layer, rows, place)
        incoming: list[Any] = [output, model.rows(rows, place)] if layer == model.last else []
        for e in model.out[layer]:
            above = next(b for b, into in enumerate(model.into) if e in into)
            incoming.append(gradient(backward(above, rows, place), model.into[above].index(e)))
        carried = gradient(backward(layer, (r, i + 1, step), place), "carry") if model.carries(layer, i) else None
        return fingerprint(layer, fingerprint(saved, *incoming, carried), *params(layer, rows, place, False))

    return param, update, forward


class Pending(NamedTuple):
    """A value under way: what brings it, or None before it is there; and what must not change until then."""

    arrive: Callable[[], Any]
    source: Value | None = None


class Machine:
    """All ranks' memories, the messages between them, and which parameters and micro-batches were used."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, Model(program)
        begin = partial(self.right, found=lambda what, g, place: self.model.numbers(g, place, what))
        self.memory = [{value: begin(rank, value) for value in held} for rank, held in enumerate(program.state)]
        self.sent: dict[Any, list[tuple[Any, dict[Any, Any]]]] = defaultdict(list)
        self.received: Counter[Any] = Counter()
        self.turns: dict[tuple[int, ...], list[dict[int, Any]]] = defaultdict(list)
        self.losses: Counter[int] = Counter()
        self.version: dict[int, int] = {}  # of a parameter's number
        self.versions: dict[Any, list[int]] = {}  # as `reference` takes them
        self.since: dict[tuple[int, int], set[Rows]] = defaultdict(set)  # what went into a gradient since an update
        self.taken: dict[tuple[int, int], set[Rows]] = defaultdict(set)
        kinds: dict[Callable[[int, Instruction, Values], None], tuple[Op, ...]] = {
            self.forward: (Op.FORWARD, Op.RECOMPUTE), self.backward: (Op.BACKWARD, Op.BACKWARD_INPUT),
            self.backward_weight: (Op.BACKWARD_WEIGHT,), self.update: (Op.STEP, Op.APPLY), self.reduce: (Op.REDUCE,),
            self.send: tuple(PARTNERS), self.receive: tuple(PARTNERS.values()), self.copy: (Op.OFFLOAD, Op.FETCH),
            self.join: (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.NORM),
        }  # fmt: skip
        self.do = {op: done for done, ops in kinds.items() for op in ops}

    def right(self, rank: int, value: Value, found: Callable[[str, int, Place], Numbers]) -> Any:
        """What a rank should have of a value of the state, of what is `found` for parameters and optimizer states."""
        kind, g = home(value).kind, value.index
        if kind not in (*PARAMS, *GRADS, *STATES):
            return fingerprint(value, rank)
        numbers: Numbers = (0,) * self.model.count[g]
        if kind not in GRADS:
            numbers = found("param" if kind in PARAMS else "state", g, self.model.place[rank])
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
            raise Wrong(f"ranks wait for ever at {[str(row[0]) for row in waiting if row]}")
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
                raise Wrong(f"rank {rank} `{ins}` reads {value}, which is not there")
        for value in (*ins.writes, *ins.frees):
            if isinstance(memory.get(value), Pending) or value in copied:
                raise Wrong(f"rank {rank} `{ins}` changes {value}, which is under way")
        where = "host" if ins.stream == "host" and ins.op is not Op.REDUCE else "device"
        reads = sorted(ins.reads, key=lambda value: value.step)  # (of several versions the newest counts)
        has = {plain(value): memory[value] for value in reads if tier(value) == where}
        self.do[ins.op](rank, ins, has)
        for value in ins.writes if ins.op in (*COMPUTED, Op.REDUCE) else ():
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
            raise Wrong(f"rank {rank} `{ins}` uses other versions than another rank, or than before")
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
            output, saved = forwarded(layer, *sources, carry, *self.params(rank, ins, layer, has))
            form = model.form(layer, "writes")
            has[Value("output", layer, i, step, form)] = (output + model.mask(form, place)) % M
            has[Value("saved", layer, i, step)] = has[Value("carry", layer, i, step)] = saved
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
                has[Value("grad_output", e, i, step, form)] = (gradient(back, k) + model.mask(form, place)) % M
            has[Value("grad_carry", layer, i - 1, step)] = gradient(back, "carry")
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
            raise Wrong(f"rank {rank} `{ins}` copies {source} to another value")
        content, leaves = memory[source], ins.op is Op.OFFLOAD or source.microbatch >= 0  # (the source is let go)
        if leaves:
            memory[source] = (0,) * len(content) if home(source).kind in GRADS else None
        memory[target] = Pending(lambda: content, None if leaves or source in ins.frees else source)

    def send(self, rank: int, ins: Instruction, has: Values) -> None:
        values = [value for value in ins.reads if value.kind != "residual"]
        contents = {value if value.kind in MOVED else value.index: self.memory[rank][value] for value in values}
        self.sent[ins.op, rank, ins.peer].append((label(ins, contents), contents))

    def receive(self, rank: int, ins: Instruction, has: Values) -> None:
        link = (next(op for op, other in PARTNERS.items() if other is ins.op), ins.peer, rank)
        names = {value: value if value.kind in MOVED else value.index for value in ins.writes}
        for value, name in names.items():
            place = (link, self.received[link], label(ins, names.values()), name)
            self.memory[rank][value] = Pending(partial(self.message, ins, *place, self.memory[rank].get(value)))
        self.received[link] += 1

    def message(self, ins: Instruction, link: Any, n: int, names: Any, name: Any, before: Any) -> Any:
        """A value of the n-th message of a link; of parameters that are pulled, with the slices of other servers."""
        if len(self.sent[link]) <= n:
            return None
        found, contents = self.sent[link][n]
        if found != names:
            raise Wrong(f"rank {link[2]} expects {names}, but rank {link[1]} sends {found}")
        if ins.op is not Op.PULL:
            return contents[name]
        return tuple(old if new is None else new for old, new in zip(before, contents[name], strict=True))

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
            raise Wrong(f"ranks {ins.group} meet in different collectives")
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
        axis = changed_axis(source.form, target.form)
        if axis is None or source._replace(form="") != target._replace(form=""):
            raise Wrong(f"rank {rank} `{ins}` makes another value, or changes no axis, or several")
        if ins.group != self.program.sharers(rank, (self.program.sharing_axes[axis],)):
            raise Wrong(f"rank {rank} `{ins}`: not the ranks along the axis that changes")
        changed = [
            (parts_of(a, axis + 1)[axis], parts_of(b, axis + 1)[axis]) for a, b in pairs(source.form, target.form)
        ]
        if any(collective_of(a, b) is not ins.op for a, b in changed if a != b):
            raise Wrong(f"rank {rank} `{ins}` cannot make {target}")
        if axis_within(source.form, target.form, axis) is not None:
            raise Wrong(f"rank {rank} `{ins}` mixes up the parts of another axis")
        values = {(x - model.mask(source.form, place[r])) % M for r, x in brought.items()}
        return ((values.pop() if len(values) == 1 else fingerprint(*values)) + model.mask(target.form, place[rank])) % M

    def check_end(self) -> None:
        program, model = self.program, self.model
        if any(len(messages) != self.received[link] for link, messages in self.sent.items()):
            raise Wrong("a message is never received")
        if any(set(turn) != set(group) for group, turns in self.turns.items() for turn in turns):
            raise Wrong("a collective is never joined by all its ranks")
        runs = list(product(range(program.replicas), range(program.microbatches), range(program.steps)))
        if program.serving and program.serving.mode != "sync":  # (a worker that is too late leaves steps out)
            runs = [rows for rows in runs if (model.last, rows, True) in self.versions]
        param, update, forward = reference(model, self.versions, self.taken)
        if program.layers:
            self.check_contract(len(runs))
            every = product(runs, model.places)
            if self.losses != Counter(fingerprint(forward(model.last, *run)[0], model.rows(*run)) for run in every):
                raise Wrong("a loss is missing, doubled, or not the one of its rows")
        updates = Counter(g for g, _ in self.taken)
        for rank, held in enumerate(program.final or program.state):
            found = {}
            for value, content in self.memory[rank].items():
                newest = value.step >= 0 and home(value).kind in PARAMS and value.step == updates[value.index]
                arrived = content.arrive() if isinstance(content, Pending) else content
                found[value._replace(step=0) if newest else value] = arrived
            if found.keys() != held:
                raise Wrong(f"rank {rank} ends with {min(found.keys() ^ held)}, or without it")

            def one(what: str, g: int, place: Place, rank: int = rank) -> Numbers:
                run = (g, updates[g], program.replica(rank) if program.local_steps else 0, place)
                return param(*run) if what == "param" else update(*run)[1]

            for value, content in found.items():
                right = content
                if value.kind == "chunk":
                    right = sum(fingerprint(value, r) for r, mine in enumerate(program.state) if value in mine) % M
                elif home(value).kind in (*PARAMS, *GRADS, *STATES) and not (program.serving and value.kind == "param"):
                    right = self.right(rank, value, one)
                if content != right:
                    raise Wrong(f"rank {rank} ends with another {value} than one rank that has everything")

    def check_contract(self, count: int) -> None:
        """Each update is of as many micro-batches as promised, and of none that is too old."""
        program, contract = self.program, self.program.contract
        stale = contract if isinstance(contract, Staleness) else Staleness(0)
        decided = program.serving is not None and isinstance(contract, Staleness)
        most = (stale.every or program.microbatches) * program.replicas
        for g in {value.index for held in program.state for value in held if home(value).kind in STATES}:
            updates = {version: taken for (k, version), taken in self.taken.items() if k == g}
            if len(set().union(*updates.values())) < sum(map(len, updates.values())):
                raise Wrong(f"two updates of group {g} take the same micro-batch")
            if not decided and (sum(map(len, updates.values())) != count or len(updates) != -(-count // most)):
                raise Wrong(f"the updates of group {g} leave a micro-batch out, or there are too many")
            for version, taken in updates.items():
                if not decided and stale.every is None and {step for _, _, step in taken} != {version}:
                    raise Wrong(f"update {version} of group {g} takes a micro-batch of another step")
                for rows, layer in product(taken, program.groups[g].layers):
                    k = self.model.groups_of[layer].index(g)
                    there, back = (self.versions[layer, rows, which][k] for which in (True, False))
                    if (stale.bound is not None and version - there > stale.bound) or (stale.stashed and there != back):
                        raise Wrong(f"update {version} of group {g} takes a gradient of versions {there} and {back}")


COMPUTED = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.STEP, Op.APPLY)


def plain(value: Value) -> Value:
    """The name of a value wherever it lies; of parameters, whatever version they are."""
    return home(value) if value.microbatch >= 0 else home(value)._replace(step=-1)


def label(ins: Instruction, names: Iterable[Any]) -> Any:
    """What a message says of itself: the names of values, or the groups of a step."""
    return list(names) if ins.op in (Op.SEND, Op.RECV) else (set(names), ins.step)


def what_meets(ins: Instruction) -> Any:
    """What the ranks of a collective must agree on."""
    if ins.op is Op.NORM:
        return ins.op
    return ins.op, (ins.reads, ins.writes) if repartitions(ins) else (ins.layers, piece_of(ins))
