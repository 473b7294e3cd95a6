"""Small trained models for the benchmarks of decoding, made once by one command and kept.

    python benchmarks/trained.py [SIZE [KIND]]     trains whatever is missing, in loopscope's cache folder, or resumes

Per-loop cross-entropy through an RMSNorm readout, with and without a norm penalty: scale-controlled and not; scaled
initialisation, rotary positions, warm-up and cosine, so that a few minutes give a model that has learned something. The
text is the built-in corpus; prompts of the benchmarks come from its validation split.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import loopscope as ls
from loopscope.data.packing import PackedTokens
from loopscope.machine import cache_folder
from loopscope.targets import Opened, open_target, tokens_for

STEPS = {"nano": 400, "micro": 60}
LR = {"nano": 4e-3, "micro": 2e-3}
PENALTY = {"controlled": 0.01, "rmsnorm": 0.0}


def trained(size: str, kind: str, num_loops: int = 4) -> Opened:
    """The model of this size: `controlled` (norm penalty 0.01) or plain `rmsnorm`; trained now if it is not there."""
    design = ls.preset(size)
    assert isinstance(design.model, ls.ModelConfig)
    config = replace(
        design,
        model=replace(design.model, num_loops=num_loops, init="scaled", positions="rope", dropout=0.0),
        objective=replace(design.objective, norm_penalty=PENALTY[kind]),
        training=replace(
            design.training,
            lr=LR[size],
            steps=STEPS[size],
            warmup=20,
            schedule="cosine",
            threads=torch.get_num_threads(),
        ),
    )
    out = cache_folder() / "benchmarks" / f"{size}-{kind}-k{num_loops}"
    result = ls.train(config, out, say=lambda text: print(text, file=sys.stderr))
    assert result.outcome == "finished", f"{out} ended with {result.outcome}"
    return open_target(out)


def held_out(opened: Opened) -> PackedTokens:
    """The validation text of a trained model, in its tokens."""
    tokens = tokens_for(opened, None, lambda text: None)
    assert isinstance(tokens, PackedTokens), "the built-in corpus is packed"
    return tokens


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in sys.argv[1:2] or STEPS:
        for kind in sys.argv[2:3] or PENALTY:
            print(f"{size} {kind}: {trained(size, kind).name}")
