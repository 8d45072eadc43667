"""The communication thread: jobs in order, and waiting for no more of them than one needs."""

from __future__ import annotations

import threading

import pytest

from shoal.runtime.step.comm_queue import CommThread, InlineQueue


def test_a_job_is_waited_for_without_those_behind_it() -> None:
    line, gate, done = CommThread(), threading.Event(), list[int]()
    first = line.submit(lambda: done.append(1))
    line.submit(lambda: gate.wait(10) and None)
    line.submit(lambda: done.append(3))
    line.join(first)
    assert done == [1]
    gate.set()
    line.join()
    assert done == [1, 3]
    line.close()


def test_an_error_reaches_who_waits_for_a_later_job() -> None:
    line = CommThread()

    def fail() -> None:
        raise ValueError("lost")

    line.submit(fail)
    later = line.submit(lambda: None)
    with pytest.raises(ValueError, match="lost"):
        line.join(later)
    line.join()  # told once
    line.close()


def test_inline_jobs_are_done_when_submitted() -> None:
    done: list[int] = []
    line = InlineQueue()
    line.join(line.submit(lambda: done.append(1)))
    assert done == [1]
