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

The local transport. Messages of up to 128 KiB travel over Unix sockets, longer ones through a shared ring: what fits is
written at once, the rest by a helper thread, and the receiver reads straight into its tensor. The end of a socket also
shows that a peer is dead. A collective is announced on its group's board, a shared file, and begins only when all
announcements agree (board.py, matching.py). Its data go through an arena, an anonymous memory file with a counter for
each rank (arena.py). A collective is a generator of steps, run by the thread that waits for it, or else by a helper
thread (shared.py). All ranks post equally often, so that a count says what a rank has done; after a mismatch `realign`
makes the counts equal again.

Over gloo there is no board: collectives start at once, and only a Communicator's own compare forms. Process groups are
made at their first use. The reduce-scatter is made of an all-to-all and a local sum, since gloo's own is an all-reduce.
With `algorithm=` a collective is a program of `program/collectives`, played message by message in pieces of 1 MiB.
"""
