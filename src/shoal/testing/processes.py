"""Run a function in n worker processes and collect what each returned.

Workers are forked from a fork server that has imported torch, so one starts in milliseconds. Each
has the environment variables that torchrun sets (RANK, ...). MASTER_ADDR is 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle  # only for results that child processes send to this process
import random
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple

PRELOAD = [
    "torch._dynamo",  # the first optimizer step would import it, which takes seconds
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "shoal.runtime.parallel",
]
PORTS = (15000, 32000)  # first port, and end (exclusive)


class Outcome(NamedTuple):
    """The result of one worker."""

    value: Any = None  # what it returned
    error: str | None = None  # its traceback if it raised
    exitcode: int | None = 0  # not 0 if it raised or died, and negative after a signal


class WorkersFailed(AssertionError):
    """At least one worker raised or died. ``outcomes`` has the outcome of every worker."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        problems = [outcome.error or outcome.exitcode for outcome in outcomes]
        super().__init__("\n".join(f"worker {i}: {why}" for i, why in enumerate(problems) if why))


@lru_cache(maxsize=1)
def _context() -> ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is not in use.

    It is below Linux's default range of ephemeral ports, so that no outgoing connection takes it
    before a worker binds it.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def outcomes(
    workers: int,
    work: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    seconds: float = 120,
    servers: int = 0,
) -> list[Outcome]:
    """Run ``work(*args)`` in worker processes. Return the outcome of each, even if some failed.

    Args:
        workers: number of worker processes.
        work: a module-level function, which finds its rank in the environment variable RANK.
        args: arguments of ``work``, the same in every process.
        env: further environment variables.
        seconds: processes that still run after about this time are killed.
        servers: number of further processes that run ``work`` as servers, without an outcome.
    """
    context = _context()
    port = free_port()
    pipes, children = [], []
    environments = [_environment(rank, workers, port) for rank in range(workers)]
    environments += [_server_environment(i, servers, workers, port) for i in range(servers)]
    for environment in environments:
        receiver, sender = context.Pipe(duplex=False)
        own = {**environment, **({"SHOAL_SERVERS": str(servers)} if servers else {}), **(env or {})}
        child = context.Process(target=_work, args=(sender, own, work, args), daemon=False)
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    answers = _collect(pipes, seconds)[: len(children)]
    results = []
    for child, answer in zip(children, answers, strict=True):
        child.join(2 if answer is None else 20)
        if child.is_alive():
            child.kill()
            child.join()
        results.append(answer or Outcome(error=None, exitcode=child.exitcode or -1))
    return results[:workers]


def run_workers(workers: int, work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return the values of :func:`outcomes`. Raise WorkersFailed if a worker raised or died."""
    results = outcomes(workers, work, *args, **options)
    if any(r.error or r.exitcode for r in results):
        raise WorkersFailed(results)
    return [r.value for r in results]


def _environment(rank: int, workers: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _server_environment(index: int, servers: int, workers: int, port: int) -> dict[str, str]:
    shared = _environment(index, workers, port)
    own = {"SHOAL_ROLE": "server", "SHOAL_SERVER": str(index), "SHOAL_SERVERS": str(servers)}
    return {**{k: v for k, v in shared.items() if k not in ("RANK", "LOCAL_RANK")}, **own}


def _collect(pipes: list[Connection], seconds: float) -> list[Outcome | None]:
    answers: list[Outcome | None] = [None] * len(pipes)
    waiting = {pipe: i for i, pipe in enumerate(pipes)}
    end = time.monotonic() + seconds
    while waiting and (remaining := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), timeout=remaining):
            if not isinstance(pipe, Connection):
                continue
            index = waiting.pop(pipe)
            with contextlib.suppress(EOFError):  # the worker died and its exit code says how
                answers[index] = pickle.loads(pipe.recv_bytes())
    return answers


def _work(pipe: Connection, env: dict[str, str], work: Callable[..., Any], args: Any) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        pipe.send_bytes(pickle.dumps(Outcome(value=work(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps(Outcome(error=traceback.format_exc(), exitcode=1)))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
