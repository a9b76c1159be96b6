"""Point-to-point messages of one rank's program: posted ahead, never blocking, checked before they are sent.

gloo aborts the process when a message is longer than the buffer that waits for it, and leaves stale data when it is
shorter. So a receiver must know shape and dtype beforehand:

    first time a layer's output of n rows crosses a link     header (structure, shapes, dtypes) | data
    afterwards                                               data, if the sender finds it still fits; else an error
    several tensors in one value, or values in one SEND      one message, if they are short (packing.py)
    gradients                                                like the output that was sent, no header ever
    a message of one tensor that has crossed before          as it is, without finding all this out again

On emulated devices each message is followed by another one: the time of its emulated arrival.

Sends are never waited for in the walk. A send is known to be done when something arrives that its receiver could only
have sent after it had used the message; `acknowledgements` reads that off the program.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm.communicator import Communicator, Handle
from minipar.comm.packing import parts_of, places_for
from minipar.errors import RankError
from minipar.program import Op, Program, Value
from minipar.tensors import allocate, differentiable, spec

HEADER_BYTES = 4096
TENSORS = 64  # tags of two values are this far apart: one for each tensor, and these two
_HEADER, _ARRIVAL = TENSORS - 1, TENSORS - 2


class _Unposted(NamedTuple):
    """A receive of which nobody was told: the message is read by whoever waits for it, and would come no sooner."""

    comm: Communicator
    tensor: Tensor
    peer: int
    tag: int

    def wait(self) -> None:
        self.comm.receive(self.tensor, self.peer, self.tag)


@dataclass
class Received:
    """A message on its way: buffers, and the handles that fill them."""

    contents: list[Any]
    handles: Sequence[Handle | _Unposted]
    arrival: Tensor | None


class _Known(NamedTuple):
    """A message of one tensor that has crossed its link before: all that sending and receiving it again needs."""

    rows: int
    tag: int
    shape: torch.Size
    dtype: torch.dtype
    listed: bool  # the value is a list of this tensor, as gradients are


Values = tuple[Value, ...]


def acknowledgements(program: Program, rank: int) -> dict[tuple[int, int], int]:
    """For the k-th receive from a peer: how many sends to that peer are surely done when it has arrived.

    The peer sent it at some place of its list; what it had read before that place, it had received.
    """
    known: dict[tuple[int, int], int] = {}
    if program.in_flight is not None:  # the order is decided as it runs, but links keep theirs
        for k in range(program.steps * program.microbatches):
            known[rank + 1, k] = k + 1  # the gradient of what was sent
            known[rank - 1, k] = max(0, k - program.in_flight + 1)  # rank 0 had room for this micro-batch
        return known
    for peer, instructions in enumerate(program.ranks):
        if peer == rank:
            continue
        position: dict[Value, int] = {}  # of a received value among the receives, counted from 1
        received = used = sent = 0
        for ins in instructions:
            for value in ins.reads:
                used = max(used, position.pop(value, 0))
            if ins.op is Op.RECV and ins.peer == rank:
                received += 1
                position.update(dict.fromkeys(ins.writes, received))
            elif ins.op is Op.SEND and ins.peer == rank:
                known[peer, sent] = used
                sent += 1
    return known


class Links:
    """All links of a rank, kept from one pass through its program to the next.

    rows(value) gives the number of rows of a value's micro-batch; nothing is sent for a micro-batch without rows.
    emulated: whether messages carry the time of their arrival.
    """

    def __init__(
        self, program: Program, comm: Communicator, rows: Callable[[Value], int], emulated: bool = False
    ) -> None:
        self.program = program
        self.comm = comm
        self.rows = rows
        self.emulated = emulated
        self.width = max(program.layers, len(program.edges))
        self.forms: dict[Any, Any] = {}  # (direction, peer, layer, rows) -> form of the value
        self.known: dict[tuple[int, Values], _Known] = {}  # by peer and message; a peer may get what another gets
        self.here: dict[Values, Values] = {}  # of a message, what really travels of it in this pass
        self.done = acknowledgements(program, comm.rank)
        self.inboxes: dict[int, _Inbox] = {}
        self.outgoing: dict[int, deque[list[Handle]]] = {}
        self.completed: dict[int, int] = {}
        for ins in program.ranks[comm.rank]:
            if ins.op is Op.RECV:
                inbox = self.inboxes.setdefault(ins.peer, _Inbox(self, ins.peer))
                inbox.positions[ins.writes] = len(inbox.order)
                inbox.order.append(ins.writes)
            elif ins.op is Op.SEND:
                self.outgoing[ins.peer] = deque()

    def tag(self, value: Value) -> int:
        """A number of its own for every value: a message can never be taken for another one."""
        i = (value.step * self.program.microbatches + value.microbatch) * self.width + value.index
        return (2 * i + (value.kind == "grad_output")) * TENSORS

    def start(self) -> None:
        """A new pass begins: post the first receives of every link."""
        self.completed.clear()
        self.here.clear()
        for inbox in self.inboxes.values():
            inbox.reached = inbox.posted = inbox.due = 0
            inbox.post(self.program.receives_ahead)

    def reach(self, peer: int) -> None:
        """The walk has come to the next RECV from a peer: post one more."""
        inbox = self.inboxes[peer]
        inbox.reached += 1
        inbox.post(inbox.reached + self.program.receives_ahead)

    def present(self, message: Values) -> Values:
        """What really travels of a message: values of micro-batches that have rows."""
        found = self.here.get(message)
        if found is None:
            found = self.here[message] = tuple([value for value in message if self.rows(value)])
        return found

    def send(self, message: Values, contents: list[Any], peer: int, arrival: float = 0.0) -> None:
        """Start sending; never blocks. Raises RankError if the message is not what the receiver expects."""
        queue = self.outgoing[peer]
        known = self.known.get((peer, message))
        if known is not None and known.rows == self.rows(message[0]):
            tensor = _only(contents[0])
            listed = tensor is not contents[0]
            if tensor is not None and (tensor.shape, tensor.dtype, listed) == known[2:]:
                queue.append([self.comm.isend(tensor.contiguous(), peer, known.tag)])
                return
        here = self.present(message)
        if not here:
            queue.append([])
            return
        found = dict(zip(message, contents, strict=True))
        tag, isend = self.tag(here[0]), self.comm.isend
        handles = []
        new: list[Any] = []
        for value in here:
            if value.kind == "output":
                key = ("out", peer, value.index, self.rows(value))
                form = spec(found[value])
                before = self.forms.setdefault(key, form)
                if before is form:
                    new.append(form)
                elif form != before:
                    raise RankError(
                        f"{value} has another form than before, which rank {peer} does not expect: "
                        f"{json.dumps(form)} instead of {json.dumps(before)}",
                        "A layer's output may depend on the number of rows only.",
                    )
        if new:
            handles.append(isend(_encode(new, here), peer, tag + _HEADER))
        for k, tensor in enumerate(parts_of([found[value] for value in here])):
            handles.append(isend(tensor, peer, tag + k))
        if self.emulated:
            handles.append(isend(torch.tensor([arrival], dtype=torch.float64), peer, tag + _ARRIVAL))
        queue.append(handles)
        self.learn(peer, message, contents)

    def learn(self, peer: int, message: Values, contents: list[Any]) -> None:
        """A message has crossed: what the next one of this kind can do without finding out."""
        tensor = _only(contents[0]) if len(message) == 1 and not self.emulated else None
        if tensor is not None:
            value, listed = message[0], tensor is not contents[0]
            self.known[peer, message] = _Known(self.rows(value), self.tag(value), tensor.shape, tensor.dtype, listed)

    def receive(self, message: Values, peer: int) -> tuple[list[Any], float]:
        """Wait for a message that was posted before: the contents of the values that are present, and the time of its
        emulated arrival (0 without).

        Forgets the sends that it acknowledges.
        """
        inbox = self.inboxes[peer]
        received = inbox.wait(message)
        self._forget(peer, self.done.get((peer, inbox.positions[message]), 0))
        return received.contents, 0.0 if received.arrival is None else received.arrival.item()

    def look(self, message: Values, peer: int) -> float | None:
        """When the next message from a peer, this one, has arrived (on an emulated link); None: it is not here."""
        if not self.present(message):
            return 0.0
        received = self.inboxes[peer].look(message)
        if received is None:
            return None
        return 0.0 if received.arrival is None else received.arrival.item()

    def wait_for_any(self, peers: list[int], seconds: float) -> None:
        """Return when a message from one of these peers is there to be read, or after so many seconds."""
        self.comm.readable(peers, seconds)

    def _forget(self, peer: int, count: int) -> None:
        queue = self.outgoing.get(peer)
        while queue and self.completed.get(peer, 0) < count:
            for handle in queue.popleft():
                handle.wait()
            self.completed[peer] = self.completed.get(peer, 0) + 1

    def finish(self) -> None:
        """Wait until every send is done."""
        for queue in self.outgoing.values():
            while queue:
                for handle in queue.popleft():
                    handle.wait()


class _Inbox:
    """The receives from one peer, in the order of its sends."""

    def __init__(self, links: Links, peer: int) -> None:
        self.links = links
        self.peer = peer
        self.order: list[Values] = []
        self.positions: dict[Values, int] = {}
        self.reached = 0
        self.posted = 0
        self.due = 0
        self.header: tuple[Tensor, Handle] | None = None
        self.open: dict[Values, Received] = {}
        self.seen: set[Values] = set()  # of those, the ones that are known to be complete

    def post(self, due: int) -> None:
        """Post receives until `due` of them are, or until one whose form is not known yet."""
        self.due = max(self.due, min(due, len(self.order)))
        links, comm = self.links, self.links.comm
        while self.posted < self.due and self.header is None:
            message = self.order[self.posted]
            known = links.known.get((self.peer, message))
            if known is not None and known.rows == links.rows(message[0]):
                tensor = torch.empty(known.shape, dtype=known.dtype)
                later = _Unposted(comm, tensor, self.peer, known.tag)
                self.open[message] = Received([[tensor] if known.listed else tensor], (later,), None)
                self.posted += 1
                continue
            here = links.present(message)
            if not here:
                self.posted += 1
                continue
            tag, forms = links.tag(here[0]), [self._form(value) for value in here]
            if None in forms:
                if self._new(here):
                    buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                    self.header = (buffer, comm.irecv(buffer, self.peer, tag + _HEADER))
                return
            contents, places = places_for([allocate(form, comm.device) for form in forms])
            handles = [comm.irecv(t, self.peer, tag + k) for k, t in enumerate(places)]
            arrival = None
            if links.emulated:
                arrival = torch.empty(1, dtype=torch.float64)
                handles.append(comm.irecv(arrival, self.peer, tag + _ARRIVAL))
            self.open[message] = Received(contents, handles, arrival)
            self.posted += 1
            if not comm.posts:
                links.learn(self.peer, message, contents)

    def wait(self, message: Values) -> Received:
        links = self.links
        if message not in self.open:
            self.post(self.positions[message] + 1)
        while message not in self.open:
            if self.header is None:
                raise RankError(f"{message[0]} from rank {self.peer} is expected before its form is known")
            buffer, announced = self.header
            announced.wait()
            new = self._new(links.present(self.order[self.posted]))
            for value, form in zip(new, _decode(buffer), strict=True):
                links.forms["in", self.peer, value.index, links.rows(value)] = form
            self.header = None
            self.post(self.due)
        received = self.open.pop(message)
        self.seen.discard(message)
        for handle in received.handles:
            handle.wait()
        return received

    def look(self, message: Values) -> Received | None:
        """The next message, if it is here; `wait` will hand it out."""
        if message in self.seen:
            return self.open[message]
        if not self.links.comm.readable([self.peer], 0.0):
            return None
        self.open[message] = received = self.wait(message)
        self.seen.add(message)
        return received

    def _new(self, here: Values) -> list[Value]:
        """The outputs whose form the sender announces, since it sends them for the first time."""
        new = [value for value in here if value.kind == "output" and self._form(value) is None]
        return list({(value.index, self.links.rows(value)): value for value in reversed(new)}.values())[::-1]

    def _form(self, value: Value) -> Any:
        rows = self.links.rows(value)
        if value.kind == "output":
            return self.links.forms.get(("in", self.peer, value.index, rows))
        layer = self.links.program.source(value)
        key = ("grad", self.peer, layer, rows)
        sent = self.links.forms.get(("out", self.peer, layer, rows))
        if key not in self.links.forms and sent is not None:
            # The gradient of an output: one tensor for each floating-point tensor in it.
            like = differentiable(allocate(sent, torch.device("meta")))
            self.links.forms[key] = spec(like)
        return self.links.forms.get(key)


def _only(content: Any) -> Tensor | None:
    """The tensor, of a value that is one, or a list of one."""
    if type(content) is list and len(content) == 1:
        content = content[0]
    return content if type(content) is Tensor else None


def _encode(forms: list[Any], message: Values) -> Tensor:
    text, value = json.dumps(forms).encode(), message[0]
    if len(text) > HEADER_BYTES - 4:
        raise RankError(f"{value} has too many tensors to announce in {HEADER_BYTES} bytes: {text[:80].decode()}...")
    if text.count(b"dtype") > _ARRIVAL:
        raise RankError(f"{value} has {text.count(b'dtype')} tensors; possible are up to {_ARRIVAL}")
    buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    buffer[:4] = torch.frombuffer(bytearray(len(text).to_bytes(4, "little")), dtype=torch.uint8)
    buffer[4 : 4 + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return buffer


def _decode(buffer: Tensor) -> Any:
    data = bytes(buffer.tolist())
    return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
