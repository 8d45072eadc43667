"""Small models for tests, which show how a model declares its tensor and pipeline parallelism.

Your own model needs none of this for data parallelism. To be split over several ranks it has one or
both of two plain methods; there is nothing to inherit or to register:

``tensor_plan(n) -> {pattern: style}``
    For ``tensor=n``. Patterns are names of ``nn.Linear`` or ``nn.Embedding`` modules, ``*`` stands
    for one level. Styles: ``"column"`` (split the outputs, and leave them split), ``"row"`` (split
    the inputs, sum the outputs), ``"gathered"`` (column, then gather the outputs), ``"vocab"`` (an
    embedding, split by its rows). A column is followed by a row; the code between them must work on
    some of the features, so write ``view(..., -1, head_width)``, never the number of heads.
    Hugging Face's ``_tp_plan`` is read too.

``pipe_stages(n) -> [[name, ...], ...]``
    For ``pipe=n``. One list for each stage: the submodules that it applies, each to the output of
    the one before. Together they are the whole ``forward``. An ``nn.Sequential`` needs no such
    method.

Both raise :class:`shoal.errors.UsageError` when the model cannot be split by ``n``.
"""

from shoal.models.gpt import GPT, GPTConfig, gpt
from shoal.models.mlp import MLP, mlp
from shoal.models.resnet import ResNet, resnet

__all__ = ["GPT", "MLP", "GPTConfig", "ResNet", "gpt", "mlp", "resnet"]
