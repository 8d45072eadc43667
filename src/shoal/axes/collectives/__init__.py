"""By what route? Each answer is a file; a route is data that is run, proved, priced and drawn."""

from shoal.axes.collectives.collective import Collective, Copy, Round
from shoal.axes.collectives.native import native
from shoal.axes.collectives.prove import prove
from shoal.axes.collectives.ring import ring

MEMBERS = (native, ring)

__all__ = ["MEMBERS", "Collective", "Copy", "Round", "native", "prove", "ring"]
