"""Many processes: who this one is, how the model is spread, and the few collectives a training loop needs.

`torchrun --nproc-per-node N -m loopscope train …` sets the environment; without it there is one rank and nothing here
communicates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loopscope.errors import RunError, UnsupportedError

TIMEOUT = timedelta(minutes=10)
LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|timed out|remote process exited|"
    r"(send|recv)(Bytes|Value|Vector)? failed|NCCL.*(abort|remote)",
    re.IGNORECASE,
)
"""What the backends say, as a plain RuntimeError, when the process at the other end is not there any more."""


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Rank 0 prints and writes."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Mean over ranks."""
        if self.world_size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world_size

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: all ranks then act alike."""
        if self.world_size == 1:
            return flag
        votes = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(votes)
        return bool(votes.item())

    def barrier(self) -> None:
        """Wait for the others."""
        if self.world_size > 1:
            dist.barrier()


def is_first_process() -> bool:
    """Whether this is the process that speaks, also after the ranks have parted."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def join(device_type: str) -> Iterator[Ranks]:
    """Join the process group that torchrun describes, and leave it at the end."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Ranks(device=device)
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    except (ValueError, dist.DistError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"cannot join the other processes ({reason}); torchrun starts them together") from error
    try:
        yield Ranks(dist.get_rank(), world_size, device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
            raise
        raise RunError(
            f"rank {os.environ.get('RANK')} lost the other processes, of which one has ended; "
            "the same command goes on from the last checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()


def spread(
    module: nn.Module, core: nn.Module | None, ranks: Ranks, shard: Literal["none", "full"], *, unused_parameters: bool
) -> nn.Module:
    """The module as it trains over all ranks: as it is, replicated (DDP), or sharded (FSDP2).

    Sharded, the core, where there is one, is a unit of its own and stays gathered from the first loop to the end of the
    backward pass.
    """
    if shard == "full":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        if core is not None:
            fully_shard(core, mesh=mesh, reshard_after_forward=False)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        return module
    if ranks.world_size == 1:
        return module
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused_parameters)
