"""What a program computes, found with symbols instead of numbers. The tests of `verify` compare its verdicts with this.

    judge(program)    "" if every rank ends with exactly what the program's contract promises, or what goes wrong

It shares no code with the engine: it uses only the fields of `Program`, `Instruction` and `Value`, and does what the
executor's documentation says about each of them. Every value is a term, such as "layer 2 of (layer 1 of (rows of
micro-batch 0))"; a gradient is a multiset of such terms, one for each contribution. A freed value no longer exists.
Messages are queues, collectives run one after another, and a rank waits when it first reads a value that has not
arrived. A field that makes the executor fail or work on other data (layers in another order, a group that is not
ascending, parts of another form) is wrong, too.

Ranks that share layers have places: their coordinates on each axis along which they do. What a rank has of a value in a
form is a part of one term, for its place on the axes on which the form is not whole. Where rows are cut along an axis,
but layers take and give whole values along it, its ranks run the model each on rows of its own: terms differ by place.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

from minipar.program import Instruction, Local, Op, Program, Staleness, Synchronous, Value

COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
JOINED = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.NORM)
MOVED = ("output", "grad_output")
SHARING = ("tp", "cp", "ep")  # axes whose ranks share layers
COPIED = ("saved", "grad", "grad_shard", "output", "grad_output", "param", "param_shard", "optimizer_state")
PARAMS = ("param", "param_shard")
STATE = ("param", "grad", "optimizer_state", "param_shard", "grad_shard", "optimizer_shard", "residual")
RANKS = {"": 0, "host": 1, "disk": 2}  # tiers, from the fastest

Params = tuple[Any, ...]
Coordinates = tuple[int, ...]  # a place among ranks that share layers, on each axis along which they do
Contributions = dict[tuple[int, Coordinates], Counter[int]]  # by parameter group, and place


class Wrong(Exception):
    """What is wrong with a program."""


def judge(program: Program) -> str:
    """Nothing if running the program's lists gives exactly what its contract asks for, or what goes wrong."""
    try:
        _check_fields(program)
        if program.chunks:
            _Collective(program).run()
        elif program.serving is not None:
            _Service(program).run()
        else:
            _Machine(program).run()
            if program.in_flight is not None:
                for seed in range(2):
                    _Machine(program, _decided(program, seed)).run()
    except Wrong as reason:
        return str(reason)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return f"a rank would fail: {type(error).__name__}: {error}"
    return ""


# the fields of a program ---------------------------------------------------------------------------------------------


def _check_fields(program: Program) -> None:
    def count(name: str, value: object, least: int) -> None:
        if type(value) is not int or value < least:
            raise Wrong(f"{name}={value!r}")

    count("receives_ahead", program.receives_ahead, 0)
    count("layers", program.layers, 0)
    if program.chunks:
        if len(program.state) != len(program.ranks) or len(program.final) not in (0, len(program.ranks)):
            raise Wrong("state of other ranks")
        for size in program.chunks:
            count("chunk", size, 0)
        return
    if not program.ranks:
        raise Wrong("no ranks")
    for name in ("microbatches", "steps", "layers"):
        count(name, getattr(program, name), 1)
    _check_mesh(program)
    if program.precision not in ("float32", "bf16"):
        raise Wrong(f"precision={program.precision}")
    if not re.fullmatch(r"none|bf16|fp16|topk:(0?\.\d*[1-9]\d*|1|1\.0*)|powersgd:[1-9]\d*", program.compress):
        raise Wrong(f"compress={program.compress}")
    if program.clip is not None and not 0 < program.clip < float("inf"):
        raise Wrong(f"clip={program.clip}")
    if program.room is not None:
        count("room", program.room, 0)
    if isinstance(program.contract, Local):
        count("local steps", program.contract.steps, 1)
    elif isinstance(program.contract, Staleness):
        for name in ("bound", "versions", "every"):
            if getattr(program.contract, name) is not None:
                count(name, getattr(program.contract, name), 0 if name == "bound" else 1)
    elif type(program.contract) is not Synchronous:
        raise Wrong(f"contract={program.contract!r}")
    slices = program.slices if isinstance(program.slices, tuple) else (1,) * program.slices
    for length in slices:
        count("slices", length, 1)
    if not slices or program.microbatches % len(slices):
        raise Wrong("no whole sequences")
    if (len(slices) > 1) != bool(program.carries):
        raise Wrong("slices, but no layer that carries anything; or the reverse")
    if len(set(program.carries)) < len(program.carries) or not set(program.carries) <= set(range(program.layers)):
        raise Wrong(f"carries={program.carries}")
    for group in program.groups:
        layers = group.layers
        if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < program.layers:
            raise Wrong(f"group of layers {layers}")
        for size in (*group.tensors, group.frozen):
            count("bytes", size, 0)
    _check_edges(program)
    _check_state(program)
    _check_built(program)
    if program.in_flight is not None:
        _check_deciding(program)


def _check_mesh(program: Program) -> None:
    """rank = place on dp * place on pp; replicas are runs of neighbouring ranks."""
    product, inner = 1, 1
    for name, size in program.mesh:
        if type(size) is not int or size < 1:
            raise Wrong(f"mesh {program.mesh}")
        product *= size
        inner = 1 if name == "dp" else inner * size
    names = [name for name, _ in program.mesh]
    first = [size for name, size in program.mesh[: names.index("dp")]] if "dp" in names else []
    if len(set(names)) < len(names) or any(size > 1 for size in first):
        raise Wrong(f"mesh {program.mesh}: replicas are not the slowest axis")
    servers = program.serving.servers if program.serving is not None else 0
    if product != len(program.ranks) - servers:
        raise Wrong(f"mesh {program.mesh}: of another number of ranks")


def _check_edges(program: Program) -> None:
    """Edge l is the first one out of layer l; all go forward, and every layer is read and reads."""
    edges, last = program.edges, program.layers - 1
    if not edges:
        return
    if len(set(edges)) < len(edges) or any(not 0 <= a < b <= last for a, b in edges):
        raise Wrong("edges that are none")
    first = {a: min(b for source, b in edges if source == a) for a, _ in edges}
    rest = sorted((a, b) for a, b in edges if b != first[a])
    if set(first) != set(range(last)) or {b for _, b in edges} != set(range(1, last + 1)):
        raise Wrong("a layer that nobody reads, or that reads nothing")
    if list(edges) != [(a, first[a]) for a in range(last)] + rest:
        raise Wrong("edges in another order than their numbers")


def _check_state(program: Program) -> None:
    if len(program.state) != len(program.ranks):
        raise Wrong("state of other ranks")
    if program.final and program.final != program.state:
        raise Wrong("ends with other values than it begins with")
    for held in program.state:
        for value in held:
            kind = value.kind.rpartition(" ")[2]
            if program.serving is not None and kind in ("served", "served_state"):
                continue
            version = value.step == 0 and _home(value).kind in PARAMS and isinstance(program.contract, Staleness)
            if kind not in STATE or value.microbatch != -1 or (value.step != -1 and not version):
                raise Wrong(f"begins with {value}, which is no state")
            if not 0 <= value.index < len(program.groups):
                raise Wrong(f"begins with {value}, of a group that is not there")


def _check_built(program: Program) -> None:
    """What the executor has no code for."""
    sizes = dict(program.mesh)
    shared = any(size > 1 for axis, size in program.mesh if axis in SHARING)
    if program.serving is None and shared and program.compress != "none":
        raise Wrong("ranks that share layers, with sums that carry less")
    if program.serving is None and isinstance(program.contract, Staleness):
        values = {value for held in program.state for value in held}
        if shared or any(_tier(value) or value.kind.endswith("_shard") for value in values):
            raise Wrong("no flushes, with parameters that are not whole on their device")
    several = isinstance(program.contract, Local) and sizes.get("dp", 1) > 1
    if several and (len(program.ranks) > sizes["dp"] or program.clip is not None):
        raise Wrong("replicas that train alone, of several ranks or with a common norm")


def _check_deciding(program: Program) -> None:
    """The executor's rule is for stages in a row, of which each has one version and updates at once."""
    contract = program.contract
    if type(program.in_flight) is not int or program.in_flight < 1:
        raise Wrong(f"in_flight={program.in_flight}")
    if not isinstance(contract, Staleness) or contract.stashed or contract.every is None:
        raise Wrong("in_flight without a rule by which ranks decide")
    if contract.bound is not None and contract.bound < -(-(program.in_flight - 1) // contract.every):
        raise Wrong("in_flight makes gradients older than promised")
    if any(size > 1 for name, size in program.mesh if name == "dp") or program.edges:
        raise Wrong("in_flight with replicas or branches")
    held = [sorted({layer for ins in row if ins.op is Op.FORWARD for layer in ins.layers}) for row in program.ranks]
    if [layer for mine in held for layer in mine] != list(range(program.layers)) or not all(held):
        raise Wrong("in_flight with stages that are not in a row")


def _decided(program: Program, seed: int) -> list[list[int]]:
    """An order in which ranks that decide might walk their lists: backwards first, whatever has arrived.

    Of what belongs to one forward or backward, messages included, the order is that of the list; an update comes when
    enough micro-batches are through.
    """
    contract = program.contract
    assert isinstance(contract, Staleness)
    random, ranks, total = Random(seed), len(program.ranks), program.steps * program.microbatches
    blocks: list[dict[tuple[bool, int], list[int]]] = []
    steps = []
    for row in program.ranks:
        found: dict[tuple[bool, int], list[int]] = defaultdict(list)
        for k, ins in enumerate(row):
            if ins.op is not Op.STEP:
                moves = ins.op in (Op.SEND, Op.RECV)
                moved = _home((ins.reads or ins.writes)[0]).kind if moves else ""
                there = ins.op is Op.FORWARD or moved == "output"
                found[there, ins.step * program.microbatches + ins.microbatch].append(k)
        blocks.append(found)
        updates: dict[int, list[int]] = defaultdict(list)
        for k, ins in enumerate(row):
            if ins.op is Op.STEP:
                updates[ins.step].append(k)
        steps.append(updates)
    done = [[0, 0] for _ in range(ranks)]  # backwards, forwards
    orders: list[list[int]] = [[] for _ in range(ranks)]
    assert program.in_flight is not None
    for _ in range(100 * ranks * total):
        if all(mine == [total, total] for mine in done):
            return orders
        rank = random.randrange(ranks)
        back, on = done[rank]
        before, after = done[rank - 1][1] if rank else total, done[rank + 1][0] if rank + 1 < ranks else on
        if back < min(on, after):
            there = False
        elif on < min(before, total) and (rank or on - back < program.in_flight):
            there = True
        else:
            continue
        orders[rank] += blocks[rank][there, done[rank][there]]
        done[rank][there] += 1
        back = done[rank][0]
        if not there and steps[rank] and (back % (contract.every or 1) == 0 or back == total):
            orders[rank] += steps[rank][(back - 1) // (contract.every or 1)]
    raise Wrong("ranks that decide would never end")


# model and contract --------------------------------------------------------------------------------------------------


class _Model:
    """What one device would compute, in terms."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.terms: dict[tuple[Any, ...], int] = {}
        self.last = program.layers - 1
        self.groups_of = [
            [g for g, group in enumerate(program.groups) if k in group.layers] for k in range(self.last + 1)
        ]
        self.first = min((min(g.layers) for g in program.groups if g.tensors), default=program.layers)
        edges = program.edges or tuple((a, a + 1) for a in range(self.last))
        self.edges = edges
        layers = range(program.layers)
        self.into = [sorted((e for e, (_, b) in enumerate(edges) if b == k), key=lambda e: edges[e]) for k in layers]
        self.out = [[e for e, (a, _) in enumerate(edges) if a == k] for k in layers]
        self.inputs = [[edges[e][0] for e in into] for into in self.into]
        lengths = [size for name, size in program.mesh if name in SHARING and size > 1]
        self.axes = range(len(lengths))
        self.all_places: list[Coordinates] = list(product(*map(range, lengths)))
        own, first = self.parts(program.inputs or "R"), program.forms[0].reads if program.forms else ""
        whole = [{parts[k] for parts in map(self.parts, (first or "R").split(","))} == {"R"} for k in self.axes]
        self.apart = [k for k in self.axes if own[k] != "R" and whole[k]]  # axes on which each rank has its own rows
        self.slices = len(program.slices) if isinstance(program.slices, tuple) else program.slices
        self.carries = set(program.carries)

    def term(self, *parts: Any) -> int:
        """A number for a term: equal terms get equal numbers."""
        return self.terms.setdefault(parts, len(self.terms))

    def parts(self, letter: str) -> list[str]:
        """What a letter says of each axis."""
        found = letter.split("/")
        return found + ["R"] * (len(self.axes) - len(found))

    def axes_of(self, g: int, letters: str) -> list[int]:
        """The axes along which ranks have shards of a group, "S", or make parts of its gradient, "P"."""
        return [
            k
            for k, part in zip(self.axes, self.program.groups[g].form.split("/"), strict=False)
            if part in letters and part
        ]

    def rows(self, replica: int, i: int, step: int, place: Coordinates) -> Params:
        return ("rows", replica, i, step, tuple(place[k] for k in self.apart))

    def forward(self, layer: int, sources: Params, params: Params, carry: Any, rows: Params) -> int:
        result = self.term("forward", layer, sources, params, carry)
        return self.term("loss", result, rows) if layer == self.last else result

    def trainable(self, g: int) -> bool:
        return bool(self.program.groups[g].tensors)

    def whole(
        self, replica: int, step: int, params: Callable[[int, int, bool], Params]
    ) -> tuple[Counter[int], list[Contributions]]:
        """The losses of a replica's step, and for each micro-batch its contributions to every gradient.

        params   (layer, micro-batch, forward or not) -> what the layer computes with
        """
        losses: Counter[int] = Counter()
        found: list[Contributions] = [{} for _ in range(self.program.microbatches)]
        alike: dict[Params, list[Coordinates]] = {}
        for place in self.all_places:
            alike.setdefault(self.rows(replica, 0, step, place), []).append(place)
        for places in alike.values():
            self.run(replica, step, params, places, losses, found)
        return losses, found

    def run(
        self,
        replica: int,
        step: int,
        params: Callable[[int, int, bool], Params],
        places: Sequence[Coordinates],
        losses: Counter[int],
        found: list[Contributions],
    ) -> None:
        """Add the losses and contributions that the ranks at some places make of their rows, which are the same."""
        m, n, count = self.program.microbatches, self.last + 1, self.slices
        for begin in range(0, m, count):
            kept: dict[tuple[int, int], int] = {}
            outputs: dict[tuple[int, int], int] = {}
            for i in range(begin, begin + count):
                rows = self.rows(replica, i, step, places[0])
                for layer in range(n):
                    sources = tuple(outputs[a, i] for a in self.inputs[layer]) if layer else (rows,)
                    carry = self.carry(kept.get((layer, i - 1))) if layer in self.carries and i > begin else None
                    given = params(layer, i, True)
                    outputs[layer, i] = self.forward(layer, sources, given, carry, rows)
                    kept[layer, i] = self.term("saved", layer, sources, given, carry)
                losses[outputs[self.last, i]] += 1
            more: dict[int, int] = {}  # of each layer the gradient of its carry
            for i in reversed(range(begin, begin + count)):
                grads: dict[int, int] = {}
                for layer in reversed(range(self.first, n)):
                    incoming = tuple(grads[e] for e in self.out[layer])
                    back = self.backward(layer, kept[layer, i], incoming, params(layer, i, False), more.get(layer))
                    grads.update({e: self.term("into", back, k) for k, e in enumerate(self.into[layer])})
                    if layer in self.carries:
                        more[layer] = self.term("into carry", back)
                    for g in filter(self.trainable, self.groups_of[layer]):
                        for place in places:
                            for needing in self.summed_at(g, place):
                                mine = found[i].setdefault((g, needing), Counter())
                                mine[self.made(g, back, place)] += 1

    def made(self, g: int, back: int, place: Coordinates) -> int:
        """What a rank's backward adds to a gradient: all of it, that of its shard, or its part of the sum."""
        which = tuple((k, place[k]) for k in self.axes_of(g, "SP"))
        return self.term("weights", g, back, *which)

    def summed_at(self, g: int, place: Coordinates) -> list[Coordinates]:
        """The places that need before a STEP what the rank at this one adds to a gradient: all along those axes on
        which ranks make parts of a sum."""
        summed = self.axes_of(g, "P")
        return [other for other in self.all_places if all(k in summed or other[k] == place[k] for k in self.axes)]

    def read(self, layer: int, back: bool = False) -> str:
        """The form that a layer's input has, or the gradient of its output: of a C each rank takes its shard."""
        if not self.program.forms:
            return ""
        form = self.program.forms[layer].grad_reads if back else self.program.forms[layer].reads
        letters = []
        for letter in form.split(",") if form else ():
            parts = ["R" if part[0] == "C" else part for part in letter.split("/")]
            while len(parts) > 1 and parts[-1] == "R":
                del parts[-1]
            letters.append("/".join(parts))
        return "" if set(letters) <= {"R"} else ",".join(letters)

    def written(self, layer: int, back: bool = False) -> str:
        if not self.program.forms:
            return ""
        return self.program.forms[layer].grad_writes if back else self.program.forms[layer].writes

    def carry(self, kept: Any) -> int:
        return self.term("carry", kept)

    def backward(self, layer: int, kept: int, incoming: Params, params: Params, carried: Any) -> int:
        return self.term("backward", layer, kept, incoming, params, carried)


def _frozen(contributions: Counter[int]) -> frozenset[tuple[int, int]]:
    return frozenset((+contributions).items())


def _tier(value: Value) -> str:
    return value.kind.rpartition(" ")[0]


def _home(value: Value) -> Value:
    return value._replace(kind=value.kind.rpartition(" ")[2])


# ranks ---------------------------------------------------------------------------------------------------------------


class _Machine:
    """All ranks' memories, links and groups. A memory maps a value's name to its term, or to its contributions.

    orders   of ranks that decide: the order in which each walks its list
    """

    def __init__(self, program: Program, orders: Sequence[Sequence[int]] | None = None) -> None:
        self.program, self.model, self.orders = program, _Model(program), orders
        self.replicas = next((size for name, size in program.mesh if name == "dp"), 1)
        workers = len(program.ranks) - (program.serving.servers if program.serving is not None else 0)
        self.replica = [rank * self.replicas // workers for rank in range(len(program.ranks))]
        self.place = [self.place_of(rank, inner=True) for rank in range(len(program.ranks))]
        self.team = [self.place_of(rank, inner=False) for rank in range(len(program.ranks))]  # those that share layers
        self.every = getattr(program.contract, "steps", 0) if self.replicas > 1 else 0
        self.stale = program.contract if isinstance(program.contract, Staleness) else None
        self.homes = [{_home(value) for value in held} for held in program.state]
        self.memory = [{value: self.initial(value) for value in held} for held in program.state]
        self.underway: list[dict[Value, tuple[Any, ...]]] = [{} for _ in program.ranks]
        self.copying: list[dict[Value, Value]] = [{} for _ in program.ranks]  # source -> target
        self.sent: dict[tuple[int, int], list[tuple[tuple[Value, ...], list[Any]]]] = defaultdict(list)
        self.received: Counter[tuple[int, int]] = Counter()
        self.joined: dict[tuple[int, ...], list[dict[int, tuple[Any, dict[int, Any]]]]] = {}
        self.pieces: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        self.summed: list[set[tuple[int, ...]]] = [set() for _ in program.ranks]  # slices of gradients under these keys
        self.graphs: list[dict[tuple[int, int, int], tuple[int, ...]]] = [{} for _ in program.ranks]
        self.halves: list[dict[tuple[int, int, int], tuple[int, ...]]] = [{} for _ in program.ranks]
        self.cuts = [self.cuts_of(row) for row in program.ranks]
        self.losses: Counter[int] = Counter()
        self.used: dict[tuple[int, int, int, int, bool], Params] = {}  # replica, layer, micro-batch, step, forward
        self.noted: set[tuple[Coordinates, int, int, int, int, bool]] = set()  # the same, with the place in front
        self.updates: list[tuple[int, int, int, Counter[int]]] = []  # of asynchronous ranks: rank, group, version
        self.order: dict[tuple[int, int, int], int] = {}  # rank, step, sequence -> the last slice that went forward
        self.right: dict[tuple[int, int], list[Contributions]] = {}
        self.wanted: Counter[int] = Counter()
        if self.stale is None:
            for step in range(program.steps):
                for replica in range(self.replicas):
                    losses, found = self.model.whole(replica, step, self.promised_in(step, replica))
                    self.right[step, replica] = found
                    self.wanted += losses

    def place_of(self, rank: int, inner: bool) -> Coordinates:
        """A rank's coordinates on those axes along which ranks share layers, or on the others. (Servers have none.)"""
        found = []
        for name, size in reversed(self.program.mesh):
            rank, own = divmod(rank, size)
            if (name in SHARING) is inner and size > 1:
                found.append(own)
        return (*([] if inner else [rank]), *reversed(found))

    def initial(self, value: Value) -> Any:
        kind = _home(value).kind
        if kind in ("grad", "grad_shard"):
            return Counter()
        return ("param" if kind == "param_shard" else kind, value.index, 0)

    def promised_in(self, step: int, replica: int) -> Callable[[int, int, bool], Params]:
        return lambda layer, i, there: self.promised(layer, step, replica)

    def used_by(self, replica: int, step: int) -> Callable[[int, int, bool], Params]:
        return lambda layer, i, there: self.used[replica, layer, i, step, there]

    def promised(self, layer: int, step: int, replica: int) -> Params:
        """The parameters that a layer uses in a step of a synchronous program."""
        found = []
        for g in self.model.groups_of[layer]:
            version = step if self.model.trainable(g) else 0
            apart = self.every and version % self.every
            found.append(("param", g, version, *((replica,) if apart else ())))
        return tuple(found)

    def cuts_of(self, row: Sequence[Instruction]) -> dict[int, set[int]]:
        """Per micro-batch the layers before which autograd's graph is cut."""
        first = {self.model.first}
        if any(ins.op is Op.BACKWARD_INPUT for ins in row):
            first.add(self.model.first + 1)
        cuts: dict[int, set[int]] = {}
        for ins in row:
            if ins.op in COMPUTE and ins.layers:
                cuts.setdefault(ins.microbatch, set(first)).add(ins.layers[0])
        return cuts

    def cut(self, rank: int, ins: Instruction) -> list[tuple[int, ...]]:
        runs: list[list[int]] = []
        for layer in ins.layers:
            if not runs or layer in self.cuts[rank][ins.microbatch]:
                runs.append([])
            runs[-1].append(layer)
        return [tuple(run) for run in runs]

    # walking

    def row(self, rank: int) -> Sequence[Instruction]:
        row = self.program.ranks[rank]
        return row if self.orders is None else [row[k] for k in self.orders[rank]]

    def run(self) -> None:
        self.check_lists()
        rows = [self.row(rank) for rank in range(len(self.program.ranks))]
        place = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while place[rank] < len(row) and self.await_reads(rank, row[place[rank]]):
                    self.execute(rank, row[place[rank]])
                    place[rank] += 1
                    moved = True
        for rank, row in enumerate(rows):
            if place[rank] < len(row):
                raise Wrong(f"rank {rank} is stuck at `{row[place[rank]]}`")
        self.check_end()

    def check_lists(self) -> None:
        """What the executor makes ready before it walks, from all of a rank's instructions."""
        for rank, row in enumerate(self.program.ranks):
            updated: dict[int, tuple[int, ...]] = {}
            flat: dict[int, tuple[int, ...]] = {}
            for ins in row:
                if type(str(ins)) is not str or not isinstance(ins.op, Op):
                    raise Wrong(f"rank {rank} has an instruction that does {ins.op!r}")
                if ins.stream == "host" and ins.op not in (*COMPUTE, Op.STEP):
                    raise Wrong(f"rank {rank} `{ins}` computes nothing, but is on the host's stream")
                if ins.group and ins.op not in JOINED:
                    raise Wrong(f"rank {rank} `{ins}` makes a group that others do not make")
                if ins.op in JOINED:
                    group = ins.group
                    if rank not in group or list(group) != sorted(set(group)):
                        raise Wrong(f"rank {rank} `{ins}`: ranks of a group ascend")
                    if not 0 <= group[0] <= group[-1] < len(self.program.ranks):
                        raise Wrong(f"rank {rank} `{ins}`: of ranks that are not there")
                if (ins.op is Op.STEP or (ins.op in JOINED and not self.repartitions(ins))) and (
                    len(set(ins.layers)) < len(ins.layers) or not ins.layers
                ):
                    raise Wrong(f"rank {rank} `{ins}` names a group twice, or none")
                if ins.op is Op.STEP:
                    for g in ins.layers:
                        if not self.model.trainable(g) or updated.setdefault(g, ins.layers) != ins.layers:
                            raise Wrong(f"rank {rank} `{ins}`: an optimizer has these groups together, or none")
                summed = ins.op is Op.ALL_REDUCE and ins.reads and _home(ins.reads[0]).kind == "grad"
                if summed and any(part.layer < 0 for part in ins.parts):
                    for g in ins.layers:
                        if flat.setdefault(g, ins.layers) != ins.layers:
                            raise Wrong(f"rank {rank} `{ins}`: a gradient in two buffers")

    def name(self, value: Value) -> Value:
        """The name under which a memory has a value: one that decides has one version, whatever it is called."""
        known = self.orders is not None and _home(value).kind == "param" and value.step >= 0
        return value._replace(step=0) if known else value

    def await_reads(self, rank: int, ins: Instruction) -> bool:
        """Whether all that the instruction reads has arrived. What has is put into memory."""
        underway = self.underway[rank]
        for value in ins.reads:
            if value in underway:
                found = self.arrival(rank, value, underway[value])
                if found is None:
                    return False
                source = underway.pop(value)
                if source[0] == "copy" and self.copying[rank].get(source[1]) == value:
                    del self.copying[rank][source[1]]
                self.memory[rank][value] = found
        return True

    def arrival(self, rank: int, value: Value, source: tuple[Any, ...]) -> Any:
        """What a message, a collective or a copy brings, or None if it is not there."""
        if source[0] == "copy":
            return source[2]
        if source[0] == "forms":
            return self.repartitioned(rank, value, *source[1:])
        if source[0] == "link":
            _, link, n, message = source
            if len(self.sent[link]) <= n:
                return None
            values, contents = self.sent[link][n]
            if values != message:
                raise Wrong(f"rank {rank} expects {message[0]}, but {values[0]} comes")
            return contents[message.index(value)]
        if source[0] == "pieces":
            parts = source[1]
            found = [self.total(rank, value, where, n, None) for where, n, _, _ in parts]
            if None in found:
                return None
            covered = sorted((a, b) for _, _, a, b in parts)
            ends = [0, *(b for _, b in covered)]
            size = sum(self.program.groups[value.index].tensors)
            if [a for a, _ in covered] != ends[:-1] or ends[-1] != size:
                raise Wrong(f"{value} of rank {rank} is not summed byte by byte")
            if any(_frozen(other) != _frozen(found[0]) for other in found):
                raise Wrong(f"pieces of {value} of rank {rank} hold different contributions")
            return found[0]
        return self.total(rank, value, *source[1:])

    def total(self, rank: int, value: Value, group: tuple[int, ...], turn: int, before: Any) -> Any:
        """What a value is after a collective; None while somebody is missing."""
        joined = self.joined[group][turn]
        if len(joined) < len(group):
            return None
        what = joined[rank][0]
        if any(other != what for other, _ in joined.values()):
            raise Wrong(f"ranks {group} meet in different collectives")
        op, kind = what[0], _home(value).kind
        if kind == "norm":
            return ("norm", [found for _, brought in joined.values() for found in brought.items()])
        brought = {r: of_rank[value.index] for r, (_, of_rank) in joined.items()}
        if kind == "param":
            if len({found[:3] for found in brought.values()}) > 1:
                raise Wrong(f"ranks {group} bring {value} of different versions")
            if op is Op.ALL_REDUCE and {self.replica[r] for r in joined} != set(range(self.replicas)):
                raise Wrong(f"ranks {group} average {value} without some replica")
            return ("param", *brought[rank][1:3])
        total = Counter(before or ())
        for found in brought.values():
            total.update(found)
        return total

    def execute(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        for value in ins.reads:
            if self.name(value) not in memory:
                raise Wrong(f"rank {rank} `{ins}` reads {value}, which is not there")
            if memory[self.name(value)] == "gone":
                raise Wrong(f"rank {rank} `{ins}` reads {value}, which was copied away")
        for value in (*ins.writes, *ins.frees):
            if value in self.underway[rank] or value in self.copying[rank]:
                raise Wrong(f"rank {rank} `{ins}` touches {value} while it is under way")
        kinds = {Op.FORWARD: self.forward, Op.RECOMPUTE: self.forward, Op.BACKWARD: self.backward}
        kinds |= {Op.BACKWARD_INPUT: self.backward, Op.BACKWARD_WEIGHT: self.weights, Op.STEP: self.update}
        kinds |= {Op.SEND: self.send, Op.RECV: self.receive, Op.ALL_REDUCE: self.reduce}
        kinds |= {Op.REDUCE_SCATTER: self.scatter, Op.ALL_GATHER: self.gather, Op.NORM: self.norm}
        kinds |= {Op.OFFLOAD: self.copy, Op.FETCH: self.copy} if self.stale is None else {}
        if self.repartitions(ins):
            kinds = dict.fromkeys((Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL), self.repartition)
        if ins.op not in kinds:
            raise Wrong(f"rank {rank} `{ins}`: no rank does this")
        kinds[ins.op](rank, ins)
        for value in ins.frees:
            if self.orders is not None and _home(value).kind == "param" and value.step >= 0:
                continue
            if value not in memory:
                raise Wrong(f"rank {rank} `{ins}` frees {value}, which is not there")
            del memory[value]

    # computing

    def forward(self, rank: int, ins: Instruction) -> None:
        model, i, step, rows = self.model, ins.microbatch, ins.step, self.rows(rank, ins)
        inside: dict[Value, Any] = {}
        kept = {value.index for value in ins.writes if _home(value).kind == "saved"}
        first = ins.layers[0]
        sources: Params = (rows,)
        if first:
            form = model.read(first)
            sources = tuple(self.content(rank, ins, Value("output", a, i, step, form)) for a in model.inputs[first])
        for layer in ins.layers[1:]:
            if model.read(layer) != model.written(layer - 1):
                raise Wrong(f"rank {rank} `{ins}`: layer {layer} takes another form than it is given")
        self.follow_slices(rank, ins)
        for piece in self.cut(rank, ins):
            graph = piece[0] in kept
            for layer in piece:
                if graph != (layer in kept):
                    raise Wrong(f"rank {rank} `{ins}` keeps a graph of some layers only")
                params = self.params(rank, ins, layer)
                carry = None
                if layer in model.carries and i % model.slices:
                    carry = self.take(rank, ins, Value("carry", layer, i - 1, step))
                result = model.forward(layer, sources, params, carry, rows)
                form = model.written(layer)
                handed = self.shared(rank, result, form) if layer == piece[-1] else ("inside", result)
                inside[Value("output", layer, i, step, form)] = handed
                saved = inside[Value("saved", layer, i, step)] = model.term("saved", layer, sources, params, carry)
                if layer in model.carries and (i + 1) % model.slices and ins.op is Op.FORWARD:
                    inside[Value("carry", layer, i, step)] = model.carry(saved)
                if ins.op is Op.FORWARD:
                    self.note(rank, layer, i, step, True, params)
                    once = all(k in model.apart or self.place[rank][k] == 0 for k in model.axes)
                    if layer == model.last and once:  # (all that share it have the same)
                        self.losses[result] += 1
                sources = (result,)
            if graph:
                self.graphs[rank][piece[-1], i, step] = piece
        self.put(rank, ins, inside)

    def follow_slices(self, rank: int, ins: Instruction) -> None:
        """The executor counts tokens as slices go by: the first forward of each comes after that of the one before."""
        count, i = self.model.slices, ins.microbatch
        key = rank, ins.step, i // count
        if i % count > self.order.get(key, -1) + 1:
            raise Wrong(f"rank {rank} `{ins}` comes before the slice before it")
        self.order[key] = max(i % count, self.order.get(key, -1))

    def note(self, rank: int, layer: int, i: int, step: int, there: bool, params: Params) -> None:
        if self.stale is None and self.program.serving is None:
            return
        key = (self.replica[rank], layer, i, step, there)
        if (self.place[rank], *key) in self.noted:
            raise Wrong(f"rank {rank}: layer {layer} runs micro-batch {i} of step {step} twice")
        self.noted.add((self.place[rank], *key))
        if self.used.setdefault(key, params) != params:
            raise Wrong(f"rank {rank}: layer {layer} has other parameters than on the ranks that share it")

    def backward(self, rank: int, ins: Instruction) -> None:
        model, i, step = self.model, ins.microbatch, ins.step
        self.rows(rank, ins)
        whole = ins.op is Op.BACKWARD
        inside: dict[Value, Any] = {}
        added: dict[Value, Counter[int]] = {}
        last = ins.layers[-1]
        if last == model.last:
            self.take(rank, ins, Value("output", last, i, step, model.written(last)))
        form = model.read(last, back=True)
        incoming = tuple(self.content(rank, ins, Value("grad_output", e, i, step, form)) for e in model.out[last])
        for layer in ins.layers[1:]:
            if model.read(layer - 1, back=True) != model.written(layer, back=True):
                raise Wrong(f"rank {rank} `{ins}`: layer {layer - 1} takes another form than it is given")
        back: Any = None
        for piece in reversed(self.cut(rank, ins)):
            if self.graphs[rank].pop((piece[-1], i, step), None) != piece:
                raise Wrong(f"rank {rank} `{ins}`: autograd has no graph of layers {piece}")
            for layer in reversed(piece):
                for a in model.inputs[layer]:
                    self.take(rank, ins, Value("output", a, i, step, model.read(layer)), True)
                kept = self.take(rank, ins, Value("saved", layer, i, step))
                carried = None
                if layer in model.carries and not whole:
                    raise Wrong(f"rank {rank} `{ins}`: the backward of a slice is not split")
                if layer in model.carries and i % model.slices:
                    self.take(rank, ins, Value("carry", layer, i - 1, step))
                if layer in model.carries and (i + 1) % model.slices:
                    self.take(rank, ins, Value("carry", layer, i, step))
                    carried = self.take(rank, ins, Value("grad_carry", layer, i, step))
                params = self.params(rank, ins, layer)
                self.note(rank, layer, i, step, False, params)
                back = model.backward(layer, kept, incoming, params, carried)
                incoming = (model.term("into", back, 0),)
                if layer in model.carries and i % model.slices:
                    inside[Value("grad_carry", layer, i - 1, step)] = model.term("into carry", back)
                if whole:
                    self.contribute(rank, layer, back, added)
                else:
                    inside[Value("saved_weight", layer, i, step)] = back
            if not whole:
                self.halves[rank][piece[-1], i, step] = piece
        first = ins.layers[0]
        for k, (e, a) in enumerate(zip(model.into[first], model.inputs[first], strict=True)):
            if a >= model.first:
                form = model.written(first, back=True)
                handed = self.shared(rank, model.term("into", back, k), form)
                inside[Value("grad_output", e, i, step, form)] = handed
        self.add(rank, ins, added, inside)

    def weights(self, rank: int, ins: Instruction) -> None:
        added: dict[Value, Counter[int]] = {}
        self.rows(rank, ins)
        for piece in reversed(self.cut(rank, ins)):
            if self.halves[rank].pop((piece[-1], ins.microbatch, ins.step), None) != piece:
                raise Wrong(f"rank {rank} `{ins}`: no input half of layers {piece}")
            for layer in piece:
                back = self.take(rank, ins, Value("saved_weight", layer, ins.microbatch, ins.step))
                replica, half = self.replica[rank], (layer, ins.microbatch, ins.step, False)
                wanted = self.promised(layer, ins.step, replica)
                if self.program.serving is not None:  # (what was pulled)
                    wanted = self.used[(replica, *half)]
                if self.params(rank, ins, layer) != wanted:
                    raise Wrong(f"rank {rank} `{ins}` reads other parameters than its input half")
                self.contribute(rank, layer, back, added)
        self.add(rank, ins, added, {})

    def contribute(self, rank: int, layer: int, back: int, added: dict[Value, Counter[int]]) -> None:
        for g in self.model.groups_of[layer]:
            if self.model.trainable(g):
                added.setdefault(Value("grad", g), Counter())[self.model.made(g, back, self.place[rank])] += 1

    def add(self, rank: int, ins: Instruction, added: dict[Value, Counter[int]], inside: dict[Value, Any]) -> None:
        for value, contributions in added.items():
            named = self.there(ins, value)
            if named not in ins.writes:
                raise Wrong(f"rank {rank} `{ins}` loses its contribution to {named}")
            before = self.memory[rank].get(named, Counter())
            if before == "gone":
                raise Wrong(f"rank {rank} `{ins}` adds to {named}, which was copied away")
            inside[value] = before + contributions
        self.put(rank, ins, inside)

    def there(self, ins: Instruction, value: Value) -> Value:
        """The name of a value for an instruction of the host, or of the device."""
        return value._replace(kind=f"host {value.kind}") if ins.stream == "host" else value

    def take(self, rank: int, ins: Instruction, value: Value, inside: bool = False) -> Any:
        """A value that the instruction needs, and so must read. `inside`: autograd has it, if nobody else."""
        named = self.there(ins, value)
        if named not in ins.reads:
            raise Wrong(f"rank {rank} `{ins}` needs {named}, but does not read it")
        found = self.memory[rank][self.name(named)]
        if not inside and isinstance(found, tuple) and found[0] == "inside":
            if value.kind == "output" and value.index == self.model.last:
                return found
            raise Wrong(f"rank {rank} `{ins}` reads {named}, which is inside of a graph")
        return found

    def params(self, rank: int, ins: Instruction, layer: int) -> Params:
        found = []
        for g in self.model.groups_of[layer]:
            kind = self.there(ins, Value("param", g)).kind
            named = [v for v in ins.reads if v[:2] == (kind, g)]
            if len(set(named)) != 1:
                raise Wrong(f"rank {rank} `{ins}` does not say which param({g}) it uses")
            content = self.memory[rank][self.name(named[0])]
            if content[0] != "param":
                raise Wrong(f"rank {rank} `{ins}` uses param({g}), of which a slice is newer")
            found.append(content)
        return tuple(found)

    def put(self, rank: int, ins: Instruction, inside: dict[Value, Any]) -> None:
        found = {self.there(ins, value): content for value, content in inside.items()}
        for value in dict.fromkeys(ins.writes):
            if value not in found:
                raise Wrong(f"rank {rank} `{ins}` writes {value}, which it does not compute")
            before = self.memory[rank].get(value)
            if before is not None and value.microbatch >= 0:
                raise Wrong(f"rank {rank} `{ins}` makes {value} a second time")
            self.memory[rank][value] = found[value]

    def rows(self, rank: int, ins: Instruction) -> Params:
        i, step = ins.microbatch, ins.step
        if not 0 <= i < self.program.microbatches or not 0 <= step < self.program.steps or not ins.layers:
            raise Wrong(f"rank {rank} `{ins}`: no such rows")
        return self.model.rows(self.replica[rank], i, step, self.place[rank])

    # updates

    def update(self, rank: int, ins: Instruction) -> None:
        inside: dict[Value, Any] = {}
        host = ins.stream == "host"
        for g in ins.layers:
            sliced = Value("optimizer_shard", g) in self.homes[rank]
            apart = sliced if host else self.apart(rank, g)
            gradient = Value("grad_shard" if sliced else "grad", g)
            state = Value("optimizer_shard" if sliced else "optimizer_state", g)
            version = self.newest(rank, g) if self.stale else -1
            held = Value("param_shard" if apart else "param", g, -1, version)
            content = self.take(rank, ins, held)
            name, _, updates, *owner = content
            if name != "param" or (self.stale and updates != version) or updates != ins.step:
                raise Wrong(f"rank {rank} `{ins}` updates param({g}) of another version")
            if self.take(rank, ins, state)[2:] not in ((updates,), (updates, ins.layers)):
                raise Wrong(f"rank {rank} `{ins}` has an optimizer state of another version, or optimizer")
            found = self.take(rank, ins, gradient)
            if self.stale:
                self.updates.append((rank, g, updates, Counter(found)))
            else:
                self.check_gradient(rank, ins, g, updates, found, bool(owner))
            after: list[Any] = ["param", g, updates + 1]
            if self.every:
                after.append(self.replica[rank])
            if sliced and not apart:
                after[0] = "my slice"
            target = held._replace(step=version + 1) if self.stale else held
            inside[target], inside[state] = tuple(after), (state.kind, g, updates + 1, ins.layers)
            for needed in (target, state):
                if self.there(ins, needed) not in ins.writes:
                    raise Wrong(f"rank {rank} `{ins}` does not write {needed}")
            named = self.there(ins, gradient)
            if self.stale and named not in (*ins.frees, *self.program.state[rank]):
                raise Wrong(f"rank {rank} `{ins}` keeps {named}")
            self.memory[rank][named] = Counter()
            if self.orders is not None:
                self.memory[rank][Value("param", g, -1, 0)] = tuple(after)
        self.summed[rank] = {key for key in self.summed[rank] if key[0] not in ins.layers}
        if self.orders is None:
            self.put(rank, ins, inside)
        else:
            self.memory[rank].update({v: c for v, c in inside.items() if v.kind != "param"})
        self.check_alive(rank, ins)

    def newest(self, rank: int, g: int) -> int:
        if self.orders is not None:
            return int(self.memory[rank][Value("param", g, -1, 0)][2])
        mine = [*self.memory[rank], *self.underway[rank]]
        return max((v.step for v in mine if v.kind == "param" and v.index == g), default=-1)

    def apart(self, rank: int, g: int) -> bool:
        """Whether a rank keeps a slice of the parameters, and not all of them."""
        return {v.kind for v in self.homes[rank] if v.index == g and v.kind in PARAMS} == {"param_shard"}

    def check_alive(self, rank: int, ins: Instruction) -> None:
        most = self.stale.versions if self.stale else None
        if most is None or self.orders is not None:
            return
        for g in ins.layers:
            mine = {*self.memory[rank], *self.underway[rank]} - {*ins.frees}
            alive = {v.step for v in mine if v.kind == "param" and v.index == g and v.step >= 0}
            if len(alive) > most:
                raise Wrong(f"rank {rank} `{ins}` leaves {len(alive)} versions of param({g}) alive")

    def check_gradient(self, rank: int, ins: Instruction, g: int, updates: int, found: Counter[int], own: bool) -> None:
        replicas: Iterable[int] = [self.replica[rank]] if self.every else range(self.replicas)
        if updates >= self.program.steps:
            raise Wrong(f"rank {rank} `{ins}`: one update too many")
        right: Counter[int] = Counter()
        for replica in replicas:
            for contributions in self.right[updates, replica]:
                right.update(contributions.get((g, self.place[rank]), ()))
        if self.every and own != bool(updates % self.every):
            raise Wrong(f"rank {rank} `{ins}` updates what was averaged at another time")
        if _frozen(found) != _frozen(right):
            raise Wrong(f"rank {rank} `{ins}` applies a wrong gradient of group {g}")
        length = Value("norm", 0)
        if (length in ins.reads) != (self.program.clip is not None):
            if self.program.clip is not None:
                raise Wrong(f"rank {rank} `{ins}` does not read the norm")
        elif self.program.clip is not None:
            self.check_norm(rank, ins, updates)

    def check_norm(self, rank: int, ins: Instruction, updates: int) -> None:
        """The norm counts every gradient, right and complete, on each rank that holds it or a slice of it."""
        wanted: Counter[Any] = Counter()
        for holder, homes in enumerate(self.homes):
            for value in homes:
                if value.kind in ("optimizer_state", "optimizer_shard"):
                    right: Counter[int] = Counter()
                    for replica in range(self.replicas):
                        for contributions in self.right[updates, replica]:
                            right.update(contributions.get((value.index, self.place[holder]), ()))
                    wanted[value.index, _frozen(right)] += 1
        _, found = self.memory[rank][Value("norm", 0)]
        if Counter((g, _frozen(gradient)) for g, gradient in found) != wanted:
            raise Wrong(f"rank {rank} `{ins}` scales gradients by a wrong norm")

    # messages

    def send(self, rank: int, ins: Instruction) -> None:
        self.check_message(rank, ins, ins.reads, ins.writes)
        contents = [self.memory[rank][value] for value in ins.reads]
        if any(isinstance(found, tuple) and found[0] == "inside" for found in contents):
            raise Wrong(f"rank {rank} `{ins}` sends what is inside of a graph")
        self.sent[rank, ins.peer].append((tuple(ins.reads), contents))

    def receive(self, rank: int, ins: Instruction) -> None:
        self.check_message(rank, ins, ins.writes, ins.reads)
        link = (ins.peer, rank)
        for value in ins.writes:
            if value in self.memory[rank]:
                raise Wrong(f"rank {rank} `{ins}` receives {value} a second time")
            self.underway[rank][value] = ("link", link, self.received[link], tuple(ins.writes))
        self.received[link] += 1

    def check_message(self, rank: int, ins: Instruction, moved: Sequence[Value], other: Sequence[Value]) -> None:
        if not moved or other or len(set(moved)) < len(moved):
            raise Wrong(f"rank {rank} `{ins}` moves nothing, or something twice")
        if not 0 <= ins.peer < len(self.program.ranks) or ins.peer == rank:
            raise Wrong(f"rank {rank} `{ins}`: no such rank")
        if any(value.kind not in ("output", "grad_output") for value in moved):
            raise Wrong(f"rank {rank} `{ins}`: only outputs and their gradients travel")
        if any(
            not 0 <= v.microbatch < self.program.microbatches or not 0 <= v.step < self.program.steps for v in moved
        ):
            raise Wrong(f"rank {rank} `{ins}`: no such rows")
        seen = [i for i in self.program.ranks[rank] if i.op is ins.op and i.peer == ins.peer]
        if sum((i.reads or i.writes) == tuple(moved) for i in seen) > 1:
            raise Wrong(f"rank {rank} `{ins}`: the same message twice")

    # collectives

    def turn(self, rank: int, ins: Instruction, what: tuple[Any, ...], brought: dict[int, Any]) -> int:
        """Which of its group's collectives this rank joins."""
        turns = self.joined.setdefault(ins.group, [])
        turn = sum(rank in joined for joined in turns)
        if turn == len(turns):
            turns.append({})
        turns[turn][rank] = ((ins.op, *what), brought)
        return turn

    def repartitions(self, ins: Instruction) -> bool:
        return bool(ins.group and ins.reads) and ins.reads[0].kind in MOVED

    def shared(self, rank: int, term: int, form: str) -> Any:
        """What a rank has of a value that others have, too."""
        return ("part", term, form, self.where(rank, form)) if form else term

    def where(self, rank: int, form: str) -> Params:
        """A rank's place on those axes on which a form is not whole."""
        letters = [self.model.parts(letter) for letter in form.split(",")]
        return tuple((k, self.place[rank][k]) for k in self.model.axes if any(parts[k] != "R" for parts in letters))

    def content(self, rank: int, ins: Instruction, value: Value) -> Any:
        """What value a rank's content is a part of, if it is its own part."""
        found = self.take(rank, ins, value)
        if value.form and found[2:] != (value.form, self.where(rank, value.form)):
            raise Wrong(f"rank {rank} `{ins}` reads another part of {value}")
        return found[1] if value.form else found

    def repartition(self, rank: int, ins: Instruction) -> None:
        """All ranks along one of the axes that share a layer give a value another form."""
        (source,), (target,) = ins.reads, ins.writes
        if ins.layers or ins.frees != ins.reads or source._replace(form="") != target._replace(form=""):
            raise Wrong(f"rank {rank} `{ins}` names other values")
        if (ins.microbatch, ins.step) != source[2:4] or target in self.memory[rank]:
            raise Wrong(f"rank {rank} `{ins}` is of other rows, or makes {target} a second time")
        before, after = (value.form.split(",") if value.form else [] for value in (source, target))
        count = max(len(before), len(after))
        olds, news = ([self.model.parts(x) for x in letters or ["R"] * count] for letters in (before, after))
        changed = {k for k in self.model.axes for old, new in zip(olds, news, strict=True) if old[k] != new[k]}
        if len(changed) != 1:
            raise Wrong(f"rank {rank} `{ins}` changes {source} along {len(changed)} axes")
        (axis,) = changed
        own, alike = self.place[rank], range(len(self.program.ranks))
        there = [r for r in alike if self.team[r] == self.team[rank] and len(self.place[r]) == len(own)]
        rest = [r for r in there if all(self.place[r][k] == own[k] for k in self.model.axes if k != axis)]
        if list(ins.group) != rest:
            raise Wrong(f"rank {rank} `{ins}`: not the ranks that share a layer along the axis that changes")
        for n, (old, new) in enumerate(zip(olds, news, strict=True)):
            if old[axis] == new[axis]:
                continue
            counted = any(earlier[axis] == "N" for earlier in olds[:n])
            if self.collective(old[axis], new[axis], counted) is not ins.op:
                raise Wrong(f"rank {rank} `{ins}` cannot make {target}")
            if any(
                self.is_inside(old[axis], old[k]) or self.is_inside(new[axis], old[k])
                for k in range(axis + 1, len(own))
            ):
                raise Wrong(
                    f"rank {rank} `{ins}` joins or cuts what another axis has cut into pieces, in a wrong order"
                )
        turn = self.turn(rank, ins, (source, target), {0: self.content(rank, ins, source)})
        self.underway[rank][target] = ("forms", ins.group, turn)

    def collective(self, before: str, after: str, counted: bool) -> Op | None:
        """What makes one part of a letter of another. `counted`: the counts of unequal shards are there, whole."""
        if before in ("P", "M") and after == "R":
            return Op.ALL_REDUCE
        if before[0] == "S" and after in ("R", "N"):
            return Op.ALL_GATHER
        if before == "P" and after[0] == "S":
            return Op.REDUCE_SCATTER
        if before[0] == after[0] == "S" or (before[0] == after[0] == "U" and counted):
            return Op.ALL_TO_ALL
        return None

    def is_inside(self, outer: str, inner: str) -> bool:
        """Whether the part of a letter on a later axis must change before the one on an earlier axis does: that axis
        cuts what the earlier one has left of a dimension; or the largest of sums is not the sum of the largest."""
        if outer[0] in "SU" and inner[0] in "SU":
            return self.cuts_dimension(outer) == self.cuts_dimension(inner)
        return {outer, inner} == {"M", "P"}

    def cuts_dimension(self, part: str) -> tuple[str, bool]:
        """Which dimension a shard is cut in; of rows and tokens that are one dimension, whether in the tokens."""
        if part[0] == "U":
            return "0", False
        return part[1:].partition(":")[0], part.endswith("r")

    def repartitioned(self, rank: int, value: Value, group: tuple[int, ...], turn: int) -> Any:
        joined = self.joined[group][turn]
        if len(joined) < len(group):
            return None
        if len({what for what, _ in joined.values()}) > 1:
            raise Wrong(f"ranks {group} meet in different collectives")
        terms = {brought[0] for _, brought in joined.values()}
        if len(terms) > 1:
            raise Wrong(f"ranks {group} bring parts of different values for {value}")
        return self.shared(rank, terms.pop(), value.form)

    def reduce(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        if ins.reads and ins.reads[0].kind == "param":
            self.average(rank, ins)
            return
        names, rest = {g: Value("grad", g) for g in ins.layers}, {Value("residual", g) for g in ins.layers}
        kept, piece = self.program.compress.startswith(("topk", "powersgd")), self.is_piece(ins)
        if not set(names.values()) <= set(ins.reads) <= {*names.values(), *rest}:
            raise Wrong(f"rank {rank} `{ins}` does not read what it sums")
        if not set(ins.writes) <= {*names.values(), *rest} or (
            not piece and not set(names.values()) <= set(ins.writes)
        ):
            raise Wrong(f"rank {rank} `{ins}` does not write what it sums")
        if kept and not (rest <= set(ins.reads) and rest <= set(ins.writes)):
            raise Wrong(f"rank {rank} `{ins}` leaves its residual out")
        flat = any(part.layer < 0 for part in ins.parts)
        what = (ins.layers, flat, ins.parts if piece else (), str(ins))
        turn = self.turn(rank, ins, what, {g: memory[v] for g, v in names.items()})
        if not piece:
            for value in names.values():
                del memory[value]
                self.underway[rank][value] = ("group", ins.group, turn, None)
            return
        pieces = self.add_piece(rank, ins, turn)
        if ins.writes:
            (value,) = names.values()
            del memory[value], self.pieces[rank, ins.layers[0]]
            self.underway[rank][value] = ("pieces", pieces)

    def is_piece(self, ins: Instruction) -> bool:
        return len(ins.parts) == 1 and ins.parts[0].start >= 0

    def add_piece(self, rank: int, ins: Instruction, turn: int) -> list[tuple[Any, ...]]:
        (part,) = ins.parts
        if part.layer >= 0 or len(ins.layers) > 1 or part.end <= part.start or self.program.compress != "none":
            raise Wrong(f"rank {rank} `{ins}`: a piece of no buffer")
        pieces = self.pieces.setdefault((rank, ins.layers[0]), [])
        pieces.append((ins.group, turn, part.start, part.end))
        return pieces

    def average(self, rank: int, ins: Instruction) -> None:
        memory, names = self.memory[rank], list(ins.reads)
        if not self.every or set(names) != set(ins.writes) or set(names) != {Value("param", g) for g in ins.layers}:
            raise Wrong(f"rank {rank} `{ins}` averages what is no replica's own")
        brought = {v.index: memory.pop(v) for v in names}
        if any(found[2] != ins.step + 1 for found in brought.values()):
            raise Wrong(f"rank {rank} `{ins}`: replicas weigh as in another step")
        turn = self.turn(rank, ins, (ins.layers, str(ins), "param"), brought)
        self.underway[rank].update(dict.fromkeys(names, ("group", ins.group, turn, None)))

    def check_slices(self, rank: int, ins: Instruction) -> None:
        """Slice k is that of the k-th rank that has one, of those with the same shard of the layer."""
        if any(Value("optimizer_shard", g) not in self.homes[rank] for g in ins.layers):
            raise Wrong(f"rank {rank} `{ins}` works on a group that is not cut into slices")
        for g in ins.layers:
            having = [r for r, held in enumerate(self.homes) if Value("optimizer_shard", g) in held]
            if list(ins.group) != [r for r in having if self.place[r] == self.place[rank]]:
                raise Wrong(f"rank {rank} `{ins}`: not all ranks with slices of group {g}, ascending")

    def scatter(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        self.check_slices(rank, ins)
        sources, made = ([Value(kind, g) for g in ins.layers] for kind in ("grad", "grad_shard"))
        more = set(ins.reads) & set(made)
        if self.program.compress != "none" or self.is_piece(ins):
            raise Wrong(f"rank {rank} `{ins}`: slices are summed whole, as they are")
        if not set(sources) <= set(ins.reads) or len(more) not in (0, len(made)):
            raise Wrong(f"rank {rank} `{ins}` does not read what it sums")
        if not set(made) <= set(ins.writes):
            raise Wrong(f"rank {rank} `{ins}` does not name what it sums")
        if bool(more) != (ins.layers in self.summed[rank]):
            raise Wrong(f"rank {rank} `{ins}` adds to other slices than there are")
        if not more and any(memory.get(v) for v in made):
            raise Wrong(f"rank {rank} `{ins}` loses what its slices held")
        if set(ins.writes) - set(made) != {Value("buffer", g) for g in ins.layers}:
            raise Wrong(f"rank {rank} `{ins}` names other values")
        turn = self.turn(rank, ins, (ins.layers,), {v.index: memory[v] for v in sources})
        self.summed[rank].add(ins.layers)
        for value in made:
            self.underway[rank][value] = ("group", ins.group, turn, memory.pop(value, None))
        memory.update({v: Counter() for v in sources})
        memory.update({v: None for v in ins.writes if v.kind == "buffer"})

    def gather(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        self.check_slices(rank, ins)
        made = {g: Value("param", g) for g in ins.layers}
        kinds = {g: "param_shard" if self.apart(rank, g) else "param" for g in ins.layers}
        brought = {g: self.take(rank, ins, Value(kinds[g], g)) for g in ins.layers}
        if set(ins.writes) != set(made.values()):
            raise Wrong(f"rank {rank} `{ins}` does not write what it gathers")
        brought = {g: ("param", *found[1:]) for g, found in brought.items()}
        turn = self.turn(rank, ins, (ins.layers,), brought)
        for value in ins.writes:
            memory.pop(value, None)
            self.underway[rank][value] = ("group", ins.group, turn, None)

    def norm(self, rank: int, ins: Instruction) -> None:
        brought, names = {}, set()
        for g in ins.layers:
            sliced = Value("optimizer_shard", g) in self.homes[rank]
            named = [v for v in ins.reads if _home(v) == Value("grad_shard" if sliced else "grad", g)]
            if len(named) != 1:
                raise Wrong(f"rank {rank} `{ins}` does not read the gradient of group {g}")
            brought[g] = self.memory[rank][named[0]]
            names.add(named[0])
        if ins.writes != (Value("norm", 0),) or not names <= set(ins.reads):
            raise Wrong(f"rank {rank} `{ins}` names other values than the norm")
        self.memory[rank].pop(Value("norm", 0), None)
        self.underway[rank][Value("norm", 0)] = ("group", ins.group, self.turn(rank, ins, (), brought), None)

    # copies

    def copy(self, rank: int, ins: Instruction) -> None:
        memory = self.memory[rank]
        source, (target,) = ins.reads[0], ins.writes
        down = RANKS[_tier(target)] - RANKS[_tier(source)]
        same = _home(source) == _home(target)
        part = _home(source).kind == "param_shard" and target == Value("param", source.index)
        if not (same or part) or (down <= 0 if ins.op is Op.OFFLOAD else down >= 0):
            raise Wrong(f"rank {rank} `{ins}` is no copy")
        if ins.layers != (source.index,) or _home(source).kind not in (*COPIED, "optimizer_shard"):
            raise Wrong(f"rank {rank} `{ins}`: nothing that is copied")
        if target in memory and target.microbatch >= 0:
            raise Wrong(f"rank {rank} `{ins}` makes {target} a second time")
        if target.microbatch >= 0 and (target.microbatch, target.step) != (ins.microbatch, ins.step):
            raise Wrong(f"rank {rank} `{ins}` is of another micro-batch")
        content = memory[source]
        if _home(source).kind in ("grad", "grad_shard"):
            steps = [
                other for other in self.program.ranks[rank] if other.op is Op.STEP and source.index in other.layers
            ]
            if ins.op is not Op.OFFLOAD or not steps or any(other.stream != "host" for other in steps):
                raise Wrong(f"rank {rank} `{ins}`: no STEP on the host takes this gradient")
        if part and isinstance(content, tuple):
            content = ("my slice", *content[1:])
        memory.pop(target, None)
        self.underway[rank][target] = ("copy", source, content)
        activation = source.microbatch >= 0
        if ins.op is Op.OFFLOAD or activation:  # the source is let go
            memory[source] = Counter() if _home(source).kind in ("grad", "grad_shard") else "gone"
        elif source not in ins.frees:
            self.copying[rank][source] = target

    # the end

    def check_end(self) -> None:
        program = self.program
        if any(len(messages) != self.received[link] for link, messages in self.sent.items()):
            raise Wrong("a message was never received")
        if any(len(turn) < len(group) for group, turns in self.joined.items() for turn in turns):
            raise Wrong("a collective was never joined by all its ranks")
        if self.pieces:
            raise Wrong("a gradient of which some pieces are summed only")
        if self.stale is not None:
            self.check_updates()
        if self.losses != self.wanted:
            raise Wrong("a loss is missing, doubled or not that of its rows")
        for rank, memory in enumerate(self.memory):
            for value, source in list(self.underway[rank].items()):
                version = self.stale is not None and value._replace(step=0) in program.state[rank]
                if version or value in program.state[rank]:  # the end waits for it
                    memory[value] = self.arrival(rank, value, source)
                    del self.underway[rank][value]
            if self.underway[rank]:
                raise Wrong(f"rank {rank} ends before {next(iter(self.underway[rank]))} was awaited")
            self.check_left(rank, memory)

    def check_left(self, rank: int, memory: dict[Value, Any]) -> None:
        program, updates = self.program, self.last_version()
        named = {}
        for value, content in memory.items():
            version = value.step >= 0 and _home(value).kind in PARAMS and self.orders is None
            named[value._replace(step=0) if version and value.step == updates else value] = content
        if named.keys() != program.state[rank]:
            raise Wrong(f"rank {rank} ends with other values than it began with")
        for value, content in named.items():
            kind = _home(value).kind
            if kind in ("grad", "grad_shard") and +content:
                raise Wrong(f"{value} of rank {rank} holds contributions that no update used")
            after = updates if self.model.trainable(value.index) else 0
            if kind in ("param", "param_shard") and content != ("param", value.index, after):
                raise Wrong(f"{value} of rank {rank} has seen the wrong number of updates")
            if kind in ("optimizer_state", "optimizer_shard") and content[:3] != (kind, value.index, after):
                raise Wrong(f"{value} of rank {rank} has seen the wrong number of updates")

    def last_version(self) -> int:
        """How many updates the parameters of a rank have had at the end."""
        if self.stale is None:
            return self.program.steps
        return -(-self.program.steps * self.program.microbatches // (self.stale.every or self.program.microbatches))

    def check_updates(self) -> None:
        """Of an asynchronous program: what was used, how old it was, and that each micro-batch went into one update."""
        assert self.stale is not None
        program, model, contract = self.program, self.model, self.stale
        m, every = program.microbatches, self.stale.every or program.microbatches

        of_all: dict[tuple[int, int], Contributions] = {}
        for step in range(program.steps):
            for replica in range(self.replicas):
                losses, of_step = model.whole(replica, step, self.used_by(replica, step))
                self.wanted += losses
                for i, contributions in enumerate(of_step):
                    for key, mine in contributions.items():
                        of_all.setdefault((step, i), {}).setdefault(key, Counter()).update(mine)
        taken: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for rank, g, version, gradient in self.updates:
            own = (g, self.place[rank])
            places = [place for place, mine in of_all.items() if mine.get(own, Counter()).keys() & gradient.keys()]
            right: Counter[int] = Counter()
            for place in places:
                right.update(of_all[place].get(own, ()))
            if right != gradient or taken[rank, g] & set(places):
                raise Wrong(f"rank {rank}: update {version} of group {g} takes a wrong gradient")
            taken[rank, g] |= set(places)
            left = program.steps * m - version * every
            if len(places) != min(every, left):
                raise Wrong(f"rank {rank}: update {version} of group {g} is of {len(places)} micro-batches")
            if contract.every is None and {step for step, _ in places} != {version}:
                raise Wrong(f"rank {rank}: update {version} of group {g} is of another step")
            for step, i in places:
                self.check_age(rank, g, version, step, i)

    def check_age(self, rank: int, g: int, version: int, step: int, i: int) -> None:
        contract = self.stale
        assert contract is not None
        for layer in self.program.groups[g].layers:
            seen = {there: self.used[self.replica[rank], layer, i, step, there] for there in (True, False)}
            if contract.stashed and seen[True] != seen[False]:
                raise Wrong(f"rank {rank}: micro-batch {i} of step {step} goes backward with other parameters")
            (own,) = [found for found in seen[True] if found[1] == g]
            if contract.bound is not None and version - own[2] > contract.bound:
                raise Wrong(f"rank {rank}: micro-batch {i} of step {step} is {version - own[2]} updates old")


# parameter servers ---------------------------------------------------------------------------------------------------


class _Service(_Machine):
    """Workers and parameter servers: what is pulled, pushed, accepted, applied and answered.

    The executor walks a worker's instructions step by step, in the order in which servers let it; what servers do
    follows from the mode, and where their lists are there, they say the same.

    every_one   whether an update takes the gradients of all workers
    """

    def __init__(self, program: Program) -> None:
        assert program.serving is not None
        servers = program.serving.servers
        if type(servers) is not int or not 1 <= servers < len(program.ranks):
            raise Wrong(f"servers={servers}")
        super().__init__(program)
        self.workers = len(program.ranks) - servers
        self.known = any(program.ranks[self.workers :])
        mode = program.serving.mode
        kinds = r"(sync)|async|ssp:\d+|k-of-n:\d+/" + str(self.workers)
        found = re.fullmatch(kinds, mode)
        if not found or (not found[1] and self.stale is None) or (mode == "sync" and not self.known):
            raise Wrong(f"mode={mode} with contract {program.contract}")
        self.every_one = bool(found[1])
        if self.every or self.replicas != self.workers:
            raise Wrong("servers of workers that update alone, or that are no replicas")
        self.shares = [{v.index for v in held if v.kind == "served"} for held in program.state[self.workers :]]
        if any(not share for share in self.shares):
            raise Wrong("a server that serves nothing")
        self.messages: dict[tuple[Op, int, int], list[Any]] = defaultdict(list)
        self.taken: Counter[tuple[Op, int, int]] = Counter()
        self.pushes: dict[tuple[int, int, int, int], Counter[int]] = {}  # worker, step, server, group
        self.pulls: dict[tuple[int, int, int, int], Any] = {}
        self.versions: Counter[int] = Counter()  # by server
        self.applied: set[tuple[int, int, int]] = set()  # server, worker, step
        self.taken_by: dict[int, set[tuple[int, int]]] = {}  # by version: worker, step

    def run(self) -> None:
        program = self.program
        for rank, row in enumerate(program.ranks):
            possible = (Op.PULL, Op.PUSH, *COMPUTE) if rank < self.workers else (Op.ACCEPT, Op.APPLY, Op.REPLY)
            for ins in row:
                if ins.op not in possible or ins.stream == "host" or ins.group:
                    raise Wrong(f"rank {rank} `{ins}`: not here")
        place = [0] * len(program.ranks)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(program.ranks):
                while place[rank] < len(row) and self.serve(rank, row[place[rank]]):
                    place[rank] += 1
                    moved = True
        for rank, row in enumerate(program.ranks):
            if place[rank] < len(row):
                raise Wrong(f"rank {rank} is stuck at `{row[place[rank]]}`")
        self.check_service()

    def serve(self, rank: int, ins: Instruction) -> bool:
        if ins.op in COMPUTE:
            for g in {v.index for v in ins.reads if v.kind == "param"}:
                if self.model.trainable(g) and not self.everywhere(self.pulls, rank, ins.step, g):
                    raise Wrong(f"rank {rank} `{ins}` uses param({g}), of which parts are not there")
                if self.model.trainable(g) and self.memory[rank].get(Value("param", g), (0, 0, 0, -1))[3] != ins.step:
                    raise Wrong(f"rank {rank} `{ins}` uses param({g}) that was pulled in another step")
            self.execute(rank, ins)
            return True
        link = {Op.PULL: (Op.REPLY, ins.peer, rank), Op.ACCEPT: (Op.PUSH, ins.peer, rank)}.get(ins.op)
        content: Any = None
        if ins.op is not Op.APPLY:
            here = range(self.workers) if rank >= self.workers else range(self.workers, len(self.program.ranks))
            if ins.peer not in here or len(set(ins.layers)) < len(ins.layers) or not ins.layers:
                raise Wrong(f"rank {rank} `{ins}`: no such partner, or group")
        if link is not None and (self.known or ins.op is Op.ACCEPT):
            if len(self.messages[link]) <= self.taken[link]:
                return False
            layers, step, content = self.messages[link][self.taken[link]]
            self.taken[link] += 1
            if (layers, step) != (ins.layers, ins.step):
                raise Wrong(f"rank {rank} `{ins}` meets another message")
        if any(value not in self.memory[rank] for value in ins.reads):
            raise Wrong(f"rank {rank} `{ins}` reads what is not there")
        {Op.PULL: self.pull, Op.PUSH: self.push, Op.ACCEPT: self.accept, Op.APPLY: self.apply, Op.REPLY: self.reply}[
            ins.op
        ](rank, ins, content)
        for value in ins.frees:
            if self.memory[rank].pop(value, None) is None:
                raise Wrong(f"rank {rank} `{ins}` frees {value}, which is not there")
        return True

    def pull(self, rank: int, ins: Instruction, content: Any) -> None:
        version = ins.step if content is None else content
        server = ins.peer - self.workers
        if (
            not 0 <= ins.step < self.program.steps
            or set(ins.writes) != {Value("param", g) for g in ins.layers}
            or ins.reads
        ):
            raise Wrong(f"rank {rank} `{ins}` does not write what it pulls")
        for g in ins.layers:
            if g not in self.shares[server] or (rank, ins.step, server, g) in self.pulls:
                raise Wrong(f"rank {rank} `{ins}` pulls what is not there, or twice")
            self.pulls[rank, ins.step, server, g] = version
            found = {v for (w, s, _, _), v in self.pulls.items() if (w, s) == (rank, ins.step)}
            if len(found) > 1 or (self.stale is None and found != {ins.step}):
                raise Wrong(f"rank {rank} `{ins}` pulls another version")
            self.memory[rank][Value("param", g)] = ("param", g, version, ins.step)

    def push(self, rank: int, ins: Instruction, content: Any) -> None:
        server = ins.peer - self.workers
        left = {Value("residual", g) for g in ins.layers if self.program.compress.startswith("topk")}
        if {*ins.reads} != {Value("grad", g) for g in ins.layers} | left or {*ins.writes} != left:
            raise Wrong(f"rank {rank} `{ins}` does not read what it pushes")
        for g in ins.layers:
            if g not in self.shares[server] or (rank, ins.step, server, g) in self.pushes:
                raise Wrong(f"rank {rank} `{ins}` pushes what the server does not have, or twice")
            self.pushes[rank, ins.step, server, g] = Counter(self.memory[rank][Value("grad", g)])
        self.messages[Op.PUSH, rank, ins.peer].append((ins.layers, ins.step, True))

    def accept(self, rank: int, ins: Instruction, content: Any) -> None:
        values = tuple(Value("pushed", g, ins.peer, ins.step) for g in ins.layers)
        if ins.writes != values or ins.reads or any(v in self.memory[rank] for v in values):
            raise Wrong(f"rank {rank} `{ins}` does not write what it accepts")
        self.memory[rank].update(dict.fromkeys(values, True))

    def apply(self, rank: int, ins: Instruction, content: Any) -> None:
        server = rank - self.workers
        share, version = self.shares[server], self.versions[server]
        found: dict[int, set[tuple[int, int]]] = {
            g: {(v.microbatch, v.step) for v in ins.reads if v.kind == "pushed" and v.index == g} for g in share
        }
        state = {Value(kind, g) for g in share for kind in ("served", "served_state")}
        named = {v for v in ins.reads if v.kind == "pushed"}
        if set(ins.layers) != share or len(ins.layers) != len(share) or version != ins.step:
            raise Wrong(f"rank {rank} `{ins}` updates other groups than it serves, or another version of them")
        if set(ins.writes) != state:
            raise Wrong(f"rank {rank} `{ins}` updates other groups than it serves")
        if not state <= set(ins.reads) or not named <= set(ins.frees):
            raise Wrong(f"rank {rank} `{ins}` does not read what it updates")
        taken = next(iter(found.values()))
        if not taken or any(other != taken for other in found.values()):
            raise Wrong(f"rank {rank} `{ins}` takes other gradients of one group than of the rest")
        if self.taken_by.setdefault(version, taken) != taken:
            raise Wrong(f"rank {rank} `{ins}` takes the gradients of other workers than another server")
        bound = 0 if self.every_one or self.stale is None else self.stale.bound
        for worker, step in taken:
            if (server, worker, step) in self.applied:
                raise Wrong(f"rank {rank} `{ins}` takes a gradient twice")
            self.applied.add((server, worker, step))
            late = version - min(v for (w, s, _, _), v in self.pulls.items() if (w, s) == (worker, step))
            if bound is not None and late > bound:
                raise Wrong(f"rank {rank} `{ins}` takes a gradient that is {late} updates old")
        if self.every_one and taken != {(worker, version) for worker in range(self.workers)}:
            raise Wrong(f"rank {rank} `{ins}` does not take the gradients of all workers")
        self.versions[server] += 1

    def reply(self, rank: int, ins: Instruction, content: Any) -> None:
        if set(ins.reads) != {Value("served", g) for g in ins.layers} or ins.writes:
            raise Wrong(f"rank {rank} `{ins}` does not read what it hands out")
        version = self.versions[rank - self.workers]
        self.messages[Op.REPLY, rank, ins.peer].append((ins.layers, ins.step, version))

    def check_service(self) -> None:
        program = self.program
        if any(len(messages) != self.taken[link] for link, messages in self.messages.items() if self.known):
            raise Wrong("a message was never received")
        steps = {(rank, step) for rank, step, _, _ in self.pulls}
        if self.stale is None and len(steps) != self.workers * program.steps:
            raise Wrong("a worker that leaves a step out")
        if not self.known and steps != {(w, s) for w in range(self.workers) for s in range(program.steps)}:
            raise Wrong("a worker that leaves a step out")
        wanted: Counter[int] = Counter()
        for rank, step in steps:
            losses, found = self.model.whole(self.replica[rank], step, self.used_by(self.replica[rank], step))
            wanted += losses
            for g in set().union(*self.shares):
                right: Counter[int] = Counter()
                for contributions in found:
                    right.update(contributions.get((g, self.place[rank]), ()))
                if not all(self.everywhere(messages, rank, step, g) for messages in (self.pushes, self.pulls)):
                    raise Wrong(f"rank {rank} pushes or pulls a part of group {g} in step {step}")
                if any(self.pushes.pop((rank, step, server, g)) != right for server in self.keepers(g)):
                    raise Wrong(f"rank {rank} pushes a wrong gradient of group {g} in step {step}")
        if self.pushes or self.losses != wanted:
            raise Wrong("a loss or gradient that nobody asked for")
        for rank, memory in enumerate(self.memory):
            if memory.keys() != program.state[rank]:
                raise Wrong(f"rank {rank} ends with other values than it began with")
        made = {self.versions[server] for server in range(len(self.shares))}
        if (len(made) > 1 and self.known) or (self.stale is None and made != {program.steps}):
            raise Wrong("servers that make other numbers of updates")

    def keepers(self, g: int) -> list[int]:
        """The servers that have a part of a group."""
        return [server for server, share in enumerate(self.shares) if g in share]

    def everywhere(self, messages: dict[tuple[int, int, int, int], Any], rank: int, step: int, g: int) -> bool:
        """Whether a worker has pushed, or pulled, all parts of a group in a step."""
        return all((rank, step, server, g) in messages for server in self.keepers(g))


# collectives ---------------------------------------------------------------------------------------------------------


class _Collective:
    """The program of a collective: which ranks' parts are summed in each chunk."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.memory: list[dict[Value, Counter[int]]] = [
            {value: Counter([rank]) for value in held} for rank, held in enumerate(program.state)
        ]

    def run(self) -> None:
        program = self.program
        for value in (v for held in (*program.state, *program.final) for v in held):
            if value[2:] != (-1, -1, "") or value.kind != "chunk" or not 0 <= value.index < len(program.chunks):
                raise Wrong(f"{value} is no chunk")
        sent: dict[tuple[int, int], list[tuple[tuple[int, ...], list[Counter[int]]]]] = defaultdict(list)
        received: Counter[tuple[int, int]] = Counter()
        underway: list[dict[Value, tuple[tuple[int, int], int, tuple[Value, ...]]]] = [{} for _ in program.ranks]
        place = [0] * len(program.ranks)

        def arrive(rank: int, values: Iterable[Value]) -> bool:
            for value in list(values):
                if value in underway[rank]:
                    link, n, message = underway[rank][value]
                    if len(sent[link]) <= n:
                        return False
                    chunks, contents = sent[link][n]
                    if chunks != tuple(v.index for v in message):
                        raise Wrong(f"rank {rank} expects other chunks than rank {link[0]} sends")
                    for other, content in zip(message, contents, strict=True):
                        if underway[rank].pop(other, None):
                            self.memory[rank][other] = content
            return True

        def step(rank: int, ins: Instruction) -> None:
            memory = self.memory[rank]
            chunks = tuple(Value("chunk", c) for c in ins.layers)
            if (
                not chunks
                or len(set(chunks)) < len(chunks)
                or not 0 <= min(ins.layers) <= max(ins.layers) < len(program.chunks)
            ):
                raise Wrong(f"rank {rank} `{ins}`: no chunks")
            for value in ins.reads:
                if value not in memory:
                    raise Wrong(f"rank {rank} `{ins}` reads {value}, which is not there")
            for value in (*ins.writes, *ins.frees):
                if value in underway[rank]:
                    raise Wrong(f"rank {rank} `{ins}` touches {value} while it is under way")
            if ins.op in (Op.SEND, Op.RECV) and (not 0 <= ins.peer < len(program.ranks) or ins.peer == rank):
                raise Wrong(f"rank {rank} `{ins}`: no such rank")
            if ins.op is Op.SEND and ins.reads == chunks and not ins.writes:
                sent[rank, ins.peer].append((ins.layers, [memory[v] for v in chunks]))
            elif ins.op is Op.RECV and not ins.reads:
                link = (ins.peer, rank)
                coming = tuple(Value("incoming", c, ins.peer) for c in ins.layers)
                if ins.writes not in (chunks, coming):
                    raise Wrong(f"rank {rank} `{ins}` receives other chunks than it names")
                if any(v in memory for v in ins.writes if v.kind == "incoming"):
                    raise Wrong(f"rank {rank} `{ins}` makes {ins.writes[0]} a second time")
                underway[rank].update(dict.fromkeys(ins.writes, (link, received[link], ins.writes)))
                received[link] += 1
            elif ins.op is Op.REDUCE and ins.writes == chunks:
                self.add(rank, ins, chunks)
            else:
                raise Wrong(f"rank {rank} `{ins}` is no move of a collective")
            for value in ins.frees:
                if memory.pop(value, None) is None:
                    raise Wrong(f"rank {rank} `{ins}` frees {value}, which is not there")

        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(program.ranks):
                while place[rank] < len(row) and arrive(rank, row[place[rank]].reads):
                    step(rank, row[place[rank]])
                    place[rank] += 1
                    moved = True
        if any(place[rank] < len(row) for rank, row in enumerate(program.ranks)):
            raise Wrong("ranks wait for ever")
        for rank in range(len(program.ranks)):
            if not arrive(rank, tuple(underway[rank])):
                raise Wrong(f"rank {rank} waits for a message that nobody sends")
        if any(len(messages) != received[link] for link, messages in sent.items()):
            raise Wrong("a message was never received")
        self.check_end()

    def add(self, rank: int, ins: Instruction, chunks: tuple[Value, ...]) -> None:
        """A player adds what one RECV brings, all of it, in the order of the chunks."""
        memory = self.memory[rank]
        added = [value for value in ins.reads if value.kind == "incoming"]
        sources = {value.microbatch for value in added}
        if [v.index for v in added] != list(ins.layers) or len(sources) != 1 or set(ins.reads) != {*added, *chunks}:
            raise Wrong(f"rank {rank} `{ins}` does not read what it adds")
        rows = [other.writes for other in self.program.ranks[rank] if other.op is Op.RECV]
        if tuple(added) not in rows:
            raise Wrong(f"rank {rank} `{ins}` adds a part of a message")
        for own, other in zip(chunks, added, strict=True):
            memory[own] = memory[own] + memory[other]

    def check_end(self) -> None:
        program = self.program
        wanted: dict[Value, Counter[int]] = defaultdict(Counter)
        for rank, held in enumerate(program.state):
            for value in held:
                wanted[value][rank] += 1
        for rank, (memory, held) in enumerate(zip(self.memory, program.final or program.state, strict=True)):
            if memory.keys() != held:
                raise Wrong(f"rank {rank} ends with other chunks than it should")
            for value, content in memory.items():
                if content != wanted[value]:
                    raise Wrong(f"rank {rank} ends with a wrong {value}")


def values_of(program: Program) -> Iterator[Value]:
    """Every value that a program names."""
    for row in program.ranks:
        for ins in row:
            yield from (*ins.reads, *ins.writes, *ins.frees)
