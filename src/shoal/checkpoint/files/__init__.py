"""The files of a checkpoint: its directory, manifest and raw tensor bytes."""
