"""``mindx-elastic run``: one agent a node, which starts the workers, watches them and brings their memory to disk.

`options` and `launcher` lead from the command line to the exit code. `supervisor` is torch's elastic agent with our way
to start, watch and stop workers; it runs one `attempt` after another. `workers`, `inbox`, `nodes` and `stop_files` are
what an attempt waits for: processes, signals, nodes, files. `endings`, `hang` and `restarts` decide. `ledger` keeps
account. `holder` saves what dead workers have left in memory. `child` is the program that stands between the agent and
a worker's own.
"""
