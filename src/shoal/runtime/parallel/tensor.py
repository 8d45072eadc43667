"""``tensor=n``: linear layers split by columns and rows, as the model's plan says.

Parameters that no pattern names (norms, positions) stay whole on each tensor rank. Their gradients
are equal on all of them, because activations between a row and the next column are whole. Dropout
on these activations must draw equal numbers: seed all tensor ranks of a replica alike.

References:
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shoal.errors import UnknownName, UsageError

# Hugging Face's names of the styles
ALIASES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gathered",
    "colwise_gather_output": "gathered",
    "embedding_rowwise": "vocab",
}
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": partial(ColwiseParallel, output_layouts=Replicate()),
    "vocab": partial(RowwiseParallel, input_layouts=Replicate()),
}


def plan(model: nn.Module, n: int) -> dict[str, str]:
    """Return the style of each module that the model's plan names; check that it can be split."""
    styles: dict[str, str] = {}
    for pattern, word in _declared_plan(model, n).items():
        style = ALIASES.get(word, word)
        if style not in STYLES:
            raise UnknownName("tensor style", word, STYLES)
        names = [name for name, _ in model.named_modules() if _matches(name, pattern)]
        if not names:
            raise UsageError(
                f"tensor({n}): because the plan of {type(model).__name__} names {pattern!r} and no"
                f" module is called so; instead: a pattern that matches one"
            )
        styles |= dict.fromkeys(names, style)
    for name, style in styles.items():
        _check(name, model.get_submodule(name), style=style, n=n)
    return styles


def apply(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace the weights of the named modules by this rank's part, in place.

    All ranks must have equal weights before: each splits its own copy, and none is sent.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, STYLES[style](), src_data_rank=None)
    for first, *others in aliases.values():
        if others:
            _tie(model, first, others)


def _declared_plan(model: nn.Module, n: int) -> Mapping[str, str]:
    if callable(declared := getattr(model, "tensor_plan", None)):
        return cast("Mapping[str, str]", declared(n))
    if declared := getattr(model, "_tp_plan", None):
        _check_heads(model, n)
        return cast("Mapping[str, str]", declared)
    raise UsageError(
        f"tensor({n}): because {type(model).__name__} does not say how its layers may be cut;"
        f" instead: give it a method tensor_plan(n) -> {{module name: {' | '.join(STYLES)}}}"
        f" (see shoal.models), or use shard({n}), which needs no plan"
    )


def _check_heads(model: nn.Module, n: int) -> None:
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None) or 0
        if heads % n:
            raise UsageError(
                f"tensor({n}): because {field}={heads} does not divide by {n}; instead: a tensor"
                f" degree that divides it, or shard({n})"
            )


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern, in which ``*`` is one part of a name, matches; compares part by part."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check(name: str, module: nn.Module, *, style: str, n: int) -> None:
    expected = nn.Embedding if style == "vocab" else nn.Linear
    if not isinstance(module, expected):
        raise UsageError(
            f"tensor({n}): because {style!r} cuts {expected.__name__} and {name} is"
            f" {type(module).__name__}; instead: leave it out of the plan"
        )
    sizes = {"column": "out_features", "row": "in_features"}
    size = getattr(module, sizes[style]) if style in sizes else 0
    if size % n:
        raise UsageError(
            f"tensor({n}): because the {size} {sizes[style]} of {name} do not divide by {n};"
            f" instead: a width that does, or another degree"
        )


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    """Make the other names of a tied parameter refer to its new tensor again."""
    parameter = model.get_parameter(first)
    for name in others:
        layouts = [getattr(p, "placements", None) for p in (parameter, model.get_parameter(name))]
        if layouts[0] != layouts[1]:
            raise UsageError(
                f"tensor: because {first} and {name} are one parameter that the plan cuts in two"
                f" ways; instead: styles that cut it alike (vocab and gathered), or untie them"
            )
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, parameter)
