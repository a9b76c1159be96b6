"""What `Communicator` does with numbers, lists, arrays and tensors: one function for each operation.

Each function turns its argument into a tensor, announces what it is, lets one of the transports do the work once all
ranks agree, and turns tensors back into the caller's type.

Rows of a list, an array or a tensor are those of its first dimension; `shared.share` divides them among ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minipar.comm import playing, values
from minipar.comm.handles import Handle, to_host
from minipar.comm.transport import backend, shared
from minipar.comm.transport.shared import share
from minipar.comm.values import as_bytes
from minipar.comm.world import RankGroup, Way
from minipar.errors import CollectiveMismatch, RankError
from minipar.program import collectives
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.comm.communicator import Communicator

ALLREDUCE = Way(shared.allreduce, backend.allreduce)
REDUCE_SCATTER = Way(shared.reduce_scatter, backend.reduce_scatter)
ALL_GATHER = Way(shared.all_gather, backend.all_gather)
BROADCAST = Way(shared.broadcast, backend.broadcast)
ALL_TO_ALL = Way(shared.all_to_all, backend.all_to_all)
_HEADER = 8 * values.FORM  # bytes before those of a tensor that travels with its form


# Reductions -----------------------------------------------------------------------------------------------------------


def allreduce(comm: Communicator, x: Any, op: Any, algorithm: str | None) -> Any:
    """Combine over all ranks, element by element."""
    return _reduced(comm, "allreduce", x, op, algorithm=algorithm)


def reduce(comm: Communicator, x: Any, root: int, op: Any) -> Any:
    """Combine over all ranks; the result is on rank `root`, None on the others (who forget the sum)."""
    _check_root(comm, "reduce", root)
    found = _reduced(comm, "reduce", x, op, f" to rank {root}")
    return found if comm.rank == root else None


def reduce_scatter(comm: Communicator, x: Any, op: Any) -> Any:
    """Combine over all ranks, each keeping its share of the rows."""
    return _reduced(comm, "reduce_scatter", x, op)


def _reduced(comm: Communicator, call: str, x: Any, op: Any, rest: str = "", algorithm: str | None = None) -> Any:
    """Combine over all ranks: the whole, or of a reduce_scatter this rank's share of the rows."""
    name = values.operation(op, call)
    kind, whole = values.to_tensor(x, name, call)
    by = f" by {algorithm}" if algorithm is not None else ""
    words = values.describe(call, kind, whole, f"for {name}{rest}{by}")
    scatters, device = call == "reduce_scatter", whole.device
    if scatters and not whole.dim():
        raise RankError(f"{call}: a {kind} has no rows to divide among {several(comm.size, 'rank')}; use a list")
    # The sum of a tensor on a GPU need not go through host memory.
    carrier = comm.gpus if call == "allreduce" and whole.is_cuda and algorithm in (None, "backend") else None
    given = _host(whole) if carrier is None and comm.size > 1 else whole
    plain = "sum" if name == "avg" else name
    result = given
    if comm.size > 1:
        algorithm = _chosen(comm, algorithm, given.nbytes)
        played = algorithm in collectives.names("allreduce")
        group = comm.group(transport=carrier)
        shares = not played and comm.shares(group, algorithm)
        # Python's numbers may be real on one rank alone: then they are on all.
        row = [int(given.dtype == torch.float64)] if kind in ("number", "list") else []

        def begin(reals: list[list[int]]) -> tuple[Any, ...] | None:
            nonlocal result
            result = summed = given.double() if [1] in reals else given
            sizes: tuple[Any, ...] = ()
            if scatters:
                rows, size = share(len(given), comm.size), given.shape[1:].numel()
                result = torch.empty((rows[comm.rank], *given.shape[1:]), dtype=summed.dtype)
                sizes = result, [n * size for n in rows]
            return (summed, *sizes, plain) if summed.numel() or shares else None

        if played:
            begin(group.meet(*words, row))
            played_sum(comm, result, tuple(range(comm.size)), str(algorithm), plain).wait()
        else:
            _submit(comm, group, REDUCE_SCATTER if scatters else ALLREDUCE, words, row, begin, shares)
    mean = values.divide(result, comm.size) if name == "avg" else result
    return values.from_tensor(kind, mean.to(device))


# Moving ---------------------------------------------------------------------------------------------------------------


def broadcast(comm: Communicator, x: Any, root: int) -> Any:
    """Give the value of rank `root` to all."""
    _check_root(comm, "broadcast", root)
    if x is None and comm.rank == root:
        raise RankError(f"broadcast: rank {root} is the root, and has None")
    kind, given = ("tensor", torch.empty(0)) if x is None else values.to_tensor(x, call="broadcast")
    form = [0] * values.FORM if x is None else values.encode_form(kind, given)
    device = given.device if x is not None else comm.device
    result = given

    def finish() -> Any:
        return values.from_tensor(values.decode_form(agreed)[0], result.to(device))

    agreed = form
    if comm.size == 1:
        return finish()
    text = f"broadcast from rank {root}"

    def begin(rows: list[list[int]]) -> tuple[Any, ...] | None:
        nonlocal agreed, result
        agreed = rows[root]
        for rank, row in enumerate(rows):
            if any(row) and not _same(row, agreed):
                theirs, mine = values.form_in_words(agreed), values.form_in_words(row)
                raise CollectiveMismatch(f"broadcast: rank {root} has {theirs}, rank {rank} has {mine}")
        _, dtype, shape = values.decode_form(agreed)
        result = _host(given) if comm.rank == root else torch.empty(shape, dtype=dtype)
        return (result, root) if result.numel() else None

    _submit(comm, comm.group(), BROADCAST, (text, text), form, begin)
    return finish()


def all_gather(comm: Communicator, x: Any) -> Any:
    """Collect the rows of all ranks, end to end, on all ranks."""
    kind, given = values.to_tensor(x, call="all_gather")
    device = given.device
    if not given.dim():
        given = given.view(1)
    words = values.describe("all_gather", kind, given, "", True)
    result = given

    def finish() -> Any:
        return values.from_tensor("list" if kind == "number" else kind, result.to(device))

    if comm.size == 1:
        return finish()

    def begin(rows: list[list[int]]) -> tuple[Any, ...] | None:
        nonlocal result
        forms = [values.decode_form(row) for row in rows]
        tails = [torch.Size(shape[1:]) for _, _, shape in forms]
        like = next((k for k, (_, _, shape) in enumerate(forms) if shape[0]), 0)
        for k, (_, _, shape) in enumerate(forms):
            if shape[0] and tails[k] != tails[like]:  # (only lists: for tensors the announcement was compared)
                ours, theirs = values.form_in_words(rows[like]), values.form_in_words(rows[k])
                raise CollectiveMismatch(f"all_gather: ranks differ: rank {like} has {ours}, rank {k} has {theirs}")
        dtype = torch.float64 if any(one == torch.float64 for _, one, _ in forms) else given.dtype
        counts = [shape[0] for _, _, shape in forms]
        result = torch.empty((sum(counts), *tails[like]), dtype=dtype)
        if not result.numel():
            return None
        if len(given):
            result.split(counts)[comm.rank].copy_(given)
        return result.view(-1), [n * tails[like].numel() for n in counts]

    _submit(comm, comm.group(), ALL_GATHER, words, values.encode_form(kind, given), begin)
    return finish()


def all_to_all(comm: Communicator, x: Any) -> Any:
    """Send the k-th piece to rank k; the result is what all ranks have for this one, in their order."""
    pieces: list[Any]
    if isinstance(x, (list, tuple)):
        if len(x) != comm.size:
            raise RankError(
                f"all_to_all: {len(x)} pieces for {several(comm.size, 'rank')}; give a list of one for each"
            )
        pieces, whole = list(x), None
        words = ("all_to_all of a list of pieces",) * 2
    else:
        kind, whole = values.to_tensor(x, call="all_to_all")
        if not whole.dim():
            raise RankError(f"all_to_all: a {kind} has no rows to divide; give a list of one piece for each rank")
        pieces = list(whole.split(share(len(whole), comm.size)))
        words = values.describe("all_to_all", kind, whole, "", True)
    packets = [pack(piece, "all_to_all") for piece in pieces]
    sent = torch.cat(packets)
    got = sent
    lengths = [packet.numel() for packet in packets]

    def finish() -> Any:
        found = [unpack(packet, comm.device if whole is None else whole.device) for packet in got.split(lengths)]
        if whole is None:
            return [values.from_tensor(*one) for one in found]
        return values.from_tensor(kind, torch.cat([tensor for _, tensor in found]))

    if comm.size == 1:
        return finish()

    def begin(rows: list[list[int]]) -> tuple[Any, ...]:
        nonlocal got, lengths
        lengths = [row[comm.rank] for row in rows]
        got = torch.empty(sum(lengths), dtype=torch.uint8)
        return sent, got, rows

    _submit(comm, comm.group(), ALL_TO_ALL, words, lengths, begin)
    return finish()


def pack(x: Any, call: str) -> Tensor:
    """A number, list, array or tensor with its form, as bytes."""
    kind, tensor = values.to_tensor(x, call=call)
    header = torch.tensor(values.encode_form(kind, tensor)).view(torch.uint8)
    return torch.cat([header, as_bytes(_host(tensor))])


def unpack(packet: Tensor, device: torch.device) -> tuple[str, Tensor]:
    """The kind and the tensor that `pack` was given."""
    kind, dtype, shape = values.decode_form(packet[:_HEADER].clone().view(torch.int64).tolist())
    tensor = torch.empty(shape, dtype=dtype)
    as_bytes(tensor).copy_(packet[_HEADER:])
    return kind, tensor.to(device) if kind == "tensor" else tensor


# What they share ------------------------------------------------------------------------------------------------------


def _chosen(comm: Communicator, algorithm: str | None, nbytes: int) -> str | None:
    """The algorithm of an allreduce: of "auto" the fastest by the rates that the ranks know."""
    if algorithm != "auto":
        return algorithm
    if comm.rates is None:
        return None
    from minipar.prediction import choice  # which needs the simulator

    found = choice.choose("allreduce", comm.size, nbytes, comm.rates)
    return None if found == choice.BACKEND else found


def _submit(
    comm: Communicator,
    group: RankGroup,
    way: Way,
    words: tuple[str, str],
    row: list[int],
    begin: Callable[[list[list[int]]], tuple[Any, ...] | None],
    shares: bool | None = None,
) -> None:
    """Exchange some numbers among all ranks, and do the collective with the arguments that `begin` makes of them."""
    text, key = words
    by = group.shares if shares is None else shares
    work = group.submit(text, way, begin, by, key=key, row=row, unattended=False)
    Handle(work, None, comm.pending).wait()


def played_sum(
    comm: Communicator, tensor: Tensor, ranks: tuple[int, ...], algorithm: str, op: str = "sum"
) -> playing.Played:
    """The sum of a contiguous tensor in place over some ranks by an algorithm's program."""
    size, number = tensor.element_size(), comm.count_played(ranks)
    program = collectives.program("allreduce", algorithm, len(ranks), tensor.numel() * size, item=size)
    flat = tensor.detach().view(-1)
    return playing.Played(lambda: playing.play(program, comm, flat, ranks, op, number=number), comm.turns)


def _same(form: list[int], other: list[int]) -> bool:
    plain = values.decode_form(other)[0] in ("number", "list")  # whole or real
    return form == other or (plain and form[0] == other[0] and form[2:] == other[2:])


def _check_root(comm: Communicator, call: str, root: int) -> None:
    if not 0 <= root < comm.size:
        raise RankError(f"{call}: root={root} is none of the {several(comm.size, 'rank')} here (0 to {comm.size - 1})")


def _host(tensor: Tensor) -> Tensor:
    return to_host(tensor) if tensor.is_cuda else tensor
