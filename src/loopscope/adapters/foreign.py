"""Somebody else's checkpoint on this machine: the fields of its config.json and its tensors, read with suspicion.

Nothing is executed, unpickled or downloaded. A field that is missing is not guessed, since the defaults of the class
that wrote it may differ; a tensor too many is as wrong as one too few. A family's adapter makes an empty model and a
`Layout`; the same table fills the model from a folder and writes it back.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from loopscope.config import ModelConfig, ObjectiveConfig
from loopscope.errors import ConfigError, RunError, UnsupportedError
from loopscope.files import open_file, read_text
from loopscope.model.looped_lm import build
from loopscope.protocol import LoopedModel
from loopscope.words import PICKLED

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MOST_CONFIG_BYTES = 64 << 20
"""Largest config.json or index that is read; the index of a model of 600 billion parameters has 9 MB."""
MOST_NAMED = 8
"""Tensors of each kind that a diff names; the names of a wrong prefix would fill a page."""
BACKPROP_LOOPS = 8
"""Loops that published training back-propagates through, where config.json does not say (Huginn's)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Floating-point kinds that weights may be opened in."""
OWN_DTYPE = "own"
"""The dtype that a folder's weights are stored in."""
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Names of safetensors for kinds of numbers that are weights as they stand."""

Shape = tuple[int, ...]
Layout = dict[str, dict[str, Shape]]
"""Our parameter or buffer → their tensors, with shapes, whose rows stacked in this order make it."""


class FieldError(ConfigError):
    """A field of a config.json is missing or of the wrong kind; the message names file and field."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A model of somebody else on the protocol, with what an audit wants to know of it.

    An adapter describes it; `fill` gives it its weights.
    """

    make: Callable[[], LoopedModel]
    """Builds it empty, on the meta device: only once a folder is known to hold what it needs."""
    vocab_size: int
    max_length: int
    objective: ObjectiveConfig
    """How this kind of model is trained; no checkpoint says so itself."""
    layout: Layout
    """Where every tensor of its files goes."""
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Our parameters that their files do not have, and what they are: gains of 1, an adapter yet to be trained."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may hold besides, each the copy of another: a tied head."""
    unused: Collection[str] = ()
    """Tensors that a file may hold besides and that the model does not read: tables of rotary angles."""
    notes: tuple[str, ...] = ()
    """What a reader of its audit should know."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    step: int | None = None
    """Training steps behind the weights, where the folder says so."""

    @classmethod
    def of_design(
        cls, model: ModelConfig, objective: ObjectiveConfig, layout: Layout, *, embedding: str, **rest: Any
    ) -> Self:
        """One of our own designs; files may hold a tied head as a copy of their tensor `embedding`."""
        return cls(
            make=partial(build, model, device="meta"),
            vocab_size=model.vocab_size,
            max_length=model.max_length,
            objective=objective,
            layout=layout,
            copies={"lm_head.weight": embedding} if model.tie_head else {},
            **rest,
        )

    @cached_property
    def model(self) -> LoopedModel:
        """The model itself."""
        return self.make()

    @property
    def network(self) -> nn.Module:
        """The model as what holds its parameters."""
        assert isinstance(self.model, nn.Module)
        return self.model


@dataclass(frozen=True)
class Fields:
    """The fields of a config.json; every error names the file and the field."""

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """A field that may be absent or null."""
        return self.values.get(name)

    def whole(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self._present(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FieldError(f"{self.path}: {name} = {value!r} is not a whole number of at least 1")
        return value

    def number(self, name: str) -> float:
        """A number above 0."""
        value = self._present(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise FieldError(f"{self.path}: {name} = {value!r} is not a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; absent and null are false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise FieldError(f"{self.path}: {name} = {value!r} is neither true nor false")
        return bool(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A token's id, or a list of them; none where the field is absent or null."""
        value = self.values.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
            raise FieldError(f"{self.path}: {name} = {value!r} is not a token's id, nor a list of them")
        return tuple(found)

    def rope_base(self) -> float:
        """rope_theta, which newer configurations keep among the rope_parameters."""
        parameters = self.get("rope_parameters")
        if parameters is None:
            return self.number("rope_theta")
        if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
            raise self.unsupported("rope_parameters", "only rope_type default is")
        return Fields(self.path, parameters).number("rope_theta")

    def inside(self, name: str) -> Fields | None:
        """The fields of an object among them; None where it is absent or null."""
        values = self.get(name)
        if values is None:
            return None
        if not isinstance(values, dict):
            raise FieldError(f"{self.path}: {name} = {values!r} is not a mapping")
        return Fields(self.path, values)

    def only(self, **allowed: Any) -> None:
        """Refuse a field that says another thing than the one that we have; one that is absent says nothing."""
        for name, value in allowed.items():
            if self.get(name) is not None and self.get(name) != value:
                raise self.unsupported(name, f"only {json.dumps(value)} is")

    def one_of(self, name: str, allowed: Collection[str]) -> str:
        """A word, one of these."""
        value = self._present(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.unsupported(name, f"only {', '.join(allowed)} are")
        return value

    def padded_vocab_size(self) -> int:
        """Rows of an embedding that is padded to a multiple (the families that come of litgpt)."""
        if self.get("padded_vocab_size") is not None:
            return self.whole("padded_vocab_size")
        multiple = 1 if self.get("padding_multiple") is None else self.whole("padding_multiple")
        return -(-self.whole("vocab_size") // multiple) * multiple

    def check_plain_transformer(self, *, own_head_width: bool = False) -> None:
        """Refuse what would change the layers into ones that we do not have, by the names that most families share."""
        if self.get("hidden_act") != "silu":
            raise self.unsupported("hidden_act", "only silu is")
        for name in ("attention_bias", "mlp_bias"):
            if self.flag(name):
                raise self.unsupported(name, "only false is")
        for name in ("rope_scaling", "quantization_config"):
            if self.get(name) is not None:
                raise self.unsupported(name, "only null is")
        width, num_heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        if own_head_width and self.get("head_dim") is not None:
            if self.whole("head_dim") % 2:
                raise self.unsupported("head_dim", "rotary positions turn pairs of channels")
            return
        if width % num_heads:
            raise self.unsupported("num_attention_heads", f"it does not divide hidden_size = {width}")
        if width // num_heads % 2:
            raise self.unsupported("num_attention_heads", f"it cuts hidden_size = {width} into odd heads")
        if self.get("head_dim") is not None and self.whole("head_dim") != width // num_heads:
            raise self.unsupported("head_dim", f"only hidden_size / num_attention_heads = {width // num_heads} is")

    def check_full_attention(self) -> None:
        """Refuse layers that do not attend to everything before."""
        kinds = self.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
            raise self.unsupported("layer_types", "only full_attention is")

    def backprop_loops(self) -> int:
        """Loops that training back-propagates through (the families that come of litgpt)."""
        name = "mean_backprop_depth"
        return BACKPROP_LOOPS if self.get(name) is None else self.whole(name)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around what makes a configuration of the fields: a rule of ours that it breaks is told with the file."""
        try:
            yield
        except FieldError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{self.path} describes no model that can be built: {error}") from error

    def unsupported(self, name: str, why: str) -> UnsupportedError:
        """The error for a value that may well be right, but that the adapter cannot express."""
        return UnsupportedError(f"{self.path}: {name} = {self.get(name)!r} is not supported: {why}")

    def _present(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise FieldError(f"{self.path}: the field {name} is missing")
        return self.values[name]


class Weights:
    """The tensors of a folder, in one .safetensors file or in those that its index names; each read when asked for.

    Files are mapped, not read: a tensor that a model takes as it is stays a view of its file, and memory holds of it
    what has been touched.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        for path in _files(folder):
            self._opened[path] = _open(path)
            for name in self._opened[path].keys():  # noqa: SIM118 (an opened file is no mapping)
                if name in self._home:
                    raise RunError(f"{path} holds the tensor {name}, which another file of the folder holds too")
                self._home[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def check(self, expected: Mapping[str, Shape], optional: Collection[str] = ()) -> None:
        """Refuse a folder whose names and shapes are not exactly these; nothing but headers is read.

        All that does not fit is in the message, since one name says little about what went wrong with the others.
        """
        missing, beyond = expected.keys() - self._home.keys(), self._home.keys() - expected.keys() - set(optional)
        found = {name: tuple(self._header(name).get_shape()) for name in expected.keys() & self._home.keys()}
        reshaped = {name for name, shape in found.items() if shape != expected[name]}
        if not (missing or beyond or reshaped):
            return
        lines = [f"{self.folder} does not hold the tensors that its config.json describes"]
        lines += _listed("missing", ((name, f"{name} {expected[name]}") for name in missing))
        lines += _listed("unexpected", ((name, name) for name in beyond))
        lines += _listed("wrong shape", ((name, f"{name} is {found[name]}, not {expected[name]}") for name in reshaped))
        raise RunError("\n  ".join(lines))

    def dtype(self) -> torch.dtype:
        """What most of the numbers are stored in."""
        numbers: Counter[torch.dtype] = Counter()
        for name in self._home:
            numbers[self._stored(name)] += torch.Size(self._header(name).get_shape()).numel()
        return max(numbers, key=lambda dtype: numbers[dtype])

    def stacked(self, names: Mapping[str, Shape], dtype: torch.dtype) -> Tensor:
        """Tensors of these names on top of each other; one alone that has the dtype stays a view of its file."""
        name = next(iter(names))
        if len(names) == 1 and self._stored(name) == dtype:
            return self._tensor(self._opened[self._home[name]], name)
        if len(names) == 1:
            return self._tensor(_open(self._home[name]), name).to(dtype)
        rows = sum(shape[0] for shape in names.values())
        whole = torch.empty(rows, *next(iter(names.values()))[1:], dtype=dtype)
        for name, part in zip(names, whole.split([shape[0] for shape in names.values()]), strict=True):
            self._stored(name)
            # A mapping of its own, which goes once it is copied: of what is in memory twice, there is never more.
            part.copy_(self._tensor(_open(self._home[name]), name))
        return whole

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same."""
        first, second = (self._tensor(_open(self._home[name]), name) for name in (one, other))
        return torch.equal(first, second)

    def _stored(self, name: str) -> torch.dtype:
        kind = self._header(name).get_dtype()
        if kind not in _STORED:
            raise UnsupportedError(f"{self.folder}: {name} is of {kind}; quantised weights are not read")
        return _STORED[kind]

    def _header(self, name: str) -> Any:
        return self._opened[self._home[name]].get_slice(name)

    def _tensor(self, opened: Any, name: str) -> Tensor:
        try:
            return opened.get_tensor(name)
        except SafetensorError as error:
            raise RunError(f"{self.folder}: {name} cannot be read: {error}") from error


def fill(foreign: Foreign, weights: Weights, dtype: torch.dtype | None = torch.float32) -> None:
    """Give an empty model the folder's weights, which must fit exactly; None is the dtype they are stored in.

    Parameters become the tensors themselves: the model is never initialised, and held once.
    """
    shapes = {name: shape for theirs in foreign.layout.values() for name, shape in theirs.items()}
    weights.check(shapes | {copy: shapes[of] for copy, of in foreign.copies.items() if copy in weights}, foreign.unused)
    dtype = dtype or weights.dtype()
    for copy, of in foreign.copies.items():
        if copy in weights and not weights.are_equal(copy, of):
            raise RunError(
                f"{weights.folder}: {copy} should be a copy of {of}, to which config.json ties it, and is not"
            )
    for ours in (*foreign.layout, *foreign.given):
        home, _, leaf = ours.rpartition(".")
        module, given = foreign.network.get_submodule(home), foreign.given.get(ours)
        empty = getattr(module, leaf)
        tensor = weights.stacked(foreign.layout[ours], dtype) if given is None else given.to(dtype, copy=True)
        tensor = tensor.view(empty.shape)
        is_learned = isinstance(empty, nn.Parameter)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=empty.requires_grad) if is_learned else tensor)
    assert not any(tensor.is_meta for tensor in foreign.network.state_dict().values()), "the layout forgets a tensor"
    foreign.network.eval()


def tensors_of(network: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The model's parameters under their names and in their shapes: what `fill` has read."""
    tensors: dict[str, Tensor] = {}
    for ours, theirs in layout.items():
        home, _, leaf = ours.rpartition(".")
        parameter = getattr(network.get_submodule(home), leaf).detach()
        if len(theirs) == 1:
            tensors |= {name: parameter.reshape(shape) for name, shape in theirs.items()}
        else:
            parts = parameter.split([shape[0] for shape in theirs.values()])
            tensors |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return tensors


def llama_design(fields: Fields, base: ModelConfig | None = None, **own: Any) -> ModelConfig:
    """A design whose sizes have the names that llama gave them; `own` is what else the family has, beyond `base`."""
    with fields.building():
        return replace(
            base or ModelConfig(),
            vocab_size=fields.whole("vocab_size"),
            width=fields.whole("hidden_size"),
            num_heads=fields.whole("num_attention_heads"),
            mlp_width=fields.whole("intermediate_size"),
            dropout=0.0,
            positions="rope",
            max_length=fields.whole("max_position_embeddings"),
            rope_base=fields.rope_base(),
            norm_eps=fields.number("rms_norm_eps"),
            tie_head=fields.flag("tie_word_embeddings"),
            **own,
        )


def litgpt_design(fields: Fields, **own: Any) -> ModelConfig:
    """A design of the families that come of litgpt (Huginn, Parcae); `own` is what else the family has."""
    with fields.building():
        return ModelConfig(
            vocab_size=fields.padded_vocab_size(),
            width=fields.whole("n_embd"),
            prelude_layers=fields.whole("n_layers_in_prelude"),
            num_layers=fields.whole("n_layers_in_recurrent_block"),
            coda_layers=fields.whole("n_layers_in_coda"),
            num_loops=fields.whole("mean_recurrence"),
            mlp_width=fields.whole("intermediate_size"),
            dropout=0.0,
            positions="rope",
            max_length=fields.whole("block_size"),
            rope_pairs="interleaved",
            norm_eps=fields.number("norm_eps"),
            tie_head=fields.flag("tie_embeddings"),
            **own,
        )


def outside(config: ModelConfig, embedding: str, norm: str) -> Layout:
    """What nearly every family has around its layers: embedding, the norm that is read through, a head of its own."""
    table: Layout = {
        "embedding.weight": {embedding: (config.vocab_size, config.width)},
        "readout_map.norm.weight": {norm: (config.width,)},
    }
    if not config.tie_head:
        table["unembedding.weight"] = {"lm_head.weight": (config.vocab_size, config.width)}
    return table


def layers(one: Layout, places: Iterable[tuple[str, str]]) -> Layout:
    """The table of one layer at all places of a layer, ours and theirs."""
    return {
        f"{ours}.{name}": {f"{theirs}.{each}": shape for each, shape in parts.items()}
        for ours, theirs in places
        for name, parts in one.items()
    }


def llama_layer(config: ModelConfig) -> Layout:
    """One layer by the names that llama gave its tensors."""
    width, hidden = config.width, config.mlp_hidden
    return {
        "attention_norms.norm.weight": {"input_layernorm.weight": (width,)},
        "attention.qkv.weight": attention_rows(config, [f"self_attn.{name}_proj.weight" for name in "qkv"]),
        "attention.out.weight": {"self_attn.o_proj.weight": (width, config.attention_width)},
        "feed_forward_norms.norm.weight": {"post_attention_layernorm.weight": (width,)},
        "feed_forward.up.weight": {"mlp.gate_proj.weight": (hidden, width), "mlp.up_proj.weight": (hidden, width)},
        "feed_forward.out.weight": {"mlp.down_proj.weight": (width, hidden)},
    }


def litgpt_places(config: ModelConfig) -> list[tuple[str, str]]:
    """Our layers and theirs, in the families that come of litgpt (Huginn, Parcae)."""
    stacks = (
        ("prelude", "prelude", config.prelude_layers),
        ("recurrence.core", "core_block", config.num_layers),
        ("coda", "coda", config.coda_layers),
    )
    return [
        (f"{ours}.layers.{index}", f"transformer.{theirs}.{index}")
        for ours, theirs, count in stacks
        for index in range(count)
    ]


def attention_rows(config: ModelConfig, names: Iterable[str]) -> dict[str, Shape]:
    """Queries, keys and values as three matrices, in the order of our one."""
    rows = (config.attention_width, config.kv_width, config.kv_width)
    return {name: (count, config.width) for name, count in zip(names, rows, strict=True)}


def randomly_deep(num_loops: int, backprop_loops: int) -> ObjectiveConfig:
    """The last loop's cross-entropy at a random depth, back-propagated through the last loops."""
    if num_loops == 1:
        return ObjectiveConfig(placement="terminal")
    return ObjectiveConfig(
        placement="terminal", depth="poisson-lognormal", backprop_loops=min(backprop_loops, num_loops)
    )


def _listed(what: str, named: Iterable[tuple[str, str]]) -> list[str]:
    texts = [text for _, text in sorted(named)]
    if not texts:
        return []
    more = f", and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return [f"{what} ({len(texts)}): {', '.join(texts[:MOST_NAMED])}{more}"]


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        text = read_text(path, MOST_CONFIG_BYTES)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise RunError(f"{path} is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RunError(f"{path} holds not a JSON object but a {type(data).__name__}")
    return data


def _files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those the index names, or the only one there is."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = any(path.suffix in PICKLED for path in folder.iterdir())
        why = (
            "; pickled weights are never opened, loopscope convert --from-pickle makes safetensors of them"
            if pickles
            else ""
        )
        raise RunError(f"{folder} has no .safetensors file{why}")
    if len(files) > 1:
        raise RunError(f"{folder} has {len(files)} .safetensors files and no {INDEX_FILE} to say which belong together")
    return files


def _indexed(index: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint names; only those of its own folder."""
    home = read_json(index).get("weight_map")
    if not isinstance(home, dict) or not home:
        raise RunError(f"{index} has no weight_map")
    for name in home.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RunError(f"{index} names {name!r}, which is not a .safetensors file of its own folder")
    files = [index.parent / name for name in sorted(set(home.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise RunError(f"{index.parent} lacks {missing[0]}, which its index names; the download may be incomplete")
    return files


def _open(path: Path) -> Any:
    try:
        open_file(path).close()  # safetensors maps whatever it is given
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{path} is not a readable .safetensors file: {why}") from error
