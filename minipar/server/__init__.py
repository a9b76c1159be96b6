"""The parameter server on real processes: its messages, its order of updates, its workers.

Server 0 decides every update and every answer, and the others follow it row by row. So all servers have one order, and
a replay needs nothing else. The rule itself is `program/server_rule.py`, its proof `program/verify/service.py`, its
simulation `prediction/service.py`: all follow the same rule, and return the program as it happened. Whether a worker is
alive is decided by its process, not by its silence. A dead worker is started again during the run
(`Cluster.run_reviving`), and calls the same function. With `sync=ps` one program and one trace cover all steps; `time`
and `bytes_sent` are per step.

A worker may be one rank of a pipeline, with some layers, or share layers with others; `shard.Division` says who has
what. For the rule all ranks of a replica are one worker, and they start again together (lives.py). In mode sync layers
may be served one by one (overlap=priority, and pipelines without flushes). In modes async and ssp each stage of such a
pipeline is a worker of a rule of its own.

What stands where, from the ground up: framing.py says what a message is, and how both ends prove that they know the
token of the folder in which they meet (rendezvous.py). Servers use sockets of their own with a fixed header and raw
bytes: connection.py has the two ends of one, switchboard.py all that a server has. shard.py is what a server keeps, and
snapshot.py its copy on the disk. process.py is a server, pushing.py a worker's end. steps.py has what the workers
report of their steps, saving.py writes a run to a folder from which it goes on, and serving.py runs a program with all
of them.
"""
