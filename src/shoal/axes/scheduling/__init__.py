"""In what order do messages go? One file an answer."""

from shoal.axes.scheduling.fifo import fifo
from shoal.axes.scheduling.priority import priority
from shoal.axes.scheduling.schedule import Cost, Event, Layer, Schedule, Slice, Task
from shoal.axes.scheduling.wfbp import wfbp

MEMBERS = (fifo, wfbp, priority)

__all__ = [
    "MEMBERS",
    "Cost",
    "Event",
    "Layer",
    "Schedule",
    "Slice",
    "Task",
    "fifo",
    "priority",
    "wfbp",
]
