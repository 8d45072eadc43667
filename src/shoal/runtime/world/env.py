"""The environment variables by which a launcher tells a process its place in the run.

They are torchrun's (RANK, WORLD_SIZE, ...) and optional ones that start with ``SHOAL_``, so a
script can also be started by torchrun, Slurm or any launcher that sets torchrun's variables.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import UsageError

RUN_ID = "SHOAL_RUN_ID"
TOKEN = "SHOAL_TOKEN"
GENERATION = "SHOAL_GENERATION"
STRATEGY = "SHOAL_STRATEGY"
ERROR_FILE = "SHOAL_ERROR_FILE"
DIRECTORY = "SHOAL_DIR"
ROLE = "SHOAL_ROLE"
SERVER = "SHOAL_SERVER"
SERVERS = "SHOAL_SERVERS"
BACKEND = "SHOAL_BACKEND"
TIMEOUT = "SHOAL_TIMEOUT"
JOIN_SECONDS = "SHOAL_JOIN_SECONDS"
RESUME = "SHOAL_RESUME"
CHECKPOINT = "SHOAL_CHECKPOINT"
DEFAULT_JOIN_SECONDS = 60.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")  # unset in the environment of a server


@dataclass(frozen=True)
class RankEnv:
    """The place of one process in its run, as its environment describes it.

    The defaults are those of a process that was started alone.
    """

    rank: int = 0  # of a server: its index among the servers
    size: int = 1  # processes of the same role
    local_rank: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    run_id: str = "none"
    generation: int = 0
    token: str = field(default="", repr=False)
    role: str = "worker"
    workers: int = 1
    servers: int = 0
    hosted: bool = False  # the launcher (ours, or torchrun's agent) hosts the store, not rank 0

    @property
    def prefix(self) -> str:
        """The prefix of this run's keys in the store, a new one after each restart."""
        return prefix(self.run_id, self.token, self.generation)

    @property
    def hosts_store(self) -> bool:
        """Whether this process hosts the store."""
        return self.rank == 0 and self.role == "worker" and not self.hosted

    @property
    def name(self) -> str:
        """The process's name in messages."""
        return f"rank {self.rank}" if self.role == "worker" else f"server {self.rank}"

    @property
    def key(self) -> str:
        """The process's name in keys and file names."""
        return str(self.rank) if self.role == "worker" else f"server-{self.rank}"


def prefix(run_id: str, token: str, generation: int) -> str:
    """Return the key prefix of one generation of one run."""
    return f"shoal/{run_id}/{token}/{generation}"


def fingerprint(token: str) -> str:
    """Return a hash that identifies a token without revealing it."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Read this process's place in its run; None when it was started alone."""
    env = os.environ if environ is None else environ
    # A Slurm batch script itself has SLURM_PROCID, too; MASTER_ADDR tells its tasks apart.
    slurm = all(name in env for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR"))
    if env.get(ROLE) == "server":
        rank, size = _whole(env, SERVER), _whole(env, SERVERS)
    elif "RANK" in env or "WORLD_SIZE" in env:
        rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
    elif slurm:
        rank, size = _whole(env, "SLURM_PROCID"), _whole(env, "SLURM_NTASKS")
    else:
        return None
    _check(rank, size, env)
    workers = _whole(env, "WORLD_SIZE", size)
    return RankEnv(
        rank,
        size,
        *_local(rank, workers, env),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_whole(env, "MASTER_PORT", 0),
        run_id=env.get(RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "none",
        generation=_whole(env, GENERATION, _whole(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        token=env.get(TOKEN, ""),
        role=env.get(ROLE, "worker"),
        workers=workers,
        servers=_whole(env, SERVERS, 0),
        hosted=env.get(AGENT_STORE) == "True",
    )


def _local(rank: int, workers: int, env: Mapping[str, str]) -> tuple[int, int]:
    """Return the local rank, 0 for a server, and the number of workers on this machine."""
    per_node = _whole(env, "SLURM_NTASKS_PER_NODE", 1 << 30)
    if env.get(ROLE) == "server":
        return 0, _whole(env, "LOCAL_WORLD_SIZE", min(workers, per_node))
    local_rank = _whole(env, "LOCAL_RANK", _whole(env, "SLURM_LOCALID", rank))
    local_size = _whole(env, "LOCAL_WORLD_SIZE", max(local_rank + 1, min(workers, per_node)))
    if not 0 <= local_rank < local_size:
        raise UsageError(
            f"LOCAL_RANK={local_rank} but LOCAL_WORLD_SIZE={local_size}: "
            f"local ranks run from 0 to {local_size - 1}"
        )
    return local_rank, local_size


def _check(rank: int, size: int, env: Mapping[str, str]) -> None:
    if size < 1:
        raise UsageError(f"WORLD_SIZE={size}: there must be at least one worker")
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} but WORLD_SIZE={size}: ranks run from 0 to {size - 1}; "
            "this worker is one too many, or WORLD_SIZE is too small"
        )
    if size == 1 and env.get(ROLE) != "server":
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"WORLD_SIZE={size} but {name} is not set: workers cannot find each other; start "
                "the script with `shoal run` or torchrun, or set it to the address of rank 0"
            )
    port = _whole(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT={port}: a port lies between 1 and 65535")


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number; without a default the variable must be set."""
    text = env.get(name)
    if text is None or text == "":
        if default is None:
            raise UsageError(f"{name} is not set, although other variables of a launcher are")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None


def read_seconds(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """Read a positive number of seconds from the environment."""
    text = (os.environ if environ is None else environ).get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text}: seconds must be positive and finite")
    return value
