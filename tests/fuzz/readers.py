"""Every file that loopscope reads, whole, with the code that reads it and what is right for it to say.

A reader gets a folder in which one file is damaged. It may raise one of our errors, or an OSError, which the command
line tells as a sentence. Otherwise what it returns must be right: equal to what the whole file says where damage can be
noticed, and of the right form where it cannot.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from atlas_samples import sample_atlas, write_atlas
from checkpoints import (
    HUGINN,
    OURO,
    PAPER,
    PARCAE,
    huginn_tensors,
    ouro_tensors,
    paper_tensors,
    parcae_tensors,
    save_folder,
    save_sharded,
)
from made_up import sample_calibration, sample_certificate, write_reproduction, write_run

import loopscope as ls
from loopscope.api.cards import Card
from loopscope.api.cards import read_results as read_card_results
from loopscope.config import Config, DataConfig, TrainingConfig, config_to_dict, load_config
from loopscope.data.corpora import open_corpus
from loopscope.data.packing import pack
from loopscope.data.tokenizers import bytes_tokenizer, load_tokenizer, read_tokenizer
from loopscope.inference.halting import Halting, parse_halting
from loopscope.inference.rules import RULES, Probe
from loopscope.machine import recall, remember
from loopscope.protocol import run_loops
from loopscope.results.checkpoint import GuardState, MonitorState, SavedRun
from loopscope.results.evaluation import Depth, Split, Throughput
from loopscope.results.ouro import (
    EXIT_THRESHOLDS,
    NORM_QUANTILES,
    GateLoop,
    GateSpread,
    GateThreshold,
    LoopStates,
    OuroModel,
    OuroRecord,
    OuroRequest,
    OuroStates,
    TaskScore,
)
from loopscope.results.record import encode, read_record, write_record
from loopscope.rows.ledger import Ledger
from loopscope.rows.spec import RowSpec
from loopscope.runs import RunFolder
from loopscope.show.atlas import render
from loopscope.show.formats import line_of
from loopscope.show.page import build_report
from loopscope.studies.atlas import collect
from loopscope.studies.atlas_properties import atlas_tables
from loopscope.studies.ouro_tables import ouro_tables
from loopscope.studies.paper_claims import judge_all
from loopscope.studies.results import read_results
from loopscope.studies.tables import all_tables, depths_csv
from loopscope.targets import open_target
from loopscope.training import checkpoint
from loopscope.training.distributed import Ranks
from loopscope.training.optimizers import Optimizers

MODEL = ls.ModelConfig(vocab_size=256, width=8, num_heads=2, num_layers=1, num_loops=2, max_length=8, dropout=0.0)
STEP = "checkpoints/step-00000003"
STATE = SavedRun(
    step=3,
    penalty_on=False,
    best_ce=4.25,
    best_step=2,
    guard=GuardState(recent=[4.5, 4.0], bad_in_a_row=0, rollbacks=0),
    monitor=MonitorState(start=1.5, since=None, recent=[(1, 0.5)], raised=["runaway"]),
    world_size=1,
)
LINES = [f"line {n} of a text about rivers, ä and {n * n} stones" for n in range(60)]
ROW = "per-loop+rmsnorm-s42"

Make = Callable[[Path], None]
Read = Callable[[Path], Any]
Right = Callable[[Any, Any], bool]
"""Whether a result is right, given what the whole file gives."""


@dataclass(frozen=True)
class Reader:
    """One file and one way to read it."""

    name: str
    file: str
    """Which is damaged, below the folder."""
    make: Make
    """Writes the folder."""
    read: Read
    right: Right
    mend: Callable[[Path, Path], None] | None = None
    """Makes checksums agree with the damaged file again: what is in it must be noticed by other means."""

    @property
    def suffix(self) -> str:
        """What kind of file it is."""
        return Path(self.file).suffix


def anything(result: Any, whole: Any) -> bool:
    """The reader leaves out what it cannot use, and its own checks say what may stay."""
    return True


# --- runs ------------------------------------------------------------------------------------------------------------


def make_run(folder: Path) -> None:
    """A run as training leaves it, with every file that comes later."""
    run = folder / "run"
    write_run(run, steps=3)
    config = Config(model=MODEL, data=DataConfig(tokenizer="bytes"), training=TrainingConfig(steps=3, batch=4))
    RunFolder(run).create(config)
    model = ls.build(MODEL, seed=0)
    checkpoint.save(run / "checkpoints", model, _optimizers(model), STATE)
    bytes_tokenizer().save(run / "tokenizer")
    (run / "row.json").write_text(json.dumps({"schema_version": 1, "name": "x", "state": "finished", "seed": 42}))
    (run / "log.txt").write_text("a line\nanother\n")
    write_record(run / "calibration.json", sample_calibration(sample_certificate("fixed", 2.0, 2.0)))


def _optimizers(model: Any) -> Optimizers:
    """With a state, as after a step."""
    optimizers = Optimizers(model, TrainingConfig())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    for part in optimizers.parts:
        part.step()
    return optimizers


def read_config(folder: Path) -> Config:
    return load_config(folder / "run/config.yaml")


def survives_writing(result: Config, whole: Config) -> bool:
    from loopscope.config import config_from_dict

    return config_from_dict(json.loads(json.dumps(config_to_dict(result), allow_nan=False))) == result


def open_and_use(folder: Path) -> list[Any]:
    """Open a run as every verb does, and run its model and tokenizer on a text."""
    opened = open_target(folder / "run")
    ids, counts = opened.tokenizer.encode_counted(["rivers"])[0]
    with torch.no_grad():
        trace = run_loops(opened.model, torch.zeros(1, 4, dtype=torch.long), num_loops=2)
    return [ids.tolist(), int(counts.sum()), trace.states[2].h_BTD.shape[-1]]


def whole_text_counted(result: list[Any], whole: list[Any]) -> bool:
    return result[1] == whole[1]


def resume(folder: Path) -> dict[str, Any]:
    """What `train --resume` takes from a checkpoint."""
    found = checkpoint.load(folder / "run" / STEP)
    found.resumable()
    model = ls.build(MODEL, seed=1)
    optimizers = Optimizers(model, TrainingConfig())
    found.restore_tensors(model, optimizers)
    tensors = checkpoint.model_tensors(model) | checkpoint.optimizer_tensors(model, optimizers)
    return {"step": found.step, **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()}}


def equal(result: Any, whole: Any) -> bool:
    return bool(result == whole)


def same_form(result: dict[str, Any], whole: dict[str, Any]) -> bool:
    """A forged checkpoint may hold other numbers, but all those of the model; an optimiser may start without any."""
    sizes = [{name: len(value) for name, value in each.items() if name != "step"} for each in (result, whole)]
    own = {name: size for name, size in sizes[1].items() if "/" not in name}
    return own.items() <= sizes[0].items() <= sizes[1].items()


def correct_sums(folder: Path, damaged: Path) -> None:
    """Write the checksum that belongs to the damaged file."""
    path = damaged.parent / "checksums.json"
    sums = json.loads(path.read_text())
    path.write_text(json.dumps({**sums, damaged.name: hashlib.sha256(damaged.read_bytes()).hexdigest()}))


def make_sharded(folder: Path) -> None:
    """The same with the checkpoint of a sharded run."""
    make_run(folder)
    shutil.rmtree(folder / "run" / STEP)
    model = ls.build(MODEL, seed=0)
    checkpoint.save_sharded(folder / "run/checkpoints", model, _optimizers(model), STATE, Ranks())


def shard_of() -> str:
    return f"{STEP}/shard-00001-model-00001-of-00001.safetensors"


def page(folder: Path) -> str:
    return build_report([folder / "run"]).html


def is_a_page(result: str, whole: str) -> bool:
    """Whatever was damaged: a page that is whole, and that no content of a file could break out into."""
    return result.rstrip().endswith("</html>") and "<script>alert" not in result


def metrics(folder: Path) -> tuple[list[Any], int]:
    """Everything that a resume does to metrics.jsonl."""
    run = RunFolder(folder / "run")
    last = run.last_step()
    run.forget_metrics_after(2)
    return run.read_metrics(), last


def metrics_kept(result: tuple[list[Any], int], whole: tuple[list[Any], int]) -> bool:
    return all(row.step <= 2 for row in result[0])


def ledger(folder: Path) -> Any:
    """What `reproduce` makes of a row's folder."""
    (folder / "rows").mkdir(exist_ok=True)
    (folder / "run").rename(folder / "rows" / ROW)
    config = Config(model=MODEL, training=TrainingConfig(steps=3))
    spec = RowSpec(condition="per-loop+rmsnorm", recipe="paper", seed=42, config=config, audit=False, halting=True)
    book = Ledger(folder)
    return book.status(spec), book.last_words(spec)


def a_state(result: Any, whole: Any) -> bool:
    return result[0].state in ("open", "failed", "finished") and 0 <= result[0].share_done <= 1


def line(folder: Path) -> int:
    return line_of(folder / "run/config.yaml", [("model", "readout")])


# --- reproductions ---------------------------------------------------------------------------------------------------


def make_grid(folder: Path) -> None:
    write_reproduction(folder / "grid", {"per-loop+rmsnorm": 1, "per-loop+raw": 1})


def results(folder: Path) -> list[str]:
    """Claims and tables, as `reproduce --rebuild` makes them."""
    found = read_results(folder / "grid")
    claims = judge_all(found)
    encode(claims)
    return [*(table.markdown() for table in all_tables(found, claims)), depths_csv(found)]


def tables_of_text(result: list[str], whole: list[str]) -> bool:
    return all(isinstance(table, str) and table for table in result)


# --- atlases ---------------------------------------------------------------------------------------------------------


def make_atlas(folder: Path) -> None:
    """An atlas whose rows are gone."""
    record = sample_atlas()
    names = {design.name for design in record.designs[:2]}
    entries = [entry for entry in record.entries if entry.design in names]
    write_atlas(folder / "atlas", replace(record, designs=record.designs[:2], entries=entries))


def atlas_page(folder: Path) -> str:
    """As `atlas --rebuild` makes it."""
    record = collect(folder / "atlas")
    encode(record)
    for table in atlas_tables(record):
        table.markdown()
    return render(record)


# --- text and tokens -------------------------------------------------------------------------------------------------


def make_texts(folder: Path) -> None:
    """The same documents in every kind of file."""
    import pyarrow
    import zstandard
    from pyarrow import parquet

    records = "".join(json.dumps({"text": line, "n": n}) + "\n" for n, line in enumerate(LINES))
    plain = "\n".join(LINES) + "\n"
    (folder / "a.txt").write_text(plain)
    (folder / "a.jsonl").write_text(records)
    (folder / "a.txt.gz").write_bytes(gzip.compress(plain.encode(), mtime=0))
    (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(records.encode()))
    parquet.write_table(pyarrow.table({"text": LINES}), folder / "a.parquet")


def documents_of(name: str) -> Read:
    def read(folder: Path) -> list[str]:
        corpus = open_corpus(DataConfig(data=(str(folder / name),), valid=(str(folder / name),)))
        return list(corpus.documents("train"))

    return read


def texts(result: list[str], whole: list[str]) -> bool:
    """Text that can be encoded; a compressed or checked format gives what was in it or an error."""
    return bool(result) and all(isinstance(each, str) and each.encode() is not None for each in result)


def make_tokens(folder: Path) -> None:
    make_texts(folder)
    tokens(folder)
    (packed,) = (folder / "cache/tokens").glob("*/")
    packed.rename(folder / "cache/tokens/packed")


def tokens(folder: Path) -> tuple[list[int], int, int]:
    """The packed tokens of a text: from the cache, or packed again where that is damaged."""
    source = (str(folder / "a.txt"),)
    corpus = open_corpus(DataConfig(data=source, valid=source))
    kept = folder / "cache/tokens/packed"
    tokenizer = bytes_tokenizer()
    if kept.exists():
        from loopscope.data.packing import _key

        kept.rename(kept.with_name(_key(corpus, "train", tokenizer)))
    found = pack(corpus, "train", tokenizer, cache=folder / "cache")
    return found[0 : len(found)].tolist(), found.num_bytes, found.bytes_between(0, len(found))


def correct_manifest(folder: Path, damaged: Path) -> None:
    """Write the checksum that belongs to a damaged shard or table."""
    path = damaged.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    for entry in (*manifest["shards"], manifest["token_bytes"], manifest["byte_exceptions"]):
        if entry["file"] == damaged.name:
            entry["sha256"] = hashlib.sha256(damaged.read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def saved_tokenizer(folder: Path) -> tuple[list[int], int]:
    tokenizer = load_tokenizer(folder / "run/tokenizer")
    ids, counts = tokenizer.encode_counted(["rivers ä"])[0]
    return ids.tolist(), int(counts.sum())


def named_tokenizer(folder: Path) -> tuple[list[int], int]:
    """Somebody's tokenizer.json."""
    tokenizer = read_tokenizer(folder / "run/tokenizer/tokenizer.json")
    ids, counts = tokenizer.encode_counted(["rivers ä"])[0]
    tokenizer.decode(ids.tolist())
    return ids.tolist(), int(counts.sum())


def counts_bytes(result: tuple[list[int], int], whole: tuple[list[int], int]) -> bool:
    """However the text is cut, the bytes of its tokens are its bytes; a tokenizer that finds none has none."""
    return result[1] == whole[1] or not result[0]


def make_memory(folder: Path) -> None:
    remember(folder / "memory.json", {"schema_version": 1, "sha256": "x", "documents": ["a"]})


def memory(folder: Path) -> int:
    from loopscope.data.corpora import _intact_documents

    return len(_intact_documents(recall(folder / "memory.json")) or [])


# --- other people's checkpoints --------------------------------------------------------------------------------------


def make_ouro(folder: Path) -> None:
    save_folder(folder / "hf", OURO, ouro_tensors(OURO))
    (folder / "hf/tokenizer.json").write_text(bytes_tokenizer().definition)


def make_ouro_shards(folder: Path) -> None:
    save_sharded(folder / "hf", OURO, ouro_tensors(OURO))


def make_family(config: dict[str, Any], tensors: Callable[[dict[str, Any]], dict[str, torch.Tensor]]) -> Make:
    def make(folder: Path) -> None:
        save_folder(folder / "hf", config, tensors(config))

    return make


FAMILIES = {
    "Huginn": make_family(HUGINN, huginn_tensors),
    "Parcae": make_family(PARCAE, parcae_tensors),
    "paper": make_family(PAPER, paper_tensors),
}


def make_ordinary(folder: Path) -> None:
    """A llama folder, without transformers: its tensors are those of an Ouro folder but for two norms and the gate."""
    theirs = ("_2.weight", "early_exit_gate.weight", "early_exit_gate.bias")
    tensors = {name: tensor for name, tensor in ouro_tensors(OURO).items() if not name.endswith(theirs)}
    save_folder(folder / "hf", {**OURO, "model_type": "llama"}, tensors)


def open_looped(folder: Path) -> list[int]:
    opened = open_target(f"{folder / 'hf'},loop-layers=1,num-loops=2")
    with torch.no_grad():
        trace = run_loops(opened.model, torch.zeros(1, 4, dtype=torch.long), num_loops=2)
        return list(opened.model.readout(trace.states[2], 2).shape)


def make_hrm(folder: Path) -> None:
    save_folder(folder / "hf", HRM, {})


HRM = {"model_type": "hrm_text", "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "H_cycles": 2}


def open_hf(folder: Path) -> list[int]:
    opened = open_target(folder / "hf")
    with torch.no_grad():
        trace = run_loops(opened.model, torch.zeros(1, 4, dtype=torch.long), num_loops=2)
        return list(opened.model.readout(trace.states[2], 2).shape)


def make_ouro_record(folder: Path) -> None:
    quantiles = [1.0] * len(NORM_QUANTILES)
    sweep, shares = {"norm": [1.0, 1.0], "none": [1.0, 9.0]}, {"norm": 1e-8, "none": 0.4}
    loop = LoopStates(k=3, sweep=sweep, radial_share=shares, norm=9.0, norm_quantiles=quantiles)
    at_loop = GateLoop(k=1, leaving=0.5, exit_probability=0.5, exit_quantiles=quantiles)
    thresholds = [GateThreshold(threshold=q, mean_loops=1.0, shares=[1.0]) for q in EXIT_THRESHOLDS]
    model = {"name": "hf", "step": None, "num_loops": 3, "width": 16, "vocab_size": 300, "parameters": 5}
    asked = OuroRequest(depths=[1, 3], data=["x"], tokenizer="bytes", length=None, max_tokens=None, sweep_tokens=8)
    record = OuroRecord(
        asked=asked,
        subject=OuroModel(**model, dtype="float32", device="cpu"),
        text="x",
        text_sha256="0" * 64,
        depths=Split(tokens=9, bytes=9, depths=[Depth(1, 2.0, 9.0), Depth(3, 1.5, None)]),
        throughput=[Throughput(1, 10.0)],
        states=OuroStates(tokens=8, alphas=[0.1, 1.0], loops=[loop]),
        gate=GateSpread(tokens=8, expected_loops=2.0, loops=[at_loop], thresholds=thresholds),
        tasks=[TaskScore(k=1, task="t", metric="acc", value=0.5, error=0.1)],
    )
    write_record(folder / "ouro.json", record)


def ouro_record(folder: Path) -> tuple[str, list[str]]:
    found = read_record(folder / "ouro.json", OuroRecord, {})
    return ("", []) if found is None else (found.verdict, [table.markdown() for table in ouro_tables(found)])


def a_verdict(found: tuple[str, list[str]], _: object) -> bool:
    return found[0] in ("", "holds", "does not hold here", "not measured")


def make_exported(folder: Path) -> None:
    """A model as `convert` writes it for Hugging Face's libraries, with settings of a tokenizer and results."""
    ls.convert("preset:demo", folder / "hf")
    (folder / "hf/tokenizer.json").write_text(bytes_tokenizer().definition)
    settings = {"eos_token": "a", "bos_token": {"content": "b"}, "chat_template": "{{ messages }}"}
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    write_run(folder / "results", steps=3)
    make_policy(folder / "results")


def settings_of_a_tokenizer(folder: Path) -> list[Any]:
    tokenizer = read_tokenizer(folder / "hf/tokenizer.json")
    return [tokenizer.encode("rivers"), tokenizer.special_id("bos_token"), tokenizer.end_ids]


def names_tokens(result: list[Any], whole: list[Any]) -> bool:
    ids = [each for each in (result[1], *result[2]) if each is not None]
    return result[0] == whole[0] and all(0 <= each < 256 for each in ids)


def card(folder: Path) -> str:
    """What an exported folder says of its results."""
    audit, evaluation, halting = read_card_results(folder / "results")
    made = Card(
        name="x",
        design=MODEL,
        parameters=1,
        dtype="float32",
        config=None,
        step=3,
        text=None,
        audit=audit,
        evaluation=evaluation,
        policy=halting,
    )
    return made.to_markdown()


def is_a_card(result: str, whole: str) -> bool:
    """No content of a file opens a heading, a tag or a row of its own."""
    headings = [line for line in result.splitlines() if line.startswith("#")]
    known = {"# x", "## Load", "## Configuration", "## Training", "## Audit", "## By depth", "## Halting"}
    return bool(result.encode()) and result.startswith("---\n") and set(headings) <= known and "<script" not in result


# --- policies --------------------------------------------------------------------------------------------------------


def make_policy(folder: Path) -> None:
    promise = {"max_ppl_increase": 0.01, "confidence": 0.95, "units": 64}
    whole = {
        "schema_version": 1,
        "rule": "kl",
        "threshold": -0.125,
        "num_loops": 4,
        "target": "run",
        "promise": promise,
    }
    (folder / "policy.json").write_text(json.dumps(whole, indent=2))


def make_probe_policy(folder: Path) -> None:
    make_policy(folder)
    whole = json.loads((folder / "policy.json").read_text())
    weights = [[0.5, -0.25, 1e-3], [0.0, 2.0, -1.0], [1.5, 0.125, 3.0]]
    probe = {"rule": "probe", "fill": "project", "width": 3, "probe": {"weights": weights, "biases": [0.5, -1.0, 0.0]}}
    (folder / "policy.json").write_text(json.dumps({**whole, **probe}, indent=2))


def policy(folder: Path) -> Halting:
    return parse_halting(str(folder / "policy.json"))


def is_a_policy(found: Halting, _: object) -> bool:
    """A known rule and a number; a probe has a finite weight for every channel of every loop but the last."""
    rule = found.rule
    if isinstance(rule, Probe):
        rows = [*rule.weights_KD, rule.biases_K]
        whole = len(rule.weights_KD) == len(rule.biases_K) == (found.num_loops or 0) - 1
        whole &= all(len(row) == found.width for row in rule.weights_KD)
        whole &= all(math.isfinite(each) for row in rows for each in row)
    else:
        whole = rule.name in RULES
    return whole and found.threshold == found.threshold and found.fill in ("copy", "project")


# --- all of them -----------------------------------------------------------------------------------------------------


def _readers() -> Iterable[Reader]:
    yield Reader("config", "run/config.yaml", make_run, read_config, survives_writing)
    yield Reader("where a setting is written", "run/config.yaml", make_run, line, lambda found, _: found >= 1)
    for file in ("config.yaml", f"{STEP}/state.json", f"{STEP}/checksums.json", f"{STEP}/model.safetensors"):
        yield Reader("open", f"run/{file}", make_run, open_and_use, whole_text_counted)
    for file in ("tokenizer/tokenizer.json", "tokenizer/tokenizer-manifest.json"):
        yield Reader("tokenizer of a run", f"run/{file}", make_run, saved_tokenizer, equal)
    yield Reader("tokenizer", "run/tokenizer/tokenizer.json", make_run, named_tokenizer, counts_bytes)
    for file in ("state.json", "model.safetensors", "optimizer.safetensors"):
        yield Reader("resume", f"run/{STEP}/{file}", make_run, resume, equal)
        yield Reader("resume, forged", f"run/{STEP}/{file}", make_run, resume, same_form, correct_sums)
    for file in (f"{STEP}/state.json", shard_of()):
        yield Reader("resume of shards, forged", f"run/{file}", make_sharded, resume, same_form, correct_sums)
    for file in ("config.yaml", "metrics.jsonl"):
        yield Reader("page", f"run/{file}", make_run, page, is_a_page)
    yield Reader("metrics", "run/metrics.jsonl", make_run, metrics, metrics_kept)
    for file in ("metrics.jsonl", "row.json", "log.txt"):
        yield Reader("ledger", f"run/{file}", make_run, ledger, a_state)
    for file in ("grid.json", *(f"rows/{ROW}/{name}.json" for name in ("row", "audit", "halting"))):
        yield Reader("claims and tables", f"grid/{file}", make_grid, results, tables_of_text)
    yield Reader("claims and tables", f"grid/rows/{ROW}/config.yaml", make_grid, results, tables_of_text)
    yield Reader("page of an atlas", "atlas/atlas.json", make_atlas, atlas_page, is_a_page)
    for file in ("a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.zst", "a.parquet"):
        yield Reader("text", file, make_texts, documents_of(file), texts)
    for file in ("manifest.json", "tokens-00000.bin", "token-bytes.bin", "byte-exceptions.bin"):
        yield Reader("packed tokens", f"cache/tokens/packed/{file}", make_tokens, tokens, equal)
    yield Reader("memory", "memory.json", make_memory, memory, lambda found, whole: found == 0)
    yield Reader("checks of Ouro", "ouro.json", make_ouro_record, ouro_record, a_verdict)
    yield Reader("halting policy", "policy.json", make_policy, policy, is_a_policy)
    yield Reader("halting policy with a probe", "policy.json", make_probe_policy, policy, is_a_policy)
    for file in ("config.json", "model.safetensors"):
        yield Reader("Hugging Face folder", f"hf/{file}", make_ouro, open_hf, anything)
    for name, make in FAMILIES.items():
        for file in ("config.json", "model.safetensors"):
            yield Reader(f"{name} folder", f"hf/{file}", make, open_hf, anything)
    yield Reader("ordinary folder, looped", "hf/config.json", make_ordinary, open_looped, anything)
    yield Reader("Hugging Face folder", "hf/tokenizer.json", make_ouro, open_hf, equal)
    for file in ("config.json", "model.safetensors"):
        yield Reader("exported folder", f"hf/{file}", make_exported, open_hf, anything)
    yield Reader(
        "settings of a tokenizer", "hf/tokenizer_config.json", make_exported, settings_of_a_tokenizer, names_tokens
    )
    for file in ("audit.json", "policy.json"):
        yield Reader("model card", f"results/{file}", make_exported, card, is_a_card)
    for file in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        yield Reader("Hugging Face shards", f"hf/{file}", make_ouro_shards, open_hf, equal)


READERS = list(_readers())
