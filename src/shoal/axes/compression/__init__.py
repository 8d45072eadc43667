"""In what form do messages go? One file an answer."""

from shoal.axes.compression.cast import cast
from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.error_feedback import error_feedback
from shoal.axes.compression.exact import exact
from shoal.axes.compression.powersgd import powersgd
from shoal.axes.compression.topk import topk

MEMBERS = (exact, cast, topk, powersgd, error_feedback)

__all__ = [
    "MEMBERS",
    "Compressor",
    "Trait",
    "Value",
    "cast",
    "error_feedback",
    "exact",
    "powersgd",
    "topk",
]
