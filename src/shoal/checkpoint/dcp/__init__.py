"""Save and load with the planners of torch.distributed.checkpoint (DCP), but Shoal's own files.

Importing DCP takes long, so ``save`` and ``load`` import this package when they are called.
"""
