"""Our models as models of transformers: importing this module registers them, and no remote code is ever run.

    import loopscope.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("out")        # what `loopscope convert runs/nano out --to hf` wrote
    model.generate(**tokenizer("The river", return_tensors="pt"), num_loops=8)

A key/value slot is one layer of one loop, in the order in which they run: prelude, the core once for every loop, coda.
So many slots a cache of transformers has by itself, since the configuration's num_hidden_layers counts them.

Shape legend: B batch, T new tokens, S all tokens, D width, V vocabulary, H heads, C head width.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.adapters.native import MODEL_TYPE, STANDARD, config_of, derived, num_loops_of, tensor_names, to_fields
from loopscope.config import Config, ModelConfig, config_from_dict
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.objectives.placement import Objective
from loopscope.protocol import Cache, ExitGate, LinearReadout, LoopState, Slot, check_products, run_loops

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationMixin,
        PretrainedConfig,
        PreTrainedModel,
    )
    from transformers.cache_utils import Cache as TheirCache
    from transformers.cache_utils import DynamicCache, DynamicLayer
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple
except ImportError as error:
    raise UnsupportedError(f"loopscope.hf needs {error.name or 'transformers'}: pip install 'loopscope[hf]'") from error


class LoopscopeConfig(PretrainedConfig):
    """A `ModelConfig` under the names that transformers knows, its other fields in `design`; see `adapters.native`.

    Made from keywords as `LoopscopeConfig(hidden_size=64, design={"num_layers": 2, "num_loops": 4})`: fields that
    transformers has a name for are given under that name or in `design`, all others in `design`.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    design: dict[str, Any] | None = None
    objective: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    num_loops: int | None = None
    """Loops that are run unless a call says otherwise; the trained depth, design["num_loops"], by default."""
    step: int | None = None
    """Training steps behind the weights, where they are known."""
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        given = dict(self.design or {})
        for name, ours in STANDARD.items():
            if getattr(self, name) is not None:
                given[ours] = getattr(self, name)
        sections = {name: getattr(self, name) for name in ("objective", "data", "training")}
        config = config_from_dict(
            {"model": given, **{name: value for name, value in sections.items() if value is not None}},
            source="LoopscopeConfig",
        )
        fields = to_fields(config, config.design("a LoopscopeConfig"))
        for name in (*STANDARD, "design", "objective"):
            setattr(self, name, fields[name])
        self.num_loops = num_loops_of({"num_loops": self.num_loops}, self.model_config, "LoopscopeConfig")
        for name in derived(self.model_config, 1):  # of a config.json: they follow from the rest
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)

    @property
    def loopscope_config(self) -> Config:
        """The whole configuration in our own words."""
        return config_of(self.__dict__, "LoopscopeConfig")

    @property
    def model_config(self) -> ModelConfig:
        """The model in our own words."""
        return self.loopscope_config.design("a LoopscopeConfig")

    @property
    def num_hidden_layers(self) -> int:
        """Key/value slots at the depth that is run."""
        return self._derived("num_hidden_layers")

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads of a layer."""
        return self._derived("num_key_value_heads")

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self._derived("head_dim")

    @property
    def intermediate_size(self) -> int:
        """Hidden width of the feed-forward."""
        return self._derived("intermediate_size")

    def _derived(self, name: str) -> int:
        return derived(self.model_config, self.num_loops or 1)[name]

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it, with what follows from the rest."""
        return {**super().to_dict(), **derived(self.model_config, self.num_loops or 1)}


class LoopscopeForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LoopedLM` that transformers can load, train, generate with and save.

    With `labels` (equal to the ids; shifted here) there is a loss. In evaluation mode it is the cross-entropy of the
    logits. In training mode it is that of the objective the folder was trained with, exits and penalties included, so
    that fine-tuning goes on with what loopscope trained; `config.objective["placement"] = "terminal"` asks for the last
    loop alone. Hidden states are those of the loops: h_0 … h_K.
    """

    config_class = LoopscopeConfig
    config: LoopscopeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 (as transformers has it)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: LoopscopeConfig) -> None:
        super().__init__(config)
        self.model = build(config.model_config)
        self.gradient_checkpointing = False
        # A tied head is the embedding itself, not a second name of it; what has two names are modules that are one.
        self._tied_weights_keys = {
            f"model.{name}": f"model.{first}" for name, first in tensor_names(self.model).items() if name != first
        }
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TheirCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_loops: int | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits at `num_loops` loops (those of the configuration by default), and the loss where there are labels."""
        if kwargs.get("output_attentions") or self.config.output_attentions:
            raise UnsupportedError("output_attentions: attention is fused, and its weights are never there")
        depth = self.config.num_loops if num_loops is None else num_loops
        num_loops = num_loops_of({"num_loops": depth}, self.model.config, "forward")
        recompute = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not recompute
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        cache = self._cache(input_ids, attention_mask, position_ids, past_key_values, num_loops)
        check_products(self.model, input_ids.device)
        run = _Run(self.model, num_loops, cache)
        targets_BT = None if labels is None else _next_ids(labels, kwargs.get("shift_labels"))
        loss = None
        if targets_BT is not None and self.training:
            result = Objective(self._objective(num_loops), recompute=recompute)(
                run, input_ids, targets_BT.to(input_ids.device), num_loops=num_loops
            )
            states, loss = result.trace.states, result.loss
            if (items := kwargs.get("num_items_in_batch")) is not None:  # of all micro-batches of a step
                loss = loss * (targets_BT != IGNORE_INDEX).sum().to(loss.device) / items
        else:
            states = run_loops(run, input_ids, num_loops=num_loops, recompute=recompute).states
        features_BTD = run.features(states[-1], num_loops)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = F.linear(features_BTD[:, kept], self.model.head)
        if labels is not None and loss is None:
            loss = self.loss_function(logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return CausalLMOutputWithPast(
            loss=cast(Any, loss),
            logits=cast(Any, logits_BTV),
            past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(cast(Any, state.h_BTD) for state in states) if wants_states else None,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; drafting with the first layers of a flat model is refused."""
        settings = kwargs.get("generation_config") or self.generation_config
        if kwargs.get("assistant_early_exit") or getattr(settings, "assistant_early_exit", None):
            raise UnsupportedError(
                "assistant_early_exit leaves a model after some of its layers, and a looped model leaves after some of "
                "its loops: pass a second model with a smaller config.num_loops as assistant_model, or use "
                "loopscope generate --speculate, which computes nothing twice"
            )
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Another token embedding, with as many rows as it has."""
        self.model.embedding = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The head, where it is not the embedding."""
        return self.model.unembedding

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Another head."""
        self.model.unembedding = cast(nn.Linear, new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; refused where layers have embeddings of the tokens, too."""
        if self.model.config.value_embeddings and new_num_tokens not in (None, self.config.vocab_size):
            raise UnsupportedError("a model with value_embeddings has tables in its layers that cannot be resized")
        resized = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        self.model.config = self.config.model_config
        return resized

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Modules that are one are one whatever tie_word_embeddings says."""
        return dict(self._tied_weights_keys)

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """A tensor with two names is there if it was loaded under one of them, and missing if under none."""
        loading_info.missing_keys = {
            key
            for key in loading_info.missing_keys
            if not getattr(self.get_parameter_or_buffer(key), "_is_hf_initialized", False)
        }

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our model is initialised when it is built."""

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        """What a checkpoint lacks is what a fresh model has."""
        missing = {
            name: tensor
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if not getattr(tensor, "_is_hf_initialized", False)
        }
        if missing:
            fresh = build(self.model.config, device="cpu").state_dict()
            with torch.no_grad():
                for name, tensor in missing.items():
                    tensor.copy_(fresh[name])

    def _objective(self, num_loops: int) -> Any:
        config = self.config.loopscope_config.objective
        if config.loop_weights is not None and len(config.loop_weights) != num_loops:
            raise ConfigError(f"the objective weighs {len(config.loop_weights)} loops, and {num_loops} are run")
        return config

    def _cache(
        self, ids_BT: Tensor, mask: Tensor | None, positions_BT: Tensor | None, held: TheirCache | None, num_loops: int
    ) -> SlotCache | None:
        """What one call of our model sees of padding, positions and earlier tokens; None where there are none."""
        if mask is None and positions_BT is None and held is None:
            return None
        past = 0 if held is None else int(held.get_seq_length())
        if held is not None:
            _make_slots(held, self.model.config, num_loops, past)
        if positions_BT is None:
            positions_BT = _positions(ids_BT, mask, past)
        kept = create_causal_mask(
            config=self.config,
            inputs_embeds=torch.empty(*ids_BT.shape, 0, dtype=self.dtype, device=ids_BT.device),
            attention_mask=mask,
            past_key_values=held,
            position_ids=positions_BT,
            # A static cache returns room for tokens to come, which only a mask hides.
            allow_is_causal_skip=held is None or not held.is_compileable,
        )
        assert kept is None or isinstance(kept, Tensor), "attention is SDPA's, and so are its masks"
        if kept is not None and kept.dtype != torch.bool:
            kept = kept == 0
        return SlotCache(self.model.config, num_loops, positions_BT, kept, held)


class SlotCache(Cache):
    """A cache of transformers, and its mask and positions, as one call of our model sees them (`protocol.Cache`)."""

    def __init__(
        self,
        config: ModelConfig,
        num_loops: int,
        positions_BT: Tensor,
        mask_B1TS: Tensor | None,
        held: TheirCache | None,
    ) -> None:
        """`held` is None where nothing is kept; the mask and the positions are then all that matters."""
        self._config, self._num_loops = config, num_loops
        self._positions_BT, self._mask_B1TS, self._held = positions_BT.cpu(), mask_B1TS, held

    def positions(self, tokens: int) -> Tensor:
        """Position_BT of the new tokens; those of padding are of no consequence."""
        return self._positions_BT

    def mask(self, tokens: int) -> Tensor | None:
        """Which keys each new token may see; the same in every slot."""
        return self._mask_B1TS

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a slot, the new ones last."""
        if self._held is None:
            return k_BHTC, v_BHTC
        return self._held.update(k_BHTC, v_BHTC, slot_index(slot, self._config, self._num_loops))


def slot_index(slot: Slot, config: ModelConfig, num_loops: int) -> int:
    """Number of a slot in the order in which they run: prelude, core of loop 1 … num_loops, coda."""
    part, loop, layer = slot
    assert isinstance(loop, int), "transformers runs all rows at the same loop"
    if part == "prelude":
        return layer
    core = config.prelude_layers + (loop - 1) * config.num_layers
    return core + layer if part == "core" else config.prelude_layers + num_loops * config.num_layers + layer


class _Run(LinearReadout, ExitGate):
    """Our model with what one call knows of earlier tokens; the features of the last loop are computed once."""

    def __init__(self, model: LoopedLM, num_loops: int, cache: SlotCache | None) -> None:
        self._model, self.num_loops, self._cache = model, num_loops, cache
        self._last_BTD: Tensor | None = None

    @property
    def head(self) -> Tensor:
        return self._model.head

    def embed(self, ids_BT: Tensor) -> LoopState:
        return self._model.embed(ids_BT, self._cache)

    def loop(self, state: LoopState, k: int) -> LoopState:
        return self._model.loop(state, k, self._cache)

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """A coda that is run twice would write its keys twice, and some readouts keep running means."""
        if k == self.num_loops and self._last_BTD is not None:
            return self._last_BTD
        features_BTD = self._model.features(state, k, self._cache)
        if k == self.num_loops:
            self._last_BTD = features_BTD
        return features_BTD

    def exit_logits(self, features_BTD: Tensor) -> Tensor:
        return ExitGate.needed(self._model, "an objective with gated exits").exit_logits(features_BTD)


def _next_ids(labels_BT: Tensor, shifted_BT: Tensor | None) -> Tensor:
    """Targets of the usual labels: each token's is the label after it."""
    return F.pad(labels_BT, (0, 1), value=IGNORE_INDEX)[:, 1:] if shifted_BT is None else shifted_BT


def _positions(ids_BT: Tensor, mask: Tensor | None, past: int) -> Tensor:
    """Padding does not count."""
    if mask is not None and mask.dim() == 2:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
    return torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)[None]


def _make_slots(held: TheirCache, config: ModelConfig, num_loops: int, past: int) -> None:
    """Slots for the depth of this call, where the cache was made for another; refused once it has been filled."""
    needed = derived(config, num_loops)["num_hidden_layers"]
    if past:
        filled = sum(int(held.get_seq_length(index)) > 0 for index in range(len(held)))
        if filled != needed:
            raise ConfigError.of(
                "num_loops",
                num_loops,
                f"these keys and values have {filled} slots, and {needed} are needed: go on "
                "with the depth that they were computed at",
            )
    if len(held.layers) < needed and held.layer_class_to_replicate is None:
        if not all(isinstance(layer, DynamicLayer) for layer in held.layers):
            raise ConfigError.of(
                "num_loops", num_loops, "a cache of a fixed size has no slots for it; set config.num_loops"
            )
        held.layers += [DynamicLayer() for _ in range(needed - len(held.layers))]


AutoConfig.register(MODEL_TYPE, LoopscopeConfig, exist_ok=True)
AutoModelForCausalLM.register(LoopscopeConfig, LoopscopeForCausalLM, exist_ok=True)
