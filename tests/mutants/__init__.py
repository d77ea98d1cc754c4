"""Does a test notice a small change of the engine? `python -m tests.mutants` tries the changes in `list.jsonl`."""
