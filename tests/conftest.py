"""One thread a process, and one test with processes at a time: they share a small machine."""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # small tensors gain nothing from more
# no test asserts a time, nor may hypothesis: a busy machine is not a failure
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n 2 --dist loadgroup``, tests that start workers take turns; the others do not."""
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("processes"))
