"""``pipe=n``: which submodules make which stage, and what passes between them.

A stage keeps the names its parameters had in the whole model, so optimizer groups, residuals and
checkpoints mean the same thing on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.errors import UsageError

Stages = list[list[str]]
Passed = tuple[Tensor, ...]  # what one link hands to the next


def stages(model: nn.Module, n: int) -> Stages:
    """The names that each of ``n`` stages applies, one after another."""
    if callable(declared := getattr(model, "pipe_stages", None)):
        found = cast(Stages, declared(n))
    elif isinstance(model, nn.Sequential):
        found = _even(model, n)
    else:
        raise UsageError(
            f"pipe({n}): because {type(model).__name__} does not say where it may be cut; instead:"
            f" give it a method pipe_stages(n) -> [[submodule, ...], ...] (see shoal.models), make"
            f" it an nn.Sequential, or use shard({n}), which needs neither"
        )
    if len(found) != n or not all(found):
        raise UsageError(
            f"pipe({n}): because pipe_stages({n}) of {type(model).__name__} returned"
            f" {sum(map(bool, found))} stages with submodules in them; instead: return {n}"
        )
    _check_owned(model, found)
    return found


def stage_of(name: str, stages: Stages) -> int | None:
    """The stage that holds a parameter or buffer of this name."""
    for index, links in enumerate(stages):
        if any(name.startswith(f"{link}.") for link in links):
            return index
    return None


class Stage(nn.Module):
    """The submodules of one stage under their old names, applied one after another."""

    def __init__(self, model: nn.Module, links: Sequence[str]) -> None:
        super().__init__()
        self.links = tuple(links)
        self.dtypes: tuple[torch.dtype, ...] | None = None  # of what the next stage awaits
        _prune(model, self.links)
        for name, child in model.named_children():
            self.add_module(name, child)
        self.train(model.training)

    def forward(self, *passed: Tensor) -> Any:
        for link in self.links:
            passed = as_passed(self.get_submodule(link)(*passed))
        if self.dtypes:  # under autocast a link may return less than was announced
            passed = tuple(t.to(d) for t, d in zip(passed, self.dtypes, strict=True))
        return passed if len(passed) > 1 else passed[0]


class Blueprint:
    """The whole model without its numbers: says what passes between stages for a given input."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        # filling the memo by hand keeps deepcopy from copying the numbers first
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        memo |= {id(b): b.to("meta") for b in model.buffers()}
        self.model = copy.deepcopy(model, memo)
        self.stages = stages

    def passed(self, inputs: Passed) -> list[Passed]:
        """What enters the first stage, then what leaves each, as tensors without numbers."""
        now: Passed = tuple(t.detach().to("meta") for t in inputs)
        found = [now]
        with torch.enable_grad():
            for links in self.stages:
                for link in links:
                    now = as_passed(self.model.get_submodule(link)(*now))
                now = tuple(t.detach().requires_grad_(t.requires_grad) for t in now)
                found.append(now)
        return found


def as_passed(value: Any) -> Passed:
    """One tensor or several, as a tuple; anything else cannot be sent to the next stage."""
    several = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(t, Tensor) for t in several):
        raise UsageError(
            f"pipe: because a link of the chain returned {type(value).__name__}, and only tensors"
            f" pass from stage to stage; instead: return a tensor or a tuple of tensors"
        )
    return several


def _check_owned(model: nn.Module, stages: Stages) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        stage = stage_of(name, stages)
        if stage is None:
            raise UsageError(
                f"pipe({len(stages)}): because {name} is in no submodule of any stage; instead:"
                f" move it into one, and name that in pipe_stages"
            )
        held, first = owner.setdefault(id(value), (stage, name))
        if held != stage:
            raise UsageError(
                f"pipe({len(stages)}): because {first} (stage {held}) and {name} (stage {stage})"
                f" are one tied parameter, which cannot be on two stages; instead: untie them"
                f" (tied=False in shoal's GPT), or use shard({len(stages)})"
            )


def _even(model: nn.Sequential, n: int) -> Stages:
    """Cut a chain so that stages hold about equal numbers of parameters, each at least some."""
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_children()}
    holders = [name for name, size in sizes.items() if size]
    if len(holders) < n:
        raise UsageError(
            f"pipe({n}): because only {len(holders)} of this model's links have parameters, fewer"
            f" than stages; instead: pipe({max(1, len(holders))}) or less"
        )
    starts = set(_starts([sizes[name] for name in holders], n))
    found: Stages = [[]]
    for name in sizes:
        if name in holders and holders.index(name) in starts:
            found.append([])
        found[-1].append(name)
    return found


def _starts(sizes: Sequence[int], n: int) -> list[int]:
    """Where stages 1 .. n-1 begin: nearest to equal shares, no stage empty."""
    total, before = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    starts: list[int] = []
    for stage in range(1, n):
        low = starts[-1] + 1 if starts else 1
        room = range(low, len(sizes) - (n - 1 - stage))
        starts.append(min(room, key=lambda i: abs(before[i] - total * stage / n)))
    return starts


def _prune(module: nn.Module, links: Iterable[str]) -> None:
    """Drop every submodule that no link needs; those kept keep their names."""
    for name, child in list(module.named_children()):
        if name in links:
            continue
        inner = [link[len(name) + 1 :] for link in links if link.startswith(f"{name}.")]
        if inner:
            _prune(child, inner)
        else:
            delattr(module, name)
