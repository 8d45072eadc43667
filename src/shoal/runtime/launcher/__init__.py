"""How worker processes are started, watched and stopped; nothing here imports torch at load."""
