"""Lesson 18, an engine in three hundred lines: lists of tuples, their interpreter, four engines of which one is right.

Lists are judged by `verify`, which gets them from `tuples.to_program`, and by `stuck`: in these lists a RECV waits. An
interpreter runs on real ranks beside plain torch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minipar.cluster import Cluster
from minipar.errors import MiniparError
from minipar.program.verify.verifier import verify
from minipar.trace import Trace
from minipar.wording import several
from minipar_course import small_engine
from minipar_course.against import Comparison, descend, whole_batch
from minipar_course.exercises.building import WIDTH, added_up, batches
from minipar_course.exercises.kinds.built import Trained, Trial
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised
from minipar_course.small_engine import Row, compiled, data_parallel, gpipe, one_f_one_b, recomputed, zero_1
from minipar_course.tuples import to_program, to_trace

Rows = list[Row]
Wasteful = Callable[[Rows, Rows], tuple[str, str] | None]  # of an answer and a right one: what is too much, and a hint

# Exercise 1: how long a list is ---------------------------------------------------------------------------------------


def _length(rank: float, stages: float, microbatches: float) -> float:
    return len(compiled(one_f_one_b, int(stages), int(microbatches))[int(rank)])


LENGTH = Formula(
    ("rank", "stages", "microbatches"),
    _length,
    ((0, 1, 3), (0, 2, 4), (1, 2, 4), (1, 4, 8), (3, 4, 8), (2, 5, 1)),
    (
        (
            lambda r, p, m: 6 * m + 1,
            "the first and the last stage have one neighbour, and one stage alone has none",
        ),
        (lambda r, p, m: 2 * m + 1, "that is the work; count the messages with it: one comes and one goes for each"),
        (
            lambda r, p, m: m * (2 + 2 * ((r > 0) + (r < p - 1))),
            "almost: which tuple stands in each list once, whatever the micro-batches are?",
        ),
    ),
    judge_name="the compiler",
    hint="for each micro-batch F and B, and with each neighbour one message that comes and one that goes",
)

# Lists ----------------------------------------------------------------------------------------------------------------


_TIME = {"F": 1.0, "F0": 1.0, "R": 1.0, "B": 2.0}


def _walked(rows: Rows) -> tuple[list[int], list[float]]:
    """How far each rank comes in its list, and when: a RECV waits for its SEND, a collective for all of its ranks."""
    at, clock = [0] * len(rows), [0.0] * len(rows)
    sent: dict[tuple[Any, ...], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                ins = row[at[rank]]
                ranks = ins[1] if ins[0] in ("SUM", "SCATTER", "GATHER") else (rank,)
                message = (ins[3], rank, *ins[1:3]) if ins[0] == "RECV" else None
                if message is not None and message not in sent:
                    break
                if any(at[r] >= len(rows[r]) or rows[r][at[r]] != ins for r in ranks):
                    break
                end = max([clock[r] for r in ranks] + ([sent[message]] if message else [])) + _TIME.get(ins[0], 0.0)
                for r in ranks:
                    at[r], clock[r] = at[r] + 1, end
                if ins[0] == "SEND":
                    sent[(rank, ins[3], *ins[1:3])] = end
                moved = True
    return at, clock


def stuck(rows: Rows) -> dict[int, tuple[Any, ...]]:
    """Where each rank waits for ever that does not reach the end of its list."""
    at, _ = _walked(rows)
    return {rank: row[k] for rank, (row, k) in enumerate(zip(rows, at, strict=True)) if k < len(row)}


@dataclass(frozen=True)
class Lists:
    """`signature` makes lists of tuples; it is tried on cases.

    cases     (arguments, stages): of which it gets copies
    truth     the same by the small engine
    wasteful  demands on lists that can run and do the same work
    mistakes  (wrong function, the hint that its author needs)
    """

    signature: str
    truth: Callable[..., Rows]
    cases: tuple[tuple[tuple[Any, ...], int], ...]
    wasteful: tuple[Wasteful, ...]
    praise: str
    mistakes: tuple[tuple[Callable[..., Rows], str], ...] = ()

    def judge(self, answer: Any) -> Verdict:
        name = self.signature.partition("(")[0]
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", f"def {self.signature}: ...")
        for case, stages in self.cases:
            right = self.truth(*case)
            where = f"for {several(len(right), 'rank')} of a pipeline of {several(stages, 'stage')}"
            try:
                given = answer(*deepcopy(case))
            except Exception as error:
                return raised(error, f"{where} your {name}")
            if not isinstance(given, list) or not all(isinstance(row, list) for row in given):
                hint = "return a list with one list of tuples for each rank"
                return Verdict(False, f"{where} your {name} gives {type(given).__name__}, no list of lists", hint)
            if len(given) != len(right):
                reason = f"{where} your {name} gives {several(len(given), 'list')}"
                return Verdict(False, reason, "one list for each rank, and no list that belongs to none")
            for function, hint in self.mistakes:
                if given == function(*deepcopy(case)) != right:
                    return Verdict(False, f"{where}: {_first_difference(given, right)}", hint)
            refused = _refusal(given, right, stages, where)
            if refused is not None:
                return refused
            for demand in self.wasteful:
                found = demand(given, right)
                if found is not None:
                    return Verdict(False, f"{where} it can run, and does the right work, but {found[0]}", found[1])
        return Verdict(True, f"{name} is right in all {several(len(self.cases), 'case')}: {self.praise}")


def _refusal(given: Rows, right: Rows, stages: int, where: str) -> Verdict | None:
    """Why these lists cannot run, or do other work; None if neither."""
    for rank, (row, other) in enumerate(zip(given, right, strict=True)):
        for ins in row:
            if isinstance(ins, tuple) and ins[:1] in (("SEND",), ("RECV",)) and ins[-1] not in range(len(given)):
                reason = f"{where} rank {rank} has {ins}, and there is no rank {ins[-1]}"
                return Verdict(False, reason, "the first stage has nobody before it, and the last one nobody behind it")
        try:
            to_program([row], 1)
        except (MiniparError, TypeError) as error:
            reason = f"{where} rank {rank} has what is no list of tuples: {getattr(error, 'reason', error)}"
            return Verdict(False, reason, "section 1 has a table of all tuples")
        work, expected = _work(row), _work(other)
        if Counter(work) != Counter(expected):
            missing, more = Counter(expected) - Counter(work), Counter(work) - Counter(expected)
            said = f"lacks {next(iter(missing))}" if missing else f"does {next(iter(more))} once too often"
            return Verdict(False, f"{where} rank {rank} {said}", "each F, B and STEP stands in a list once")
        if work != expected:
            k = next(k for k, pair in enumerate(zip(work, expected, strict=True)) if pair[0] != pair[1])
            reason = f"{where} rank {rank} does {work[k]} where {expected[k]} should be"
            return Verdict(False, reason, "forwards and backwards stay in the order in which they were given")
    waiting = stuck(given)
    if waiting:
        lines = "\n".join(f"rank {rank} waits at {ins}" for rank, ins in waiting.items())
        hint = "a RECV waits for the SEND of the same name and micro-batch, a collective for all of its ranks"
        return Verdict(False, f"{where} the lists never end", hint, lines)
    try:
        verify(to_program(given, stages))
    except MiniparError as error:
        hint = "`verify` names the tuple: what does it need, and which tuple should have made that before?"
        return Verdict(False, f"{where} {error.reason}", hint, getattr(error, "details", ""))
    return None


def _work(row: Row) -> list[tuple[Any, ...]]:
    """The forwards, backwards and steps of a list, in whatever way they are done."""
    return [("F" if ins[0] == "F0" else ins[0], *ins[1:2]) for ins in row if ins[0] in ("F", "F0", "B")] + [
        ("STEP",) for ins in row if ins[0] == "STEP"
    ]


def _first_difference(given: Rows, right: Rows) -> str:
    for rank, (row, other) in enumerate(zip(given, right, strict=True)):
        for k in range(max(len(row), len(other))):
            here, there = (str(one[k]) if k < len(one) else "the end" for one in (row, other))
            if here != there:
                return f"rank {rank} has {here} where {there} should be"
    raise AssertionError("equal lists have no difference")


def _slower(given: Rows, right: Rows) -> tuple[str, str] | None:
    """A RECV waits where it stands, so a list is as fast as its order lets it be."""
    times = [max(_walked(rows)[1]) for rows in (given, right)]
    if times[0] <= times[1] + 1e-9:
        return None
    return (
        f"it takes {times[0]:g} units of time; {times[1]:g} are enough",
        "a message goes out as soon as it is computed, and is received where it is used",
    )


def _longer(given: Rows, right: Rows) -> tuple[str, str] | None:
    for rank, (row, other) in enumerate(zip(given, right, strict=True)):
        if len(row) > len(other):
            reason = f"rank {rank} has {several(len(row), 'tuple')}; {len(other)} are enough"
            return reason, "which of them does nothing that another one has not done?"
    return None


# Exercise 2: the compiler ---------------------------------------------------------------------------------------------


def _one_at_a_time(rank: int, stages: int, microbatches: int) -> Iterator[Any]:
    for i in range(microbatches):
        yield small_engine.Forward(i)
        yield small_engine.Backward(i)


def _changed(make: Callable[[Row], Row]) -> Callable[..., Rows]:
    def wrong(*arguments: Any) -> Rows:
        return [make(row) for row in compiled(*arguments)]

    return wrong


def _sends_first(row: Row) -> Row:
    found: Row = []
    for ins in row:
        found.insert(len(found) - 1 if ins[0] == "SEND" else len(found), ins)
    return found


COMPILED = Lists(
    "compiled(schedule, stages, microbatches)",
    compiled,
    (((gpipe, 2, 3), 2), ((one_f_one_b, 4, 8), 4), ((_one_at_a_time, 3, 2), 3), ((gpipe, 1, 2), 1)),
    (_longer, _slower),
    "each action with the messages that it needs",
    (
        (_changed(_sends_first), "what a SEND sends is not there before its F or B: send it behind that"),
        (
            _changed(lambda row: [ins for ins in row if ins[0] not in ("SEND", "RECV")]),
            "there are no messages: what does stage 1 compute its forward from?",
        ),
        (
            _changed(lambda row: row[:-1]),
            "the weights must be updated: each list ends with a STEP",
        ),
    ),
)

# Exercise 3: the interpreter ------------------------------------------------------------------------------------------

MICROBATCHES, ROWS, STEPS = 8, 362, 3  # rows that make replicas and micro-batches of unequal size


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def _stage(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    return nn.Sequential(*list(model.children())[2 * (rank % 2) : 2 * (rank % 2) + 2])


def _driven(interpret: Callable[..., Any], model: nn.Sequential, given: list[Any], loss: Any, lr: float) -> None:
    """On a rank: what `small_engine.train` does, with another interpreter and a stage that is cut already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    program = data_parallel(compiled(one_f_one_b, 2, MICROBATCHES), size // 2)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(k, *range(k + 2, size, 2)) for k in (0, 1)]}
    stage = small_engine.Stage(model, 0, 1, given[0][0], partial(torch.optim.SGD, lr=lr))
    stage.first, stage.last = rank % 2 == 0, rank % 2 == 1
    for x, y in given:
        xs, ys = (rows.tensor_split(size // 2)[rank // 2].tensor_split(MICROBATCHES) for rows in (x, y))
        interpret(program[rank], stage, xs, ys, len(x), loss, groups, {})


def _replicas(trial: Trial, weight: Callable[[int, int], float], only: int | None = None) -> nn.Module:
    """Training in which a micro-batch's loss is multiplied by `weight(its rows, all rows)`; of one replica's rows."""
    model, replicas = trial.first, trial.ranks // 2
    for x, y in trial.batches:
        model.zero_grad()
        for replica in range(replicas) if only is None else [only]:
            parts = (rows.tensor_split(replicas)[replica].tensor_split(MICROBATCHES) for rows in (x, y))
            for rows, target in zip(*parts, strict=True):
                (trial.loss(model(rows), target) * weight(len(rows), len(x))).backward()
        descend(model.parameters(), trial.lr)
    return model


def _sums_once(found: Comparison) -> tuple[str, str] | None:
    sums = max(rank.calls["all_reduce"] for rank in found.ranks)
    if sums <= STEPS:
        return None
    reason = f"it sums gradients {several(sums // STEPS, 'time')} in a step"
    return reason, "the list has one SUM, and all gradients are one line: one all_reduce of stage.gradients"


def _sends_once(found: Comparison) -> tuple[str, str] | None:
    sends = max(rank.calls["send"] for rank in found.ranks)
    if sends <= STEPS * MICROBATCHES:
        return None
    return f"a rank sends {several(sends // STEPS, 'message')} in a step", "one isend for each SEND of the list"


def _lets_go(found: Comparison) -> tuple[str, str] | None:
    weights, rows = 2 * (WIDTH * WIDTH + WIDTH) * 8, -(-ROWS // (len(found.ranks) // 2) // MICROBATCHES)
    enough = 6 * weights + 14 * rows * WIDTH * 8  # 1F1B has two micro-batches under way, of five tensors each
    if found.peak <= enough:
        return None
    return (
        f"a rank holds up to {found.peak:,} bytes; {enough:,} are enough",
        "what stays in a dict stays alive: a backward takes its graph out of the table, x, out = graphs.pop(i)",
    )


def _equal_parts(trial: Trial) -> nn.Module:
    return _replicas(trial, lambda part, rows: 1 / (MICROBATCHES * (trial.ranks // 2)))


def _alone(trial: Trial) -> nn.Module:
    return _replicas(trial, lambda part, rows: part / rows, only=trial.rank // 2)


@dataclass(frozen=True)
class Interpreter:
    """An interpreter of lists, driven as `small_engine.train` drives its own; `trained` says how it is tried."""

    trained: Trained

    def judge(self, answer: Any, clusters: Callable[[int], Cluster] | None = None) -> Verdict:
        return self.trained.judge(partial(_driven, answer) if callable(answer) else answer, clusters)


INTERPRETER = Interpreter(
    Trained(
        "interpret(row, stage, xs, ys, rows, loss, groups, pace)",
        _layers,
        batches(ROWS, STEPS, outputs=WIDTH),  # (replicas and micro-batches are of unequal size)
        ranks=(2, 4),
        praise="an engine, for pipelines and replicas of them",
        share=whole_batch,
        part=_stage,
        mistakes=(
            (
                partial(_replicas, weight=lambda part, rows: 1.0),
                "the loss of a micro-batch is the mean of its rows: multiply it by its part of all `rows`",
            ),
            (_equal_parts, "every micro-batch counts the same here; but one with more rows counts more"),
            (_alone, "each replica trains on its own rows: SUM adds the gradients of all ranks of its group"),
            (added_up, "gradients of the step before are still there: stage.step(ranks) sets them to zero"),
        ),
        cheap=(_sums_once, _sends_once, _lets_go),
        hint="is what arrives what was sent: of the same name and micro-batch, and after its F or B?",
    )
)

# Exercise 4: ZeRO-1 ---------------------------------------------------------------------------------------------------


def _parallel(stages: int, microbatches: int, replicas: int) -> Rows:
    return data_parallel(compiled(one_f_one_b, stages, microbatches), replicas)


def _each(change: Callable[[Row], Row]) -> Callable[[Rows], Rows]:
    return lambda rows: [change(row) for row in rows]


def _without(op: str) -> Callable[[Rows], Rows]:
    return lambda rows: [[ins for ins in row if ins[0] != op] for row in zero_1(rows)]


def _sums_whole(rows: Rows) -> Rows:
    return [[("SUM", ins[1]) if ins[0] == "SCATTER" else ins for ins in row] for row in zero_1(rows)]


def _whole_step(rows: Rows) -> Rows:
    return [[("STEP",) if ins[0] == "STEP" else ins for ins in row] for row in zero_1(rows)]


ZERO_1 = Lists(
    "zero_1(rows)",
    zero_1,
    (((_parallel(1, 2, 2),), 1), ((_parallel(2, 4, 2),), 2), ((_parallel(3, 2, 4),), 3)),
    (_longer,),
    "the state of one slice on each rank, and as many bytes as one sum",
    (
        (lambda rows: rows, "these are the lists that went in: every rank still updates all weights"),
        (
            _sums_whole,
            "right, but wasteful: a SUM brings each rank the sums of all slices, and it needs that of its own: SCATTER",
        ),
        (_without("GATHER"), "each rank has updated its own slice: from where does it get the others?"),
        (_whole_step, "after a SCATTER a rank has the sum of its own slice only: ('STEP', ranks) updates no more"),
    ),
)

# Exercise 5: recomputation --------------------------------------------------------------------------------------------


def _everywhere(rows: Rows) -> Rows:
    """Every forward runs again, also where its backward follows at once."""
    found: Rows = []
    for row in rows:
        new: Row = []
        for ins in row:
            if (ins[0] == "B" and ("R", ins[1]) not in new) or ins[:2] == ("RECV", "gradient"):
                new.append(("R", ins[1] if ins[0] == "B" else ins[2]))
            new.append(("F0", ins[1]) if ins[0] == "F" else ins)
        found.append(new)
    return found


def _never_again(rows: Rows) -> Rows:
    return [[ins for ins in row if ins[0] != "R"] for row in recomputed(rows)]


def _with_graph(rows: Rows) -> Rows:
    return [[("F", ins[1]) if ins[0] == "F0" else ins for ins in row] for row in recomputed(rows)]


def _recomputes_late(given: Rows, right: Rows) -> tuple[str, str] | None:
    for rank, row in enumerate(given):
        for k, ins in enumerate(row):
            came = [j for j, other in enumerate(row[:k]) if other[:3] == ("RECV", "gradient", *ins[1:2])]
            if ins[0] == "R" and came:
                reason = f"rank {rank} waits at {row[came[0]]} before {ins}, and does nothing meanwhile"
                return (
                    reason,
                    "R needs no gradient: before the RECV it runs while the message is on its way",
                )
    return None


def _holds_more(given: Rows, right: Rows) -> tuple[str, str] | None:
    for rank, pair in enumerate(zip(given, right, strict=True)):
        held, enough = map(_graphs_at_once, pair)
        if held > enough:
            reason = f"rank {rank} holds {several(held, 'graph')} at one time; {enough} would do"
            return (
                reason,
                "make a graph as late as you can: R stands right before what its B needs",
            )
    return None


def _graphs_at_once(row: Row) -> int:
    now = most = 0
    for ins in row:
        now += (ins[0] in ("F", "R")) - (ins[0] == "B")
        most = max(most, now)
    return most


RECOMPUTED = Lists(
    "recomputed(rows)",
    recomputed,
    (
        ((compiled(gpipe, 2, 3),), 2),
        ((compiled(one_f_one_b, 4, 8),), 4),
        ((_parallel(2, 3, 2),), 2),
        ((compiled(gpipe, 1, 2),), 1),
    ),
    (_recomputes_late, _holds_more, _longer),
    "one graph at a time, and nothing runs again in vain",
    (
        (lambda rows: rows, "these are the lists that went in: every forward still keeps its graph"),
        (_never_again, "an F0 keeps no graph: R runs the forward again, before the backward needs it"),
        (_with_graph, "the first forward keeps its graph, too: make it F0, which keeps its input only"),
        (
            _everywhere,
            "it can run, but wastes time: where B follows its F at once, F0 and R free nothing; leave that F as it is",
        ),
    ),
)

# Exercise 6: who waits ------------------------------------------------------------------------------------------------


def _stuck_without_names(rows: Rows) -> dict[int, Any]:
    """Any message of the same two ranks will do."""
    return stuck([[(*ins[:1], "", 0, ins[3]) if ins[0] in ("SEND", "RECV") else ins for ins in row] for row in rows])


def _stuck_without_collectives(rows: Rows) -> dict[int, Any]:
    return stuck([[ins for ins in row if ins[0] not in ("SUM", "SCATTER", "GATHER")] for row in rows])


def _stuck_at_sends(rows: Rows) -> dict[int, Any]:
    """A SEND that waits until its RECV is reached."""
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] >= len(row):
                continue
            ins = row[at[rank]]
            others = ins[1] if ins[0] in ("SUM", "SCATTER", "GATHER") else (rank,)
            wanted = dict.fromkeys(others, ins)
            if ins[0] in ("SEND", "RECV"):
                wanted[ins[3]] = ("RECV" if ins[0] == "SEND" else "SEND", *ins[1:3], rank)
            if all(at[r] < len(rows[r]) and rows[r][at[r]] == there for r, there in wanted.items()):
                moved = True
                for r in wanted:
                    at[r] += 1
    return {rank: row[k] for rank, (row, k) in enumerate(zip(rows, at, strict=True)) if k < len(row)}


_TURNS = [  # each waits for the other one's message before it sends its own
    [("RECV", "gradient", 0, 1), ("F", 0), ("SEND", "output", 0, 1), ("B", 0), ("STEP",)],
    [("RECV", "output", 0, 0), ("F", 0), ("B", 0), ("SEND", "gradient", 0, 0), ("STEP",)],
]
_NAMES = [[("SEND", "output", 1, 1), ("STEP",)], [("RECV", "output", 0, 0), ("STEP",)]]
_LATE = [[("SUM", (0, 1)), ("STEP",)], [("SUM", (0, 1)), ("STEP",)], [("SUM", (2, 3)), ("STEP",)], [("STEP",)]]
_CROSSED = [  # both send first: nothing waits, because an isend returns at once
    [("SEND", "output", 0, 1), ("RECV", "gradient", 0, 1), ("STEP",)],
    [("SEND", "gradient", 0, 0), ("RECV", "output", 0, 0), ("STEP",)],
]
STUCK = Function(
    "stuck(rows)",
    ((_TURNS,), (_NAMES,), (_LATE,), (_CROSSED,), (_parallel(2, 4, 2),), (zero_1(_parallel(3, 2, 2)),)),
    truth=stuck,
    mistakes=(
        (_stuck_without_names, "a message has a name: output 1 does not end a wait for output 0"),
        (_stuck_without_collectives, "a SUM waits, too: until all ranks of its group stand at it"),
        (_stuck_at_sends, "a SEND does not wait: isend returns at once, and the message is on its way"),
    ),
    hint="let each rank go on as far as it can, again and again, until none moves any more; who is not at its end?",
)

# Exercise 7: one of four engines is right -----------------------------------------------------------------------------

CAUSES = {
    "nothing": "nothing is wrong with it",
    "weight": "every micro-batch counts the same, however many rows it has",
    "early send": "an output is sent before its forward has computed it",
    "order": "gradients are taken in another order than that of their micro-batches",
}
_WOULD_SHOW = {
    "nothing": "the loss and all gradients would be plain torch's for both batches",
    "weight": "16 rows, which make equal micro-batches, would be right, and 18 would not",
    "early send": "stage 1 would begin before stage 0 has computed anything, and the loss would be wrong for both",
    "order": "the loss and the last stage's gradient would be right: only what comes back to stage 0 is mixed up",
}
_IS = {"A": "early send", "B": "nothing", "C": "order", "D": "weight"}
_EDITS = {  # what is changed in the source of `interpret`
    "early send": ("live.pop((what, i))\n", "live.pop((what, i), torch.zeros(len(xs[i]), *stage.shapes[what]))\n"),
    "nothing": ("", ""),
    "order": (
        "dist.irecv(buffer, peer, tag=2 * i",
        "dist.irecv(buffer, peer, tag=2 * (i ^ 1 if what == 'gradient' else i)",
    ),
    "weight": ("* (len(ys[i]) / rows)", "/ len(xs)"),
}
_PACE = {"F": 0.02, "B": 0.04}


@dataclass(frozen=True)
class Evidence:
    """What one of the four engines did in a step of a pipeline of two stages with 4 micro-batches, beside plain torch.

    loss_error        difference of the losses
    gradient_error    of each stage: the largest difference of a gradient, as a part of the largest gradient
    trace             the picture: forwards take 20 ms, backwards 40 ms
    """

    loss_error: float
    gradient_error: tuple[float, ...]
    trace: Trace


def evidence(name: str, rows: int, cluster: Cluster | None = None) -> Evidence:
    """Run engine "A", "B", "C" or "D" on two ranks, with a batch of so many rows."""
    torch.manual_seed(0)
    model, loss = _layers(), nn.functional.mse_loss
    x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    right = deepcopy(model)
    whole = loss(right(x), y)
    gradients = torch.autograd.grad(whole, list(right.parameters()))
    program = compiled(one_f_one_b, 2, 4)
    if _IS[name] == "early send":
        program = [_sends_first(program[0]), program[1]]
    arguments = (name, program, model, (x, y))
    with nullcontext(cluster) if cluster is not None else Cluster(2, device="cpu") as ranks:
        done = ranks.run(_suspect, *arguments)
    parts = [torch.cat([one.flatten() for one in half]) for half in (gradients[:4], gradients[4:])]
    largest = max(float(part.abs().max()) for part in parts)
    apart = [(one.gradients[: len(part)] - part).abs().max() for one, part in zip(done, parts, strict=True)]
    loss_error = abs(sum(one.loss for one in done) - whole.item())
    errors = tuple(float(each) / largest for each in apart)
    return Evidence(loss_error, errors, to_trace(to_program(program, 2), [one.times for one in done]))


def _suspect(name: str, program: Rows, model: nn.Sequential, batch: tuple[Tensor, Tensor]) -> small_engine.Done:
    """On a rank: train with an interpreter in whose source one place is changed."""
    source = inspect.getsource(small_engine.interpret)
    changed = source.replace(*_EDITS[_IS[name]])
    names = dict(vars(small_engine))
    exec(changed + inspect.getsource(small_engine.train), names)
    dist.init_process_group("gloo")
    try:
        dist.barrier()
        still = partial(torch.optim.SGD, lr=0.0)
        steps = [batch] * 3  # (in the first one ranks connect, and one may be late for the second)
        done: list[small_engine.Done] = names["train"](program, 2, model, steps, nn.functional.mse_loss, still, _PACE)
        return done[-1]
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Diagnosis:
    """`culprit(name)` says what is wrong with each engine: one of the causes."""

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def culprit(name): ...")
        right = 0
        wrong: list[tuple[str, Any]] = []
        for name, cause in _IS.items():
            try:
                said = answer(name)
            except Exception as error:
                return raised(error, f'culprit("{name}")')
            if said not in CAUSES:
                known = ", ".join(f'"{one}"' for one in CAUSES)
                return Verdict(False, f'culprit("{name}") gives {said!r}', f"it is one of {known}")
            right += said == cause
            wrong += [] if said == cause else [(name, said)]
        if not wrong:
            return Verdict(True, "all four engines are told apart by what they do")
        name, said = wrong[0]
        reason = f'{right} of 4 are right; with engine {name} it is not "{said}"'
        return Verdict(False, reason, f"if it were, {_WOULD_SHOW[said]}: look at the lines of {name} again")


CULPRIT = Diagnosis()

# Exercise 8: bytes ----------------------------------------------------------------------------------------------------


def _sent(
    stage: float, stages: float, microbatches: float, message: float, weights: float, replicas: float, zero: float
) -> float:
    neighbours = (stage > 0) + (stage < stages - 1)
    return microbatches * message * neighbours + 2 * weights * (replicas - 1) / replicas


BYTES = Formula(
    ("stage", "stages", "microbatches", "message", "weights", "replicas", "zero"),
    _sent,
    ((0, 2, 4, 100, 1200, 2, 0), (1, 2, 4, 100, 1200, 2, 1), (1, 4, 8, 50, 2400, 4, 0), (0, 1, 4, 100, 1200, 2, 1),
     (2, 3, 2, 10, 600, 1, 0), (0, 2, 4, 100, 1200, 3, 1)),
    (
        (lambda k, p, m, a, w, n, z: 2 * m * a + 2 * w * (n - 1) / n, "a stage at the end has one neighbour"),
        (
            lambda k, p, m, a, w, n, z: m * a * ((k > 0) + (k < p - 1)) + w * (n - 1) / n,
            "a sum goes around the ring twice: once to add, once to tell; and SCATTER and GATHER are these two halves",
        ),
        (
            lambda k, p, m, a, w, n, z: m * a * ((k > 0) + (k < p - 1)) + (3 if z else 2) * w * (n - 1) / n,
            "a SCATTER is half of a SUM, and a GATHER is the other half: how many bytes more does ZeRO-1 send?",
        ),
        (
            lambda k, p, m, a, w, n, z: m * a * ((k > 0) + (k < p - 1)) + 2 * w,
            "of n ranks each one keeps 1/n of the sum where it is: (n - 1)/n travels",
        ),
    ),
    judge_name="the count",
    hint="each micro-batch sends one message to each neighbour; a sum over n ranks sends 2 (n - 1)/n of the gradients",
)  # fmt: skip
