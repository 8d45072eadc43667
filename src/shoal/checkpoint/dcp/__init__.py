"""Checkpoints by torch.distributed.checkpoint (DCP): who writes and reads which tensor."""
