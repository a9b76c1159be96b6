"""How tensors get from rank to rank: `Transport`, and the four transports.

interface.py   what the rest of `comm` needs of a transport
local.py       ranks of one machine; of several, where each pair and each group goes the shortest way that it has
gloo.py        ranks on any machines, over the network
nccl.py        tensors on GPUs, where every rank has one of its own
backend.py     the collectives of gloo and NCCL themselves

sockets.py     messages through sockets
calls.py       how ranks find that they have called different collectives
arena.py       the shared memory for collectives of one machine; shared.py has their steps
shared_memory.py   what Linux offers for all this
"""
