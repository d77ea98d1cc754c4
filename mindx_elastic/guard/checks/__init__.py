"""What the training has that a resumed run would miss, found while it trains and told to `guard.unmanaged`.

`checks` decides. It compares what `program_variables` finds with what `named_state` says is kept; `movements` and
`unnamed_optimizers` say what moves. `ddp` sees what DDP does not.
None reads the program's source. `guard.loops` imports these, never the other way round.
"""
