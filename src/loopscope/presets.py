"""Named configurations: our own sizes, the paper's, and published designs. No torch here."""

from __future__ import annotations

from dataclasses import replace

from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig
from loopscope.errors import ConfigError, suggest

# The paper's models (arXiv 2606.24898): V = 20,000 word-level tokens, sequences of 256, 4 loops; they differ in size.
_PAPER_44M = ModelConfig(vocab_size=20_000, max_length=256, width=512, num_layers=8, num_heads=8)
_PAPER_129M = replace(_PAPER_44M, width=768, num_layers=12, num_heads=12)
# Its recipe: WikiText-103 in words, stride of half a sequence, constant learning rate. Epochs are a matter of steps.
_PAPER_DATA = DataConfig(data=("hf:Salesforce/wikitext:wikitext-103-raw-v1",), tokenizer="word", stride=128)
_PAPER_TRAINING = TrainingConfig(lr=3e-4, batch=64)

PRESETS: dict[str, Config] = {
    # Ours, from a coffee break to an afternoon on two cores; the paper's design, scaled down.
    "demo": Config(
        model=ModelConfig(vocab_size=512, width=64, num_layers=2, num_heads=4, max_length=128),
        training=TrainingConfig(lr=2e-3, steps=200, eval_tokens=8192),
    ),
    "nano": Config(model=ModelConfig(vocab_size=2048, width=128, num_layers=2, num_heads=4, max_length=128)),
    "micro": Config(
        model=ModelConfig(vocab_size=4096, width=256, num_layers=4, num_heads=8, max_length=256),
        training=TrainingConfig(lr=6e-4),
    ),
    # Pointer chasing in minutes on one core: one layer, which can look one pointer up, eight times; see docs/tasks.md.
    # With a tied head it is not learnt so fast: h_0 is the embedding of the cell asked about, and read as the answer.
    "hops": Config(
        model=ModelConfig(
            vocab_size=256,
            width=64,
            num_layers=1,
            num_loops=8,
            num_heads=1,
            mlp_width=64,
            dropout=0.0,
            max_length=43,
            readout="raw",
            tie_head=False,
        ),
        data=DataConfig(data=("task:hops:8",), tokenizer="bytes", curriculum=50),
        training=TrainingConfig(steps=1000, batch=64, lr=3e-3, schedule="cosine", warmup=50),
    ),
    "paper-44m": Config(model=_PAPER_44M, data=_PAPER_DATA, training=_PAPER_TRAINING),
    "paper-129m": Config(model=_PAPER_129M, data=_PAPER_DATA, training=replace(_PAPER_TRAINING, batch=32)),
    # Ouro 1.4B: sandwich norms, and one norm that closes a loop: it feeds the head, the exit gate and the next loop.
    # In our canonical cut that norm is at once the readout and the inter-loop norm.
    "ouro-1.4b": Config(
        model=ModelConfig(
            vocab_size=49_152,
            width=2048,
            num_layers=24,
            num_heads=16,
            mlp_width=5632,
            max_length=65_536,
            positions="rope",
            rope_base=1e6,
            dropout=0.0,
            norm_placement="sandwich",
            inter_loop_norm="rmsnorm",
            readout="rmsnorm",
            share_readout_norm=True,
            exit_gate=True,
            tie_head=False,
            init="scaled",
        ),
        objective=ObjectiveConfig(placement="gated", exit_entropy=0.05),
    ),
}


def preset(name: str) -> Config:
    """The configuration of that name; a wrong name gets a suggestion."""
    if name not in PRESETS:
        raise ConfigError.of("preset", name, suggest(name, PRESETS))
    return PRESETS[name]
