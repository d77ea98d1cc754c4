"""Where does the state of this process come from: what is there (on disk, in memory), which of it, and reading it.

`findings` says what one process sees, `inventory` puts the findings of all ranks together, `planner` chooses (pure),
`restore` is the ranks' way to one plan, and `reader` verifies and reads what the plan gives this rank.
"""
