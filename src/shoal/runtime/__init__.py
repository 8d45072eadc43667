"""Launch the processes of a run, connect them, train step by step, save and restore."""
