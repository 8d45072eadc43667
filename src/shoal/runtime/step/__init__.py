"""One training step, one module for each part, in the order of the step:

batches -> replica -> modes -> engine and comm_queue -> exchange over buffers -> stats -> update.
"""
