"""The environment that a launcher and its workers agree on: torchrun's, and a few names of ours.

A script started by torchrun, Slurm or anything else that sets RANK and friends joins in the same
way; what only our launcher sets is optional.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

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
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")  # what a server has none of


@dataclass(frozen=True)
class RankEnv:
    """Where one process sits: its number, and where the others meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    run_id: str
    generation: int
    token: str
    role: str = "worker"
    workers: int = 1
    servers: int = 0
    hosted: bool = False  # somebody else hosts the store: our launcher, or torchrun's agent

    @property
    def prefix(self) -> str:
        """Every key of this run and this start of it lies below; never re-used after a restart."""
        return prefix(self.run_id, self.token, self.generation)

    @property
    def hosts_store(self) -> bool:
        """Whether the others meet in this very process."""
        return self.rank == 0 and self.role == "worker" and not self.hosted

    @property
    def name(self) -> str:
        """What people call this process."""
        return f"rank {self.rank}" if self.role == "worker" else f"server {self.rank}"

    @property
    def key(self) -> str:
        """The same, as part of a key or a file name."""
        return str(self.rank) if self.role == "worker" else f"server-{self.rank}"


def prefix(run_id: str, token: str, generation: int) -> str:
    """The store prefix of one generation of one run."""
    return f"shoal/{run_id}/{token}/{generation}"


def fingerprint(token: str) -> str:
    """What may be shown of a token."""
    return hashlib.sha256(token.encode()).hexdigest()[:16]


def read_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv | None:
    """This process's env, or None when it was started alone."""
    env = os.environ if environ is None else environ
    if env.get(ROLE) == "server":
        rank, size = _whole(env, SERVER), _whole(env, SERVERS)
    elif "RANK" in env or "WORLD_SIZE" in env:
        rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
    elif _slurm(env):
        rank, size = _whole(env, "SLURM_PROCID"), _whole(env, "SLURM_NTASKS")
    else:
        return None
    _check(rank, size, env)
    workers = _whole(env, "WORLD_SIZE", size)
    return RankEnv(
        rank, size, *_local(rank, workers, env),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_whole(env, "MASTER_PORT", 0),
        run_id=env.get(RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "none",
        generation=_whole(env, GENERATION, _whole(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        token=env.get(TOKEN, ""),
        role=env.get(ROLE, "worker"),
        workers=workers,
        servers=_whole(env, SERVERS, 0),
        hosted=env.get(AGENT_STORE) == "True",
    )  # fmt: skip


def _local(rank: int, workers: int, env: Mapping[str, str]) -> tuple[int, int]:
    """My number among this machine's workers, and how many they are; a server is none of them."""
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


def _slurm(env: Mapping[str, str]) -> bool:
    # A batch script itself also has SLURM_PROCID; only MASTER_* says that workers shall meet.
    return "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "MASTER_ADDR" in env


def _check(rank: int, size: int, env: Mapping[str, str]) -> None:
    if size < 1:
        raise UsageError(f"WORLD_SIZE={size}: there must be at least one worker")
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} but WORLD_SIZE={size}: ranks run from 0 to {size - 1}; "
            "this worker is one too many, or WORLD_SIZE was set too low"
        )
    if size == 1 and env.get(ROLE) != "server":
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise UsageError(
                f"WORLD_SIZE={size} but {name} is not set: workers cannot find each other; "
                "start with `shoal run` or torchrun, or set it to where rank 0 runs"
            )
    port = _whole(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT={port}: a port lies between 1 and 65535")


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None or text == "":
        if default is None:
            raise UsageError(f"{name} is not set, though other variables of a launcher are")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None


def read_seconds(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """A positive number of seconds from the environment."""
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
