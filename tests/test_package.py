"""Importing does nothing heavy, and the public names are what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest

import loopscope as ls


def in_a_fresh_process(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_numpy():
    assert (
        in_a_fresh_process("import loopscope, sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
        == "False False"
    )


def test_reading_configurations_loads_no_torch():
    script = "import loopscope as ls, sys; ls.preset('nano'); ls.Config(); print('torch' in sys.modules)"
    assert in_a_fresh_process(script) == "False"


def test_a_plan_does_not_pay_for_torchs_compiler():
    """It takes as long to import as torch itself; what is never compiled does without."""
    script = "import sys, loopscope.training.plan; print('torch._dynamo' in sys.modules)"
    assert in_a_fresh_process(script) == "False"


def test_importing_leaves_torch_as_it_was():
    """No threads, dtypes, seeds or denormal modes are set by an import."""
    script = (
        "import torch; torch.manual_seed(1);"
        "before = torch.get_num_threads(), torch.get_default_dtype(), torch.rand(1);"
        "torch.manual_seed(1); import loopscope as ls; [getattr(ls, n) for n in ls.__all__];"
        "after = torch.get_num_threads(), torch.get_default_dtype(), torch.rand(1);"
        "print(before == after, (torch.tensor(1e-40) / 2).item() > 0)"
    )
    assert in_a_fresh_process(script) == "True True"


@pytest.mark.parametrize("name", ls.__all__)
def test_every_public_name_exists_is_documented_and_is_listed(name):
    value = getattr(ls, name)
    assert value.__doc__
    assert name in dir(ls)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'adpat'"):
        ls.adpat  # noqa: B018
