"""Split linear layers by columns or rows, for ``tensor(n)``, as the model's tensor plan says.

Parameters that no pattern names (norms, positions) stay whole on each tensor rank. Their gradients
are equal on all tensor ranks, because the activations after a row layer and before the next column
layer are whole. Dropout on these activations must draw equal random numbers, so all tensor ranks of
a replica need the same seed.

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

# Hugging Face's names for the styles
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
    """Return the style of each module in the model's plan. Raise if one cannot be split."""
    styles: dict[str, str] = {}
    for pattern, style_name in _declared_plan(model, n).items():
        style = ALIASES.get(style_name, style_name)
        if style not in STYLES:
            raise UnknownName("tensor style", style_name, STYLES)
        names = [name for name, _ in model.named_modules() if _matches(name, pattern)]
        if not names:
            raise UsageError(
                f"tensor({n}) cannot split {type(model).__name__}, because {pattern!r} in its plan"
                f" matches no module; instead: use a pattern that matches one"
            )
        styles |= dict.fromkeys(names, style)
    for name, style in styles.items():
        _check(name, model.get_submodule(name), style=style, n=n)
    return styles


def apply(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Replace the parameters of the named modules by this rank's part, in place.

    All ranks must have equal parameters, because each rank splits its own copy and sends nothing.
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
        f"tensor({n}) cannot split {type(model).__name__}, because it has no tensor plan;"
        f" instead: give it a method tensor_plan(n) -> {{module name: {' | '.join(STYLES)}}}"
        f" (see shoal.models), or use shard({n}), which needs no plan"
    )


def _check_heads(model: nn.Module, n: int) -> None:
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None) or 0
        if heads % n:
            raise UsageError(
                f"tensor({n}) cannot split this model, because {field}={heads} is not divisible by"
                f" {n}; instead: use a degree that divides it, or shard({n})"
            )


def _matches(name: str, pattern: str) -> bool:
    """Return whether a module's name matches a pattern, in which ``*`` never matches a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check(name: str, module: nn.Module, *, style: str, n: int) -> None:
    expected = nn.Embedding if style == "vocab" else nn.Linear
    if not isinstance(module, expected):
        raise UsageError(
            f"tensor({n}) cannot split {name}, because the style {style!r} needs an"
            f" nn.{expected.__name__}, and it is a {type(module).__name__}; instead: leave it"
            f" out of the plan"
        )
    sizes = {"column": "out_features", "row": "in_features"}
    size = getattr(module, sizes[style]) if style in sizes else 0
    if size % n:
        raise UsageError(
            f"tensor({n}) cannot split {name}, because its {sizes[style]}={size} is not divisible"
            f" by {n}; instead: use another width or another degree"
        )


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    """Register the new tensor of a tied parameter under its other names, too."""
    parameter = model.get_parameter(first)
    for name in others:
        layouts = [getattr(p, "placements", None) for p in (parameter, model.get_parameter(name))]
        if layouts[0] != layouts[1]:
            raise UsageError(
                f"tensor cannot split {first} and {name}, because they are one tied parameter that"
                f" the plan splits in two ways; instead: use styles that split it alike (vocab and"
                f" gathered), or untie them"
            )
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, parameter)
