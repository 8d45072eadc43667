"""Split a model into pipeline stages, for ``pipe(n)``.

The parameters of a stage keep the names that they have in the whole model. So optimizer groups,
compression residuals and checkpoints use the same parameter names on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.errors import UsageError

Stages = list[list[str]]
Activations = tuple[Tensor, ...]  # the outputs of one submodule and inputs of the next


def stages(model: nn.Module, n: int) -> Stages:
    """Return, for each of ``n`` stages, the names of its submodules in the order of their calls."""
    if callable(declared := getattr(model, "pipe_stages", None)):
        names = cast(Stages, declared(n))
    elif isinstance(model, nn.Sequential):
        names = _balanced(model, n)
    else:
        raise UsageError(
            f"pipe({n}) cannot split {type(model).__name__}, because it does not define its stages;"
            f" instead: give it a method pipe_stages(n) -> [[submodule, ...], ...] (see"
            f" shoal.models), make it an nn.Sequential, or use shard({n}), which needs neither"
        )
    if len(names) != n or not all(names):
        empty = sum(not submodules for submodules in names)
        raise UsageError(
            f"pipe({n}) cannot split {type(model).__name__}, because its pipe_stages({n}) returned"
            f" {len(names)} stages, {empty} of them empty; instead: return {n}, none of them empty"
        )
    _check_stages(model, names)
    return names


def stage_of(name: str, stages: Stages) -> int | None:
    """Return the index of the stage that holds a parameter or buffer, or None."""
    for index, submodules in enumerate(stages):
        if any(name.startswith(f"{submodule}.") for submodule in submodules):
            return index
    return None


class Stage(nn.Module):
    """Calls the submodules of one stage in turn. They keep their names in the whole model.

    Deletes all other submodules of ``model`` in place, so the caller can no longer use ``model``.
    If ``dtypes`` is set, outputs are cast to these dtypes, which the next stage expects. Under
    autocast a submodule may return other dtypes.
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
    """A copy of the whole model on the meta device, to compute shapes between stages."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        # deepcopy uses the meta tensors in the memo, and does not copy the real ones
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        memo |= {id(b): b.to("meta") for b in model.buffers()}
        self.model = copy.deepcopy(model, memo)
        self.stages = stages

    def activations(self, inputs: Activations) -> list[Activations]:
        """Return the inputs of the first stage, then the outputs of each stage, as meta tensors."""
        values: Activations = tuple(t.detach().to("meta") for t in inputs)
        result = [values]
        with torch.enable_grad():
            for submodules in self.stages:
                for name in submodules:
                    values = as_activations(self.model.get_submodule(name)(*values))
                values = tuple(t.detach().requires_grad_(t.requires_grad) for t in values)
                result.append(values)
        return result


def as_activations(value: Any, label: str = "the output of a submodule") -> Activations:
    """Return a tensor or a tuple of tensors as a tuple. Raise an error for any other value."""
    values = value if isinstance(value, tuple) else (value,)
    wrong_types = [type(item).__name__ for item in values if not isinstance(item, Tensor)]
    if wrong_types:
        raise UsageError(
            f"pipe: {label} contains a {wrong_types[0]}, but stages exchange only tensors; instead:"
            f" use a tensor or a tuple of tensors"
        )
    return values


def _check_stages(model: nn.Module, stages: Stages) -> None:
    """Raise if a parameter or saved buffer is in no stage, or if a tied one is in two stages."""
    owner: dict[int, tuple[int, str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        stage = stage_of(name, stages)
        if stage is None:
            raise UsageError(
                f"pipe({len(stages)}) cannot split this model, because {name} is in no stage;"
                f" instead: list its submodule in pipe_stages (a parameter of the model itself must"
                f" first move into a submodule)"
            )
        first_stage, first = owner.setdefault(id(value), (stage, name))
        if first_stage != stage:
            raise UsageError(
                f"pipe({len(stages)}) cannot split this model, because {first} (stage"
                f" {first_stage}) and {name} (stage {stage}) are one tied parameter, which cannot"
                f" be on two stages; instead: untie them (tied=False in shoal's GPT), or use"
                f" shard({len(stages)})"
            )


def _balanced(model: nn.Sequential, n: int) -> Stages:
    """Split an nn.Sequential into n stages with about equal numbers of parameters, none empty."""
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_children()}
    with_parameters = [name for name, size in sizes.items() if size]
    if len(with_parameters) < n:
        raise UsageError(
            f"pipe({n}) needs {n} submodules with parameters, but this model has only"
            f" {len(with_parameters)}; instead: use at most pipe({max(1, len(with_parameters))})"
        )
    starts = {with_parameters[i] for i in _starts([sizes[name] for name in with_parameters], n)}
    result: Stages = [[]]
    for name in sizes:
        if name in starts:
            result.append([])
        result[-1].append(name)
    return result


def _starts(sizes: Sequence[int], n: int) -> list[int]:
    """Return the indices at which stages 1 .. n-1 begin, so that all stages have similar sizes."""
    total, before = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    starts: list[int] = []
    for stage in range(1, n):
        low = starts[-1] + 1 if starts else 1
        candidates = range(low, len(sizes) - (n - 1 - stage))
        starts.append(min(candidates, key=lambda i: abs(before[i] - total * stage / n)))
    return starts


def _prune(module: nn.Module, submodules: Iterable[str]) -> None:
    """Delete, in place, every submodule that neither is nor contains one of ``submodules``."""
    for name, child in list(module.named_children()):
        if name in submodules:
            continue
        inner = [path[len(name) + 1 :] for path in submodules if path.startswith(f"{name}.")]
        if inner:
            _prune(child, inner)
        else:
            delattr(module, name)
