"""Decode at variable depth: the same weights run for one loop or for many, or for as many as each token needs.

    python examples/decode_at_depth.py [TARGET [PROMPT]]

TARGET is anything that names a model: a run folder, a Hugging Face folder, hf:ORG/NAME. Without one, a small model is
trained first (half a minute), into runs/decode-at-depth.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import loopscope as ls

RULE = "kl:-0.05"
"""A token leaves as soon as a loop changes its prediction by less than 0.05 nats. `loopscope calibrate` finds a
threshold with a bound on what it costs, for your model and your text."""
SAMPLING = {"temperature": 0.7, "seed": 1, "max_tokens": 24}


def trained(out: str = "runs/decode-at-depth") -> str:
    """A small model whose every exit is trained; called again, it is found finished."""
    base = ls.preset("demo")
    training = replace(base.training, steps=120, threads=1)
    ls.train(replace(base, objective=replace(base.objective, norm_penalty=0.01), training=training), out)
    return out


def main(target: str | None = None, prompt: str = "The return value is") -> None:
    """The same prompt at several depths, beyond the trained one too, and with each token leaving when it is sure."""
    opened = ls.open(target or trained())
    for num_loops in (1, 2, opened.model.num_loops, 2 * opened.model.num_loops):
        text = ls.generate(opened, prompt, num_loops=num_loops, **SAMPLING)
        print(f"{num_loops} loops: {prompt + text.text!r}")
    text = ls.generate(opened, prompt, halting=RULE, **SAMPLING)
    left = Counter(token.loops for token in text.tokens)
    print(f"{RULE}: {prompt + text.text!r}")
    print("  tokens by loops:", ", ".join(f"{count} after {loops}" for loops, count in sorted(left.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
