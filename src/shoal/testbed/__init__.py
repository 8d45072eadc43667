"""A slow network on one machine: hosts that are network namespaces, and a limit on each cable."""

from __future__ import annotations

from shoal.testbed.network import Testbed, down, limit, up
from shoal.testbed.plan import Host, Plan, plan
from shoal.testbed.record import Record, find, records

__all__ = ["Host", "Plan", "Record", "Testbed", "down", "find", "limit", "plan", "records", "up"]
