"""The parameter server on real processes: its messages, its order of updates, its workers.

Server 0 decides every update and every answer, and the others follow it line by line. So all servers have one order,
and a replay needs nothing else (ordering.py, replaying.py). The rule itself is `program/server_rule.py`, its proof
`program/verify/service.py`, its simulation `prediction/service.py`: all follow the same rule, and return the program as
it happened. Servers use sockets of their own with a fixed header and raw bytes; both ends prove that they know the
folder's token (framing.py, rendezvous.py). Whether a worker is alive is decided by its process, not by its silence. A
dead worker is started again during the run (`Cluster.run_reviving`), and calls the same function. With `sync=ps` one
program and one trace cover all steps; `time` and `bytes_sent` are per step.
"""
