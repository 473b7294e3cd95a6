"""Callbacks in the real trainers of transformers and lightning: figures in their logs, alarms, stopping, resuming."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopscope as ls
from loopscope.adapters import callbacks
from loopscope.adapters.callbacks import ids_and_targets
from loopscope.errors import ConfigError, DataError, UnsupportedError

VOCABULARY, LENGTH, STEPS = 29, 12, 40
KEYS = {"loopscope/norm_K", "loopscope/radial_gradient_share", "loopscope/slope", "loopscope/headroom"}


class Net(nn.Module):
    """A looped language model as transformers.Trainer wants it: input_ids and labels in, a loss out."""

    def __init__(self, readout: str = "rmsnorm", width: int = 32, loops: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm, self.readout_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.block = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.loops, self.readout = loops, readout

    def advance(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.block(self.norm(h))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return (self.readout_norm(h) if self.readout == "rmsnorm" else h) @ self.embedding.weight.T

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h, losses = self.embedding(input_ids), []
        for _ in range(self.loops):
            h = self.advance(h)
            losses.append(F.cross_entropy(self.logits(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        return {"loss": torch.stack(losses).mean()}


def adapted(net: Net):
    return ls.adapt(
        embed=net.embedding,
        loop=lambda h, k: net.advance(h),
        readout=lambda h, k: net.logits(h),
        num_loops=net.loops,
        module=net,
    )


def sequences(count: int = 160) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path):
    """A function that makes a transformers.Trainer over a net, with our callback and any others."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

    def make(net: Net, *extra, **arguments):
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        data = [{"input_ids": row, "labels": row} for row in sequences()]
        settings = transformers.TrainingArguments(**{**defaults, **arguments})
        return transformers.Trainer(model=net, args=settings, train_dataset=data, callbacks=list(extra))

    return make


def test_the_hugging_face_trainer_logs_the_figures_and_warns_once(hugging_face, caplog):
    net = Net("rmsnorm")
    callback = callbacks.LoopscopeCallback(adapted(net), every=5)
    trainer = hugging_face(net, callback)
    with caplog.at_level(logging.WARNING, logger="loopscope"):
        trainer.train()
    (alarm,) = (record.getMessage() for record in caplog.records if record.name == callbacks.__name__)
    assert alarm.startswith("blind-spot: step") and "No loss sees the scale" in alarm
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == STEPS // 10 and all(row.keys() >= KEYS for row in rows)
    assert rows[-1]["loopscope/norm_K"] == callback.monitor.history[-1].norms[-1]
    assert rows[-1]["loopscope/radial_gradient_share"] < 1e-4
    assert [seen.step for seen in callback.monitor.history] == [1, *range(5, STEPS + 1, 5)]
    assert trainer.state.global_step == STEPS, "a warning does not stop"
    assert callback.monitor.closed and not net._forward_pre_hooks and callback.monitor.failure is None


def test_stop_ends_the_hugging_face_training_at_the_alarm(hugging_face):
    net = Net("rmsnorm")
    callback = callbacks.LoopscopeCallback(adapted(net), every=5, on_blind_spot="stop")
    trainer = hugging_face(net, callback)
    trainer.train()
    (alarm,) = callback.monitor.alarms
    assert trainer.state.global_step == alarm.step < STEPS
    stopped = next(row for row in trainer.state.log_history if row["step"] == alarm.step)
    assert stopped["loopscope/norm_K"] > 10 * callback.monitor.history[0].norms[-1]


def test_a_raw_readout_trains_to_the_end_under_stop(hugging_face):
    net = Net("raw")
    callback = callbacks.LoopscopeCallback(adapted(net), every=5, on_blind_spot="stop")
    trainer = hugging_face(net, callback)
    trainer.train()
    assert trainer.state.global_step == STEPS and callback.monitor.alarms == []


def test_a_callback_put_first_reaches_reporters(hugging_face):
    """The trainer's own reporters come before the user's callbacks; docs/monitoring.md shows this line."""
    transformers = pytest.importorskip("transformers")

    class Reporter(transformers.TrainerCallback):
        rows: list = []  # noqa: RUF012

        def on_log(self, args, state, control, logs=None, **_):
            self.rows.append(dict(logs))

    net = Net()
    callback = callbacks.LoopscopeCallback(adapted(net), every=5)
    trainer = hugging_face(net, Reporter(), callback, max_steps=10)
    trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(callback))
    trainer.train()
    assert Reporter.rows[0].keys() >= KEYS


def test_a_resumed_hugging_face_run_remembers_where_the_scale_started(hugging_face, tmp_path):
    net = Net("rmsnorm")
    first = callbacks.LoopscopeCallback(adapted(net), every=50)
    hugging_face(net, first, save_strategy="steps", save_steps=STEPS).train()
    again = callbacks.LoopscopeCallback(adapted(net), every=50)
    checkpoint = tmp_path / "out" / f"checkpoint-{STEPS}"
    hugging_face(net, again, max_steps=STEPS + 1).train(resume_from_checkpoint=str(checkpoint))
    assert again.monitor.monitor.start == first.monitor.history[0].norms[-1]
    assert [alarm.step for alarm in again.monitor.alarms] == [STEPS + 1]


def test_accumulated_batches_are_one_step(hugging_face):
    net = Net("raw")
    callback = callbacks.LoopscopeCallback(adapted(net), every=2)
    hugging_face(net, callback, gradient_accumulation_steps=3, max_steps=4).train()
    assert [seen.step for seen in callback.monitor.history] == [1, 2, 4]


def test_a_batch_without_ids_is_one_warning_and_training_goes_on(hugging_face):
    net = Net("raw")
    callback = callbacks.LoopscopeCallback(adapted(net), every=1, ids_of=lambda batch: batch["tokens"])
    trainer = hugging_face(net, callback, max_steps=3)
    with pytest.warns(RuntimeWarning, match="KeyError: 'tokens'") as caught:
        trainer.train()
    assert len([w for w in caught if "loopscope.watch" in str(w.message)]) == 1
    assert trainer.state.global_step == 3 and callback.monitor.history == []


# --- lightning -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning(tmp_path):
    """Functions that make a LightningModule over a net and a lightning.Trainer with a callback."""
    package = pytest.importorskip("lightning", reason="the lightning extra is not installed")

    class Module(package.LightningModule):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net, self.looped = net, adapted(net)

        def training_step(self, batch, batch_idx):
            return self.net(batch, batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def make(callback, **arguments):
        defaults = {
            "max_steps": STEPS,
            "accelerator": "cpu",
            "logger": package.pytorch.loggers.CSVLogger(str(tmp_path)),
            "log_every_n_steps": 5,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": str(tmp_path),
        }
        return package.Trainer(**{**defaults, **arguments}, callbacks=[callback])

    return Module, make


def loader(rows: int = 160):
    return torch.utils.data.DataLoader(sequences(rows), batch_size=4, collate_fn=torch.stack)


def test_lightning_logs_the_figures_and_warns_once(lightning, caplog, tmp_path):
    make_module, make_trainer = lightning
    module = make_module(Net("rmsnorm"))
    callback = callbacks.LoopscopeLightningCallback(every=5)  # the looped model is found in the module
    trainer = make_trainer(callback)
    with caplog.at_level(logging.WARNING, logger="loopscope"):
        trainer.fit(module, loader())
    (alarm,) = (record.getMessage() for record in caplog.records if record.name == callbacks.__name__)
    assert alarm.startswith("blind-spot: step")
    assert callback.monitor.model is module.looped and callback.monitor.closed
    assert [seen.step for seen in callback.monitor.history] == [1, *range(5, STEPS + 1, 5)]
    assert trainer.global_step == STEPS
    assert trainer.logged_metrics["loopscope/norm_K"].item() == pytest.approx(callback.monitor.history[-1].norms[-1])
    table = next(tmp_path.rglob("metrics.csv")).read_text()
    assert set(table.splitlines()[0].split(",")) >= KEYS


def test_stop_ends_the_lightning_training_at_the_alarm(lightning):
    make_module, make_trainer = lightning
    callback = callbacks.LoopscopeLightningCallback(every=5, on_blind_spot="stop")
    trainer = make_trainer(callback)
    trainer.fit(make_module(Net("rmsnorm")), loader())
    (alarm,) = callback.monitor.alarms
    assert trainer.global_step == alarm.step < STEPS


def test_a_raw_readout_trains_to_the_end_in_lightning(lightning):
    make_module, make_trainer = lightning
    callback = callbacks.LoopscopeLightningCallback(every=5, on_blind_spot="stop")
    trainer = make_trainer(callback)
    trainer.fit(make_module(Net("raw")), loader())
    assert trainer.global_step == STEPS and callback.monitor.alarms == []


def test_accumulated_batches_are_one_step_in_lightning(lightning):
    make_module, make_trainer = lightning
    callback = callbacks.LoopscopeLightningCallback(every=2)
    make_trainer(callback, max_steps=4, accumulate_grad_batches=3).fit(make_module(Net("raw")), loader())
    assert [seen.step for seen in callback.monitor.history] == [1, 2, 4]


def test_a_resumed_lightning_run_remembers_where_the_scale_started(lightning, tmp_path):
    make_module, make_trainer = lightning
    module, first = make_module(Net("rmsnorm")), callbacks.LoopscopeLightningCallback(every=50)
    trainer = make_trainer(first)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = callbacks.LoopscopeLightningCallback(every=50)
    make_trainer(again, max_steps=STEPS + 1).fit(module, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert again.monitor.monitor.start == first.monitor.history[0].norms[-1]
    assert [alarm.step for alarm in again.monitor.alarms] == [STEPS + 1]


# --- without either --------------------------------------------------------------------------------------------------


def test_importing_the_module_imports_neither_package():
    script = "import loopscope.adapters.callbacks, sys; print({'transformers', 'lightning'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("LoopscopeCallback", "transformers", "hf"), ("LoopscopeLightningCallback", "lightning", "lightning")],
)
def test_a_missing_package_is_an_error_that_names_the_extra(name, package, extra, monkeypatch):
    for loaded in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    afresh = importlib.util.module_from_spec(callbacks.__spec__)  # an import that nobody has asked for a class yet
    callbacks.__spec__.loader.exec_module(afresh)
    with pytest.raises(UnsupportedError, match=rf"{name} needs {package}.*: pip install 'loopscope\[{extra}\]'"):
        getattr(afresh, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        callbacks.KerasCallback  # noqa: B018


def test_an_unknown_reaction_is_refused():
    with pytest.raises(ConfigError, match=r"on_blind_spot = 'penalize'; allowed: warn, stop"):
        callbacks._Events(on_blind_spot="penalize")


def test_ids_and_targets_are_found_in_the_usual_batches():
    ids, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    assert ids_and_targets(ids) == (ids, None)
    assert ids_and_targets((ids, targets)) == (ids, targets)
    assert ids_and_targets([ids]) == (ids, None)
    assert ids_and_targets({"input_ids": ids, "targets": targets}) == (ids, targets)
    assert ids_and_targets({"input_ids": ids, "attention_mask": ids}) == (ids, None)
    shifted = ids_and_targets({"input_ids": ids, "labels": ids})[1]
    assert shifted.tolist() == [[2, 3, -100]], "labels are shifted by the model, so here too"


@pytest.mark.parametrize("batch", [{"pixels": torch.zeros(1)}, "text", []])
def test_a_batch_without_ids_says_how_to_name_them(batch):
    with pytest.raises(DataError, match="ids_of="):
        ids_and_targets(batch)


def test_documented_callbacks_run(tmp_path, monkeypatch):
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package, reason="the documented callbacks need the hf and lightning extras")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    blocks = [part.split("\n```")[0] for part in page.split("\n```py\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/monitoring.md", "exec"), {})
