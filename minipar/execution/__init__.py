"""A program on real tensors, processes and messages: the loop of a rank, and everything that it needs.

The executor (executor.py) interprets instructions by the rule of `program/rule.py`, and knows no strategy. Autograd's
graph of a forward is cut, by `detach` and without a copy, wherever a backward instruction of the same micro-batch
begins. So one fused forward can have a backward in several pieces, with collectives between them. A piece keeps only
the graph's edges and not its output, so that the output is free as soon as it is sent (compute.py, graph_cuts.py).
Where an operation cannot run twice (a shared parameter, a hook, a custom function), the input half of a split backward
computes all gradients, and the weight half only adds them up (split_backward.py).

The call of a layer is composed when the rank is built: the module is wrapped only in what this program needs for this
layer, such as dropout by row, copies of what autograd keeps, or the loss (layer_calls.py).

Every value of the program is an entry of one table, `live`: outputs, gradients, graphs, parameters and their versions,
slices, copies in slower tiers. What is on its way is in `pending`; an instruction waits for what it reads, reads and
writes the table, and drops what it frees. A parameter group is a line (lines.py): what the layers use, and what the
optimizer works on, which may be a slice, a float32 copy, or a copy on the host. So ZeRO, versions, bf16 and offload are
entries and moves between them (state.py, copies.py), and no product of keys has code of its own.

Measured times are clock readings. A compute instruction is timed from its start to its end, a SEND while it gives its
message to the transport, a RECV from when it is posted until it is read, and a collective from its start until its last
message is reported done. A rank's own work on a message counts in the compute instruction before the SEND, or in the
first one that reads the message.

Where a GPU computes, the walk of the host is ahead of it, times are events, and waits are the device's own. All that
the executor needs of a device is in streams.py, for a CPU and for a GPU; docs/gpu.md says what of it has run where.

Emulated devices (emulation.py): `ProgramCosts` (prediction) turns a `DeviceSpec` into seconds of each instruction, for
the prediction and for the delays of the run alike. A compute instruction is followed by a sleep until its device would
have ended. A message carries the time at which it arrives, and its reader waits for that. A thread that is woken late
does not make its device late, since the next instruction still ends when it should. Real work that is late by more than
2 ms cannot be hidden: it is noted in `Trace.overruns`, and the device goes on from the clock.

`train` lays up to 8 steps in one program where one step's messages travel during the next.
"""
