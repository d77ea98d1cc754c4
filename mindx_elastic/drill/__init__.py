"""``mindx-elastic drill``: breaks a script in named ways, and compares what became of it with the uninterrupted run.

`faults` knows the kinds (pure). `inject` carries one out inside a rank, told by the control file of `prove`'s runs.
`drill` makes the runs and judges them.
"""
