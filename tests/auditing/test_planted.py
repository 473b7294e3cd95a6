"""The audit on models whose blind subspace is derived in `benchmarks/cases/`, and the comparators beside it.

A few of every class, small and quick; `python benchmarks/planted.py` runs them all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import loopscope as ls
import planted
from cases import plain

TESTED = """
rmsnorm; rmsnorm in 4 groups; rmsnorm tiny state, eps; alpha 0.01; layernorm, rmsnorm blocks; raw; damped injection
3 unread before norm; 3 unread, rolled; lost subspace, raw; write-only channels; 8 unread, 3 erased, strong
leaky unread, strong; undamped unread channels; vocabulary of 2; 17 of 32 leak 1e-4; 16 of 32 leak 0.1; parcae-like
uneven norm opens loop; uneven norm closes loop; 3 unread, bounded; layernorm, bounded; 3 unread beside opening norm
penalty 1e-6; penalty 0.01; anchor, 3 unread; shift channel, z-loss 0.01; negative weight, raw; final-only, weights 1e-6
final-only, gate 1e-7; unread tensor; tensor read in part; tensor behind rmsnorm; injection as a tensor
two-step, rmsnorm; read by later tokens; handed to the next token; the next token's exit; hidden for 40 % of tokens
20-fold for 40 % of tokens; raw last leaves 3 out; raw last of low rank; 3 unread, copied 10 times
turned by 20 degrees; turned by 70 degrees; coda with attention, rmsnorm; strong coda, rmsnorm; coda with attention, raw
bf16, no module; detached statistic; fitted text, raw; K = 1; exactly K loop embeddings; context without batch
"""
NAMES = {name for line in TESTED.strip().splitlines() for name in line.split("; ")}
SMALL = [planted.Case(kind, min(kind.widths)) for kind in planted.KINDS if kind.name in NAMES]
QUICK = ls.AuditOptions(states=3, tokens=96, rollout=4)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_audit_finds_the_derived_dimension_and_verdicts(case):
    row = planted.examine(case, QUICK)
    kind = case.kind
    assert row.found == kind.blind
    assert row.verdict == kind.verdict
    assert kind.scale in (None, row.scale)
    assert kind.mean in (None, row.mean)
    assert row.verdicts_right
    assert row.agreement > 0.6 or not kind.every_token, (
        "the dimension is a property of the design, not of a lucky state"
    )


def test_there_are_enough_faults_and_controls_of_all_sizes():
    assert len(planted.CASES) >= 190
    assert len(SMALL) == len(NAMES), "a tested name that no case has"
    assert all(any(kind.control for kind in module.KINDS) for module in planted.CLASSES), "no class without a control"
    assert all(max(width for kind in module.KINDS for width in kind.widths) >= 128 for module in planted.CLASSES)
    assert {16, 32, 64, 128, 256, 512} <= {case.width for case in planted.CASES}
    assert len({kind.name for kind in planted.FAULTS + planted.CONTROLS}) == len(planted.FAULTS + planted.CONTROLS)
    assert all(kind.blind == 0 and kind.control for kind in planted.CONTROLS)


def row(case, **changes):
    right = planted.Row(
        case=case,
        found=case.kind.blind,
        agreement=1.0,
        verdict=case.kind.verdict,
        scale=case.kind.scale,
        mean=case.kind.mean,
        tensors={name: {verdict} for name, verdict in case.kind.tensors.items()},
        told=case.kind.blind > 0,
        norm_alarm=False,
        head_null=0,
        seconds=0.1,
    )
    return replace(right, **changes)


@pytest.mark.parametrize(
    ("changes", "exit_code", "words"),
    [
        ({}, 0, "1/1 dimensions right, 1/1 verdicts right, 0 false alarms"),
        ({"found": 1}, 1, "WRONG DIMENSION"),
        ({"verdict": "blind-spot"}, 1, "1 false alarms"),
        ({"scale": "blind"}, 1, "WRONG VERDICT: controlled, scale visible"),
        ({"mean": "inert"}, 1, "WRONG VERDICT"),
        ({"verdict": "undecided"}, 1, "0/1 verdicts right"),
        ({"told": True}, 1, "0/1 verdicts right"),
    ],
)
def test_the_table_says_what_is_wrong_and_the_exit_code_too(monkeypatch, capsys, changes, exit_code, words):
    monkeypatch.setattr(planted, "examine", lambda case: row(case, **changes))
    assert planted.main(only="saturated softmax") == exit_code
    assert words in capsys.readouterr().out


def test_a_name_that_no_case_has_lists_the_names(capsys):
    assert planted.main(only="no such case") == 2
    assert "alpha 1e-4" in capsys.readouterr().out


def test_the_norm_monitor_alarms_at_a_doubling_over_30_loops_and_not_below():
    def growing(factor):
        net = planted.Net(16)
        return planted.plant(net, lambda h, k: net.logits(h), loop=lambda h, k: factor * h)

    assert planted.norm_monitor(growing(2.01 ** (1 / 29)))
    assert not planted.norm_monitor(growing(1.99 ** (1 / 29)))


def test_the_head_comparator_counts_the_null_space_of_the_centred_head():
    head_VD = torch.randn(5, 8)
    assert planted.head_null_space(head_VD) == 8 - 4
    assert planted.head_null_space(torch.cat([head_VD, head_VD.mean(0, keepdim=True)])) == 8 - 4
    assert planted.head_null_space(torch.randn(64, 8)) == 0
    assert planted.head_null_space(torch.randn(64, 8) * torch.tensor([1.0] * 7 + [0.0])) == 1


def test_a_planted_model_is_the_same_every_time():
    first, second = plain.rmsnorm_readout_trained(16), plain.rmsnorm_readout_trained(16)
    assert torch.equal(first.ids(), second.ids())
    states = [ls.run_loops(planted_.model, first.ids()).states[-1].h_BTD for planted_ in (first, second)]
    assert torch.equal(*states)
