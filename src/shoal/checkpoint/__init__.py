"""Save and load checkpoints: atomic, with checksums, without pickle, for any number of workers.

::

    root/
    ├── .lock                            rank 0 holds a lock on this file during a save
    ├── .tmp-00000140-5f0c…/             an unfinished save; the next save deletes it
    └── step-00000120/
        ├── rank-00000-9a41….bin         raw bytes of tensors, one after another
        ├── rank-00001-9a41….bin
        └── manifest.json                written last: without it the directory is not a checkpoint

:mod:`shoal.checkpoint.dcp` uses torch.distributed.checkpoint (DCP) to plan which rank writes which
part of a tensor, and to reshard on load. The data files, the JSON manifest and the messages between
ranks are Shoal's own (:mod:`shoal.checkpoint.files`), because DCP's writer and its object
collectives use pickle. CRC-32 checksums cover the manifest and all bytes of the tensors.
"""

from shoal.checkpoint.files.directory import newest
from shoal.checkpoint.load import load
from shoal.checkpoint.match import match
from shoal.checkpoint.rng import rng_state, set_rng_state
from shoal.checkpoint.save import save
from shoal.checkpoint.state import Loaded, SaveOptions, State

__all__ = [
    "Loaded", "SaveOptions", "State", "load", "match", "newest", "rng_state", "save",
    "set_rng_state",
]  # fmt: skip
