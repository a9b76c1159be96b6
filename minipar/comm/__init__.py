"""Communication between ranks. `communicator.create()` inside a rank gives its `Communicator`.

Messages. gloo ends a process when a message is longer than the buffer that waits for it, and leaves old data where it
is shorter. So a header announces the first output of a layer (for a number of rows) that crosses a link, and from then
on the sender checks that the form is the announced one; gradients have the form of their output. Messages of a link are
read in the order in which they were sent. The walk never waits for a send: the program says which sends must be done
when a given message has arrived (`links.acknowledgements`), and the rank waits for the rest at the end.

Transports. A `Transport` carries tensors (transport/interface.py): local, gloo or nccl. Where these differ, the
difference is an attribute or a method of theirs, so that callers need not know which one they have. A rank has one for
tensors on the CPU, and also NCCL where it has a GPU of its own. With `Cluster(transport="gloo")` gloo carries
everything on the CPU, as for ranks on several machines.

The local transport. Messages travel over Unix sockets: what fits is written at once, the rest by a helper thread, and
the receiver reads straight into its tensor. The end of a socket also shows that a peer is dead. The data of a
collective go through an arena, an anonymous memory file with a counter for each rank (arena.py).

A collective is a generator of steps (shared.py), run by the thread that waits for it, or else by a helper thread
(queues.py). It begins with an announcement, in shared memory or by a small collective of gloo, and goes on only when
all ranks have called the same (calls.py). The reduce-scatter over gloo is made of an all-to-all and a local sum, since
gloo's own is an all-reduce.
With `algorithm=` a collective is a program of `program/collectives`, played message by message in pieces of 1 MiB.
"""
