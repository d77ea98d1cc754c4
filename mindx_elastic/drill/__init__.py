"""``mindx-elastic drill``: breaks a script in named ways, and compares what became of it with the uninterrupted run.

`faults` knows the kinds (pure). `inject` carries one out inside a rank, told by the control file of `prove`'s runs;
`outside` finds what a run has left behind. `drill` makes the runs, judges them and writes the result down.
"""
