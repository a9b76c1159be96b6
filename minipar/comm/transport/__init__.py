"""How tensors get from rank to rank: `Transport`, and the four transports.

interface.py   what the rest of `comm` needs of a transport
local.py       ranks of one machine; of several, where each pair and each group goes the shortest way that it has
gloo.py        ranks on any machines, over the network
nccl.py        tensors on GPUs, where every rank has one of its own
backend.py     the collectives of gloo and NCCL themselves

sockets.py     messages through sockets; of one machine, long ones go through a ring in shared memory (stream.py)
board.py       where the ranks of one machine announce their collectives; gloo_board.py the same across hosts
arena.py       the shared memory for the data of collectives; shared.py has their steps
shared_memory.py   what Linux offers for all this
"""
