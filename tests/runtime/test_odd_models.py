"""Models that are not plain stacks of layers train on workers as they do on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equality_cases import Deep, difference, parameters, points
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.optim import LBFGS, SGD, Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

import shoal
from shoal.testing.processes import run_workers

pytestmark = pytest.mark.gloo
TOLERANCE = 1e-9
BATCH, STEPS = 7, 3
Loss = Callable[[Any, Any], Tensor]
Judge = Callable[[nn.Module, Any], Tensor]


def chunks(data: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, BATCH * STEPS, BATCH):
        yield data[start : start + BATCH]


def gap(
    made: tuple[nn.Module, list[Optimizer]],
    data: list[Any],
    collate: Callable[[list[Any]], Any],
    judge: Judge,
    strategy: str,
    *,
    own_loss: bool = False,
) -> float:
    """The largest difference between workers and one plain process that start alike."""
    model, (optimizer,) = made
    plain = copy.deepcopy(model)
    kind, options = type(optimizer), optimizer.defaults
    alone = kind(plain.parameters(), **_taken(kind, options))
    for rows in chunks(data):
        alone.zero_grad()
        judge(plain, collate(rows)).backward()
        alone.step()

    def loss(output: Any, target: Any) -> Tensor:
        return judge(lambda *_: output, target if own_loss else (None, target))

    run = shoal.distribute(model, optimizer, loss=None if own_loss else loss, strategy=strategy)
    with run:
        for batch in run.loader(data[: BATCH * STEPS], BATCH, shuffle=False, collate=collate):
            run.step(batch)
    return difference(parameters(model), parameters(plain))


def _taken(kind: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("lr", "momentum", "weight_decay", "betas")}


def paired(rows: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def cross(model: Callable[..., Tensor], batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Reader(nn.Module):
    """An LSTM over sequences of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        """n sequences -> (n, 3)."""
        hidden, lengths = pad_packed_sequence(self.core(packed)[0], batch_first=True)
        last: Tensor = self.head(hidden[torch.arange(len(lengths)), lengths - 1])
        return last


def lstm(strategy: str) -> float:
    torch.manual_seed(0)
    model = Reader().double()
    data = [(torch.randn(2 + i % 4, 2).double(), torch.tensor(i % 3)) for i in range(21)]

    def collate(rows: list[Any]) -> tuple[PackedSequence, Tensor]:
        xs = pack_sequence([x for x, _ in rows], enforce_sorted=False)
        return xs, torch.stack([y for _, y in rows])

    return gap((model, [SGD(model.parameters(), lr=0.1)]), data, collate, cross, strategy)


class Graphs(SimpleNamespace):
    """Several graphs as one: nodes, edges, and to which graph a node belongs."""

    def to(self, device: Any) -> Graphs:
        return self


class GraphNet(nn.Module):
    """One round of messages, then a mean over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.own = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, g: Graphs) -> Tensor:
        """Graphs -> (graphs, 3)."""
        heard = torch.zeros_like(g.x).index_add(0, g.edges[1], g.x[g.edges[0]])
        h = torch.tanh(self.near(heard) + self.own(g.x))
        total = h.new_zeros(g.num_graphs, 3).index_add(0, g.of, h)
        return total / torch.bincount(g.of, minlength=g.num_graphs).unsqueeze(1)


def joined(rows: list[Any]) -> Graphs:
    sizes = [len(x) for x, _, _ in rows]
    starts = [sum(sizes[:i]) for i in range(len(rows))]
    edges = torch.cat([e + s for (_, e, _), s in zip(rows, starts, strict=True)], dim=1)
    of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
    y = torch.stack([y for _, _, y in rows])
    x = torch.cat([x for x, _, _ in rows])
    return Graphs(x=x, edges=edges, of=of, y=y, num_graphs=len(rows))


def graphs(strategy: str) -> float:
    torch.manual_seed(0)
    model = GraphNet().double()
    data = []
    for i in range(21):
        n = 2 + i % 3
        edges = torch.stack([torch.arange(n), torch.arange(n).roll(1)])
        data.append((torch.randn(n, 2).double(), edges, torch.tensor(i % 3)))
    plain = copy.deepcopy(model)
    alone = SGD(plain.parameters(), lr=0.1)
    for rows in chunks(data):
        g = joined(rows)
        alone.zero_grad()
        nn.functional.cross_entropy(plain(g), g.y).backward()
        alone.step()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = shoal.distribute(
        model,
        optimizer,
        loss=lambda out, g: nn.functional.cross_entropy(out, g.y),
        strategy=strategy,
    )
    with run:
        for batch in run.loader(data, BATCH, shuffle=False, collate=joined):
            run.step(batch)
    return difference(parameters(model), parameters(plain))


def autoencoder(strategy: str) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)).double()
    x, _ = points()
    plain = copy.deepcopy(model)
    alone, optimizer = Adam(plain.parameters(), lr=0.1), Adam(model.parameters(), lr=0.1)
    for part in x[:21].split(BATCH):
        alone.zero_grad()
        nn.functional.mse_loss(plain(part), part).backward()
        alone.step()
    run = shoal.distribute(model, optimizer, loss=nn.functional.mse_loss, strategy=strategy)
    with run:
        for batch in run.loader(TensorDataset(x[:21]), BATCH, shuffle=False):
            run.step(batch[0])
    return difference(parameters(model), parameters(plain))


class Words(nn.Module):
    """A large table of which a batch looks up a few rows, on some workers none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 3, sparse=True)
        self.rare = nn.Embedding(5, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        """(n,) -> (n, 3)."""
        found: Tensor = self.table(ids)
        special = (ids == 11).nonzero().flatten()
        if len(special):
            found = found.index_add(0, special, self.rare(special * 0))
        return found


def sparse(strategy: str, kind: type[Optimizer], rows: int = 50) -> float:
    torch.manual_seed(0)
    model = Words(rows).double()
    data = [(torch.tensor((i * 5) % 13), torch.tensor(i % 3)) for i in range(21)]
    optimizer = kind(model.parameters(), lr=0.1)
    return gap((model, [optimizer]), data, paired, cross, strategy)


def mixed_types(strategy: str) -> float:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(6, 4).double()
            self.narrow = nn.Linear(4, 4)
            self.coarse = nn.Linear(4, 3).bfloat16()
            self.wave = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            h = self.narrow(torch.tanh(self.wide(x)).float())
            out = self.coarse(h.bfloat16()).double()
            return out + (x.to(self.wave.dtype) @ self.wave).abs()

    model = Mixed()
    data = list(zip(*points(), strict=True))
    told = gap((model, [SGD(model.parameters(), lr=0.1)]), data, paired, cross, strategy)
    return 0.0 if told < 2e-2 else told  # bfloat16 rounds each worker's part on its own


def hugging_face(strategy: str) -> float:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    data = [torch.randint(0, 17, (8,)) for _ in range(21)]

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids}

    def judge(model: Any, batch: Any) -> Tensor:
        return model(**batch).loss

    optimizer = SGD(model.parameters(), lr=0.1)
    told = gap((model, [optimizer]), data, collate, judge, strategy, own_loss=True)
    return 0.0 if told < 1e-7 else told  # its own loss is computed in single precision


def compiled(strategy: str) -> float:
    torch.manual_seed(0)
    model = Deep().double()
    plain = copy.deepcopy(model)
    fast = torch.compile(model, backend="eager")
    x, y = points()
    alone, optimizer = Adam(plain.parameters(), lr=0.1), Adam(fast.parameters(), lr=0.1)
    run = shoal.distribute(fast, optimizer, loss=nn.functional.cross_entropy, strategy=strategy)
    with run:
        for batch in run.loader(TensorDataset(x[:24], y[:24]), 12, shuffle=False, epochs=2):
            run.step(batch)
    for _ in range(2):
        for a, b in zip(x[:24].split(12), y[:24].split(12), strict=True):
            alone.zero_grad()
            nn.functional.cross_entropy(plain(a), b).backward()
            alone.step()
    return difference(parameters(model), parameters(plain))


EVERY = ["wfbp(1)", "priority(64)"]


def train_odd(_: int) -> dict[str, float]:
    told = {}
    for s in EVERY:
        for case in (lstm, graphs, autoencoder, mixed_types, hugging_face):
            told[f"{case.__name__}; {s}"] = case(s)
        told[f"sparse SGD; {s}"] = sparse(s, SGD)
        told[f"sparse Adam; {s}"] = sparse(s, SparseAdam)
    return told


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_odd_models_equal_one_process(workers: int) -> None:
    for told in run_workers(workers, train_odd, 0):
        assert {what: by for what, by in told.items() if not by <= TOLERANCE} == {}


def train_compiled(_: int) -> dict[str, float]:
    return {s: compiled(s) for s in EVERY}


def test_a_compiled_model_equals_one_process() -> None:
    for told in run_workers(2, train_compiled, 0):
        assert {what: by for what, by in told.items() if not by <= TOLERANCE} == {}


def huge(strategy: str) -> tuple[float, bool]:
    """A table of 2**22 rows, 400 MB as float64: peak memory tells whether it was made dense."""
    model = Words(2**22)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy, strategy=strategy)
    replica = next(iter(run.replicas.values()))
    held = replica.mode.exchange.flat.nbytes
    run.step((torch.arange(4), torch.arange(4) % 3))
    is_sparse = held < 2**20
    run.close()
    return float(held), is_sparse


def test_a_huge_table_stays_sparse() -> None:
    for held, is_sparse in run_workers(2, huge, "all_reduce"):
        assert is_sparse, held


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(3, 6)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.core(z)
        return out


def adversaries() -> tuple[nn.Module, Optimizer, nn.Module, Optimizer]:
    torch.manual_seed(0)
    g, d = Maker().double(), nn.Linear(6, 1).double()
    return g, SGD(g.parameters(), lr=0.1), d, Adam(d.parameters(), lr=0.1)


def d_loss(g: nn.Module, d: nn.Module, x: Tensor) -> Tensor:
    made = g(x[:, :3]).detach()
    return nn.functional.softplus(-d(x)).mean() + nn.functional.softplus(d(made)).mean()


def g_loss(g: nn.Module, d: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.softplus(-d(g(x[:, :3]))).mean()


def gan(strategy: str) -> float:
    x, _ = points()
    g, og, d, od = adversaries()
    run = shoal.distribute({"g": (g, og), "d": (d, od)}, strategy=strategy)
    with run:
        for batch in run.loader(TensorDataset(x), 13, shuffle=False):
            for (real,) in run.micro(batch):
                od.zero_grad()
                run.backward(d_loss(g, d, real))
                run.update("d")
                run.backward(g_loss(g, d, real))
                run.update("g")
                od.zero_grad()
            if run.loaders[0].loader.mine == 0:
                run.update("d")
                run.update("g")
    one, oo, two, ot = adversaries()
    for part in x.split(13):
        for loss, used in ((d_loss, ot), (g_loss, oo)):
            oo.zero_grad()
            ot.zero_grad()
            loss(one, two, part).backward()
            used.step()
    return max(
        difference(parameters(g), parameters(one)), difference(parameters(d), parameters(two))
    )


def test_two_models_are_stepped_in_turn() -> None:
    for by in run_workers(3, gan, "wfbp"):
        assert by <= TOLERANCE


def lbfgs(strategy: str) -> float:
    x, y = points()
    torch.manual_seed(0)
    model = Deep().double()
    plain = copy.deepcopy(model)
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4)
    alone = LBFGS(plain.parameters(), lr=0.5, max_iter=4)
    run = shoal.distribute(model, optimizer, loss=nn.functional.cross_entropy, strategy=strategy)
    with run:
        for batch in run.loader(TensorDataset(x, y), 29, shuffle=False, epochs=3):

            def closure(batch: Any = batch) -> None:
                for micro in run.micro(batch):
                    run.backward(run.forward(micro))

            run.update(closure=closure)
    for _ in range(3):

        def whole() -> Tensor:
            alone.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            return loss

        alone.step(whole)
    return difference(parameters(model), parameters(plain))


def test_a_closure_is_agreed_on_each_time() -> None:
    for by in run_workers(3, lbfgs, "wfbp"):
        assert by <= TOLERANCE
