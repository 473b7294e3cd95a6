"""Every example runs as its first lines say, and shows what it is there to show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "blind_spot.ipynb"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def run(*arguments: object, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_told_of_and_tested():
    told = (EXAMPLES / "README.md").read_text("utf-8")
    tested = Path(__file__).read_text("utf-8")
    for path in EXAMPLES.iterdir():
        assert f"]({path.name}" in told or path.name == "README.md", f"{path.name} is not in examples/README.md"
        assert path.is_dir() or path.name in tested, f"nothing runs {path.name}"


def test_a_network_of_your_own_is_audited_with_three_functions(tmp_path):
    said = run(EXAMPLES / "audit_your_model.py", cwd=tmp_path)
    assert "RMSNorm readout: blind-spot\n  scale is blind" in said
    assert "raw readout: controlled\n  scale is visible" in said


def test_the_runs_of_the_scaling_example_are_equally_deep_when_unrolled(tmp_path):
    stub = tmp_path / "loopscope"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/runs.txt\n')
    stub.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", str(EXAMPLES / "scaling.sh"), "out", "1"], env={**os.environ, "PATH": path}, check=True)
    runs = [line.split() for line in (tmp_path / "runs.txt").read_text().splitlines()]
    flags = [dict(zip(run[1::2], run[2::2], strict=True)) for run in runs]
    assert {int(run["--num-layers"]) * int(run["--num-loops"]) for run in flags} == {8}
    assert len({run["--out"] for run in flags}) == len(flags) == 36


def test_two_processes_train_one_sharded_run(tmp_path):
    said = run(*TORCHRUN, EXAMPLES / "train_on_two_processes.py", "run", "4", cwd=tmp_path)
    assert said.count("finished at step 4 on 2 processes: run") == 1, "only the first one speaks"
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(list(newest.rglob("*.safetensors"))) >= 2, "both wrote their share"


def test_a_model_is_decoded_at_several_depths_and_as_needed(tmp_path):
    """decode_at_depth.py on a model that is there already: the one that it would train takes half a minute."""
    program = "import decode_at_depth, loopscope as ls; from dataclasses import replace; base = ls.preset('demo'); "
    program += "training = replace(base.training, steps=3, threads=1); "
    program += "ls.train(replace(base, training=training), 'run'); decode_at_depth.main('run', 'The')"
    said = run("-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {program}", cwd=tmp_path)
    assert re.findall(r"^(\d+) loops: 'The", said, flags=re.MULTILINE) == ["1", "2", "4", "8"]
    by_loops = re.findall(r"(\d+) after (\d+)", said.splitlines()[-1])
    assert sum(int(count) for count, _ in by_loops) == 24 and all(1 <= int(loops) <= 4 for _, loops in by_loops)


# --- the notebook ----------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """A kernel of this very interpreter, whatever others are installed."""
    folder = tmp_path / "jupyter" / "kernels" / "this"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "this", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    return "this"


@pytest.mark.timeout(600)  # half a minute of a processor, and a busy machine may have other things to do
def test_the_notebook_runs_from_top_to_bottom_and_shows_the_blind_spot_and_its_remedy(kernel, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=500, kernel_name=kernel, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "finished after 80 steps" in said
    assert "BLIND-SPOT:" in said and "- scale is blind" in said
    before, after = (float(norm) for norm in re.findall(r"^(?:before|after): [a-z-]+, norm ([\d.]+)", said, re.M))
    assert after < before / 2, "the remedy has brought the norm down"
    assert re.search(r"^\d+ loops for 24 tokens, instead of 96$", said, flags=re.MULTILINE)
    assert any("image/png" in output.get("data", {}) for output in outputs), "the chart is drawn"


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
