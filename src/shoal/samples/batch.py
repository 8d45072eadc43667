"""Count the samples of a batch of any structure, move the batch to a device, or split it.

A batch is a tree of mappings, lists, tuples, named tuples and dataclasses. Its leaves are tensors
or other objects of the user. Each tensor is a column, as ``default_collate`` makes it, so its first
dimension counts samples. ``torch.utils._pytree`` is not used, because it treats subclasses, other
mappings and dataclasses as leaves unless each type is registered.

An object of another type can be

* counted if it has an int ``num_samples``, ``num_graphs`` (PyTorch Geometric) or ``__len__``;
* moved if it has ``to(device)``;
* split if it can be counted and ``batch[start:stop]`` works.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shoal.errors import BadArgument, UsageError
from shoal.samples.order import DataShard, SampleRange, part

Rebuild = Callable[[list[Any]], Any]

_SCALARS = (str, bytes, int, float, complex, bool, type(None))


def count(batch: Any) -> int:
    """Return the number of samples of the first tensor (or other countable object) in a batch.

    Tensors without dimensions do not count. If nothing can be counted, the length of a list of
    plain values is returned.

    >>> count({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
    8
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else None
    if isinstance(first, Tensor) and first.dim():  # fast path for most batches
        return first.size(0)
    samples = next(chain(_counts(batch), _list_lengths(batch)), None)
    if samples is None:
        raise UsageError(
            f"cannot tell how many samples are in a batch of type {type(batch).__name__}: it holds"
            " no tensor; take it from a loader of run.loader, or give it a num_samples attribute"
            " or a __len__"
        )
    return samples


def move(batch: Any, device: torch.device | str) -> Any:
    """Return the batch on ``device``. Leaves without a method ``to`` are not changed."""
    target = device if isinstance(device, torch.device) else torch.device(device)
    if type(batch) in (list, tuple) and all(
        isinstance(node, Tensor) and node.device == target for node in batch
    ):
        return batch  # fast path for tensors that are already on the device
    # A copy to the CPU must block: otherwise it could be read before it is complete.
    must_block = target.type == "cpu"

    def moved(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node if node.device == target else node.to(target, non_blocking=not must_block)
        opened = _open(node)
        if opened is not None:
            return _mapped(node, opened, moved)
        to = getattr(node, "to", None)
        return to(target) if callable(to) else node

    return moved(batch)


def split(batch: Any, parts: int, *, rows: int | None = None) -> list[Any]:
    """Split a batch into at most ``parts`` micro-batches, whose sizes differ by at most one.

    Samples stay in order. No micro-batch is empty, except that a batch without samples is returned
    as the only micro-batch, because its worker must still take part in the step. Numbers, strings
    and 0-dimensional tensors are repeated in each micro-batch. ``rows`` is the number of samples.
    By default, :func:`count` computes this number.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise BadArgument(f"split(parts={parts!r})", "parts must be an int of at least 1")
    if parts == 1:
        return [batch]
    rows = count(batch) if rows is None else rows
    if rows <= 1:
        return [batch]
    spans = [part(SampleRange(0, rows), DataShard(index, parts)) for index in range(parts)]
    return [cut(batch, rows, span) for span in spans if span.size]


def cut(batch: Any, rows: int, span: SampleRange) -> Any:
    """Return samples ``span`` of a batch of ``rows``. Raise a UsageError if it cannot be split."""
    # A list of leaves of which none can be counted is one column. Any other list holds columns.
    flat = isinstance(batch, (list, tuple)) and all(_open(child) is None for child in batch)
    column = flat and next(_counts(batch), None) is None
    piece = (_inner if column else _outer)(batch, rows, span)
    if piece is batch:
        raise UsageError(
            f"cannot split a batch of type {type(batch).__name__}: nothing in it has {rows}"
            " entries, one for each sample; collate it into tensors, or use neither accumulate nor"
            " pipe"
        )
    return piece


def _inner(node: Any, rows: int, span: SampleRange) -> Any:
    """Return samples ``span`` of a part of a batch. In such a part, a list may be one column."""
    plain = isinstance(node, (list, tuple)) and not hasattr(node, "_fields")
    # A list of length ``rows`` is one column, unless it has leaves that can be counted and all of
    # these have ``rows`` samples. In that case its children are columns, not samples.
    if plain and len(node) == rows and set(_counts(node)) != {rows}:
        return node[span.start : span.stop]
    return _outer(node, rows, span)


def _outer(node: Any, rows: int, span: SampleRange) -> Any:
    if isinstance(node, Tensor):
        return _cut_tensor(node, rows, span)
    if isinstance(node, PackedSequence):
        return _cut_packed(node, rows, span)
    if isinstance(node, _SCALARS):
        return node
    if _declared_count(node) is None and (opened := _open(node)) is not None:
        return _mapped(node, opened, lambda child: _inner(child, rows, span))
    if hasattr(node, "__getitem__") and _declared_count(node) == rows:
        try:
            return node[span.start : span.stop]
        except (TypeError, KeyError, IndexError) as error:
            raise UsageError(
                f"cannot split a {type(node).__name__}: batch[{span.start}:{span.stop}] raised"
                f" {error!r}; let its __getitem__ take a slice, or use neither accumulate nor pipe"
            ) from error
    raise UsageError(
        f"cannot split a batch that holds a {type(node).__name__}: this object does not have"
        f" {rows} samples that can be sliced; give it __len__ and batch[start:stop], or use"
        " neither accumulate nor pipe"
    )


def _cut_tensor(tensor: Tensor, rows: int, span: SampleRange) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    if tensor.size(0) != rows:
        raise UsageError(
            f"cannot split a tensor of shape {tuple(tensor.shape)} in a batch of {rows} samples:"
            " its first dimension must count samples; collate it like this, or use no accumulate"
            " and no pipe"
        )
    return tensor[span.start : span.stop]


def _cut_packed(packed: PackedSequence, rows: int, span: SampleRange) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)  # (rows, longest, ...)
    if len(lengths) != rows or not span.size:
        raise UsageError(
            f"cannot take {span.size} of {rows} samples from a PackedSequence of {len(lengths)}:"
            f" it must have {rows} sequences, and at least one of them must be taken"
        )
    part_lengths = lengths[span.start : span.stop]
    values = padded[span.start : span.stop, : int(part_lengths.max())]
    is_sorted = packed.sorted_indices is None
    return pack_padded_sequence(values, part_lengths, batch_first=True, enforce_sorted=is_sorted)


def _counts(node: Any) -> Iterator[int]:
    """Yield the number of samples of each leaf that can be counted, in order."""
    if isinstance(node, Tensor):
        if node.dim():
            yield node.size(0)
    elif isinstance(node, PackedSequence):
        yield int(node.batch_sizes[0])
    elif (declared := _declared_count(node)) is not None:
        yield declared
    elif (opened := _open(node)) is not None:
        for child in opened[0]:
            yield from _counts(child)


def _list_lengths(node: Any) -> Iterator[int]:
    """Yield the length of each list that holds only leaves, such as texts. Skip all other lists."""
    opened = _open(node)
    if opened is None:
        return
    children = opened[0]
    if isinstance(node, (list, tuple)) and all(_open(child) is None for child in children):
        yield len(children)
    elif not isinstance(node, (list, tuple)):
        for child in children:
            yield from _list_lengths(child)


def _declared_count(node: Any) -> int | None:
    """Return ``num_samples``, ``num_graphs`` or ``len()``, or None if none of these is a count."""
    if isinstance(node, (*_SCALARS, type)):
        return None
    for name in ("num_samples", "num_graphs"):
        value = getattr(node, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if isinstance(node, (Mapping, list, tuple)):
        return None  # the length of a container need not be its number of samples
    try:
        return len(node)
    except TypeError:
        return None


def _open(node: Any) -> tuple[list[Any], Rebuild] | None:
    """Return the children of a container and a function that rebuilds it, or None for a leaf."""
    if isinstance(node, PackedSequence):
        return None
    if isinstance(node, (list, tuple)):
        named = hasattr(node, "_fields")
        return list(node), lambda new: type(node)(*new) if named else type(node)(new)
    if isinstance(node, Mapping):
        keys = list(node)
        return [node[key] for key in keys], lambda new: _remapped(node, keys, new)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node) if field.init]
        return (
            [getattr(node, name) for name in names],
            lambda new: dataclasses.replace(node, **dict(zip(names, new, strict=True))),
        )
    return None


def _remapped(node: Mapping[Any, Any], keys: Sequence[Any], new: list[Any]) -> Any:
    values = dict(zip(keys, new, strict=True))
    if not isinstance(node, MutableMapping):
        return type(node)(values)  # type: ignore[call-arg]
    # A copy keeps the attributes of a subclass, such as the factory of a defaultdict.
    clone = copy.copy(node)
    clone.update(values)
    return clone


def _mapped(node: Any, opened: tuple[list[Any], Rebuild], change: Callable[[Any], Any]) -> Any:
    children, rebuild = opened
    new = [change(child) for child in children]
    same = all(before is after for before, after in zip(children, new, strict=True))
    return node if same else rebuild(new)
