"""Watching somebody else's training loop: it raises what it should, disturbs nothing, and never ends a training."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopscope as ls
from loopscope.auditing.monitor import looped_part, next_ids, watch
from loopscope.config import ModelConfig
from loopscope.errors import ConfigError, ProtocolError

VOCABULARY, LENGTH = 29, 12


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


class Stranger(nn.Module):
    """A looped model that knows nothing of loopscope: shared pre-norm blocks, a unit-normal tied embedding (the
    paper's initialisation), dropout, and a counter that every pass writes to."""

    def __init__(self, readout: str = "rmsnorm", width: int = 32, loops: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.readout_norm = nn.RMSNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(0.1)
        self.loops, self.readout = loops, readout
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("absent", None)

    def advance(self, h: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        for each in self.blocks:
            h = h + self.dropout(each(h))
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return (self.readout_norm(h) if self.readout == "rmsnorm" else h) @ self.embedding.weight.T

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy at every loop."""
        h, losses = self.embedding(ids), []
        for _ in range(self.loops):
            h = self.advance(h)
            losses.append(F.cross_entropy(self.logits(h).flatten(0, 1), targets.flatten()))
        return torch.stack(losses).mean()


def adapted(net: Stranger):
    return ls.adapt(
        embed=net.embedding,
        loop=lambda h, k: net.advance(h),
        readout=lambda h, k: net.logits(h),
        num_loops=net.loops,
        module=net,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Text that cannot be guessed, as all text is to a new model."""
    ids = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train(net: Stranger, steps: int, monitor=None, lr: float = 0.01) -> None:
    """A plain PyTorch loop."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(steps):
        ids, targets = batch(step)
        net(ids, targets).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(ids, targets)
        optimizer.zero_grad()


# --- what it finds ---------------------------------------------------------------------------------------------------


def test_a_plain_loop_over_a_strangers_model_with_a_norm_readout_raises_the_blind_spot_alarm_once():
    net, told = Stranger("rmsnorm"), []
    with watch(adapted(net), every=5, on_alarm=told.append) as monitor:
        train(net, 40, monitor)
    (alarm,) = told
    assert alarm.kind == "blind-spot" and monitor.alarms == told and monitor.failure is None
    assert 1 < alarm.since <= alarm.step < 40
    assert f"step {alarm.step}: ‖h_K‖ is" in alarm.message and "No loss sees the scale" in alarm.message
    assert [seen.step for seen in monitor.history] == [1, *range(5, 41, 5)]
    last = monitor.history[-1]
    assert len(last.norms) == 3 and list(last.shares) == [1, 2, 3] and max(last.shares.values()) < 1e-4
    assert last.carried == pytest.approx(1, abs=0.2) and 35 < last.headroom < 38.5


def test_the_same_loop_with_a_raw_readout_raises_none():
    net = Stranger("raw")
    with watch(adapted(net), every=5, on_alarm=pytest.fail) as monitor:
        train(net, 40, monitor)
    assert min(monitor.history[-1].shares.values()) > 0.01


@pytest.mark.parametrize(("readout", "blind"), [("rmsnorm", True), ("raw", False)])
def test_our_own_model_in_a_plain_loop_gives_the_papers_verdicts(readout, blind):
    config = ModelConfig(vocab_size=VOCABULARY, width=32, num_layers=2, num_heads=2, num_loops=3, readout=readout)
    model, told = ls.build(config, seed=0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with watch(model, every=5, on_alarm=told.append) as monitor:
        for step in range(40):
            ids, targets = batch(step)
            trace = ls.run_loops(model, ids)
            logits = torch.stack([model.readout(trace.states[k], k) for k in (1, 2, 3)])
            F.cross_entropy(logits.flatten(0, 2), targets.flatten().repeat(3)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(ids, targets)
    assert [alarm.kind for alarm in told] == (["blind-spot"] if blind else [])


def test_a_loss_term_that_sees_the_scale_silences_the_alarm():
    net = Stranger("rmsnorm")
    with watch(adapted(net), every=5, controlled=True, on_alarm=pytest.fail) as monitor:
        train(net, 40, monitor)
    assert monitor.history[-1].norms[-1] > 10 * monitor.history[0].norms[-1], "it did grow"


def test_what_counts_is_which_loops_are_supervised(tiny, ids_BT):
    """Final-only readouts are seen at their raw loops, if those get a loss."""
    model = ls.build(replace(tiny, readout="final-only"), seed=0)
    every = watch(model).step(ids_BT)
    terminal = watch(model, supervised="terminal").step(ids_BT)
    assert every.shares[1] > 0.01
    assert list(terminal.shares) == [3] and terminal.shares[3] < 1e-4


def test_without_on_alarm_it_is_a_python_warning():
    net = Stranger("rmsnorm")
    with pytest.warns(RuntimeWarning, match="blind-spot: step .* No loss sees the scale"):
        train(net, 40, watch(adapted(net), every=5))


def test_a_state_that_is_not_finite_is_an_alarm_that_names_its_loop():
    net, told = Stranger(), []
    model = ls.adapt(
        embed=net.embedding,
        loop=lambda h, k: h * (math.nan if k == 2 else 1.0),
        readout=lambda h, k: net.logits(h),
        num_loops=3,
        module=net,
    )
    watch(model, on_alarm=told.append).step(*batch(0))
    assert [alarm.kind for alarm in told] == ["non-finite"] and "from loop 2 on" in told[0].message


def test_headroom_is_that_of_the_dtype_trained_in():
    net = Stranger()
    wide, narrow = (watch(adapted(net), autocast=dtype).step(*batch(0)) for dtype in (None, torch.float16))
    assert wide.headroom - narrow.headroom == pytest.approx(38.53 - 4.82, abs=0.05)


def test_without_targets_the_next_ids_are_taken():
    ids = torch.tensor([[3, 1, 4]])
    assert next_ids(ids).tolist() == [[1, 4, -100]]
    net = Stranger("raw")
    model = adapted(net)
    assert watch(model).step(ids).shares == watch(model).step(ids, next_ids(ids)).shares


def test_the_trace_of_the_training_step_is_read_without_another_pass(tiny, ids_BT, monkeypatch):
    model = ls.build(tiny, seed=0)
    result = model(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig()))
    monkeypatch.setattr(model, "embed", lambda *_: pytest.fail("a second pass"))
    seen = watch(model).step(ids_BT, ids_BT, trace=result.trace)
    assert seen.norms == pytest.approx(result.norms_K.tolist())
    result.loss.backward()


# --- what it leaves alone --------------------------------------------------------------------------------------------


def everything(net: nn.Module) -> dict[str, object]:
    """All that a look must not change."""
    return {
        "weights": [parameter.detach().clone() for parameter in net.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "buffers": [buffer.clone() for buffer in net.buffers()],
        "identities": [id(tensor) for tensor in (*net.parameters(), *net.buffers())],
        "modes": [module.training for module in net.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in net.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "grad enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    else:
        assert before == after


class Restless(Stranger):
    """Draws random numbers and replaces a buffer in every pass, also in eval mode."""

    def advance(self, h: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        h = h + torch.randn_like(h) * random.random() * np.random.random()
        return super().advance(h)


@pytest.mark.parametrize("kind", [Stranger, Restless])
def test_a_look_leaves_everything_as_it_was(kind):
    net = kind()
    net.dropout.eval()  # a user's own choice, in a model that otherwise trains
    net(*batch(0)).backward()
    before = everything(net)
    watcher = watch(adapted(net))
    assert watcher.step(*batch(1)) is not None
    after = everything(net)
    for name, value in before.items():
        assert_same(value, after[name])


def test_a_look_between_forward_and_backward_changes_no_gradient():
    gradients = []
    for looks in (False, True):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        net = Restless()
        loss = net(*batch(0))
        if looks:
            assert watch(adapted(net)).step(*batch(1)) is not None
        loss.backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert_same(*gradients)


def test_a_watched_training_ends_with_the_same_weights_as_an_unwatched_one():
    weights = []
    for every in (None, 1):
        torch.manual_seed(1)
        net = Stranger("raw")
        train(net, 10, None if every is None else watch(adapted(net), every=every))
        weights.append([tensor.detach() for tensor in (*net.parameters(), net.passes)])
    assert_same(*weights)


def test_a_look_inside_autocast_leaves_no_weights_without_gradient_in_its_cache():
    net = Stranger()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = watch(adapted(net)).step(*batch(0))
        net(*batch(0)).backward()
    assert seen is not None and all(parameter.grad is not None for parameter in net.parameters())


# --- how it ends, fails and goes on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_the_loop_raises_passes_through_and_closes_the_watcher(error):
    with pytest.raises(error, match="mine"), watch(adapted(Stranger())) as monitor:
        raise error("mine")
    assert monitor.closed


def test_ctrl_c_during_a_look_passes_through_and_leaves_the_model_as_it_was():
    net = Stranger()

    def interrupted(h, k):
        net.advance(h)
        raise KeyboardInterrupt

    model = ls.adapt(embed=net.embedding, loop=interrupted, readout=lambda h, k: h, num_loops=2, module=net)
    before = everything(net)
    with pytest.raises(KeyboardInterrupt):
        watch(model).step(*batch(0))
    after = everything(net)
    for name, value in before.items():
        assert_same(value, after[name])


def test_what_on_alarm_raises_passes_through():
    def stop(alarm):
        raise StopIteration(alarm.kind)

    net = Stranger("rmsnorm")
    with pytest.raises(StopIteration, match="blind-spot"):
        train(net, 40, watch(adapted(net), every=5, on_alarm=stop))


def test_a_closed_watcher_does_nothing():
    net = Stranger()
    with watch(adapted(net), every=1) as monitor:
        monitor.step(*batch(0))
    monitor.model = None  # whatever it still did would fail
    assert monitor.step(*batch(1)) is None
    assert len(monitor.history) == 1 and monitor.last_step == 1 and monitor.failure is None


def test_a_look_that_fails_is_one_warning_and_training_goes_on():
    net = Stranger()
    monitor = watch(adapted(net), every=1)
    ids, targets = batch(0)
    with pytest.warns(RuntimeWarning, match=r"cannot look at the model at step 1.*\(4, 12\).*\(4, 5\)"):
        assert monitor.step(ids, targets[:, :5]) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.step(ids, targets[:, :5]) is None
        assert monitor.failure is not None and monitor.failure.startswith("DataError")
        assert monitor.step(ids, targets) is not None, "the next look may succeed"
    assert [seen.step for seen in monitor.history] == [3]


def test_a_first_look_that_fails_is_not_repeated_before_its_time():
    monitor = watch(adapted(Stranger()), every=10)
    with pytest.warns(RuntimeWarning):
        monitor.step(torch.zeros(3))
    assert not monitor.due(2) and monitor.due(10)


def test_loops_that_count_themselves_say_the_step():
    monitor = watch(adapted(Stranger()), every=100)
    for step in (250, 299, 300, 350):
        monitor.step(*batch(0), step=step)
    assert [seen.step for seen in monitor.history] == [250, 300]


def test_a_resumed_watcher_remembers_where_the_scale_started():
    net = Stranger("rmsnorm")
    early = watch(adapted(net), every=5, on_alarm=print)
    early.step(*batch(0))
    state = early.state()
    train(net, 40)
    fresh, resumed = (watch(adapted(net), every=5, on_alarm=lambda alarm: None) for _ in range(2))
    resumed.restore(state)
    assert fresh.step(*batch(1)).alarms == ()
    assert [alarm.kind for alarm in resumed.step(*batch(1)).alarms] == ["blind-spot"]
    assert resumed.last_step == 2


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_a_looped_model_is_found_inside_the_module_that_wraps_it(tiny):
    model = ls.build(tiny, seed=0)
    assert looped_part(model) is model
    assert looped_part(nn.ModuleDict({"other": nn.Linear(2, 2), "wrapped": nn.Sequential(model)})) is model


def test_what_is_no_looped_model_is_refused_with_the_way_to_make_one():
    with pytest.raises(ProtocolError, match=r"Linear is not a looped model and contains none.*loopscope\.adapt"):
        watch(nn.Linear(2, 2))


def test_a_model_whose_modules_cannot_be_seen_is_warned_about():
    net = Stranger()
    hidden = ls.adapt(embed=net.embedding, loop=lambda h, k: h, readout=lambda h, k: h, num_loops=1)
    with pytest.warns(RuntimeWarning, match="adapt takes module="):
        watch(hidden)


def test_an_interval_below_one_is_refused():
    with pytest.raises(ConfigError, match="every = 0"):
        watch(adapted(Stranger()), every=0)
