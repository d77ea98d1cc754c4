"""Checkpoints to other programs' formats; the command is ``mindx-elastic convert``. Nothing is imported here."""
