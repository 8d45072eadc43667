"""The processes of a run: launch them, join them, train step by step, save and restore."""
