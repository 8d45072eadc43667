"""One training step. Its main modules, in the order in which a step uses them:

batches -> replica -> modes -> engine and comm_queue -> exchange over buffers -> stats -> update.
"""
