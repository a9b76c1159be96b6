"""simulate() of programs with parameter servers: workers and servers follow the rule, with predicted times.

    worker   |PULL ..........|--- F, B ---|PUSH|PULL ...           a worker waits for its PULL, and for its copies
    server        |REPLY ->0|REPLY ->1|        |ACCEPT <-0|APPLY|REPLY ->0| ...      one thing after another

A worker is here a rank that is no server; all those of a replica, or of a stage of one, are one worker of the rule
(`Program.served_workers`). A server is one thread, so receiving, sending and updating wait for each other. A message
takes time on both its ranks. With fewer cores than ranks, all ranks that work share the cores equally. Where layers are
served one by one, servers follow their program, and not the rule: an update comes when all workers have pushed a layer,
or a piece of one, and its answers at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minipar.costs.protocol import Costs
from minipar.errors import ProgramError
from minipar.prediction.streams import Link
from minipar.program import COPIES, SERVICE, Instruction, Op, Portion, Program, Value, portions
from minipar.program.event_loop import EventLoop
from minipar.program.server_rule import Kind, Mode, Row, Rules
from minipar.strategies import served_order
from minipar.strategies.shares import kept_shares, shares_of

InstructionKey = tuple[int, Op, int, int, tuple[Portion, ...]]  # rank, what, peer or place in its pass, step, of what
Times = dict[InstructionKey, tuple[float, float]]


def key_of(rank: int, ins: Instruction, count: int = -1) -> InstructionKey:
    """A key for an instruction whose place in the final program is not known yet. For what has nothing to do with
    servers it has `count`, the place in its pass (`Program.pass_of`)."""
    if ins.op not in SERVICE:
        return rank, ins.op, count, ins.step, ()
    return rank, ins.op, ins.peer, ins.step, portions(ins)


def timed(program: Program, times: Times) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of a program's instructions. One that is not in `times` takes no time, after the one before
    it."""
    starts, ends = [], []
    for rank, row in enumerate(program.ranks):
        first: list[float] = []
        last: list[float] = []
        counts: dict[int, int] = {}
        for ins in row:
            number = program.pass_of(ins)
            count = counts[number] = counts.get(number, -1) + 1
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
    queues: dict[int, deque[tuple[float, Sequence[InstructionKey], Callable[[], None]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def __post_init__(self) -> None:
        program, serving = self.program, self.program.serving
        assert serving is not None
        self.loop = EventLoop(self._speeds)
        self.workers = program.workers
        self.servers = range(self.workers, len(program.ranks))
        self.shares = kept_shares(shares_of(program.groups, serving.servers), program.groups, program.sharing_mesh)
        mode = Mode.parse(serving.mode, program.replicas)
        self.updates = program.served_steps
        self.number = {rank: number for number, ranks in enumerate(program.served_workers) for rank in ranks}
        self.rule = Rules(mode, len(program.served_workers), self.updates, program.rules)
        self.blocks: list[dict[int, list[Instruction]]] = [{} for _ in range(self.workers)]
        for w in range(self.workers):
            for ins in program.ranks[w]:
                self.blocks[w].setdefault(program.pass_of(ins), []).append(ins)
        self.messages: dict[tuple[Op, int, int], list[Instruction]] = defaultdict(list)  # a worker's, of a step
        for w, row in enumerate(program.ranks[: self.workers]):
            for ins in row:
                if ins.op in SERVICE:
                    self.messages[ins.op, w, ins.step].append(ins)
        self.expected: dict[tuple[int, int], int] = {}  # (worker of the rule, step) -> accepts still to come
        self.asking: dict[int, set[int]] = defaultdict(set)  # worker of the rule -> its ranks that wait for an answer
        self.asked = [0] * self.workers  # the last step for which each worker has asked
        self.links: dict[tuple[int, int], Link] = defaultdict(Link)  # between workers, by sender and receiver
        self.groups: dict[tuple[int, ...], Link] = defaultdict(Link)  # of workers that share layers
        self.joined: Counter[tuple[int, tuple[int, ...]]] = Counter()  # the collectives of a worker, by group
        self.joining: dict[tuple[tuple[int, ...], int], list[InstructionKey]] = defaultdict(list)  # not all are there
        self.lanes: dict[tuple[int, str], Link] = defaultdict(Link)  # for copies, by worker and direction
        self.coming: dict[tuple[int, Value], tuple[Link, int, InstructionKey]] = {}  # what nobody has waited for
        self.place: dict[int, tuple[int, int]] = {}  # worker -> its pass, and its place there; none: between two
        self.begun = [0.0] * self.workers  # when each worker's step began
        self.since: dict[int, float] = {}  # worker -> since when it has waited for a pull
        self.replied: set[InstructionKey] = set()  # pulls that were answered, and not begun yet
        self.layers = _Layers(self) if served_order.is_by_layer(program) else None

    # time

    def go(self) -> None:
        for w in range(self.workers):
            self._ask(w)
        if self.layers is not None:
            for server in self.servers:
                self.layers.answer(server)
        self._decide()
        self.loop.run()
        if not self.rule.over:
            raise ProgramError("parameter servers wait for ever; verify(program) says why")

    def _speeds(self, working: Collection[int]) -> dict[int, float]:
        return dict.fromkeys(working, min(1.0, self.cores / max(1, len(working))))

    def _later(self, delay: float, then: Callable[[], None]) -> None:
        self.loop.at(self.loop.now + delay, then)

    def work(self, rank: int, seconds: float, keys: Sequence[InstructionKey], then: Callable[[], None]) -> None:
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
        self.since[worker] = self.loop.now
        self.asking[self.number[worker]].add(worker)
        self._ask_together(self.number[worker])

    def _ask_together(self, number: int) -> None:
        """A worker of the rule asks when all its ranks do, and none of its pushes is still under way."""
        everyone = self.program.served_workers[number]
        if len(self.asking[number]) == len(everyone) and all(other != number for other, _ in self.expected):
            self.asking[number].clear()
            self.rule.ask(number)

    def answered(self, worker: int, pull: Instruction) -> None:
        """A server's reply has arrived."""
        self.replied.add(key_of(worker, pull))
        if worker not in self.place and worker in self.since:  # (it waits between two steps)
            self._begin(worker, self.program.pass_of(pull))
        elif worker in self.since:
            self._run_on(worker)

    def _begin(self, worker: int, step: int) -> None:
        self.place[worker] = step, 0
        self.begun[worker] = self.loop.now
        self._run_on(worker)

    def _run_on(self, worker: int) -> None:
        """Walk a worker until it works or waits."""
        step, index = self.place[worker]
        block = self.blocks[worker][step]
        while index < len(block):
            ins = block[index]
            self.place[worker] = step, index
            if ins.op is Op.PULL:
                return self._pull(worker, step, index)
            if not all(self._arrived(worker, value) for value in ins.reads):
                return
            key, now = key_of(worker, ins, index), self.loop.now
            index += 1
            self.place[worker] = step, index
            if ins.op in COPIES:
                lane = self.lanes[worker, ins.stream]
                self.times[key] = lane.send(now, *self.costs.transfer(worker, ins))
                self.coming[worker, ins.writes[0]] = lane, len(lane) - 1, key
            elif ins.op is Op.SEND:
                link = self.links[worker, ins.peer]
                self.times[key] = link.send(now, *self.costs.transfer(worker, ins))
                for waiter in link.waiters:
                    self.loop.at(now, self._then_run(waiter))
                link.waiters = []
            elif ins.op is Op.RECV:
                link = self.links[ins.peer, worker]
                k, posted = link.reach(now, self.program.receives_ahead)
                self.times[key] = (max(posted, self.begun[worker]),) * 2
                self.coming |= {(worker, value): (link, k, key) for value in ins.writes}
            elif ins.group:
                self._join(worker, ins, key)
            elif ins.op is Op.PUSH:
                return self._push(worker, ins)
            else:
                return self.work(worker, self.costs.compute(worker, ins), [key], self._then_run(worker))
        del self.place[worker]
        if self.layers is not None and step + 1 in self.blocks[worker]:
            return self._begin(worker, step + 1)
        self._ask(worker)
        self._decide()

    def _pull(self, worker: int, step: int, index: int) -> None:
        """Wait for all pulls that follow each other here; then the worker copies their parameters into its layers."""
        pulls = list(takewhile(lambda ins: ins.op is Op.PULL, self.blocks[worker][step][index:]))
        keys = [key_of(worker, pull) for pull in pulls]
        if self.layers is None and self.program.virtual_workers and pulls[0].step > self.asked[worker]:
            self.asked[worker] = pulls[0].step  # (in the middle of a pass of many steps)
            self._ask(worker)
            self._decide()
        since = self.since.setdefault(worker, self.loop.now)
        if not self.replied.issuperset(keys):
            return
        del self.since[worker]
        self.replied.difference_update(keys)
        self.place[worker] = step, index + len(pulls)

        def done() -> None:
            self.times |= dict.fromkeys(keys, (since, self.loop.now))
            self._run_on(worker)

        self.work(worker, sum(self.costs.transfer(worker, pull)[0] for pull in pulls), [], done)

    def _join(self, worker: int, ins: Instruction, key: InstructionKey) -> None:
        """Join a collective, which begins when the last rank of its group has joined it."""
        stream, now = self.groups[ins.group], self.loop.now
        k = self.joined[worker, ins.group]
        self.joined[worker, ins.group] += 1
        self.times[key] = now, now
        self.coming |= {(worker, value): (stream, k, key) for value in ins.writes if value not in ins.frees}
        members = self.joining[ins.group, k]
        members.append(key)
        if len(members) == len(ins.group):
            before = stream.free
            _, end = stream.send(now, self.costs.collective(ins), 0.0)
            self.times |= {each: (max(self.times[each][0], before), end) for each in self.joining.pop((ins.group, k))}
            for waiter in stream.waiters:
                self.loop.at(now, self._then_run(waiter))
            stream.waiters = []

    def _arrived(self, worker: int, value: Value) -> bool:
        """Whether a value has arrived. If not, the worker goes on when it does."""
        if (worker, value) not in self.coming:
            return True
        link, k, key = self.coming[worker, value]
        if len(link) <= k:
            link.waiters.append(worker)
        elif link[k] > self.loop.now:
            self.loop.at(link[k], self._then_run(worker))
        else:
            del self.coming[worker, value]
            self.times[key] = self.times[key][0], max(self.times[key][0], link[k])
            return True
        return False

    def _then_run(self, worker: int) -> Callable[[], None]:
        return lambda: self._run_on(worker)

    def _push(self, worker: int, ins: Instruction) -> None:
        occupied, delay = self.costs.transfer(worker, ins)
        self.work(worker, occupied, [key_of(worker, ins)], self._then_run(worker))
        number = self.number[worker]
        if (number, ins.step) not in self.expected:
            everyone = self.program.served_workers[number]
            self.expected[number, ins.step] = sum(len(self.pushes(w, ins.step)) for w in everyone)
        accept = served_order.accept(ins, worker)
        key = key_of(ins.peer, accept)
        self._later(delay, lambda: self.work(ins.peer, occupied, [key], lambda: self._accepted(worker, ins)))

    # servers

    def _accepted(self, worker: int, ins: Instruction) -> None:
        if self.layers is not None:
            self.layers.accepted(ins)
        number = self.number[worker]
        self.expected[number, ins.step] -= 1
        if not self.expected[number, ins.step]:
            del self.expected[number, ins.step]
            self.rule.push(number, ins.step)
            if self.layers is not None and ins.step + 1 < self.updates:
                self.rule.ask(number)  # (nobody asks for what is sent anyway)
            self._ask_together(number)
            self._decide()

    def _decide(self) -> None:
        while rows := self.rule.decide():
            self.order += rows
            for row in rows:
                if row.kind is Kind.ANSWER and row.step >= self.updates:
                    self.order.append(self.rule.leave(row.worker))
                elif self.layers is not None:
                    pass  # (it is done already)
                elif row.kind is Kind.APPLY:
                    self._apply(row, [take for take in rows if take.kind is Kind.TAKE])
                elif row.kind is Kind.ANSWER:
                    for worker in self.program.served_workers[row.worker]:
                        for pull in self.pulls(worker, row.step):
                            self.reply(worker, pull)

    def pulls(self, worker: int, step: int) -> list[Instruction]:
        return self.messages[Op.PULL, worker, step]

    def pushes(self, worker: int, step: int) -> list[Instruction]:
        return self.messages[Op.PUSH, worker, step]

    def _apply(self, row: Row, taken: Sequence[Row]) -> None:
        for server, share in zip(self.servers, self.shares, strict=True):
            ranks = ((w, take.step) for take in taken for w in self.program.served_workers[take.worker])
            pushes = ((worker, ins) for worker, step in ranks for ins in self.pushes(worker, step))
            accepts = [served_order.accept(ins, worker) for worker, ins in pushes if ins.peer == server]
            some = {one: share[one.group] for ins in accepts for one in portions(ins)}
            if some:  # (of some stages a server may have nothing)
                self.update(server, served_order.update(some, row.version, accepts), lambda: None)

    def update(self, server: int, ins: Instruction, then: Callable[[], None]) -> None:
        self.work(server, self.costs.compute(server, ins), [key_of(server, ins)], then)

    def reply(self, worker: int, pull: Instruction) -> None:
        """A server sends what a worker pulls."""
        server, reply = pull.peer, served_order.reply(pull, worker)
        occupied, delay = self.costs.transfer(server, reply)

        def sent() -> None:
            self._later(delay, lambda: self.answered(worker, pull))

        self.work(server, occupied, [key_of(server, reply)], sent)


class _Layers:
    """Servers that serve layers, or pieces of them, one by one, as their program says.

    left      (server, step, of what) -> accepts still to come before these are updated
    applies   the same -> the update
    updates   (server, of what) -> the updates of it so far
    wanted    (server, worker) -> the answers that are still to be sent
    """

    def __init__(self, run: _Simulated) -> None:
        self.run = run
        every = [ins for (op, *_), some in run.messages.items() if op is Op.PUSH for ins in some]
        self.left = Counter((ins.peer, ins.step, frozenset(portions(ins))) for ins in every)
        self.applies = {
            (server, ins.step, frozenset(portions(ins))): ins
            for server in run.servers
            for ins in run.program.ranks[server]
            if ins.op is Op.APPLY
        }
        self.updates: Counter[tuple[int, Portion]] = Counter()
        self.wanted = {
            (server, worker): deque(
                pull for step in range(run.updates) for pull in run.pulls(worker, step) if pull.peer == server
            )
            for server in run.servers
            for worker in range(run.workers)
        }

    def accepted(self, push: Instruction) -> None:
        """A server has what a worker pushed; if it is the last one's, it is updated."""
        server, some = push.peer, portions(push)
        key = server, push.step, frozenset(some)
        self.left[key] -= 1
        if self.left[key]:
            return

        def then() -> None:
            self.updates.update((server, one) for one in some)
            self.answer(server)

        self.run.update(server, self.applies[key], then)

    def answer(self, server: int) -> None:
        """Send what is there to all workers, to each in the order in which it pulls."""
        for worker in range(self.run.workers):
            wanted = self.wanted[server, worker]
            while wanted and all(self.updates[server, one] >= wanted[0].step for one in portions(wanted[0])):
                self.run.reply(worker, wanted.popleft())
