"""Scheduling: the order in which messages are sent. One file per technique."""

from shoal.axes.scheduling.adaptive import adaptive
from shoal.axes.scheduling.dear import dear
from shoal.axes.scheduling.fifo import fifo
from shoal.axes.scheduling.fused import fused
from shoal.axes.scheduling.magnitude import magnitude
from shoal.axes.scheduling.merged import merged
from shoal.axes.scheduling.mlnet import mlnet
from shoal.axes.scheduling.priority import priority
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Slice, Task
from shoal.axes.scheduling.tictac import tictac
from shoal.axes.scheduling.wfbp import wfbp

MEMBERS = (fifo, wfbp, fused, merged, priority, dear, tictac, magnitude, mlnet, adaptive)

__all__ = [
    "MEMBERS", "Cost", "Event", "Layer", "Schedule", "Slice", "Task", "adaptive", "dear", "fifo",
    "fused", "magnitude", "merged", "mlnet", "priority", "tictac", "wfbp",
]  # fmt: skip
