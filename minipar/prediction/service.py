"""simulate() of programs with parameter servers: workers and servers follow the rule, with predicted times.

    worker   |PULL ..........|--- F, B ---|PUSH|PULL ...           a worker waits for its PULL, and for its copies
    server        |REPLY ->0|REPLY ->1|        |ACCEPT <-0|APPLY|REPLY ->0| ...      one thing after another

A server is one thread, so receiving, sending and updating wait for each other. A message takes time on both its ranks.
With fewer cores than ranks, all ranks that work share the cores equally.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from minipar.costs.protocol import Costs
from minipar.errors import ProgramError
from minipar.prediction.streams import Link
from minipar.program import COPIES, Instruction, Op, Program, Value
from minipar.program.event_loop import EventLoop
from minipar.program.server_rule import Consistency, Kind, Mode, Row
from minipar.strategies import served_order
from minipar.strategies.shares import shares_of

InstructionKey = tuple[int, Op, int, int, tuple[int, ...]]  # rank, what, peer, step, groups
Times = dict[InstructionKey, tuple[float, float]]


def key_of(rank: int, ins: Instruction, count: int = -1) -> InstructionKey:
    """A key for an instruction whose place in the final program is not known yet. For compute it has `count`, the place
    in its step."""
    if ins.op is Op.APPLY:
        return rank, ins.op, -1, ins.step, ()
    if ins.op in (Op.PULL, Op.REPLY):
        return rank, ins.op, ins.peer, ins.step, ()
    return rank, ins.op, ins.peer if ins.peer >= 0 else count, ins.step, ins.layers if ins.peer >= 0 else ()


def timed(program: Program, times: Times) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of a program's instructions. One that is not in `times` takes no time, after the one before
    it."""
    starts, ends = [], []
    for rank, row in enumerate(program.ranks):
        first: list[float] = []
        last: list[float] = []
        counts: dict[int, int] = {}
        for ins in row:
            count = counts[ins.step] = counts.get(ins.step, -1) + 1
            now = last[-1] if last else 0.0
            start, end = times.get(key_of(rank, ins, count), (now, now))
            first.append(start)
            last.append(end)
        starts.append(first)
        ends.append(last)
    return starts, ends


def follow_rule(
    program: Program, costs: Costs, cores: float | None
) -> tuple[Program, list[list[float]], list[list[float]]]:
    """The program as it would happen, with starts and ends of its instructions."""
    run = _Simulated(program, costs, float("inf") if cores is None else cores)
    run.go()
    if program.serving is not None and program.serving.mode != "sync":
        program = served_order.as_it_happened(program, run.order, run.shares)
    return program, *timed(program, run.times)


@dataclass
class _Simulated:
    program: Program
    costs: Costs
    cores: float
    times: Times = field(default_factory=dict)
    order: list[Row] = field(default_factory=list)
    queues: dict[int, deque[tuple[float, InstructionKey, Callable[[], None]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def __post_init__(self) -> None:
        program, serving = self.program, self.program.serving
        assert serving is not None
        self.loop = EventLoop(self._speeds)
        self.workers = program.workers
        self.servers = range(self.workers, len(program.ranks))
        self.shares = shares_of(program.groups, serving.servers)
        self.rule = Consistency(Mode.parse(serving.mode, self.workers), self.workers, program.steps)
        self.blocks: list[dict[int, list[Instruction]]] = [{} for _ in range(self.workers)]
        for w in range(self.workers):
            for ins in program.ranks[w]:
                self.blocks[w].setdefault(ins.step, []).append(ins)
        self.expected: dict[tuple[int, int], int] = {}  # (worker, step) -> number of accepts still to come
        self.early: set[int] = set()
        self.lanes: dict[tuple[int, str], Link] = defaultdict(Link)  # for copies, by worker and direction
        self.arrivals: dict[tuple[int, Value], float] = {}  # of copies that nobody has waited for
        self.pulling: dict[int, tuple[float, int]] = {}  # worker -> start of its pull, number of replies still to come

    # time

    def go(self) -> None:
        for w in range(self.workers):
            self._ask(w)
        self._decide()
        self.loop.run()
        if self.rule.members:
            raise ProgramError("parameter servers wait for ever; verify(program) says why")

    def _speeds(self, working: Collection[int]) -> dict[int, float]:
        return dict.fromkeys(working, min(1.0, self.cores / max(1, len(working))))

    def _later(self, delay: float, then: Callable[[], None]) -> None:
        self.loop.at(self.loop.now + delay, then)

    def _work(self, rank: int, seconds: float, key: InstructionKey, then: Callable[[], None]) -> None:
        """Let a rank do some work after all work that it got before."""
        self.queues[rank].append((seconds, key, then))
        self._next_of_queue(rank)

    def _next_of_queue(self, rank: int) -> None:
        if self.loop.is_working(rank) or not self.queues[rank]:
            return
        seconds, key, then = self.queues[rank].popleft()
        begin = self.loop.now

        def finish() -> None:
            self.times[key] = begin, self.loop.now
            then()
            self._next_of_queue(rank)

        self.loop.work(rank, seconds, finish)

    # workers

    def _ask(self, worker: int) -> None:
        self.pulling[worker] = self.loop.now, len(self.servers)
        if any(w == worker for w, _ in self.expected):
            self.early.add(worker)  # its last push is still under way
        else:
            self.rule.ask(worker)

    def _answered(self, worker: int, step: int) -> None:
        since, left = self.pulling[worker]
        self.pulling[worker] = since, left - 1
        if left == 1:  # (the worker then copies all parameters into its layers)
            pulls = [ins for ins in self.blocks[worker][step] if ins.op is Op.PULL]
            seconds = sum(self.costs.transfer(worker, ins)[0] for ins in pulls)
            self._work(worker, seconds, (worker, Op.PULL, -1, step, ()), self._then_begin(worker, step))

    def _run_on(self, worker: int, step: int, index: int) -> None:
        block = self.blocks[worker][step]
        while index < len(block):
            ins = block[index]
            ready = max((self.arrivals.pop((worker, value), 0.0) for value in ins.reads), default=0.0)
            if ready > self.loop.now:
                return self._later(ready - self.loop.now, self._then_run(worker, step, index))
            if ins.op in COPIES:
                times = self.lanes[worker, ins.stream].send(self.loop.now, *self.costs.transfer(worker, ins))
                self.times[key_of(worker, ins, index)] = times
                self.arrivals.update({(worker, value): times[1] for value in ins.writes})
                index += 1
                continue
            if ins.op is Op.PUSH:
                return self._push(worker, ins, self._then_run(worker, step, index + 1))
            if ins.op is not Op.PULL:
                seconds = self.costs.compute(worker, ins)
                self._work(worker, seconds, key_of(worker, ins, index), self._then_run(worker, step, index + 1))
                return
            index += 1
        self._ask(worker)
        self._decide()

    def _then_begin(self, worker: int, step: int) -> Callable[[], None]:
        def begin() -> None:
            since = self.pulling[worker][0]
            for server in self.servers:
                self.times[worker, Op.PULL, server, step, ()] = since, self.loop.now
            self._run_on(worker, step, 0)

        return begin

    def _then_run(self, worker: int, step: int, index: int) -> Callable[[], None]:
        return lambda: self._run_on(worker, step, index)

    def _push(self, worker: int, ins: Instruction, then: Callable[[], None]) -> None:
        occupied, delay = self.costs.transfer(worker, ins)
        self._work(worker, occupied, key_of(worker, ins), then)
        pushes = sum(other.op is Op.PUSH for other in self.blocks[worker][ins.step])
        self.expected.setdefault((worker, ins.step), pushes)
        key = (ins.peer, Op.ACCEPT, worker, ins.step, ins.layers)
        self._later(delay, lambda: self._work(ins.peer, occupied, key, lambda: self._accepted(worker, ins.step)))

    # servers

    def _accepted(self, worker: int, step: int) -> None:
        self.expected[worker, step] -= 1
        if not self.expected[worker, step]:
            del self.expected[worker, step]
            self.rule.push(worker, step)
            if worker in self.early:
                self.early.discard(worker)
                self.rule.ask(worker)
            self._decide()

    def _decide(self) -> None:
        while rows := self.rule.decide():
            self.order += rows
            for row in rows:
                if row.kind is Kind.APPLY:
                    self._apply(row, [take for take in rows if take.kind is Kind.TAKE])
                elif row.kind is Kind.ANSWER and row.step >= self.program.steps:
                    self.order.append(self.rule.leave(row.worker))
                elif row.kind is Kind.ANSWER:
                    self._reply(row)

    def _apply(self, row: Row, taken: Sequence[Row]) -> None:
        for server, share in zip(self.servers, self.shares, strict=True):
            ins = served_order.update(share, row, taken)
            self._work(server, self.costs.compute(server, ins), key_of(server, ins), lambda: None)

    def _reply(self, row: Row) -> None:
        for server, pull in zip(self.servers, self.blocks[row.worker][row.step], strict=False):
            reply = pull._replace(op=Op.REPLY, peer=row.worker, writes=())
            occupied, delay = self.costs.transfer(server, reply)
            answered = self._then_answer(row.worker, row.step, delay)
            self._work(server, occupied, key_of(server, reply), answered)

    def _then_answer(self, worker: int, step: int, delay: float) -> Callable[[], None]:
        return lambda: self._later(delay, lambda: self._answered(worker, step))
