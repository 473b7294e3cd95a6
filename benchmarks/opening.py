"""Memory of opening somebody else's checkpoint: a folder of Ouro-1.4B's names and shapes, random weights, two shards.

    python benchmarks/opening.py [--size-of ouro-1.4b]

Files stack nothing and our layers stack q, k and v, and gate and up: these tensors must be copied, the other ones stay
views of the mapped file. Every figure comes from a process of its own and is the peak resident memory minus what was
resident before, mapped pages included, once after opening and once after a pass of 16 tokens, which touches every
weight. "copies" is that peak in units of the weights' own size in that dtype. The folder is in bf16 (2.9 GB), is
written to the temporary folder, and is deleted.
Exit code 1 when a target is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import tyro
from safetensors.torch import save_file

from loopscope.adapters import ouro
from loopscope.adapters.foreign import CONFIG_FILE, INDEX_FILE, Layout
from loopscope.config import ModelConfig
from loopscope.machine import limit_cpu_isa
from loopscope.presets import preset
from loopscope.protocol import run_loops
from loopscope.targets import open_target
from side_by_side import machine, status_kib

MOST_COPIES = 1.1
"""One copy of the weights, and a tenth: the largest tensor that is being copied, and what torch needs for a pass."""
DTYPES = {"own": 2, "float32": 4}
"""How it is opened, and bytes of a number then."""


def main(size_of: str = "ouro-1.4b") -> None:
    """Write the folder, open it in processes of their own, and compare."""
    limit_cpu_isa()
    print(machine())
    missed = False
    with tempfile.TemporaryDirectory(prefix="loopscope-opening-") as name:
        numbers = write(Path(name), design(size_of))
        print(f"{size_of}: {numbers / 1e9:.3f} billion numbers, {2 * numbers / 1e9:.2f} GB in bf16, two shards")
        for dtype, size in DTYPES.items():
            command = [sys.executable, __file__, "--measure", name, dtype]
            opened, run = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            copies = [kib * 1024 / (size * numbers) for kib in (opened, run)]
            met = max(copies) <= MOST_COPIES
            missed |= not met
            print(
                f"  --dtype {dtype:8} peak {opened / 2**20:.2f} GiB to open, {run / 2**20:.2f} GiB with a pass: "
                f"{copies[0]:.2f} and {copies[1]:.2f} copies  target ≤ {MOST_COPIES}: {'met' if met else 'MISSED'}"
            )
    sys.exit(int(missed))


def design(name: str) -> ModelConfig:
    """The preset's model."""
    return preset(name).design("this benchmark")


def write(folder: Path, config: ModelConfig) -> int:
    """The folder, a tensor at a time into the shard it belongs to; returns its numbers."""
    table: Layout = ouro.layout(config)
    shapes = {name: shape for theirs in table.values() for name, shape in theirs.items()}
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    home = {name: files[place % 2] for place, name in enumerate(sorted(shapes))}
    for file in files:
        names = [name for name in shapes if home[name] == file]
        save_file({name: torch.randn(shapes[name]).bfloat16() * 0.02 for name in names}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": home}))
    (folder / CONFIG_FILE).write_text(json.dumps(fields(config)))
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def fields(config: ModelConfig) -> dict[str, object]:
    """An Ouro config.json of that size."""
    return {
        "model_type": "ouro",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_head,
        "total_ut_steps": config.num_loops,
    }


def measured(folder: str, dtype: str) -> None:
    """Print the peaks in KiB above what was resident, after opening and after a pass."""
    limit_cpu_isa()
    before = status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    model = open_target(folder, dtype=dtype).model
    opened = status_kib("VmHWM") - before
    with torch.no_grad():
        trace = run_loops(model, torch.arange(16)[None])
        model.readout(trace.states[-1], trace.num_loops)
    print(json.dumps([opened, status_kib("VmHWM") - before]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measured(*sys.argv[2:4])
    else:
        tyro.cli(main)
