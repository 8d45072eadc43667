"""The user's optimizer, made before the model was cut, pointed at the parameters that took over.

Groups keep their number, order and options, so learning-rate schedulers made on it stay valid. A
rank's groups hold what it keeps: on a pipeline some may be empty.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError

Names = list[list[str]]  # of the parameters, by group


def names(optimizer: Optimizer, model: nn.Module) -> Names:
    """The parameters of each group by name, while ``model`` is still whole."""
    if optimizer.state:
        raise UsageError(
            f"the optimizer holds state of {len(optimizer.state)} parameters already: because a"
            f" model is cut before its first step; instead: call distribute first, then restore"
        )
    known: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        known[id(parameter)] = name
    groups = [[known.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    found = [[name for name in group if name is not None] for group in groups]
    strangers = sum(map(len, groups)) - sum(map(len, found))
    if strangers:
        raise UsageError(
            f"{strangers} parameters of the optimizer are not in the model: because a model is cut"
            f" with its optimizer; instead: one optimizer over this model's parameters"
        )
    return found


def repoint(optimizer: Optimizer, names: Names, model: nn.Module) -> None:
    """Put the parameters that now have these names where those of the whole model were."""
    here = dict(model.named_parameters())
    for group, members in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [here[name] for name in members if name in here]
        _check_kernels(group, [str(_layout(p)) for p in group["params"]])


def _check_kernels(group: dict[str, object], layouts: list[str]) -> None:
    asked = [kernel for kernel in ("foreach", "fused") if group.get(kernel)]
    if asked and len(set(layouts)) > 1:
        raise UsageError(
            f"{asked[0]}=True in the optimizer: because it takes tensors of one layout, and this"
            f" partition leaves {len(set(layouts))}; instead: leave {asked[0]} out"
        )


def _layout(parameter: Tensor) -> object:
    return getattr(parameter, "device_mesh", None)
