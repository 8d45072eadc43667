"""Small models that show how a model may be cut, and that fit a test.

A model of yours needs none of this to train. To be cut over several ranks it offers two plain
methods; nothing is inherited and nothing is registered:

``tensor_plan(n) -> {pattern: style}``
    For ``tensor=n``. Patterns are names of ``nn.Linear`` or ``nn.Embedding`` modules, ``*`` stands
    for one level. Styles: ``"column"`` (cut the outputs, leave them cut), ``"row"`` (cut the
    inputs, sum the outputs), ``"gathered"`` (column, then gather the outputs), ``"vocab"`` (an
    embedding, cut by its rows). A column is followed by a row; what lies between must work on a
    share of the features, so write ``view(..., -1, head_width)``, never the number of heads.
    Hugging Face's ``_tp_plan`` is read too.

``pipe_stages(n) -> [[name, ...], ...]``
    For ``pipe=n``. One list for each stage: the submodules it applies, one after another, each
    taking what the one before returned. Together they are the whole ``forward``. An
    ``nn.Sequential`` needs no such method.

Both raise :class:`shoal.errors.UsageError` when the model cannot be cut by ``n``.
"""

from shoal.models.gpt import GPT, GPTConfig, gpt
from shoal.models.mlp import MLP, mlp
from shoal.models.resnet import ResNet, resnet

__all__ = ["GPT", "MLP", "GPTConfig", "ResNet", "gpt", "mlp", "resnet"]
