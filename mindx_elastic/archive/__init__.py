"""A second place for the checkpoint files: an object store, or another file system."""
