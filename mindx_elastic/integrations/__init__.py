"""For programs that leave the loop to a trainer: `lightning`, `transformers`, `accelerate`.

Each file is all that knows one library. It imports the library, and is imported by nothing else of this package. The
private places of the library that it needs are listed in it, and looked for before the training begins.
"""
