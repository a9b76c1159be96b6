"""Communication between ranks. `communicator.create()` inside a rank gives its `Communicator`.

Messages. gloo ends a process when a message is longer than the buffer that waits for it, and leaves old data where it
is shorter. So the first output of a layer (for a number of rows) that crosses a link is announced by a header, and from
then on the sender checks that the form is the announced one; gradients have the form of their output. Messages of a
link are read in the order in which they were sent. The walk never waits for a send: the program says which sends must
be done when a given message has arrived (`links.acknowledgements`), and the rest is waited for at the end.

On one machine, messages of up to 128 KiB travel over Unix sockets, longer ones through a shared ring: what fits is
written at once, the rest by a helper thread, and the receiver reads straight into its tensor. The end of a socket also
tells that a peer is dead. Across machines gloo carries the messages; tensors on GPUs of their own go through NCCL.

Collectives. A collective is announced on its group's board, a shared file, and begins only when all announcements agree
(board.py, matching.py). Ranks of one machine exchange data in an arena, an anonymous memory file with a counter for
each rank (arena.py); a collective is a generator of steps, run by whoever waits for it, or else by one helper thread
(shared.py). All ranks post equally often, so that a count says what a rank has done; after a mismatch `realign` makes
the counts equal again. Across machines there is no board, and only `allreduce` compares forms. gloo's own groups are
made at their first use. Its reduce-scatter is made of an all-to-all and a local sum, since its own is an all-reduce.
With `algorithm=` a collective is a program of `program/collectives`, played message by message in pieces of 1 MiB.
"""
