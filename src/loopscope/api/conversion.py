"""`loopscope.convert`: a model of ours as a Hugging Face folder, and back as a run folder; nothing is half-written."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from loopscope.adapters.foreign import CONFIG_FILE, DTYPES, INDEX_FILE, read_json
from loopscope.adapters.native import MODEL_TYPE, PREFIX, config_of, own_tensors, to_fields
from loopscope.api.cards import Card, read_results
from loopscope.config import Config, ModelConfig, ObjectiveConfig
from loopscope.data.tokenizers import SETTINGS_FILE, TOKENIZER_FILE, Tokenizer
from loopscope.errors import ConfigError, RunError, UnsupportedError, words_of
from loopscope.files import MOST_JSON_BYTES, folder_written_whole, read_bytes, without_nan
from loopscope.machine import own_version, versions
from loopscope.model.looped_lm import LoopedLM
from loopscope.options import ConvertOptions, chosen
from loopscope.results.record import as_json, record_in, write_record
from loopscope.results.run import MANIFEST_FILE, DataRecord, Manifest
from loopscope.runs import RunFolder
from loopscope.targets import Opened, Say, open_target
from loopscope.training import checkpoint
from loopscope.training.session import read_data_record
from loopscope.words import TOKENIZERS

MOST_SHARD_BYTES = 5_000_000_000
"""Of one safetensors file; more than that becomes several with an index."""


@dataclass(frozen=True)
class Converted:
    """What `loopscope convert` prints."""

    target: str
    out: Path
    to: Literal["hf", "loopscope"]
    parameters: int
    files: list[str]
    pushed: str | None = None
    """Address of the repository it was pushed to."""

    def to_json(self) -> dict[str, Any]:
        """As `loopscope convert --json` prints it."""
        return {**vars(self), "out": str(self.out)}


def convert(
    target: str | Path | Opened,
    out: str | Path,
    options: ConvertOptions | None = None,
    *,
    shard_bytes: int = MOST_SHARD_BYTES,
    say: Say = lambda text: None,
    **fields: Any,
) -> Converted:
    """Write the model that `target` names to the folder `out`: for Hugging Face's libraries, or as a run folder.

    The folder is there when it is whole, and not before. `fields` are those of ConvertOptions.
    """
    options = chosen(ConvertOptions(), options, fields)
    api = None if options.push is None else _hub_api(options.push)
    place = Path(out).expanduser().absolute()
    _check_place(place, options.overwrite)
    opened = open_target(target, dtype="own")
    source = _Source.of(opened, options.dtype)
    with _written(place) as beside:
        for path in source.result_files():
            (beside / path.name).write_bytes(read_bytes(path, MOST_JSON_BYTES))
        if options.to == "hf":
            _write_hf(beside, source, place.name, shard_bytes)
        else:
            _write_run(beside, source)
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    pushed = None
    if api is not None and options.push is not None:
        pushed = _push(api, place, options.push, options.public, say)
    return Converted(opened.name, place, options.to, source.parameters, files, pushed)


# --- what is converted -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A model with everything that goes with its weights."""

    opened: Opened
    model: LoopedLM
    config: Config
    is_known: bool
    """Whether the configuration is that of its training, text and optimiser included."""
    text: DataRecord | None
    """What is on record of the text it was trained on."""
    results: Path | None
    """The folder with audit.json and its kin, where they are about these weights."""
    dtype: torch.dtype | None

    @classmethod
    def of(cls, opened: Opened, dtype: str | None) -> _Source:
        """Everything that is known of an opened model."""
        model = opened.model
        if not isinstance(model, LoopedLM):
            raise UnsupportedError(
                f"{opened.name} is a {type(model).__name__}, and only models on loopscope's own layers are converted; "
                "it goes on as the folder or factory that it comes from"
            )
        folder, fields = _exported(opened)
        if fields is not None:
            config, text = config_of(fields, f"{folder}/{CONFIG_FILE}"), record_in(fields.get("text"), DataRecord)
        else:
            objective = opened.objective or ObjectiveConfig()
            config = opened.config or Config(model=model.config, objective=objective)
            text = None if opened.run is None else read_data_record(opened.run.path)
            if text is not None and opened.tokenizer is not None:
                text = replace(text, tokenizer=opened.tokenizer.kind)
        run = None if opened.run is None or not opened.is_newest else opened.run.path
        return cls(
            opened=opened,
            model=model,
            config=replace(config, model=model.config),
            is_known=opened.config is not None or (fields is not None and fields.get("training") is not None),
            text=text,
            results=run if fields is None else folder,
            dtype=None if dtype is None else DTYPES[dtype],
        )

    @property
    def design(self) -> ModelConfig:
        """The model in our own words."""
        return self.model.config

    @property
    def parameters(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, each once."""
        found = {name: tensor.detach() for name, tensor in own_tensors(self.model).items()}
        return {name: (t if self.dtype is None else t.to(self.dtype)).contiguous() for name, t in found.items()}

    def result_files(self) -> Iterator[Path]:
        """Results that are about these weights."""
        if self.results is None:
            return
        audit, evaluation, _ = read_results(self.results)
        if audit is not None and audit.model.step == self.opened.step:
            yield self.results / "audit.json"
        if evaluation is not None and evaluation.step == self.opened.step:
            yield self.results / "eval.json"
        if (policy := self.results / "policy.json").is_file():
            yield policy


def _exported(opened: Opened) -> tuple[Path, dict[str, Any] | None]:
    """The folder that a model was opened from, and its config.json if that is one of ours."""
    folder = Path(opened.name)
    if opened.run is None and opened.config is None and (folder / CONFIG_FILE).is_file():
        fields = read_json(folder / CONFIG_FILE)
        return folder, fields if fields.get("model_type") == MODEL_TYPE else None
    return folder, None


# --- a Hugging Face folder -------------------------------------------------------------------------------------------


def _write_hf(beside: Path, source: _Source, name: str, shard_bytes: int) -> None:
    tensors = {PREFIX + name: tensor for name, tensor in source.tensors().items()}
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    tokenizer, special = source.opened.tokenizer, _special_ids(source.opened)
    fields = {
        **to_fields(source.config, source.design),
        "dtype": dtypes[0],
        **special,
        "use_cache": True,
        "step": source.opened.step,
        "text": as_json(source.text),
    }
    if not source.is_known:
        del fields["data"], fields["training"]
    _write_shards(beside, tensors, shard_bytes)
    _write_json(beside / CONFIG_FILE, fields)
    _write_json(
        beside / "generation_config.json", {name: value for name, value in special.items() if value is not None}
    )
    if tokenizer is not None:
        _write_tokenizer(beside, tokenizer, source.design.max_length)
    audit, evaluation, policy = read_results(beside)
    card = Card(
        name=name,
        design=source.design,
        parameters=source.parameters,
        dtype=" and ".join(dtypes),
        config=source.config if source.is_known else None,
        step=source.opened.step,
        text=source.text,
        audit=audit,
        evaluation=evaluation,
        policy=policy,
    )
    (beside / "README.md").write_text(card.to_markdown(), encoding="utf-8")


def _write_shards(beside: Path, tensors: Mapping[str, Tensor], most: int) -> None:
    """One model.safetensors, or several of at most so many bytes with the index that transformers reads."""
    shards: list[dict[str, Tensor]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], beside / "model.safetensors", metadata={"format": "pt"})
        return
    home = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, beside / file, metadata={"format": "pt"})
        home.update(dict.fromkeys(shard, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(beside / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": home})


def _special_ids(opened: Opened) -> dict[str, Any]:
    """Ids of the special tokens: what the folder said of the end, and the tokenizer's settings of the rest."""
    tokenizer, ends = opened.tokenizer, opened.end_ids
    ids = {name: None if tokenizer is None else tokenizer.special_id(f"{name}_token") for name in ("bos", "eos", "pad")}
    eos = list(ends) if len(ends) > 1 else ends[0] if ends else ids["eos"]
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["pad"]}


def _write_tokenizer(beside: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """tokenizer.json and what travels with it; settings that name a class of somebody's own code name the usual one."""
    (beside / TOKENIZER_FILE).write_text(tokenizer.definition, encoding="utf-8")
    for name, text in tokenizer.companions.items():
        (beside / name).write_text(text, encoding="utf-8")
    settings = dict(tokenizer.settings)
    if settings.pop("auto_map", None) is not None or "tokenizer_class" not in settings:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    usual = {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    _write_json(beside / SETTINGS_FILE, {**usual, **settings})


# --- a run folder ----------------------------------------------------------------------------------------------------


def _write_run(beside: Path, source: _Source) -> None:
    """Weights and tokenizer as a run that every verb opens; it has no optimiser state to resume from."""
    run = RunFolder(beside)
    run.create(source.config)
    if (tokenizer := source.opened.tokenizer) is not None:
        kind = "" if source.text is None else source.text.tokenizer
        (replace(tokenizer, kind=kind) if kind in TOKENIZERS else tokenizer).save(beside / "tokenizer")
    manifest = Manifest(converted_from=source.opened.name, command=sys.argv, versions=versions(), data=source.text)
    write_record(run.path / MANIFEST_FILE, manifest)
    checkpoint.save_weights(run.checkpoints, source.tensors(), source.opened.step or 0)


# --- places ----------------------------------------------------------------------------------------------------------


def _check_place(place: Path, overwrite: bool) -> None:
    """Refuse a place that holds anything, unless an earlier conversion wrote it and `overwrite` says to replace it."""
    if place.is_file():
        raise ConfigError(f"{place} is a file; name a folder")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{place} is not empty; name another folder, or replace it by --overwrite")
    if not _is_ours(place):  # whatever else is there is not ours to delete
        raise ConfigError(f"{place} was not written by loopscope convert, so --overwrite leaves it alone")


def _is_ours(place: Path) -> bool:
    """Whether a conversion wrote the folder."""
    for name, key in ((CONFIG_FILE, "model_type"), ("manifest.json", "converted_from")):
        try:
            found = read_json(place / name).get(key)
        except RunError:
            continue
        if found == MODEL_TYPE or (key == "converted_from" and found is not None):
            return True
    return False


@contextmanager
def _written(place: Path) -> Iterator[Path]:
    """A folder that becomes `place` when it is whole; what killed conversions left beside it is cleared away."""
    for left in place.parent.glob(f".{place.name}.*"):
        number = left.name.rpartition(".")[2]
        if number.isdigit() and not _is_running(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    with checkpoint.failures_of_the_disk(place), folder_written_whole(place) as beside:
        yield beside


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's, and running
        pass
    return True


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(without_nan(dict(value)), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


# --- the hub ---------------------------------------------------------------------------------------------------------


def _hub_api(name: str) -> Any:
    """The hub's client, asked for before anything is written; it finds the user's token itself."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UnsupportedError("--push needs huggingface_hub; run: pip install 'loopscope[hf]'") from None
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError.of("push", name, "expected ORG/NAME")
    try:
        hub.utils.validate_repo_id(name)
    except ValueError as error:
        raise ConfigError.of("push", name, words_of(error)) from None
    return hub.HfApi()


def _push(api: Any, folder: Path, name: str, public: bool, say: Say) -> str:
    """Upload the folder; what goes wrong there is told with where the folder is, which stays."""
    try:
        address = str(api.create_repo(name, private=not public, exist_ok=True))
        say(f"uploading to {address}")
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"loopscope {own_version()}")
    except Exception as error:  # no network, no right, no space: the library's own words say which
        why = f"{folder} is written, and could not be pushed to {name}: {words_of(error)}"
        raise RunError(why) from error
    return address
