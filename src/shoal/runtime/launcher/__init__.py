"""How worker processes are started, watched and stopped, and where they meet.

Only ``meeting`` needs torch when it is loaded: what can be refused is refused without it.
"""
