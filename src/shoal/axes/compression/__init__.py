"""The compression axis: how a tensor is encoded in a message. Each technique has its own file."""

from shoal.axes.compression.after import after
from shoal.axes.compression.by_size import by_size
from shoal.axes.compression.cast import cast
from shoal.axes.compression.coded import coded
from shoal.axes.compression.compressor import Compressor, Trait, Value
from shoal.axes.compression.dgc import dgc
from shoal.axes.compression.difference import difference
from shoal.axes.compression.error_feedback import error_feedback
from shoal.axes.compression.esgd import esgd
from shoal.axes.compression.exact import exact
from shoal.axes.compression.gtopk import gtopk
from shoal.axes.compression.int8 import int8
from shoal.axes.compression.momentum_correction import momentum_correction
from shoal.axes.compression.natural import natural
from shoal.axes.compression.onebit import onebit
from shoal.axes.compression.powersgd import powersgd
from shoal.axes.compression.qsgd import qsgd
from shoal.axes.compression.random_k import random_k
from shoal.axes.compression.sign import sign
from shoal.axes.compression.sufficient_factors import sufficient_factors
from shoal.axes.compression.terngrad import terngrad
from shoal.axes.compression.threshold import threshold
from shoal.axes.compression.topk import topk
from shoal.axes.compression.tuned import tuned
from shoal.axes.compression.twobit import twobit

MEMBERS = (
    exact, cast, qsgd, terngrad, onebit, twobit, sign, natural, int8, topk, random_k, threshold,
    dgc, gtopk, esgd, powersgd, error_feedback, momentum_correction, by_size, after, difference,
    coded, sufficient_factors, tuned,
)  # fmt: skip

__all__ = [
    "MEMBERS", "Compressor", "Trait", "Value", "after", "by_size", "cast", "coded", "dgc",
    "difference", "error_feedback", "esgd", "exact", "gtopk", "int8", "momentum_correction",
    "natural", "onebit", "powersgd", "qsgd", "random_k", "sign", "sufficient_factors", "terngrad",
    "threshold", "topk", "tuned", "twobit",
]  # fmt: skip
