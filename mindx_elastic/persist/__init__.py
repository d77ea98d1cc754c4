"""Checkpoints on disk: the file format, durable writes, verified reads, what lies in a directory, what may go.

Nothing is imported here: `retention` is a pure decider that must not pull in torch.
"""
