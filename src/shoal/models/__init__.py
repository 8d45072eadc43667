"""Small models for tests, which show how a model declares its tensor and pipeline parallelism.

For data parallelism and ``shard`` a model needs no special method. To be split by ``tensor``
or ``pipe`` it needs the matching method below. There is nothing to inherit from or to register.

``tensor_plan(n) -> {pattern: style}``
    For ``tensor(n)``. A pattern is the name of an ``nn.Linear`` or ``nn.Embedding`` module, in
    which ``*`` stands for one part of a dotted name. Styles: ``"column"`` (split the outputs, and
    leave them split), ``"row"`` (split the inputs, sum the outputs), ``"gathered"`` (like column,
    then gather the outputs), ``"vocab"`` (an embedding, split by its rows). After a column layer
    comes a row layer. The code between them gets only this rank's features, so write
    ``view(..., -1, head_width)``, and do not use the number of heads. A model of Hugging Face may
    have ``_tp_plan`` instead.

``pipe_stages(n) -> [[name, ...], ...]``
    For ``pipe(n)``. One list of submodule names for each stage. Each submodule is applied to the
    output of the one before, and together they must compute the whole ``forward``. An
    ``nn.Sequential`` needs no such method.

Both methods should raise :class:`shoal.errors.UsageError` if the model cannot be split by ``n``.
"""

from shoal.models.gpt import GPT, GPTConfig, gpt
from shoal.models.mlp import MLP, mlp
from shoal.models.resnet import ResNet, resnet

__all__ = ["GPT", "MLP", "GPTConfig", "ResNet", "gpt", "mlp", "resnet"]
