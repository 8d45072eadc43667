"""Synchrony: when a worker waits for others. One file per technique."""

from shoal.axes.synchrony.asp import asp
from shoal.axes.synchrony.bsp import bsp
from shoal.axes.synchrony.local import local
from shoal.axes.synchrony.ssp import ssp
from shoal.axes.synchrony.synchrony import Synchrony

MEMBERS = (bsp, ssp, asp, local)

__all__ = ["MEMBERS", "Synchrony", "asp", "bsp", "local", "ssp"]
