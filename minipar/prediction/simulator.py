"""simulate(program, costs): a predicted Trace, which says what would happen and when, without running anything.

It follows the rule of the executor and of `order` (program/rule.py), and adds times:

  * a rank walks its list in order; a compute instruction starts when all that it reads has arrived and the rank is free
  * transfers, copies and collectives start when the walk reaches them; the first instruction that reads what they write
    waits for them
  * a message occupies its link for bytes/bandwidth and arrives a latency later; messages of a link keep their order,
    and so do messages that leave a rank through one port
  * a copy occupies one direction of its rank's link to the slower tier; copies in one direction keep their order
  * what goes between two hosts also waits until the cable has room: all their ranks share it
  * a collective ends at the latest arrival of its ranks plus its cost; collectives of a group keep their order

If ranks decide as they run, their program is walked in the order that they would choose at these costs; the trace has
this order. If every rank has a core, and all are on one host, ranks share only links and groups, so no global clock is
needed: each rank is walked as far as possible, and again when the arrival that it waits for is known. So the time to
simulate is linear in the number of instructions.

Ranks that do the same on other rows or shards (`Program.representatives`) do it at the same times, if it costs the same
everywhere, since they wait for each other only in collectives of all of them. Then one of them is walked, and its times
are those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

from minipar.costs.protocol import Costs, SharingCosts, even
from minipar.costs.unit import UnitCosts
from minipar.errors import PlanError, ProgramError
from minipar.prediction.oversubscription import speed_of_each, walk_shared
from minipar.prediction.service import follow_rule
from minipar.prediction.streams import GroupStream, Link, Slot
from minipar.program import PORT, Action, Forward, Op, Program, Staleness, Value
from minipar.program.collector import paused
from minipar.strategies.passes.versions import as_it_happened, blocks_of
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.ampnet import decide
from minipar.trace import Trace


def simulate(
    program: Program | Plan | str,
    costs: Costs | None = None,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input_gradient: float | None = None,
    weight_gradient: float | None = None,
    latency: float = 0.0,
    stage_factors: Sequence[float] = (),
    cores: float | None = None,
) -> Trace:
    """The predicted trace of a program, or of a plan.

    program   from `Plan.compile`, or your own; or a plan, or its words such as "pp=4 microbatches=8". A plan is
              compiled for one layer in each stage

    costs     the costs of instructions and values, such as those of a profile; default `UnitCosts` of the keywords that
              follow: times of one micro-batch on one rank's whole share of the layers, the delay of a message, factors
              per stage
    cores     how many ranks can compute at the same time; default all of them (every rank is a device of its own). It
              need not be whole: ranks that compute at the same time slow each other down (`Calibration.concurrency`)
    Errors: ProgramError if the program cannot run to its end (`verify` says why); PlanError for less than 1 core, and
    for a plan that needs a model's layers or costs.
    """
    if not isinstance(program, Program):
        program = Plan.parse(program).sketch()
    if costs is None:
        costs = UnitCosts(program, forward, backward, input_gradient, weight_gradient, latency, tuple(stage_factors))
        unit = "activations"
    else:
        unit = "bytes"
    with paused():
        cables = isinstance(costs, SharingCosts) and costs.shares
        if program.in_flight is not None:
            program = _as_decided(program, costs)
            costs = _fitted(costs, program)
        if program.serving is not None:
            if cores is not None and cores < 1:
                raise PlanError(f"cores={cores}: must be at least 1")
            program, starts, ends = follow_rule(program, costs, cores)
        elif cables and (cores is None or cores >= len(program.ranks)):
            starts, ends = walk_shared(program, costs, len(program.ranks))
        elif cores is None or cores >= len(program.ranks):
            starts, ends = _walk(program, costs)
        elif cores >= 1 and not cables and not any(program.representatives) and _all_even(program, costs):
            starts, ends = _walk(program, costs, 1 / speed_of_each(len(program.ranks), cores))
        elif cores >= 1:
            starts, ends = walk_shared(program, costs, cores)
        else:
            raise PlanError(f"cores={cores}: must be at least 1")
    return Trace(program, starts, ends, costs.size, "predicted", unit)


def _all_even(program: Program, costs: Costs) -> bool:
    """Whether it costs the same on ranks that do the same."""
    return all(even(costs, first, rank) for rank, first in enumerate(program.representatives) if rank != first)


def _walk(program: Program, costs: Costs, slower: float = 1.0) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every instruction, where to compute takes `slower` times what it costs."""
    count = len(program.ranks)
    stand = program.representatives if _all_even(program, costs) else tuple(range(count))
    walked = frozenset(stand)
    begun, ended = ({rank: [0.0] * len(program.ranks[rank]) for rank in walked} for _ in range(2))
    starts, ends = ([times[first] for first in stand] for times in (begun, ended))  # (ranks that do the same share one)
    place = [0] * count
    clock = [0.0] * count
    pending: list[dict[Value, Slot]] = [{} for _ in range(count)]  # values that are under way
    links: list[dict[int, Link]] = [defaultdict(Link) for _ in range(count)]  # for each receiving rank, by sender
    groups: dict[tuple[int, ...], GroupStream] = {}
    ahead = program.receives_ahead
    lanes: dict[tuple[int, str], Link] = {}  # for copies, one per rank and direction
    ports = [0.0] * count  # when each rank's port is free
    SEND, RECV, OFFLOAD, FETCH = Op.SEND, Op.RECV, Op.OFFLOAD, Op.FETCH

    ready = sorted(walked, reverse=True)
    while ready:
        rank = ready.pop()
        instructions, begin, end = program.ranks[rank], starts[rank], ends[rank]
        waiting, arriving = pending[rank], links[rank]
        now, index, size = clock[rank], place[rank], len(instructions)
        while index < size:
            ins = instructions[index]
            op = ins[0]
            if waiting and op is not RECV:
                blocked = False
                for value in ins[4]:
                    if value in waiting:
                        arrivals, k, writer = waiting[value]
                        if len(arrivals) <= k:
                            blocked = True
                            break
                        arrival = arrivals[k]
                        end[writer] = arrival if arrival > begin[writer] else begin[writer]
                        if arrival > now:
                            now = arrival
                        del waiting[value]
                if blocked:
                    arrivals.waiters.append(rank)
                    break
            if op is SEND:
                link = links[ins.peer][rank]
                occupied, delay = costs.transfer(rank, ins)
                if ins.stream == PORT:
                    first = now if now > ports[rank] else ports[rank]
                    begin[index], end[index] = link.send(first, occupied, delay)
                    ports[rank] = end[index]
                else:
                    begin[index], end[index] = link.send(now, occupied, delay)
                if link.waiters:
                    ready += link.waiters
                    link.waiters = []
            elif op is RECV:
                link = arriving[ins.peer]
                k, begin[index] = link.reach(now, ahead)
                for value in ins.writes:
                    waiting[value] = (link, k, index)
            elif op is OFFLOAD or op is FETCH:
                lane = lanes.get((rank, ins.stream)) or lanes.setdefault((rank, ins.stream), Link())
                begin[index], end[index] = lane.send(now, *costs.transfer(rank, ins))
                for value in ins.writes:
                    waiting[value] = (lane, len(lane) - 1, index)
            elif ins.group:  # a collective
                stream = groups.get(ins.group)
                if stream is None:
                    members = ins.group if len(walked) == count else walked.intersection(ins.group)
                    stream = groups[ins.group] = GroupStream(members)
                begin[index] = now
                k = stream.join(rank, index, now, ins, costs, starts, ends)
                for value in ins.writes:
                    if value not in ins.frees:
                        waiting[value] = (stream, k, index)
                if stream.waiters and len(stream) > k:
                    ready += stream.waiters
                    stream.waiters = []
            else:
                begin[index] = now
                now += costs.compute(rank, ins) * slower
                end[index] = now
            index += 1
        place[rank], clock[rank] = index, now

    for rank in sorted(walked):
        if place[rank] < len(program.ranks[rank]):
            raise ProgramError(
                f"rank {rank} stops for ever at instruction {place[rank]} `{program.ranks[rank][place[rank]]}`; "
                "verify(program) says why"
            )
        for arrivals, k, writer in pending[rank].values():  # values that arrive but that nothing reads
            ends[rank][writer] = max(arrivals[k], starts[rank][writer])
    return starts, ends


# ranks that decide as they run ----------------------------------------------------------------------------------------


def _as_decided(program: Program, costs: Costs) -> Program:
    """The program as it would happen at these costs: each rank follows `choose` in `strategies/schedules/ampnet.py`,
    which depends on what has arrived at the rank.

    rank 1   F0 |arrived: output of mb1, gradient of mb0| -> B0, since backwards come first
    """
    assert isinstance(program.contract, Staleness)
    assert program.in_flight is not None
    ranks, m = len(program.ranks), program.microbatches
    total = m * program.steps
    SEND, RECV = Op.SEND, Op.RECV
    blocks = [blocks_of(program, rank) for rank in range(ranks)]
    links: dict[tuple[int, int], Link] = defaultdict(Link)

    def run(rank: int, action: Action, now: float) -> tuple[float, float]:
        step, i = divmod(action.microbatch, m)
        there = isinstance(action, Forward)
        arrival = now
        for ins in blocks[rank].get((there, i, step), ()):
            if ins.op is SEND:
                link = links[rank, ins.peer]
                link.send(now, *costs.transfer(rank, ins))
                arrival = link[-1]
            elif ins.op is not RECV:
                now += costs.compute(rank, ins)
        return now, arrival

    return as_it_happened(program, decide(ranks, total, program.in_flight, run), known=blocks)


def _fitted(costs: Any, program: Program) -> Any:
    """The same costs for the program as it happened."""
    fits = is_dataclass(costs) and hasattr(costs, "program")
    return replace(costs, program=program) if fits else costs
