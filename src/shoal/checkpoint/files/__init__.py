"""The bytes of a checkpoint on disk: directory, data files, manifest."""
