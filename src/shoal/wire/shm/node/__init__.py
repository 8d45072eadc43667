"""Communication inside a node: collectives and point-to-point messages through shared memory."""
