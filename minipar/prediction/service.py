"""simulate() of programs with parameter servers: workers and servers follow the rule, with predicted times.

    worker   |PULL ..........|--- F, B ---|PUSH|PULL ...           a worker waits for its PULLs
    server        |REPLY ->0|REPLY ->1|        |ACCEPT <-0|APPLY|REPLY ->0| ...      one thing after another

A server is one thread, so receiving, sending and updating wait for each other. A message takes time on both its ranks.
With fewer cores than ranks, all ranks that work share the cores equally.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from minipar.costs.protocol import Costs
from minipar.errors import ProgramError
from minipar.program import SERVICE, Instruction, Op, Program
from minipar.program.event_loop import EventLoop
from minipar.program.server_rule import Consistency, Kind, Mode, Row
from minipar.strategies import served_order
from minipar.strategies.shares import shares_of

InstructionKey = tuple[int, Op, int, int, tuple[int, ...]]  # rank, what, peer or place in its step, step, groups
Times = dict[InstructionKey, tuple[float, float]]


def key_of(rank: int, ins: Instruction, count: int = -1) -> InstructionKey:
    """A key for an instruction whose place in the final program is not known yet. For what has nothing to do with
    servers it has `count`, the place in its step."""
    if ins.op not in SERVICE:
        return rank, ins.op, count, ins.step, ()
    return rank, ins.op, ins.peer, ins.step, ins.layers


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
    """A run of workers and servers by the clock of an event loop.

    blocks     of each worker, its instructions by step
    queues     of each rank, the work that waits: seconds, the instructions that it is, and what follows
    accepts    of each worker, its PUSHes that the servers have not accepted yet
    waiting    workers that have done a step, and ask for parameters
    replies    of each worker, the replies that it waits for
    asked      of each worker, since when it waits for parameters
    """

    program: Program
    costs: Costs
    cores: float
    times: Times = field(default_factory=dict)
    order: list[Row] = field(default_factory=list)
    queues: dict[int, deque[tuple[float, Sequence[InstructionKey], Callable[[], None]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    waiting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        program, serving = self.program, self.program.serving
        assert serving is not None
        self.loop = EventLoop(self._speeds)
        self.servers = range(program.workers, len(program.ranks))
        self.shares = shares_of(program.groups, serving.servers)
        self.rule = Consistency(Mode.parse(serving.mode, program.replicas), program.workers, program.steps)
        self.blocks = [served_order.blocks_of(program, worker) for worker in range(program.workers)]
        self.accepts = [0] * program.workers
        self.replies = [0] * program.workers
        self.asked = [0.0] * program.workers

    # time

    def go(self) -> None:
        for worker in range(self.program.workers):
            self._ask(worker)
        self._decide()
        self.loop.run()
        if not self.rule.over:
            raise ProgramError("parameter servers wait for ever; verify(program) says why")

    def _speeds(self, working: Collection[int]) -> dict[int, float]:
        return dict.fromkeys(working, min(1.0, self.cores / max(1, len(working))))

    def _later(self, delay: float, then: Callable[[], None]) -> None:
        self.loop.at(self.loop.now + delay, then)

    def _work(self, rank: int, seconds: float, keys: Sequence[InstructionKey], then: Callable[[], None]) -> None:
        """Let a rank do some work after all work that it got before; it is the work of these instructions."""
        self.queues[rank].append((seconds, keys, then))
        self._next_of_queue(rank)

    def _next_of_queue(self, rank: int) -> None:
        if self.loop.is_working(rank) or not self.queues[rank]:
            return
        seconds, keys, then = self.queues[rank].popleft()
        begin = self.loop.now

        def finish() -> None:
            self.times |= dict.fromkeys(keys, (begin, self.loop.now))
            then()
            self._next_of_queue(rank)

        self.loop.work(rank, seconds, finish)

    # workers

    def _ask(self, worker: int) -> None:
        """A worker asks for parameters."""
        self.asked[worker] = self.loop.now
        self.waiting.add(worker)
        self._ask_if_pushed(worker)

    def _ask_if_pushed(self, worker: int) -> None:
        """That a worker asks counts when all servers have its last gradient."""
        if worker in self.waiting and not self.accepts[worker]:
            self.waiting.discard(worker)
            self.rule.ask(worker)

    def _replied(self, worker: int, step: int) -> None:
        """A reply has arrived. After the last one the worker copies the parameters into its layers, and computes."""
        self.replies[worker] -= 1
        if self.replies[worker]:
            return
        block = self.blocks[worker][step]
        pulls = [ins for ins in block if ins.op is Op.PULL]
        keys, since = [key_of(worker, pull) for pull in pulls], self.asked[worker]

        def copied() -> None:
            self.times |= dict.fromkeys(keys, (since, self.loop.now))
            self._compute(worker, step, len(pulls))

        self._work(worker, sum(self.costs.transfer(worker, pull)[0] for pull in pulls), [], copied)

    def _compute(self, worker: int, step: int, index: int) -> None:
        """Do a worker's next instruction of a step, and then those after it."""
        block = self.blocks[worker][step]
        if index == len(block):
            self._ask(worker)
            return self._decide()
        ins = block[index]
        key, go_on = key_of(worker, ins, index), partial(self._compute, worker, step, index + 1)
        if ins.op is not Op.PUSH:
            return self._work(worker, self.costs.compute(worker, ins), [key], go_on)
        self.accepts[worker] = self.accepts[worker] or len(self._messages(Op.PUSH, worker, step))
        occupied, delay = self.costs.transfer(worker, ins)
        accept = key_of(ins.peer, served_order.accept(ins, worker))
        self._work(worker, occupied, [key], go_on)
        self._later(delay, lambda: self._work(ins.peer, occupied, [accept], lambda: self._accepted(worker, step)))

    # servers

    def _accepted(self, worker: int, step: int) -> None:
        """A server has one of a worker's messages. With the last one the gradient is there."""
        self.accepts[worker] -= 1
        if not self.accepts[worker]:
            self.rule.push(worker, step)
            self._ask_if_pushed(worker)
            self._decide()

    def _decide(self) -> None:
        while rows := self.rule.decide():
            self.order += rows
            for row in rows:
                if row.kind is Kind.ANSWER and row.step >= self.program.steps:
                    self.order.append(self.rule.leave(row.worker))
                elif row.kind is Kind.APPLY:
                    self._apply(row, [take for take in rows if take.kind is Kind.TAKE])
                elif row.kind is Kind.ANSWER:
                    self._answer(row.worker, row.step)

    def _messages(self, op: Op, worker: int, step: int) -> list[Instruction]:
        """A worker's PULLs or PUSHes of a step."""
        return [ins for ins in self.blocks[worker][step] if ins.op is op]

    def _apply(self, row: Row, taken: Sequence[Row]) -> None:
        pushes = [(take.worker, ins) for take in taken for ins in self._messages(Op.PUSH, take.worker, take.step)]
        for server, share in zip(self.servers, self.shares, strict=True):
            accepts = [served_order.accept(ins, worker) for worker, ins in pushes if ins.peer == server]
            update = served_order.update(share, row.version, accepts)
            self._work(server, self.costs.compute(server, update), [key_of(server, update)], lambda: None)

    def _answer(self, worker: int, step: int) -> None:
        """All servers send a worker the parameters of a step."""
        pulls = self._messages(Op.PULL, worker, step)
        self.replies[worker] = len(pulls)
        for pull in pulls:
            reply = served_order.reply(pull, worker)
            self._send(pull.peer, worker, reply)

    def _send(self, server: int, worker: int, reply: Instruction) -> None:
        occupied, delay = self.costs.transfer(server, reply)

        def sent() -> None:
            self._later(delay, lambda: self._replied(worker, reply.step))

        self._work(server, occupied, [key_of(server, reply)], sent)
