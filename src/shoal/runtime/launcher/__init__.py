"""Start the processes of a run on this machine, watch them, and stop them.

Nothing here imports torch when it is loaded, so that a wrong command is refused at once.
"""
