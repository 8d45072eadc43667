"""Data: one global order of samples, cut fairly among however many workers there are.

::

    order.py        which sample stands where: pure functions of (seed, epoch, position)
    options.py      the settings of a loader, one frozen value
    randomness.py   random generators borrowed and given back
    collating.py    samples into a batch, naming the one that does not fit
    source.py       a dataset read in that order, by torch's DataLoader
    loader.py       the cursor: what the user iterates, saves and restores
    batch.py        count, move and split a batch of any shape
"""

from shoal.samples.batch import count, move, split
from shoal.samples.loader import Loader, make
from shoal.samples.options import LoaderOptions
from shoal.samples.order import DataShard

__all__ = ["DataShard", "Loader", "LoaderOptions", "count", "make", "move", "split"]
