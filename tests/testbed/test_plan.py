"""Laws of the plan: what would be done, without doing it."""

from __future__ import annotations

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BadArgument
from shoal.testbed.plan import (
    FASTEST,
    SLOWEST,
    build,
    hosts_file,
    inside,
    limits,
    parse_rate,
    plan,
    show_rate,
)

sizes = st.integers(2, 64)


@given(sizes)
def test_every_host_has_its_own_name_address_and_namespace(hosts: int) -> None:
    made = plan(hosts, "1gbit")
    for each in zip(*((h.name, h.address, h.namespace, h.port) for h in made.hosts), strict=True):
        assert len(set(each)) == hosts


@given(sizes)
def test_addresses_are_of_our_private_network_alone(hosts: int) -> None:
    ours = ipaddress.ip_network("10.77.0.0/24")
    made = plan(hosts, "1gbit")
    assert all(ipaddress.ip_address(address) in ours for address in made.addresses)
    for word in (word for command in build(made) for word in command):
        for address in re.findall(r"\d+\.\d+\.\d+\.\d+", word):
            assert ipaddress.ip_address(address) in ours


@given(sizes)
def test_no_command_touches_the_machine_outside_of_our_namespaces(hosts: int) -> None:
    made = plan(hosts, "1gbit", "x")
    for command in build(made):
        named = command[3] if command[1:3] == ("netns", "add") else command[2]
        assert command[1] in ("-n", "netns")
        assert named in made.namespaces
        assert named.startswith("shoal-x-")


@given(sizes)
def test_a_namespace_is_made_before_it_is_used(hosts: int) -> None:
    made: set[str] = set()
    for command in build(plan(hosts, "1gbit")):
        if command[1:3] == ("netns", "add"):
            made.add(command[3])
        else:
            assert command[2] in made


def test_every_host_is_limited_in_both_directions() -> None:
    made = plan(3, "100mbit")
    ends = {(command[2], command[6]) for command in limits(made)}
    sending = {(host.namespace, "eth0") for host in made.hosts}
    receiving = {(made.switch, host.port) for host in made.hosts}
    assert ends == sending | receiving
    assert all("100000000bit" in command for command in limits(made))


@given(st.integers(SLOWEST, FASTEST))
def test_a_bucket_holds_the_largest_packet_and_its_queue_more(rate: int) -> None:
    (command, *_) = limits(plan(2, f"{rate}bit"))
    found = {k: int(v.rstrip("bit")) for k, v in zip(command[9::2], command[10::2], strict=True)}
    assert found["rate"] == rate
    assert 16384 + 64 <= found["burst"] <= max(32768, rate / 8 * 0.002)
    assert found["limit"] > found["burst"]


@pytest.mark.parametrize("bits", [SLOWEST, 10**6, 25 * 10**8, FASTEST])
def test_a_rate_is_read_as_it_is_shown(bits: int) -> None:
    assert parse_rate(show_rate(bits)) == bits


@pytest.mark.parametrize("rate", ["", "fast", "1gbps", "-1gbit", "0gbit", "1 terabit", "1000gbit"])
def test_a_rate_that_is_none_says_what_one_is(rate: str) -> None:
    with pytest.raises(BadArgument, match="a rate"):
        plan(2, rate)


@pytest.mark.parametrize("hosts", [-1, 0, 1, 65])
def test_a_number_of_hosts_that_cannot_be_is_refused(hosts: int) -> None:
    with pytest.raises(BadArgument, match="2 to 64"):
        plan(hosts, "1gbit")


@pytest.mark.parametrize("name", ["", "a/b", "../x", "A", "x" * 40, "-x", "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(BadArgument, match="--name"):
        plan(2, "1gbit", name)


def test_another_rate_is_the_same_network() -> None:
    made = plan(4, "1gbit")
    slower = made.at("100mbit")
    assert (slower.hosts, slower.rate) == (made.hosts, 10**8)
    assert len(limits(slower)) == len(limits(made))


def test_hosts_know_each_other_by_name() -> None:
    made = plan(2, "1gbit")
    assert hosts_file(made).splitlines()[1:] == ["10.77.0.1 host0", "10.77.0.2 host1"]


def test_a_command_on_a_host_is_a_command_in_its_namespace() -> None:
    host = plan(2, "1gbit").hosts[1]
    assert inside(host, ("true",)) == ("ip", "netns", "exec", "shoal-testbed-1", "true")
