"""Many processes of one job in one thread, on a simulated clock: one seed is one failure, and comes again.

`world` runs threads of the package as greenlets; `store` is the job's store, `stops` a job that is told to stop.
"""
