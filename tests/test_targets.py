"""One word for a model: every kind of word opens, says what is known of it, and fails in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from checkpoints import OURO, VOCABULARY, ouro_tensors, save_folder
from strangers import SOURCE, write_text

import loopscope as ls
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig, config_to_yaml
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError, RunError
from loopscope.protocol import run_loops

SHA, BRANCH_SHA = "1" * 40, "2" * 40
TINY = Config(
    model=ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=3, max_length=24, dropout=0.0),
    objective=ObjectiveConfig(placement="terminal"),
    data=DataConfig(tokenizer="bytes", sequence_length=12),
    training=TrainingConfig(
        steps=4, batch=2, save_every=2, eval_every=4, eval_tokens=100, log_every=2, keep_last=3, seed=5
    ),
)


def logits_of(model, ids_BT) -> torch.Tensor:
    with torch.no_grad():
        return model.readout(run_loops(model, ids_BT).states[-1], model.num_loops)


# --- runs, designs, files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPSCOPE_CACHE", str(folder / "cache"))
        text = write_text(folder / "text.txt")
        ls.train(replace(TINY, data=replace(TINY.data, data=(str(text),))), folder / "run")
    return folder / "run"


def test_a_run_folder_opens_its_newest_checkpoint_with_all_the_run_knows(run, ids_BT):
    opened = ls.open(run)
    assert (opened.name, opened.step, opened.is_trained, opened.is_newest) == (str(run), 4, True, True)
    assert (opened.max_length, opened.sequence_length, opened.vocab_size) == (24, 12, 256)
    assert opened.objective == TINY.objective and opened.config.training == TINY.training
    assert opened.tokenizer.encode("ab") == [97, 98] and opened.notes == ()
    assert opened.run.path == run
    assert torch.equal(logits_of(opened.model, ids_BT), logits_of(ls.load(run), ids_BT))


def test_one_checkpoint_opens_as_it_was_at_its_step(run, ids_BT):
    """Step 0 is the initialisation of the run's own seed; step 2 is neither that nor the newest."""
    first, middle, last = (ls.open(run / "checkpoints" / f"step-{step:08d}") for step in (0, 2, 4))
    assert [opened.step for opened in (first, middle, last)] == [0, 2, 4]
    assert not any(opened.is_newest for opened in (first, middle, last))
    assert torch.equal(logits_of(first.model, ids_BT), logits_of(ls.build(TINY.model, seed=5).eval(), ids_BT))
    assert torch.equal(logits_of(last.model, ids_BT), logits_of(ls.open(run).model, ids_BT))
    assert not torch.equal(logits_of(middle.model, ids_BT), logits_of(last.model, ids_BT))
    assert middle.tokenizer == last.tokenizer == ls.open(run).tokenizer


def test_a_preset_opens_freshly_initialised_by_the_seed_that_is_asked_for():
    one, again, other = (ls.open("preset:demo", seed=seed) for seed in (1, 1, 2))
    weights = [opened.model.embedding.weight for opened in (one, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert (one.name, one.step, one.is_trained, one.tokenizer) == ("preset:demo", None, False, None)
    assert one.config == ls.preset("demo") and one.max_length == ls.preset("demo").model.max_length


def test_a_configuration_file_opens_the_design_it_describes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(config_to_yaml(TINY))
    opened = ls.open(path)
    assert (opened.name, opened.config, opened.is_trained) == (str(path), TINY, False)
    assert opened.model.config == TINY.model and opened.objective == TINY.objective


def test_what_is_already_open_is_left_as_it_is():
    opened = ls.open("preset:demo")
    assert ls.open(opened) is opened


# --- Hugging Face folders, local and of the hub ----------------------------------------------------------------------


@pytest.fixture
def ouro(tmp_path) -> Path:
    folder = save_folder(tmp_path / "their-ouro", OURO, ouro_tensors(OURO))
    (folder / "tokenizer.json").write_text(bytes_tokenizer().definition)
    return folder


def cached(cache: Path, name: str, **revisions: Path) -> None:
    """A cache as huggingface_hub lays it out: references to commits, and a snapshot folder for each commit."""
    home = cache / f"models--{name.replace('/', '--')}"
    for (reference, folder), sha in zip(revisions.items(), (SHA, BRANCH_SHA), strict=False):
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "refs" / reference).write_text(sha)
        (home / "snapshots").mkdir(exist_ok=True)
        (home / "snapshots" / sha).symlink_to(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """huggingface_hub's cache in a folder of the test's own, offline."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_local_folder_opens_with_the_tokenizer_beside_it_and_the_objective_of_its_kind(ouro):
    opened = ls.open(str(ouro))
    assert (opened.name, opened.step, opened.is_trained, opened.run) == (str(ouro), None, True, None)
    assert (opened.max_length, opened.vocab_size) == (OURO["max_position_embeddings"], VOCABULARY)
    assert opened.objective.placement == "gated"
    assert opened.tokenizer.decode(opened.tokenizer.encode("river")) == "river"


def test_a_name_of_the_hub_opens_the_main_revision_from_the_cache(hub, ouro, ids_BT):
    cached(hub, "their/ouro", main=ouro)
    opened = ls.open("hf:their/ouro")
    assert opened.name == "hf:their/ouro" and opened.tokenizer is not None
    assert torch.equal(logits_of(opened.model, ids_BT), logits_of(ls.open(ouro).model, ids_BT))


def test_a_revision_is_that_revision_by_branch_and_by_commit(hub, ouro, tmp_path, ids_BT):
    deeper = {**OURO, "total_ut_steps": 6}
    cached(hub, "their/ouro", main=ouro, deep=save_folder(tmp_path / "deeper", deeper, ouro_tensors(deeper)))
    assert ls.open("hf:their/ouro").model.num_loops == 4
    for word in ("hf:their/ouro@deep", f"hf:their/ouro@{BRANCH_SHA}"):
        opened = ls.open(word)
        assert (opened.model.num_loops, opened.name, opened.tokenizer) == (6, word, None)


def test_the_users_own_environment_names_cache_and_offline_mode(ouro, tmp_path):
    """As huggingface_hub reads it, when it is imported: in a process of its own."""
    cached(tmp_path / "home" / "hub", "their/ouro", main=ouro)
    code = (
        "import sys, loopscope as ls\n"
        "print(ls.open('hf:their/ouro').model.num_loops)\n"
        "from loopscope.cli import main\n"
        "sys.exit(main(['audit', 'hf:their/other']))"
    )
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (2, "4"), ended.stderr
    assert "error: hf:their/other cannot be fetched" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("word", ["hf:their/missing", "hf:their/missing@v2", "hf:", "hf:a/b/c", "hf:bad name"])
def test_what_the_hub_does_not_give_is_one_sentence_with_the_word(hub, word):
    with pytest.raises(RunError) as caught:
        ls.open(word)
    assert str(caught.value).startswith(f"{word} cannot be fetched: ") and "\n" not in str(caught.value)


def test_only_what_is_read_is_asked_for_and_nothing_that_could_run(ouro, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked: dict = {}

    def snapshot_download(name, *, revision=None, allow_patterns):
        asked.update(name=name, revision=revision, allow_patterns=allow_patterns)
        return str(ouro)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    ls.open("hf:their/ouro@abc")
    assert (asked["name"], asked["revision"]) == ("their/ouro", "abc")

    def wanted(file: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])

    read = ("config.json", "tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors")
    assert all(map(wanted, (*read, "model.safetensors.index.json")))
    refused = ("modeling_ouro.py", "configuration_ouro.py", "pytorch_model.bin", "model.pt", "model.pth", "x.ckpt")
    assert not any(map(wanted, (*refused, "training_args.bin", "README.md", "tokenizer.py", "x.pkl", "a/b.py")))


def test_a_missing_huggingface_hub_is_told_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["audit", "hf:their/ouro"]) == 2
    assert "loopscope[hf]" in capsys.readouterr().err


# --- factories -------------------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Their module in the working folder; gives a function that appends code to it and names a factory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    file = tmp_path / "their_model.py"
    file.write_text(SOURCE)

    def word(factory: str, code: str = "") -> str:
        file.write_text(SOURCE + code)
        return f"their_model:{factory}"

    yield word
    sys.modules.pop("their_model", None)


def test_a_factory_that_returns_a_model_gives_an_untrained_one_in_evaluation_mode(theirs):
    word = theirs("build")
    one, again, other = (ls.open(word, seed=seed) for seed in (3, 3, 4))
    assert (one.name, one.vocab_size, one.step, one.is_trained) == (word, 256, None, False)
    assert (one.tokenizer, one.objective, one.max_length, one.batches) == (None, None, None, None)
    assert not one.model.training and not one.model.module.drop.training
    weights = [opened.model.module.wte.weight for opened in (one, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_opening_a_factory_leaves_the_callers_random_numbers_alone(theirs):
    word = theirs("build")
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    ls.open(word)
    assert torch.equal(torch.rand(3), expected)


def test_a_pair_brings_the_batches_that_it_is_measured_on(theirs):
    code = "def pair():\n    return build(), [torch.arange(20).reshape(2, 10)]\n"
    opened = ls.open(theirs("pair", code))
    assert opened.batches[0][1, 0].item() == 10
    scores = ls.evaluate(opened).scores
    assert scores.tokens == 2 * 9 and scores.bytes is None


def test_a_factory_may_say_all_that_it_knows(theirs):
    code = (
        "from loopscope.data.tokenizers import bytes_tokenizer\n"
        "from loopscope.config import ObjectiveConfig\n"
        "def known():\n"
        "    return ls.Opened(name='x', model=build(), tokenizer=bytes_tokenizer(), max_length=40, vocab_size=256,\n"
        "        objective=ObjectiveConfig(placement='terminal'), notes=('made of rivers',))\n"
    )
    word = theirs("known", code)
    opened = ls.open(word)
    assert (opened.name, opened.max_length, opened.sequence_length) == (word, 40, 40)
    assert opened.tokenizer.kind == "bytes" and opened.objective.placement == "terminal"
    assert opened.notes == ("made of rivers",)


def test_a_configuration_file_may_name_the_model_instead_of_describing_it(theirs, tmp_path):
    word, path = theirs("build"), tmp_path / "theirs.yaml"
    model = {"target": word, "num_loops": 3, "vocab_size": 256, "max_length": 20}
    path.write_text(json.dumps({"model": model, "objective": {"norm_penalty": 0.1}}))
    opened = ls.open(path)
    assert type(opened.model.module).__name__ == "Network" and opened.sequence_length == 20
    assert opened.name == str(path) and opened.config.model.target == word


def test_the_objective_of_a_file_that_names_its_model_is_the_objective_it_is_audited_under(theirs, tmp_path):
    path = tmp_path / "theirs.yaml"
    model = {"target": theirs("build"), "num_loops": 3, "vocab_size": 256, "max_length": 20}
    path.write_text(json.dumps({"model": model, "objective": {"placement": "terminal", "norm_penalty": 0.1}}))
    opened = ls.open(path)
    assert opened.objective == ObjectiveConfig(placement="terminal", norm_penalty=0.1)
    assert opened.max_length == 20


FAULTS = {
    "raises": ("def broken():\n    return {}['key']\n", "failed at ", "KeyError: 'key'"),
    "is not callable": ("broken = 3\n", "their_model:broken is a int, not a function",),
    "returns nothing": ("def broken():\n    pass\n", "returned NoneType, which has no num_loops, embed, loop, readout"),
    "returns half a model": (
        "def broken():\n    model = build()\n    model.num_loops = None\n    return model\n", "has no num_loops",
    ),
    "wraps rubbish": (
        "def broken():\n    return ls.Opened(name='x', model=3, vocab_size=4)\n", "has no num_loops, embed",
    ),
    "needs arguments": ("def broken(size):\n    return build()\n", "failed", "size"),
    "is missing": ("", "module 'their_model' has no 'broken'"),
    "ends the process": ("import sys\ndef broken():\n    sys.exit(0)\n", "failed at ", "SystemExit: 0"),
    "ends the process on import": ("import sys\nsys.exit(0)\n", "cannot import 'their_model'", "SystemExit: 0"),
    "raises what cannot be printed": (
        "class Odd(Exception):\n    def __str__(self):\n        return 3\n"
        "def broken():\n    raise Odd\n", "failed at ", "Odd",
    ),
    "raises many lines": ("def broken():\n    raise ValueError('one\\ntwo\\nthree')\n", "ValueError: one"),
    "has loops that cannot be counted": (
        "class Model:\n    @property\n    def num_loops(self):\n        raise OSError('gone')\n"
        "def broken():\n    return Model()\n", "the model of their_model:broken failed at ", "OSError: gone",
    ),
    "cannot be parsed": ("def broken(:\n", "cannot import 'their_model'", "SyntaxError"),
    "fails on import": ("import math\nmath.nothing\n", "cannot import 'their_model'", "no attribute 'nothing'"),
    "has a model that fails": (
        "def broken():\n    net = Network()\n    net.turn = lambda x, k: x @ net.wte.weight\n    return adapted(net)\n",
        "their_model:broken", "RuntimeError",
    ),
    "has a vocabulary of one": (
        "def broken():\n    net = Network()\n    net.predict = lambda x, k: x[..., :1]\n    return adapted(net)\n",
        "fewer than two logits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", ["audit", "train"])
def test_a_factory_that_fails_is_one_sentence_and_exit_code_2(theirs, fault, verb, capsys):
    code, *words = FAULTS[fault]
    assert main([verb, theirs("broken", code)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "error: " in said.err and "Traceback" not in said.err
    assert said.err.count("\n") <= 2 and all(word in said.err for word in words), said.err


@pytest.mark.parametrize("verb", ["audit", "eval", "remedy", "train"])
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("nowhere", "nowhere is not a run folder"),
        ("missing_module_xyz:build", "cannot import 'missing_module_xyz'"),
        (":build", ":build"),
        ("./their_model:build", "./their_model"),
        ("..their_model:build", "..their_model"),
        ("preset:nanno", "did you mean 'nano'"),
        ("nowhere.yaml", "cannot read the configuration nowhere.yaml"),
    ],
)
def test_a_word_that_names_nothing_is_one_sentence_in_every_verb(verb, word, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([verb, word]) == 2
    said = capsys.readouterr()
    assert said.out == "" and sentence in said.err and "Traceback" not in said.err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_configuration_and_an_empty_folder_name_what_is_allowed(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    for word in (tmp_path / "weights.bin", tmp_path):
        with pytest.raises(RunError, match=str(word)):
            ls.open(word)


def test_a_file_with_a_target_says_which_of_its_fields_are_missing(tmp_path):
    path = tmp_path / "half.yaml"
    path.write_text("model: {target: 'their_model:build', num_loops: 3}\n")
    with pytest.raises(ConfigError, match="also needs vocab_size, max_length"):
        ls.open(path)
