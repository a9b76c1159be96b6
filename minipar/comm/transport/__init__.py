"""How tensors get from rank to rank: `Transport`, and the three transports.

interface.py   what the rest of `comm` needs of a transport
local.py       ranks of one machine
gloo.py        ranks on any machines, over the network
nccl.py        tensors on GPUs, where every rank has one of its own
backend.py     the collectives of gloo and NCCL themselves

sockets.py     messages of one machine; stream.py is the ring in shared memory that long ones go through
board.py       where the ranks of one machine announce their collectives
arena.py       the shared memory for the data of collectives; shared.py has their steps
futex.py, shared_memory.py   what Linux offers for all this
"""
