"""Sources of programs for the tests, and costs.

    programs()                     hypothesis: programs of every plan and model
    mutations(program, seed, n)    n programs with a few random changes (swap, drop, double, move, relabel)

Times of programs are those of `plain_simulator.start_and_end`, which shares no code and no method with `simulate`.
`tests/fuzz/fingerprints.py` finds what a program computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from minipar import Plan, Program
from minipar.program import Group, Instruction, Op, Value
from minipar.program.shape import Shape, divided
from minipar.strategies import find, schedules

# programs ------------------------------------------------------------------------------------------------------------

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

    A trainable layer has two tensors of `size` bytes, a trainable tied set has one. Of a sequence that is cut into
    slices every layer carries something on.
    """
    fixed = set(frozen)
    own = tuple(Group((k,), (), size) if k in fixed else Group((k,), (size, size)) for k in range(layers))
    sets = tuple(Group(tuple(held), (size,)) for held in tied)
    groups = own + sets + tuple(Group(tuple(held), (), size) for held in frozen_sets)
    return Shape(layers, groups, f"{layers} layers", carries=tuple(range(layers)))


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
def programs(
    draw: st.DrawFn, most_microbatches: int = 5, most_steps: int = 3, shared: bool = False, offload: bool = False
) -> Program:
    """Programs of every built-in schedule, composed with everything that a plan can choose.

    shared    half of them have layers that two ranks share
    offload   half of them copy values to the host or the disk, and back
    """
    schedule = draw(st.sampled_from(BUILT_IN))
    tp = draw(st.sampled_from([1, 2])) if shared and "slices" not in find(schedule).options else 1
    most = 4 // tp  # (a divided layer is five nodes)
    sequence = tp > 1 and draw(st.booleans())
    pp, dp = even(schedule, draw(st.integers(1, most))), draw(st.integers(1, min(3, most)))
    priority = tp == 1 and draw(st.integers(0, 3)) == 0
    local = draw(st.sampled_from([0, 0, 1, 2])) if pp == tp == 1 and not priority else 0
    count = stages_of(schedule, pp)
    split = draw(st.lists(st.integers(1, 3 if tp == 1 else 1), min_size=count, max_size=count))
    zero = 0 if priority or local or schedule in COPIED else draw(st.sampled_from([0, 0, 1, 2, 3]))
    if offload and not priority and not local and draw(st.booleans()):
        away, to = draw(_offloaded(schedule, zero)), draw(st.sampled_from(["host", "disk"]))
    else:
        away, to = (), "host"
    plan = Plan(
        dp=dp,
        pp=pp,
        tp=tp,
        sequence_parallel=sequence,
        offload=away,
        offload_to=to,
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
    model = draw(shapes(sum(split), 8 if priority else 4))
    if tp > 1:
        model = divided(model, tp, sequence)  # (without its ties)
    return plan.compile(model, steps=draw(st.integers(1, most_steps)), check=False)


def _offloaded(schedule: str, zero: int) -> st.SearchStrategy[tuple[str, ...]]:
    """What a plan may offload."""
    splits = Plan(pp=2, schedule=schedule, microbatches=enough(schedule, 2, 1)).splits
    whole = not splits and "slices" not in find(schedule).options
    possible = ["optimizer"] + ["parameters"] * (zero not in (1, 2)) + ["activations"] * whole
    return st.sets(st.sampled_from(possible), min_size=1).map(lambda found: tuple(sorted(found)))


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
