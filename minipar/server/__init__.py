"""The parameter server on real processes: its messages, its order of updates, its workers.

Server 0 decides every update and every answer, and the others follow it row by row. So all servers have one order, and
a replay needs nothing else. The rule itself is `program/server_rule.py`, its proof `program/verify/service.py`, its
simulation `prediction/service.py`: all follow the same rule, and return the program as it happened. A worker is one
rank, with a whole model. A dead worker is started again during the run (`Cluster.run_reviving`), and calls the same
function; a dead server ends the run.

What stands where, from the ground up: messages.py says how servers and workers meet, and what a message is. shard.py
has the line of all parameters, of which each server has a part. process.py is a server, pushing.py a worker's end, and
packing.py makes gradients smaller on their way. working.py is the executor of a worker's step, steps.py has what
workers report of their steps, saving.py writes a run to a folder from which it goes on, and serving.py runs a program
with all of them.
"""
