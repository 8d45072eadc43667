"""Load data: one global order of samples, divided evenly among any number of workers.

::

    order.py        compute the global order of an epoch, and each worker's part of a batch
    options.py      the options of a loader
    randomness.py   separate the random draws of reading data from those of the model
    reader.py       read and collate samples, inside torch's DataLoader
    source.py       read a dataset in the global order, with torch's DataLoader
    loader.py       the loader that the user iterates, with a position to save and restore
    batch.py        count the samples of a batch of any structure, move it, split it
"""

from shoal.samples.batch import count, move, split
from shoal.samples.loader import Loader, make
from shoal.samples.options import LoaderOptions
from shoal.samples.order import DataShard

__all__ = ["DataShard", "Loader", "LoaderOptions", "count", "make", "move", "split"]
