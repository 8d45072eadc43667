"""Data: one global order of samples, divided fairly among any number of workers.

::

    order.py        which sample is where: pure functions of (seed, epoch, position)
    options.py      the options of a loader, one frozen value
    randomness.py   keep random draws for data apart from those of the model
    reader.py       read and collate samples, inside torch's DataLoader
    source.py       a dataset read in that order, by torch's DataLoader
    loader.py       the cursor: what the user iterates, saves and restores
    batch.py        count, move and split a batch of any structure
"""

from shoal.samples.batch import count, move, split
from shoal.samples.loader import Loader, make
from shoal.samples.options import LoaderOptions
from shoal.samples.order import DataShard

__all__ = ["DataShard", "Loader", "LoaderOptions", "count", "make", "move", "split"]
