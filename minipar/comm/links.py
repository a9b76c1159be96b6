"""Point-to-point messages of one rank's program: posted ahead, never blocking, checked before they are sent.

gloo aborts the process when a message is longer than the buffer that waits for it, and leaves stale data when it is
shorter. So a receiver must know shape and dtype beforehand:

    first time a layer's output of n rows crosses a link     header (structure, shapes, dtypes) | data
    afterwards                                               data
    when its form has changed (a longer sequence)            header | data, where waiting reads the messages (through
                                                             sockets.py); elsewhere an error
    several tensors in one value, or values in one SEND      one after another
    gradients                                                like the output that was sent, without a header
    gradients where ranks share layers                       like outputs, with a header: they may cross a link in
                                                             another form than the output (forms.py)
    a missing gradient, as before a detach                   a header that says so, as for a changed form; over gloo and
                                                             NCCL zeros

The receiver finds a changed form while it reads: the header has a tag of its own, and comes where the data was
expected. So messages of one peer are read in the order in which it sends them, whichever the rank waits for first.
Where a receive is posted with its size (gloo, NCCL), the header would come too late.

On emulated devices each message is followed by another one: the time of its emulated arrival.

The walk never waits for sends. A send is known to be done when a message arrives that its receiver could only have sent
after it had used the first one; `acknowledgements` finds this in the program.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.comm.communicator import Communicator, Handle
from minipar.errors import RankError
from minipar.models.tensors import allocate, differentiable, has_tensors, laid_out, spec, tensors
from minipar.program import Op, Program, Value, output

HEADER_BYTES = 4096
TENSORS = 64  # distance between the tags of two values: one tag for each tensor, and the two below
_HEADER, _ARRIVAL = TENSORS - 1, TENSORS - 2


class _Unposted(NamedTuple):
    """A receive that is not posted, since the message would not arrive sooner: `wait` reads it."""

    comm: Communicator
    tensor: Tensor
    peer: int
    tag: int

    def wait(self) -> None:
        self.comm.receive(self.tensor, self.peer, self.tag)

    def wait_unless(self, other: int) -> bool:
        """Wait; returns whether it arrived: False if a message of the tag `other` arrived first."""
        return self.comm.receive(self.tensor, self.peer, self.tag, other)


@dataclass
class Received:
    """A message on its way: buffers, and the handles that fill them. `end`: when it arrives, if a device knows that."""

    contents: list[Any]
    handles: Sequence[Handle | _Unposted]
    arrival: Tensor | None
    forms: list[Any] | None = None  # of the contents; None: nothing travels
    end: Any = None


Values = tuple[Value, ...]


def acknowledgements(program: Program, rank: int) -> dict[tuple[int, int], int]:
    """For the k-th receive from a peer: how many sends to that peer are surely done when it has arrived.

    The peer sent that message at some place of its list, and it had received everything that it read before that place.
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


@dataclass(eq=False)
class Links:
    """All links of a rank, kept from one pass through its program to the next.

    rows(value) gives the number of rows of a value's micro-batch. For a micro-batch without rows nothing is sent; but
    where ranks decide as they run, a short message says that it is done.
    emulated: whether messages carry the time of their arrival.
    ended: given the handles of receives that have just been posted, and the peer, when they end, if a device knows that
    """

    program: Program
    comm: Communicator
    rows: Callable[[Value], int]
    emulated: bool = False
    ended: Callable[[Sequence[Any], int], Any] = lambda handles, peer: None
    forms: dict[Any, Any] = field(default_factory=dict)  # (direction, peer, kind, index, rows) -> form of the value
    changed: bool = False  # whether some form has changed; until then, forms need not be checked again
    gradients: dict[Any, Any] = field(
        default_factory=dict
    )  # (peer, layer, rows) or an output's form -> of its gradients
    first: dict[Any, Any] = field(default_factory=dict)  # (peer, kind, index, rows) -> the form that was first sent
    sent: dict[tuple[int, Value], Any] = field(default_factory=dict)  # by peer and value, once some form has changed
    here: dict[Values, Values] = field(default_factory=dict)  # message -> the values of it that travel in this pass
    inboxes: dict[int, _Inbox] = field(default_factory=dict)
    outgoing: dict[int, deque[list[Handle]]] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)
    done: dict[tuple[int, int], int] = field(default_factory=dict)  # see `acknowledgements`

    def __post_init__(self) -> None:
        program, comm = self.program, self.comm
        for ins in program.ranks[comm.rank]:
            if ins.op is Op.RECV:
                inbox = self.inboxes.setdefault(ins.peer, _Inbox(self, ins.peer))
                inbox.positions[ins.writes] = len(inbox.order)
                inbox.order.append(ins.writes)
            elif ins.op is Op.SEND:
                self.outgoing[ins.peer] = deque()
        if self.inboxes:
            self.done = acknowledgements(program, comm.rank)

    @cached_property
    def width(self) -> int:
        """How many values a micro-batch may have on its way."""
        return max(self.program.layers, len(self.program.edges))

    def tag(self, value: Value) -> int:
        """A different number for every value, so that a message can never be taken for another one."""
        i = (value.step * self.program.microbatches + value.microbatch) * self.width + value.index
        return (2 * i + (value.kind == "grad_output")) * TENSORS

    def start(self) -> None:
        """A new pass begins: post the first receives of every link."""
        self.completed.clear()
        self.here.clear()
        for inbox in self.inboxes.values():
            inbox.reached = inbox.posted = inbox.due = inbox.read = 0
            inbox.open.clear()
            inbox.post(self.program.receives_ahead)

    def reach(self, peer: int) -> None:
        """The rank has come to its next RECV from a peer: post one more receive."""
        inbox = self.inboxes[peer]
        inbox.reached += 1
        inbox.post(inbox.reached + self.program.receives_ahead)

    def present(self, message: Values) -> Values:
        """The values of a message that travel: those of micro-batches that have rows."""
        found = self.here.get(message)
        if found is None:
            found = self.here[message] = tuple([value for value in message if self.rows(value)])
        return found

    def send(self, message: Values, contents: list[Any], peer: int, arrival: float = 0.0) -> None:
        """Start sending; never blocks. Raises RankError if the message is not what the receiver expects."""
        queue = self.outgoing[peer]
        here = self.present(message)
        if not here:
            notice = self._announcement(message, arrival)
            queue.append([] if notice is None else [self.comm.isend(notice[0], peer, notice[1])])
            return
        found = dict(zip(message, contents, strict=True))
        tag, isend = self.tag(here[0]), self.comm.isend
        handles = []
        new: list[tuple[int, Any]] = []
        for k, value in enumerate(here):
            if self.announces(value):
                key = ("out", peer, value.kind, value.index, self.rows(value))
                form = spec(found[value])
                before = self.forms.get(key)
                if before is None:
                    self.first[key[1:]] = form
                elif form != before:
                    self._change(value, peer, before, form)
                if form != before or not has_tensors(form):
                    new.append((k, form))
                    self.forms[key] = form
                if self.changed:
                    self.sent[peer, value] = form
            elif any(gradient is None for gradient in found[value]):
                new.append((k, spec(found[value])))
        if new:
            handles.append(isend(_encode(new, here), peer, tag + _HEADER))
        for k, tensor in enumerate(tensors([found[value] for value in here])):
            handles.append(isend(laid_out(tensor), peer, tag + k))
        if self.emulated:
            handles.append(isend(torch.tensor([arrival], dtype=torch.float64), peer, tag + _ARRIVAL))
        queue.append(handles)

    def _announcement(self, message: Values, arrival: float = 0.0) -> tuple[Tensor, int] | None:
        """What is sent in place of a message without rows, and its tag, where ranks decide as they run. They decide by
        what has arrived, and could else begin a micro-batch that the rank before them has not reached."""
        if self.program.in_flight is None:
            return None
        return torch.tensor([arrival], dtype=torch.float64), self.tag(message[0]) + _ARRIVAL

    def announces(self, value: Value) -> bool:
        """Whether the sender of a value announces its form; that of others follows from the output they belong to."""
        return value.kind == "output" or bool(self.program.forms)

    def _change(self, value: Value, peer: int, before: Any, form: Any) -> None:
        """A value has another form than before: from now on, every message is checked."""
        if self.comm.posts:
            raise RankError(
                f"{value} has another form than before, which rank {peer} does not expect: "
                f"{json.dumps(form)} instead of {json.dumps(before)}",
                "Over gloo and NCCL a layer's output may depend on the number of rows only: pad sequences to one "
                "length, or use the CPUs of one machine.",
            )
        self.changed = True

    def receive(self, message: Values, peer: int) -> tuple[list[Any], float, Any]:
        """Wait for a message that was posted before. Returns the contents of the values that travel, the time of its
        emulated arrival (0 if there is none), and when it arrived, if a device knows that.

        This also forgets the sends that the message acknowledges.
        """
        inbox = self.inboxes[peer]
        received = inbox.wait(message)
        self._forget(peer, self.done.get((peer, inbox.positions[message]), 0))
        return received.contents, 0.0 if received.arrival is None else received.arrival.item(), received.end

    def look(self, message: Values, peer: int) -> float | None:
        """When the next message from a peer arrives on the emulated link, if it is `message`; None: it is not here."""
        received = self.inboxes[peer].look(message)
        if received is None:
            return None
        return 0.0 if received.arrival is None else received.arrival.item()

    def wait_for_any(self, peers: list[int], seconds: float) -> None:
        """Return when a message from one of these peers can be read, or after so many seconds."""
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


@dataclass(eq=False)
class _Inbox:
    """The receives from one peer, in the order of its sends."""

    links: Links
    peer: int
    order: list[Values] = field(default_factory=list)
    positions: dict[Values, int] = field(default_factory=dict)
    reached: int = 0
    posted: int = 0
    due: int = 0
    read: int = 0  # how many messages, in the order of sends, were read
    header: tuple[Tensor, Handle] | None = None
    open: dict[Values, Received] = field(default_factory=dict)

    def post(self, due: int) -> None:
        """Post receives until `due` of them are, or until one whose form is not known yet."""
        self.due = max(self.due, min(due, len(self.order)))
        links, comm = self.links, self.links.comm
        while self.posted < self.due and self.header is None:
            message = self.order[self.posted]
            here = links.present(message)
            if not here:
                self.posted += 1
                continue
            forms = self._forms(here)
            if any(links.announces(v) and not _known(form) for v, form in zip(here, forms, strict=True)):
                buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                self.header = (buffer, comm.irecv(buffer, self.peer, links.tag(here[0]) + _HEADER))
                return
            if None in forms:
                return
            self._make(message, forms)
            self.posted += 1

    def _make(self, message: Values, forms: list[Any]) -> Received:
        """Buffers for a message of these forms, and the receives that fill them."""
        links, comm = self.links, self.links.comm
        tag = links.tag(links.present(message)[0])
        contents = [allocate(form, comm.device) for form in forms]
        receive = comm.irecv if comm.posts else partial(_Unposted, comm)
        handles = [receive(place, self.peer, tag + k) for k, place in enumerate(tensors(contents))]
        arrival = None
        if links.emulated:
            arrival = torch.empty(1, dtype=torch.float64)
            handles.append(receive(arrival, self.peer, tag + _ARRIVAL))
        end = links.ended(handles, self.peer) if comm.posts else None
        self.open[message] = Received(contents, handles, arrival, forms, end)
        return self.open[message]

    def wait(self, message: Values) -> Received:
        """Wait for a message, posting its receive if that is not done yet; the messages before it are read first."""
        while self.read <= self.positions[message]:
            self._read(self.order[self.read])
            self.read += 1
        return self.open.pop(message)

    def _read(self, message: Values) -> None:
        """Fill the buffers of the next message."""
        links = self.links
        here = links.present(message)
        if not here:
            notice = links._announcement(message)
            if notice is not None:
                links.comm.receive(notice[0], self.peer, notice[1])
                self.open[message] = Received([], (), notice[0] if links.emulated else None)
            return
        if message not in self.open:
            self.post(self.positions[message] + 1)
        announced_now = False  # whether a header has announced the form
        while message not in self.open:
            announced_now = True
            if self.header is None:
                raise RankError(f"{message[0]} from rank {self.peer} is expected before its form is known")
            buffer, announced = self.header
            announced.wait()
            self.header = None
            forms = self._announced(links.present(self.order[self.posted]), buffer)
            self._make(self.order[self.posted], forms)
            self.posted += 1
            self.post(self.due)
        received = self.open[message]
        if links.changed and not announced_now and (forms := self._forms(here)) != received.forms:
            received = self._make(message, forms)
        header = links.tag(here[0]) + _HEADER
        for k, handle in enumerate(received.handles):
            if k or not isinstance(handle, _Unposted):
                handle.wait()
            elif not handle.wait_unless(header):
                links.changed = True
                buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                links.comm.receive(buffer, self.peer, header)
                for handle in self._make(message, self._announced(here, buffer)).handles:
                    handle.wait()
                return

    def look(self, message: Values) -> Received | None:
        """The next message, if it is here; `wait` will return it."""
        if self.read > self.positions[message]:
            return self.open[message]
        if not self.links.comm.readable([self.peer], 0.0):
            return None
        self._read(message)
        self.read += 1
        return self.open[message]

    def _announced(self, here: Values, buffer: Tensor) -> list[Any]:
        """The forms of a message's values, some of which were announced in a header."""
        new = dict(_decode(buffer))
        forms = []
        for k, value in enumerate(here):
            if k in new and self.links.announces(value):
                self.links.forms["in", self.peer, value.kind, value.index, self.links.rows(value)] = new[k]
            forms.append(new[k] if k in new else self._form(value))
        return forms

    def _forms(self, here: Values) -> list[Any]:
        return [self._form(value) for value in here]

    def _form(self, value: Value) -> Any:
        """The form of a value, if it is known; None: its sender announces it."""
        links, rows = self.links, self.links.rows(value)
        if links.announces(value):
            return links.forms.get(("in", self.peer, value.kind, value.index, rows))
        layer = links.program.source(value)
        sent = links.first.get((self.peer, "output", layer, rows))
        if links.changed:
            sent = links.sent.get((self.peer, output(layer, value.microbatch, value.step)), sent)
        if sent is None:
            return None
        # The gradient of an output: one tensor for each floating-point tensor in it.
        key = json.dumps(sent) if links.changed else (self.peer, layer, rows)
        if key not in links.gradients:
            links.gradients[key] = spec(differentiable(allocate(sent, torch.device("meta"))))
        return links.gradients[key]


def _known(form: Any) -> bool:
    """Whether a form is known, and need not be announced."""
    return form is not None and has_tensors(form)


def _encode(forms: list[tuple[int, Any]], message: Values) -> Tensor:
    """A header: the places of values in a message, and their forms."""
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
