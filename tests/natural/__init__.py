"""Training loops as people write them, each with what the package must say about it."""
