"""One training step, in the order in which it happens.

batches -> replica -> modes -> engine and comm_queue -> exchange over buffers -> stats -> update.
"""
