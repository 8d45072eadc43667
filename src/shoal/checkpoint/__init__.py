"""Atomic, checksummed checkpoints that load on another number of workers and never run code.

::

    root/
    ├── .lock                            held by the worker that is saving
    ├── .tmp-00000140-5f0c…/             a save under way, or one that died (swept by the next)
    └── step-00000120/
        ├── rank-00000-9a41….bin         raw bytes of tensors, back to back
        ├── rank-00001-9a41….bin
        └── manifest.json                written last: without it the directory is not a checkpoint

torch.distributed.checkpoint plans who writes what and how shards are cut anew; the bytes, the JSON
manifest and what workers tell each other are ours, because torch's own writer and its object
collectives pickle. Every byte on disk lies under a CRC-32, in the manifest or of it.
"""

from shoal.checkpoint.files.directory import newest
from shoal.checkpoint.load import load
from shoal.checkpoint.match import match
from shoal.checkpoint.rng import rng_state, set_rng_state
from shoal.checkpoint.save import save
from shoal.checkpoint.state import Loaded, SaveOptions, State

__all__ = [
    "Loaded",
    "SaveOptions",
    "State",
    "load",
    "match",
    "newest",
    "rng_state",
    "save",
    "set_rng_state",
]
