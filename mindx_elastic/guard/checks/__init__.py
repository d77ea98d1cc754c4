"""What the training has that a resumed run would miss, found while it trains and told to `guard.unmanaged`.

`checks` decides. It compares what `surroundings` finds in the program's variables with what is `kept`; `movements`
and `strangers` say what moves. `comm_hooks` and `unreduced` see what DDP does not.
None reads the program's source. `guard.loops` imports these, never the other way round.
"""
