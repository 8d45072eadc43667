"""Collectives: the routes (algorithms) of an all-reduce. One file per technique."""

from shoal.axes.collectives.blueconnect import blueconnect
from shoal.axes.collectives.butterfly import butterfly
from shoal.axes.collectives.collective import Collective, Copy, Cost, Network, Round
from shoal.axes.collectives.double_tree import double_tree
from shoal.axes.collectives.fastest import fastest
from shoal.axes.collectives.halving_doubling import halving_doubling
from shoal.axes.collectives.hierarchical import hierarchical
from shoal.axes.collectives.kit.prove import prove
from shoal.axes.collectives.kit.walk import walk
from shoal.axes.collectives.linear import linear
from shoal.axes.collectives.native import native
from shoal.axes.collectives.ring import ring
from shoal.axes.collectives.tree import tree

MEMBERS = (
    native, linear, ring, tree, double_tree, butterfly, halving_doubling, hierarchical, blueconnect,
    fastest,
)  # fmt: skip

__all__ = [
    "MEMBERS", "Collective", "Copy", "Cost", "Network", "Round", "blueconnect", "butterfly",
    "double_tree", "fastest", "halving_doubling", "hierarchical", "linear", "native", "prove",
    "ring", "tree", "walk",
]  # fmt: skip
