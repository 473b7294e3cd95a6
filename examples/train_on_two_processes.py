"""Train on two processes: what you would run on one is what every process runs.

    torchrun --nproc-per-node 2 --standalone examples/train_on_two_processes.py [FOLDER [STEPS]]

The weights are sharded over the processes (FSDP2); `shard="none"` would replicate them (DDP). Kill it and start it
again: it goes on from its last checkpoint, also on another number of processes. The verb does the same:

    torchrun --nproc-per-node 2 --standalone -m loopscope train --preset demo --shard full
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import loopscope as ls


def main(out: str = "runs/two-processes", steps: str = "40") -> None:
    """Every process calls `ls.train`; the first one writes the run folder, and speaks."""
    base = ls.preset("demo")
    training = replace(base.training, steps=int(steps), batch=8, shard="full", threads=1, save_every=20)
    config = replace(base, objective=replace(base.objective, norm_penalty=0.01), training=training)
    result = ls.train(config, out)
    if os.environ.get("RANK", "0") == "0":
        processes = os.environ.get("WORLD_SIZE", "1")
        print(f"{result.outcome} at step {result.step} on {processes} processes: {result.run.path}")
        if result.evaluation is not None:
            print("CE after each loop:", " ".join(f"{ce:.3f}" for ce in result.evaluation.ce))


if __name__ == "__main__":
    main(*sys.argv[1:])
