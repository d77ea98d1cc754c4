"""Checkpoints from and to other programs' formats; the command is ``mindx-elastic convert``.

Nothing is imported here: a format's library is loaded when that format is asked for.
"""
