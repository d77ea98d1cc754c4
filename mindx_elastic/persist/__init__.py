"""Checkpoints on disk: the file format, durable writes, verified reads, the catalog of a directory, retention.

This module imports nothing: `retention` is a pure decider that must not pull in torch.
"""
