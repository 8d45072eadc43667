"""The wire to servers: who holds what, and what a server's error becomes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ExchangeTimeout, PeerLost, UsageError
from shoal.wire.served import check, deal, fault, rates

sizes = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), max_size=12)


@given(sizes, st.integers(1, 4))
def test_every_parameter_has_one_home_and_loads_are_even(
    sizes: dict[str, int], servers: int
) -> None:
    homes = deal(sizes, servers)
    assert homes.keys() == sizes.keys()
    loads = [sum(sizes[n] for n, home in homes.items() if home == s) for s in range(servers)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert deal(dict(reversed(sizes.items())), servers) == homes


def test_hyper_parameters_travel_as_plain_numbers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    (told,) = rates(optimizer)
    assert (told["lr"], told["momentum"]) == (0.1, 0.9)
    assert "params" not in told


def test_a_servers_error_is_raised_as_what_it_was() -> None:
    late = fault("server 0", {"type": "ExchangeTimeout", "text": "rank 2 is missing"})
    assert isinstance(late, ExchangeTimeout)
    other = fault("server 0", {"type": "KeyError", "text": "w"})
    assert isinstance(other, PeerLost)
    assert "server 0 failed: KeyError" in str(other)


def test_a_parameter_without_a_home_is_named() -> None:
    with pytest.raises(UsageError, match="late joined"):
        check({"w": 0}, ["w", "late"])
