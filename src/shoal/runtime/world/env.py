"""Read the environment variables with which a launcher gives a process its rank.

These are torchrun's variables (RANK, WORLD_SIZE, ...), some of Slurm, and optional ones that start
with ``SHOAL_``. So torchrun, Slurm or any launcher that sets such variables can start a script.
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
    """The rank of one process and the facts about its run, read from its environment.

    The defaults describe a process that was started without a launcher.
    """

    rank: int = 0  # in a server, its index among the servers
    size: int = 1  # number of processes with the same role
    local_rank: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"  # of the store
    port: int = 0  # of the store
    run_id: str = "none"
    generation: int = 0  # number of restarts so far
    token: str = field(default="", repr=False)
    role: str = "worker"  # or "server"
    workers: int = 1
    servers: int = 0
    hosted: bool = False  # shoal run, torchrun or the script made the store, so join does not

    @property
    def prefix(self) -> str:
        """The prefix of this run's keys in the store. Each restart has another prefix."""
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
        """The process's name in keys of the store and in file names."""
        return str(self.rank) if self.role == "worker" else f"server-{self.rank}"


def prefix(run_id: str, token: str, generation: int) -> str:
    """Return the key prefix of one generation of one run."""
    return f"shoal/{run_id}/{token}/{generation}"


def fingerprint(token: str) -> str:
    """Return a hash that identifies a token without revealing it."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """Return the rank and the run of this process, or None if no launcher set variables."""
    env = os.environ if environ is None else environ
    # SLURM_PROCID is also set in a batch script outside srun, where MASTER_ADDR usually is not.
    slurm = all(name in env for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR"))
    if env.get(ROLE) == "server":
        rank_name, size_name = SERVER, SERVERS
    elif "RANK" in env or "WORLD_SIZE" in env:
        rank_name, size_name = "RANK", "WORLD_SIZE"
    elif slurm:
        rank_name, size_name = "SLURM_PROCID", "SLURM_NTASKS"
    else:
        return None
    rank, size = _read_int(env, rank_name), _read_int(env, size_name)
    _check(rank_name, size_name, env)
    workers = _read_int(env, "WORLD_SIZE", size)
    return RankEnv(
        rank,
        size,
        *_local(rank, workers, env),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_read_int(env, "MASTER_PORT", 0),
        run_id=env.get(RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "none",
        generation=_read_int(env, GENERATION, _read_int(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        token=env.get(TOKEN, ""),
        role=env.get(ROLE, "worker"),
        workers=workers,
        servers=_read_int(env, SERVERS, 0),
        hosted=env.get(AGENT_STORE) == "True",
    )


def _local(rank: int, workers: int, env: Mapping[str, str]) -> tuple[int, int]:
    """Return the local rank (0 in a server) and the number of workers on this machine."""
    per_node = _read_int(env, "SLURM_NTASKS_PER_NODE", 1 << 30)
    if env.get(ROLE) == "server":
        return 0, _read_int(env, "LOCAL_WORLD_SIZE", min(workers, per_node))
    local_rank = _read_int(env, "LOCAL_RANK", _read_int(env, "SLURM_LOCALID", rank))
    local_size = _read_int(env, "LOCAL_WORLD_SIZE", max(local_rank + 1, min(workers, per_node)))
    if not 0 <= local_rank < local_size:
        raise UsageError(
            f"LOCAL_RANK={local_rank} must lie between 0 and {local_size - 1}, "
            f"because LOCAL_WORLD_SIZE={local_size}"
        )
    return local_rank, local_size


def _check(rank_name: str, size_name: str, env: Mapping[str, str]) -> None:
    rank, size = _read_int(env, rank_name), _read_int(env, size_name)
    if size < 1:
        raise UsageError(f"{size_name}={size}: there must be at least one process")
    if not 0 <= rank < size:
        raise UsageError(
            f"{rank_name}={rank} must lie between 0 and {size - 1}, because {size_name}={size}; "
            f"start fewer processes, or set a larger {size_name}"
        )
    if size == 1 and env.get(ROLE) != "server":
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"{size_name}={size} but {name} is not set, so the processes cannot find "
                "each other; start the script with `shoal run` or torchrun, or set MASTER_ADDR and "
                "MASTER_PORT to the address and port of rank 0"
            )
    port = _read_int(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT={port}: the port must lie in 1 .. 65535")


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as an int. If it is unset, return the default, or raise without one."""
    text = env.get(name)
    if text is None or text == "":
        if default is None:
            raise UsageError(f"{name} is not set, although other variables of the launcher are set")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None


def read_seconds(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """Return the variable ``name`` as a positive number of seconds, or ``default`` if unset."""
    text = (os.environ if environ is None else environ).get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text}: the seconds must be positive and finite")
    return value
