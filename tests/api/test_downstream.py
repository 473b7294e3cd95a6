"""`loopscope eval --tasks`: lm-evaluation-harness at every depth, on tasks in a folder and without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from strangers import SOURCE, write_text
from torch.nn import functional as F

import loopscope as ls
from loopscope.api.downstream import Likelihoods
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError, RunError, UnsupportedError

pytest.importorskip("lm_eval")

WORDS = ["sea", "mountain", "stones"]
QUESTIONS = [{"question": f"line {n} of a text about rivers and", "choices": WORDS, "answer": n % 3} for n in range(7)]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
"""
TASKS = {
    "choice": """task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "written": """task: written
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of a few steps and a folder of tasks."""
    place = tmp_path_factory.mktemp("downstream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPSCOPE_CACHE", str(place / "cache"))
        config = Config(
            model=ModelConfig(
                vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=3, max_length=48, dropout=0.0
            ),
            data=DataConfig(data=(str(write_text(place / "text.txt")),), tokenizer="bytes"),
            training=TrainingConfig(steps=30, batch=4, lr=0.01, eval_tokens=64, threads=1),
        )
        ls.train(config, place / "run")
    (place / "tasks").mkdir()
    data = place / "tasks/questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, text in TASKS.items():
        (place / f"tasks/{name}.yaml").write_text(text + COMMON % data)
    return place


@pytest.fixture(autouse=True)
def offline(place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "datasets"))


def log_likelihood(opened: ls.Opened, context: str, continuation: str, k: int) -> float:
    """By hand: the sum of log-probabilities of the continuation's bytes, one text at a time."""
    ids = torch.tensor([list((context + continuation).encode())])
    with torch.no_grad():
        logits = opened.model.readout(ls.run_loops(opened.model, ids, num_loops=k).states[k], k)
    ce = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    return -float(ce[-len(continuation.encode()) :].sum())


def test_scores_by_depth_are_those_of_log_likelihoods_taken_one_by_one(place):
    opened = ls.open(place / "run")
    found = ls.evaluate_tasks(opened, ["choice"], depths=[1, 3, 5], task_folder=place / "tasks")
    by_metric = {score.metric: score for score in found.tasks}
    accuracy = {depth.k: depth.value for depth in by_metric["acc"].depths}
    assert by_metric["acc"].samples == 7 and by_metric["acc"].higher_is_better is True
    for k in (1, 3, 5):
        chosen = []
        for row in QUESTIONS:
            scores = [log_likelihood(opened, row["question"], f" {word}", k) for word in WORDS]
            lengths = [len(word) for word in WORDS]
            chosen.append((scores.index(max(scores)), scores, lengths))
        right = [best == row["answer"] for (best, _, _), row in zip(chosen, QUESTIONS, strict=True)]
        assert accuracy[k] == pytest.approx(sum(right) / 7)


def test_log_likelihoods_are_ours_and_those_of_the_harness_on_our_transformers_model(place, tmp_path):
    transformers = pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    import loopscope.hf  # noqa: F401

    opened = ls.open(place / "run")
    ls.convert(opened, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", pad_token="\x00")
    likelihoods = Likelihoods.of(opened, [1, 3], batch=4, progress=lambda *_: None)
    pairs = [(row["question"], f" {word}") for row in QUESTIONS for word in WORDS]
    pairs.append(("x" * 60, " and more"))  # longer than the model takes: the beginning is dropped
    requests = [(tuple(context.encode()), tuple(rest.encode())) for context, rest in pairs]
    for k in (1, 3):
        model.config.num_loops = k
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu", prefix_token_id=10)
        instances = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        expected = theirs.loglikelihood(instances, disable_tqdm=True)
        for ours, (value, greedy) in zip(likelihoods.at(requests, k), expected, strict=True):
            assert ours[0] == pytest.approx(value, abs=1e-5) and ours[1] == greedy
    for (value, _), (context, rest) in zip(likelihoods.at(requests[:-1], 3), pairs, strict=False):
        assert value == pytest.approx(log_likelihood(opened, context, rest, 3), abs=1e-5)


def test_rolling_and_written_answers_are_scored_too_and_printed_as_table_bars_and_json(place, capsys):
    arguments = ["eval", str(place / "run"), "--tasks", "rolling,written", "--task-folder", str(place / "tasks")]
    assert main([*arguments, "--depths", "1,3", "--limit", "4"]) == 0
    printed = capsys.readouterr().out
    assert "bits_per_byte ↓" in printed and "exact_match ↑" in printed and "█" in printed
    assert main([*arguments, "--depths", "1,3", "--limit", "4", "--json"]) == 0
    rows = {row["task"]: row for row in json.loads(capsys.readouterr().out)["tasks"]}
    opened = ls.open(place / "run")
    start = "\n"  # a blank line stands for the beginning: this tokenizer names no token for it
    for depth in rows["rolling"]["depths"]:
        nats = -sum(log_likelihood(opened, start, row["question"], depth["k"]) for row in QUESTIONS[:4])
        count = sum(len(row["question"].encode()) for row in QUESTIONS[:4])
        assert depth["value"] == pytest.approx(nats / count / 0.6931471805599453, abs=1e-5)
    for depth in rows["written"]["depths"]:
        texts = [
            ls.generate(opened, row["question"], num_loops=depth["k"], max_tokens=4, stop=("\n",)).text
            for row in QUESTIONS[:4]
        ]
        right = sum(text == WORDS[row["answer"]] for text, row in zip(texts, QUESTIONS, strict=False))
        assert depth["value"] == pytest.approx(right / 4)


def test_one_pass_serves_all_depths(place, monkeypatch):
    opened = ls.open(place / "run")
    calls = []
    loop = type(opened.model).loop
    monkeypatch.setattr(type(opened.model), "loop", lambda self, *a, **k: calls.append(1) or loop(self, *a, **k))
    ls.evaluate_tasks(opened, ["choice"], depths=[1, 2, 3], task_folder=place / "tasks", batch=64)
    assert len(calls) == 3


def test_a_model_of_somebody_elses_is_scored_through_the_protocol(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    (tmp_path / "their_model.py").write_text(SOURCE)
    (tmp_path / "tokenizer.json").write_text(bytes_tokenizer().definition)
    opened = ls.open("their_model:build")
    found = ls.evaluate_tasks(
        "their_model:build", ["rolling"], depths=[1], task_folder=place / "tasks", tokenizer="bytes", limit=2
    )
    nats = -sum(log_likelihood(opened, "\n", row["question"], 1) for row in QUESTIONS[:2])
    count = sum(len(row["question"]) for row in QUESTIONS[:2])
    assert found.tasks[0].depths[0].value == pytest.approx(nats / count / 0.6931471805599453, abs=1e-4)


def test_mistakes_are_sentences(place, tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="no such task"):
        ls.evaluate_tasks(place / "run", ["choise"], task_folder=place / "tasks")
    with pytest.raises(ConfigError, match="no such folder"):
        ls.evaluate_tasks(place / "run", ["choice"], task_folder=tmp_path / "nowhere")
    (tmp_path / "broken.yaml").write_text(
        TASKS["choice"].replace("task: choice", "task: broken") + COMMON % "none.jsonl"
    )
    with pytest.raises(RunError, match="broken cannot be evaluated"):
        ls.evaluate_tasks(place / "run", ["broken"], task_folder=tmp_path)
    assert main(["eval", "preset:nano", "--tasks", "choice", "--speed"]) == 2
    assert "speed = True: is about text, and --tasks asks for tasks" in capsys.readouterr().err
    assert main(["eval", "preset:nano", "--limit", "3"]) == 2
    assert "limit = 3: is for --tasks" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'loopscope\[eval\]'"):
        ls.evaluate_tasks(place / "run", ["choice"])
