"""Save and load with torch.distributed.checkpoint (DCP): its planners, with Shoal's own files.

Importing DCP takes long, so :mod:`shoal.checkpoint` imports this package only when it is needed.
"""
