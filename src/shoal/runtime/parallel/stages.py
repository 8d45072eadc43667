"""``pipe=n``: the submodules of each pipeline stage, and the activations between stages.

The parameters of a stage have the same names as in the whole model, so optimizer groups, residuals
and checkpoints mean the same on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.errors import UsageError

Stages = list[list[str]]
Activations = tuple[Tensor, ...]  # from one submodule to the next


def stages(model: nn.Module, n: int) -> Stages:
    """Return the names of the submodules that each of ``n`` stages applies in turn."""
    if callable(declared := getattr(model, "pipe_stages", None)):
        names = cast(Stages, declared(n))
    elif isinstance(model, nn.Sequential):
        names = _balanced(model, n)
    else:
        raise UsageError(
            f"pipe({n}): because {type(model).__name__} does not say where it may be cut; instead:"
            f" give it a method pipe_stages(n) -> [[submodule, ...], ...] (see shoal.models), make"
            f" it an nn.Sequential, or use shard({n}), which needs neither"
        )
    if len(names) != n or not all(names):
        raise UsageError(
            f"pipe({n}): because pipe_stages({n}) of {type(model).__name__} returned"
            f" {sum(map(bool, names))} stages with submodules in them; instead: return {n}"
        )
    _check_owned(model, names)
    return names


def stage_of(name: str, stages: Stages) -> int | None:
    """Return the stage of a parameter or buffer; None if it is in no stage."""
    for index, submodules in enumerate(stages):
        if any(name.startswith(f"{submodule}.") for submodule in submodules):
            return index
    return None


class Stage(nn.Module):
    """The submodules of one stage, with the names of the whole model, applied in turn.

    Takes ``model`` apart. ``dtypes`` are those that the next stage expects: under autocast a
    submodule may return others.
    """

    def __init__(self, model: nn.Module, submodules: Sequence[str]) -> None:
        super().__init__()
        self.submodules = tuple(submodules)
        self.dtypes: tuple[torch.dtype, ...] | None = None
        _prune(model, self.submodules)
        for name, child in model.named_children():
            self.add_module(name, child)
        self.train(model.training)

    def forward(self, *values: Tensor) -> Any:
        for name in self.submodules:
            values = as_activations(self.get_submodule(name)(*values))
        if self.dtypes:
            values = tuple(t.to(d) for t, d in zip(values, self.dtypes, strict=True))
        return values if len(values) > 1 else values[0]


class Blueprint:
    """The whole model on the meta device: computes the shapes of activations between stages."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        # with meta tensors in the memo, deepcopy does not copy the real ones
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        memo |= {id(b): b.to("meta") for b in model.buffers()}
        self.model = copy.deepcopy(model, memo)
        self.stages = stages

    def activations(self, inputs: Activations) -> list[Activations]:
        """Return the inputs of the first stage, then the outputs of each, as meta tensors."""
        values: Activations = tuple(t.detach().to("meta") for t in inputs)
        result = [values]
        with torch.enable_grad():
            for submodules in self.stages:
                for name in submodules:
                    values = as_activations(self.model.get_submodule(name)(*values))
                values = tuple(t.detach().requires_grad_(t.requires_grad) for t in values)
                result.append(values)
        return result


def as_activations(value: Any) -> Activations:
    """Return one tensor or several as a tuple; refuse what cannot be sent to the next stage."""
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(t, Tensor) for t in values):
        raise UsageError(
            f"pipe: because a submodule of a stage returned {type(value).__name__}, and stages"
            f" exchange tensors only; instead: return a tensor or a tuple of tensors"
        )
    return values


def _check_owned(model: nn.Module, stages: Stages) -> None:
    """Check that every parameter and buffer is in exactly one stage."""
    owner: dict[int, tuple[int, str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        stage = stage_of(name, stages)
        if stage is None:
            raise UsageError(
                f"pipe({len(stages)}): because {name} is in no submodule of any stage; instead:"
                f" move it into one, and name that in pipe_stages"
            )
        first_stage, first = owner.setdefault(id(value), (stage, name))
        if first_stage != stage:
            raise UsageError(
                f"pipe({len(stages)}): because {first} (stage {first_stage}) and {name} (stage"
                f" {stage}) are one tied parameter, which cannot be on two stages; instead: untie"
                f" them (tied=False in shoal's GPT), or use shard({len(stages)})"
            )


def _balanced(model: nn.Sequential, n: int) -> Stages:
    """Split a chain into stages with about equal numbers of parameters, and none without any."""
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_children()}
    weighted = [name for name, size in sizes.items() if size]
    if len(weighted) < n:
        raise UsageError(
            f"pipe({n}): because only {len(weighted)} of this model's submodules have parameters,"
            f" fewer than stages; instead: pipe({max(1, len(weighted))}) or less"
        )
    starts = {weighted[i] for i in _starts([sizes[name] for name in weighted], n)}
    result: Stages = [[]]
    for name in sizes:
        if name in starts:
            result.append([])
        result[-1].append(name)
    return result


def _starts(sizes: Sequence[int], n: int) -> list[int]:
    """Return where stages 1 .. n-1 begin: nearest to equal shares, with no stage empty."""
    total, before = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    starts: list[int] = []
    for stage in range(1, n):
        low = starts[-1] + 1 if starts else 1
        room = range(low, len(sizes) - (n - 1 - stage))
        starts.append(min(room, key=lambda i: abs(before[i] - total * stage / n)))
    return starts


def _prune(module: nn.Module, submodules: Iterable[str]) -> None:
    """Delete every submodule that is not in ``submodules``; the names of the others stay."""
    for name, child in list(module.named_children()):
        if name in submodules:
            continue
        inner = [path[len(name) + 1 :] for path in submodules if path.startswith(f"{name}.")]
        if inner:
            _prune(child, inner)
        else:
            delattr(module, name)
