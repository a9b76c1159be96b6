"""calibrate(cluster): what the ranks of a real cluster can do, alone and all at once.

    compute      a layer's forward and backward, on one rank, then on all         caches, memory and cores they share
    messages     ping-pong over sizes, one pair of ranks after another            a line: fixed + bytes / bandwidth
    collectives  allreduce over sizes, in all pairs at once, then over all ranks  a line, too
    exchange     a message to the next rank, all at once; adding what came        what algorithms consist of
    hosts        a message, several at once, collectives: longer and longer ones  the rate of the cable between hosts
    copies       tensors of a few sizes to a slower tier and back                 a line (`measure_copies`)

A cable between hosts may carry a short burst faster than it carries on: a switch or a limit of bandwidth lets so many
bytes pass. A step sends more than that, so the rate there is that of long messages, and the fixed time that of short
ones. All ranks of a host share its cable.

Nothing here knows a plan or a model, so a prediction that uses it is fitted to no run of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import median
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from tqdm.auto import tqdm

from minipar.cluster import agreement
from minipar.cluster.launched import driven
from minipar.cluster.ranks import Ranks
from minipar.comm import communicator
from minipar.comm.communicator import Communicator
from minipar.comm.playing import play
from minipar.costs.rates import FREE, Calibration, Copies, LinearCost, fit
from minipar.errors import PlanError
from minipar.execution import autograd_entry
from minipar.execution.memory.disk import DiskStore
from minipar.execution.streams import streams_of, synchronize
from minipar.prediction.oversubscription import available_cores
from minipar.program import Op, Program
from minipar.program.collectives.moves import Copy, Move, Send, Setting, lay_out
from minipar.program.instructions import PARTNERS

_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
_SUM_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_PAIRS = 28  # of up to 8 ranks all pairs are measured; of more only neighbours
_WIDTH, _ROWS, _SQUARE = 192, 256, 256
_EXCHANGE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # bytes of a message
_SEVERAL = 4
_POOL = 64 << 20  # bytes
_COPIED_SIZES = (16 << 10, 256 << 10, 4 << 20)  # bytes
_HOST_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20)  # the first bytes of what goes between hosts
_LONGEST = 0.2  # seconds after which nothing longer is tried between hosts
_MOST = 1 << 22  # bytes
Act = Callable[[], object]
_QUICK = 0.5  # seconds of a calibration that nobody asked for


@driven
def calibrate(cluster: Ranks, *, seconds: float = 2.0, progress: bool = True, algorithms: bool = True) -> Calibration:
    """Measure a cluster: rates of computing, of messages between any two ranks, and of allreduce.

    seconds    about how long it may take with 4 ranks; shorter is less exact
    progress   show a bar
    algorithms also what algorithms of collectives consist of, which takes about as long again

    Between hosts it takes some seconds longer if the network is slow. On emulated devices it measures the machine below
    them. Other programs on the machine disturb messages and collectives. Errors: PlanError for seconds that are not
    positive; what a rank raises; RankDied.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise PlanError(f"seconds={seconds!r}: must be a positive number, such as 2.0")
    return _calibrated(cluster, seconds, progress, algorithms, True, True)


def _calibrated(
    cluster: Ranks, seconds: float, progress: bool, algorithms: bool, messages: bool, sums: bool
) -> Calibration:
    """`calibrate`, with messages between two ranks of one host and sums only where they are needed."""
    size = cluster.size
    pairs = list(combinations(range(size), 2))
    if len(pairs) > _PAIRS:
        pairs = [(rank, rank + 1) for rank in range(size - 1)]
    with tqdm(total=1, desc="calibrate", disable=not progress, leave=False) as bar:
        found: Calibration = cluster.run(_measure, pairs, seconds, algorithms, messages, sums)[0]
        bar.update()
    return found


def quick_calibration(cluster: Ranks, program: Program, *, algorithms: bool, progress: bool = True) -> Calibration:
    """A quick calibration of a cluster, of what a program needs. It is measured at the first call and kept for as long
    as the cluster lives.

    Its number of ranks, their threads and their device never change, and a rank that was replaced works on the same
    machine. Arguments and errors as of `calibrate`.
    """
    known = _known.setdefault(cluster, {})
    rows = program.ranks
    needs = (
        algorithms,
        any(ins.op in PARTNERS for row in rows for ins in row),
        any(i.group for row in rows for i in row),
    )
    if needs not in known:
        known[needs] = _calibrated(cluster, _QUICK, progress, *needs)
    return known[needs]


_known: WeakKeyDictionary[Ranks, dict[tuple[bool, bool, bool], Calibration]] = WeakKeyDictionary()


# in the ranks ---------------------------------------------------------------------------------------------------------


def _measure(pairs: list[tuple[int, int]], seconds: float, algorithms: bool, messages: bool, sums: bool) -> Calibration:
    comm = communicator.create()
    cores = _cores(comm) if comm.device.type == "cpu" else None
    found = _measure_all(comm, cores, pairs if messages or _hosts(comm) else [], seconds, sums)
    return _with_exchanges(comm, found, _repeats(seconds)) if algorithms else found  # as users call them


def _measure_all(
    comm: Communicator, cores: int | None, pairs: list[tuple[int, int]], seconds: float, sums: bool
) -> Calibration:
    own_clock = comm.device.type == "cpu" and torch.get_num_threads() == 1
    repeats, hosts = _repeats(seconds), _hosts(comm)
    one, every = _compute(comm, seconds / 24, time.thread_time if own_clock else time.perf_counter)
    at_once = comm.size
    if cores is not None and own_clock:  # the threads' own time says nothing of the time that they had to wait
        at_once = min(cores, comm.size)
    links, works, far = [], [], {}
    for a, b in pairs:
        if not hosts or hosts[a] == hosts[b]:
            points = [_message(comm, [(a, b)], size, max(3, repeats // (1 + size // 2**17))) for size in _SIZES]
            line, *work = (_fit(_SIZES, column) for column in zip(*points, strict=True))
            links.append((a, b, line))
            works.append(work)
        elif (hosts[a], hosts[b]) not in far:  # (the links of other ranks of these hosts are the same cable)
            far[hosts[a], hosts[b]] = _line(partial(_seconds_of_message, comm, [(a, b)]))
            links.append((a, b, far[hosts[a], hosts[b]]))
    lines = []
    for members in _members(comm) if sums else []:
        if not any(hosts.count(host) % members for host in hosts):  # (all neighbours are on one host)
            of = partial(_collective, comm, "allreduce", _neighbours(comm, members))
            found = [of(size, max(3, repeats // (1 + size // 2**19))) for size in _SUM_SIZES]
            lines.append((members, _fit(_SUM_SIZES, found)))
    filling = _filling(comm, hosts, next(iter(far.values()))) if far else 1.0
    across = _across_hosts(comm, hosts) if hosts else ()
    send, receive = map(_middle, zip(*works, strict=True)) if works and comm.device.type == "cpu" else (FREE, FREE)
    return Calibration(
        device=comm.device.type,
        ranks=comm.size,
        cores=cores,
        flops_of_one=one[0],
        flops_of_each=every[0] * at_once / comm.size,
        concurrency=max(1.0, min(float(at_once), at_once * every[1] / one[1])),
        links=tuple(links),
        send=send,
        receive=receive,
        allreduce=tuple(lines),
        hosts=hosts,
        filling=filling,
        across=across,
    )


def _compute(comm: Communicator, window: float, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
    """FLOP/s of a matrix product and rounds a second of a layer, on rank 0 alone, and the mean of all at once."""
    device = comm.device
    square = torch.randn(_SQUARE, _SQUARE, device=device)
    layer = nn.Sequential(
        nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
    ).to(device)
    rows = torch.randn(_ROWS, _WIDTH, device=device, requires_grad=True)

    def product() -> None:
        square @ square

    def train() -> None:
        result: Tensor = layer(rows)
        autograd_entry.backward([get_gradient_edge(result)], [result.detach()])

    def rate(work: Callable[[], None], here: bool) -> float:
        work()  # warm up, and back into the caches
        synchronize(device)
        comm.barrier()
        if not here:
            comm.barrier()
            return 0.0
        count, start, end = 0, clock(), time.perf_counter() + window
        while count < 3 or time.perf_counter() < end:
            work()
            synchronize(device)
            count += 1
        found = count / (clock() - start)
        comm.barrier()
        return found

    works = {product: 2.0 * _SQUARE**3, train: 1.0}
    one: list[list[float]] = [[], []]
    every: list[list[float]] = [[], []]
    for _ in range(3):  # in turn, so that what disturbs one disturbs the other
        for k, (work, amount) in enumerate(works.items()):
            one[k].append(rate(work, comm.rank == 0) * amount)
            every[k].append(rate(work, True) * amount)
    mine = [median(column) for column in (*one, *every)]
    rates = _gather(comm, mine, len(mine))
    return rates[0][:2], [sum(column) / comm.size for column in zip(*(row[2:] for row in rates), strict=True)]


def _message(
    comm: Communicator, pairs: Sequence[tuple[int, int]], size: int, repeats: int = 4
) -> tuple[float, float, float]:
    """Seconds of a message between the two ranks of each pair, all pairs at once; the sender's own work in it, and the
    receiver's, in the first pair."""
    first, second = next((pair for pair in pairs if comm.rank in pair), (-1, -1))
    out, into = (torch.zeros(size, dtype=torch.uint8, device=comm.device) for _ in range(2))
    worked: list[list[float]] = [[], []]

    def send(peer: int) -> None:
        start = time.process_time()
        comm.isend(out, peer).wait()
        worked[0].append(time.process_time() - start)

    def receive(peer: int) -> None:
        start = time.process_time()
        comm.irecv(into, peer).wait()
        synchronize(comm.device)
        worked[1].append(time.process_time() - start)

    def there_and_back(call: int) -> None:
        if comm.rank == first:
            send(second)
            receive(second)
        elif comm.rank == second:
            receive(first)
            send(first)

    seconds = _seconds(comm, there_and_back, repeats, _calls(size)) / 2
    mine = [max(1e-9, _typical(times[1:])) for times in worked if times]  # (a clock may not have moved at all)
    sending, receiving = _gather(comm, mine, 2)[pairs[0][0]]
    return seconds, sending, receiving


def _seconds_of_message(comm: Communicator, pairs: Sequence[tuple[int, int]], size: int) -> float:
    return _message(comm, pairs, size)[0]


# between hosts --------------------------------------------------------------------------------------------------------


def _hosts(comm: Communicator) -> tuple[int, ...]:
    """By rank, the number of its host; () if there is one."""
    numbers = {host: k for k, host in enumerate(dict.fromkeys(comm.hosts))}
    return tuple(numbers[host] for host in comm.hosts) if len(numbers) > 1 else ()


def _cores(comm: Communicator) -> int:
    """The cores that all ranks have together: those of every machine count once."""
    if len(set(comm.hosts)) == 1:
        return available_cores()
    mine = [float(crc32(agreement.machine().encode())), float(available_cores())]
    return round(sum({row[0]: row[1] for row in _gather(comm, mine, 2)}.values()))


def _line(seconds: Callable[[int], float]) -> LinearCost:
    """The cost of bytes between hosts: a short message's time, and a long one's rate.

    seconds   takes so many bytes and gives the time that they take, the same number on all ranks

    Sizes grow until one takes long. The rate is that at which the time grows at the end, after any burst.
    """
    sizes = list(_HOST_SIZES)
    times = [seconds(size) for size in sizes]
    while times[-1] < _LONGEST and sizes[-1] < _MOST:
        sizes.append(4 * sizes[-1])
        times.append(seconds(sizes[-1]))
    return LinearCost(times[0], max(1e-13, (times[-1] - times[-3]) / (sizes[-1] - sizes[-3])))


def _filling(comm: Communicator, hosts: tuple[int, ...], uncontended: LinearCost) -> float:
    """How much of a cable's rate one message takes, from messages of all ranks of two hosts at once. `uncontended`:
    the cost of a message between them while no other rank sends."""
    first, second = ([rank for rank, host in enumerate(hosts) if host == k] for k in (0, 1))
    pairs = list(zip(first, second, strict=False))
    if len(pairs) < 2:
        return 1.0
    several = _line(partial(_seconds_of_message, comm, pairs))
    return min(1.0, max(1.0, several.per_byte / uncontended.per_byte) / len(pairs))


def _across_hosts(comm: Communicator, hosts: tuple[int, ...]) -> tuple[tuple[str, int, LinearCost], ...]:
    """(collective, size of the group, its time) over one rank of each host, and over all ranks."""
    groups = {tuple(hosts.index(host) for host in dict.fromkeys(hosts)), tuple(range(comm.size))}
    return tuple(
        (kind, len(group), _line(partial(_collective, comm, kind, group)))
        for group in sorted(groups, key=len)
        for kind in ("allreduce", "all_gather", "reduce_scatter")
    )


def _collective(comm: Communicator, kind: str, group: tuple[int, ...], size: int, repeats: int = 4) -> float:
    """Seconds of a collective of so many bytes. Ranks of no group only wait."""
    part = size // 4 // max(1, len(group))
    whole, mine = (torch.zeros(count, device=comm.device) for count in (part * len(group), part))
    inside = comm.rank in group
    comm.prepare({group} if inside else set())

    def work(call: int) -> None:
        if not inside:
            return
        if kind == "allreduce":
            comm.iallreduce(whole, group).wait()
        elif kind == "reduce_scatter":
            comm.ireduce_scatter(whole, mine, group).wait()
        else:
            for handle in comm.iall_gather(mine, whole, group):
                handle.wait()

    return _seconds(comm, work, repeats)


# messages of collectives ----------------------------------------------------------------------------------------------

# All ranks of a group send at once, as a collective's program has them do it.
#
#     uncontended rank 0 -> rank 1 -> rank 0                   a message while no one else sends
#     one         rank 0 -> rank 1 -> rank 2 -> rank 0         a message to the next rank, and one from the one before
#     several     the same, several messages in a row          what each further one takes
#
# These programs compute nothing, but `play` runs them as it runs an algorithm. The memory is cold, as it is for
# gradients: each call works on another part of a large tensor.


def _with_exchanges(comm: Communicator, found: Calibration, repeats: int) -> Calibration:
    """The calibration with what collectives by algorithm consist of."""
    cold = partial(_cold, comm, torch.zeros(_POOL // 4, device=comm.device), max(3, min(repeats, 20)))
    exchanges = [(members, *_exchange(comm, members, cold)) for members in _members(comm)]
    uncontended = FREE
    if comm.size > 1:  # from rank 0 to rank 1 and back, while the others wait
        both = [cold(size, 1, _player(comm, _there_and_back(), (0, 1))) for size in _EXCHANGE_SIZES]
        uncontended = _fit(_EXCHANGE_SIZES, [seconds / 2 for seconds in both])
    piece = torch.zeros(max(_EXCHANGE_SIZES) // 4, device=comm.device)
    adds = [cold(size, 1, lambda part: part.add_(piece[: len(part)])) for size in _EXCHANGE_SIZES]
    return replace(found, exchange=tuple(exchanges), uncontended=uncontended, add=_fit(_EXCHANGE_SIZES, adds))


def _exchange(comm: Communicator, members: int, cold: Callable[..., float]) -> tuple[LinearCost, LinearCost]:
    """Seconds of one message within a group, and of each further one; all complete groups of the cluster at once."""
    group = _neighbours(comm, members)
    one, several = (
        [cold(size, members * count, _player(comm, _shift(members, count), group))
         for size in _EXCHANGE_SIZES]
        for count in (1, _SEVERAL)
    )  # fmt: skip
    further = [max(1e-9, (b - a) / (_SEVERAL - 1)) for a, b in zip(one, several, strict=True)]
    return _fit(_EXCHANGE_SIZES, one), _fit(_EXCHANGE_SIZES, further)


def _player(comm: Communicator, program: Program, group: tuple[int, ...]) -> Callable[[Tensor], None]:
    """Plays a program within a group; ranks of no group only wait."""

    def work(part: Tensor) -> None:
        if comm.rank in group:
            play(program, comm, part, group)

    return work


def _cold(
    comm: Communicator, pool: Tensor, repeats: int, size: int, chunks: int, work: Callable[[Tensor], object]
) -> float:
    """Seconds of work on so many chunks of so many bytes, each time other ones of a large tensor."""
    parts = pool.split(size // 4 * chunks)
    return _seconds(comm, lambda call: work(parts[call * 7 % len(parts)]), repeats, _calls(size), median)


def _there_and_back() -> Program:
    """Rank 1 sends each message back when it has received it."""

    def moves(setting: Setting, rank: int) -> Iterator[Move]:
        there: list[Move] = [Send([0], 1 - rank), Copy([0], 1 - rank)]
        yield from there if rank == 0 else reversed(there)

    return lay_out("there and back", "allreduce", Setting(2), moves, (1,))


def _shift(ranks: int, count: int) -> Program:
    """Every rank sends `count` chunks to the next one, in as many messages."""

    def moves(setting: Setting, rank: int) -> Iterator[Move]:
        for k in range(count):
            yield Send([rank * count + k], (rank + 1) % ranks)
        for k in range(count):
            yield Copy([(rank - 1) % ranks * count + k], (rank - 1) % ranks)

    return lay_out("exchange", "allreduce", Setting(ranks), moves, (1,) * (ranks * count))


# what these share -----------------------------------------------------------------------------------------------------


def _members(comm: Communicator) -> list[int]:
    """The sizes of the groups that are measured."""
    return sorted({2, comm.size} & set(range(2, comm.size + 1)))


def _neighbours(comm: Communicator, members: int) -> tuple[int, ...]:
    """The group of so many neighbours that a rank is in; () if it is not complete."""
    first = comm.rank // members * members
    return tuple(range(first, first + members)) if first + members <= comm.size else ()


def _gather(comm: Communicator, numbers: list[float], length: int) -> list[list[float]]:
    """Every rank's numbers, on all ranks; shorter lists are filled up with zeros."""
    table = torch.zeros(comm.size, length, dtype=torch.float64)
    table[comm.rank, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    comm.iallreduce(table, tuple(range(comm.size))).wait()
    found: list[list[float]] = table.tolist()
    return found


def _typical(times: list[float]) -> float:
    """The lower quartile: other programs disturb it little, and one lucky measurement does not decide it."""
    return sorted(times)[(len(times) - 1) // 4]


def _calls(size: int) -> int:
    """Calls in a round: ranks do not begin a round at the very same moment, which short messages would show."""
    return 1 if size > 1 << 16 else 8


def _seconds(
    comm: Communicator,
    work: Callable[[int], object],
    repeats: int,
    calls: int = 1,
    middle: Callable[[list[float]], float] = _typical,
) -> float:
    """Seconds of one call on the slowest rank, in a typical round of several after one that warms up."""
    times = []
    for k in range(repeats + 1):
        comm.barrier()
        start = time.perf_counter()
        for call in range(calls):
            work(k * calls + call)
        synchronize(comm.device)
        times.append((time.perf_counter() - start) / calls)
    return middle([max(column) for column in zip(*_gather(comm, times[1:], repeats), strict=True)])


def _fit(sizes: Sequence[int], seconds: Iterable[float]) -> LinearCost:
    return fit(list(zip(sizes, seconds, strict=True)))


def _repeats(seconds: float) -> int:
    return max(3, round(seconds * 8))


def _middle(lines: Sequence[LinearCost]) -> LinearCost:
    return LinearCost(median(line.fixed for line in lines), median(line.per_byte for line in lines))


# copies to a slower tier ----------------------------------------------------------------------------------------------


def measure_copies(device: torch.device, disk: bool, folder: str | None = None) -> Copies:
    """Measure copies of tensors of `device` to the host, and to the disk if `disk`. StoreError for a bad folder."""
    streams = streams_of(device)

    def to_host(size: int) -> tuple[Act, Act]:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        room = streams.room(tensor)
        return (
            lambda: streams.copy(tensor, room, Op.OFFLOAD.value).result(),
            lambda: streams.copy(room, tensor, Op.FETCH.value).result(),
        )

    try:
        found = _lines_of(to_host)
    finally:
        streams.close()
    if not disk:
        return Copies(*found)
    store = DiskStore(folder)

    def to_disk(size: int) -> tuple[Act, Act]:
        tensor = torch.zeros(size, dtype=torch.uint8)
        return lambda: store.put("probe", tensor).result(), lambda: store.fetch("probe", tensor).result()

    try:
        return Copies(*found, *_lines_of(to_disk))
    finally:
        store.close()


def _lines_of(copies: Callable[[int], tuple[Act, Act]]) -> tuple[LinearCost, LinearCost]:
    """The costs of copies away and back. `copies` gives both, of so many bytes."""
    away: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    for size in _COPIED_SIZES:
        there, here = copies(size)
        away.append((size, _seconds_of(there)))
        back.append((size, _seconds_of(here)))
    return fit(away), fit(back)


def _seconds_of(act: Act) -> float:
    """The median of a few times, after one that touches the pages."""
    act()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return median(times)
