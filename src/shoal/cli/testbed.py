"""``shoal testbed up | down | rate | list``: simulate a slow network on this machine."""

# ruff: noqa: PT028  (the command's name begins with "test", but it is not a test)

from __future__ import annotations

import typer

from shoal.errors import UnknownName, UsageError

ACTIONS = ("up", "down", "rate", "list")
DEFAULT_HOSTS, DEFAULT_RATE = 4, "1gbit"


def testbed(
    action: str = typer.Argument(..., metavar="up|down|rate|list", help="What to do."),
    value: str = typer.Argument("", metavar="[RATE]", help="For rate: the new rate, as 100mbit."),
    hosts: int | None = typer.Option(None, help="For up: how many hosts. [default: 4]"),
    rate: str | None = typer.Option(None, help="For up: the rate of each host. [default: 1gbit]"),
    name: str = typer.Option("testbed", help="The name of the testbed, if there are several."),
) -> None:
    """Simulate a slow network of several hosts on this machine (root, Linux).

    `shoal run train.py --hosts testbed` then trains on its hosts.
    """
    if action not in ACTIONS:
        raise UnknownName("action", action, ACTIONS)
    if action != "up" and (hosts is not None or rate is not None):
        raise UsageError(f"shoal testbed {action}: --hosts and --rate are options of up only")
    if (action == "rate") != bool(value):
        why = "rate needs a value, as in rate 100mbit; the other actions take none"
        raise UsageError(f"shoal testbed {action} {value}: {why}")
    from shoal import testbed as beds

    if action == "up":
        _up(DEFAULT_HOSTS if hosts is None else hosts, rate or DEFAULT_RATE, name)
    elif action == "down":
        typer.echo(f"removed testbed {name} of {len(beds.down(name).plan.hosts)} hosts")
    elif action == "rate":
        count = len(beds.limit(value, name).plan.hosts)
        typer.echo(f"testbed {name}: {value} from and to each of {count} hosts")
    else:
        _list()


def _up(hosts: int, rate: str, name: str) -> None:
    from shoal.testbed import plan, up

    bed = up(plan(hosts, rate, name)).plan
    width = max(len(host.namespace) for host in bed.hosts)
    for host in bed.hosts:
        typer.echo(f"{host.name:8}{host.address:14}ip netns exec {host.namespace:{width}} COMMAND")
    typer.echo(
        f"{rate} from and to each host; only the bandwidth is limited, because delay and loss "
        f"need netem, which not every kernel has\n"
        f"train on them: shoal run train.py --hosts {name}\n"
        f"remove them:   shoal testbed down{'' if name == 'testbed' else f' --name {name}'}"
    )


def _list() -> None:
    from shoal.testbed import records
    from shoal.testbed.network import describe

    testbeds = records()
    for record in testbeds:
        owner = f"of process {record.owner.partition(' ')[0]}" if record.owner else ""
        if record.stale:
            owner = "left behind by a dead process; the next `up` removes it"
        typer.echo(f"{record.plan.name}: {describe(record.plan)} {owner}".rstrip())
    if not testbeds:
        typer.echo("no testbed is up; `shoal testbed up` makes one")
