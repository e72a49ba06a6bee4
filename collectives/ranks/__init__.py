"""Who the ranks of a group are, what they can reach, and how failures are told.

Imports nothing of the other rooms. Read `group` (a process group's ranks and how they reach each
other), `set_up` (what they tell each other before), `traced` (calls that are not run), `chunks`
(how a dim is cut), `peer_access` (what GPUs offer each other), `pad` (the words beside every
symmetric buffer), `reports` (how a kernel tells the host of a wait that failed), `flight` (what
every rank has called lately), `flight_files` (and where it is kept), `waits` (ranks that wait for
each other), `bounds` (waits inside of process groups), `caches` (what is kept for later calls).
"""
