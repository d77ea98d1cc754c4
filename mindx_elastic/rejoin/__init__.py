"""In-place recovery: a dead rank is replaced by a new process, and the others keep theirs.

`protocol` has the rules, `board` carries the messages, `sockets` gets a rank out of a collective, `failures` sees what
the program catches then, `groups` gives the process groups new connections, `member` is the worker's side, `joiner`
that of the new process. The agent's side is `agent.recovery`.
"""
