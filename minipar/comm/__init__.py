"""Communication between ranks. `communicator.create()` inside a rank gives its `Communicator`.

Messages. gloo ends a process when a message is longer than the buffer that waits for it, and leaves old data where it
is shorter. So the first output of a layer (for a number of rows) that crosses a link is announced by a header, and from
then on the sender checks that the form is the announced one; gradients have the form of their output. Messages of a
link are read in the order in which they were sent. The walk never waits for a send: the program says which sends must
be done when a given message has arrived (`links.acknowledgements`), and the rest is waited for at the end.

What carries tensors is a `Transport` (transport/interface.py): local, gloo or nccl. Where they differ, the difference
is one of its attributes or methods, and nobody asks which one it is. A rank has one for tensors on the CPU, and NCCL
beside it where it has a GPU of its own. `Cluster(transport="gloo")` takes gloo alone, as ranks on several machines do.

The local transport. Messages of up to 128 KiB travel over Unix sockets, longer ones through a shared ring: what fits is
written at once, the rest by a helper thread, and the receiver reads straight into its tensor. The end of a socket also
tells that a peer is dead. A collective is announced on its group's board, a shared file, and begins only when all
announcements agree (board.py, matching.py). Its data go through an arena, an anonymous memory file with a counter for
each rank (arena.py); a collective is a generator of steps, run by whoever waits for it, or else by one helper thread
(shared.py). All ranks post equally often, so that a count says what a rank has done; after a mismatch `realign` makes
the counts equal again.

Over gloo there is no board: collectives start at once, and only a Communicator's own compare forms. Its groups are made
at their first use. Its reduce-scatter is made of an all-to-all and a local sum, since its own is an all-reduce. With
`algorithm=` a collective is a program of `program/collectives`, played message by message in pieces of 1 MiB.
"""
