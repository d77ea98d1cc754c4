"""``mindx-elastic prove``: runs a script, stops and resumes it, and compares what each step has seen and made.

The guard of each run writes *witnesses* (`proof_witness`), as a control file tells it (`control`). `runs` makes one,
`proof` decides which ones, `compare` finds the first difference, and `causes` says what usually makes it.
"""
