"""Simulate a slow network on one machine: each host is a network namespace with a rate limit."""

from shoal.testbed.network import Testbed, down, limit, up
from shoal.testbed.plan import TestbedHost, TestbedPlan, plan
from shoal.testbed.record import TestbedRecord, find, records

__all__ = [
    "Testbed", "TestbedHost", "TestbedPlan", "TestbedRecord", "down", "find", "limit", "plan",
    "records", "up",
]  # fmt: skip
