"""A causal language model of transformers as it is, for `loopscope check`: its loops, if it has any, are inside.

Its cache is of the class that the model itself makes. What is written to it is seen through the cache's `update`, and
hooks say which module was writing, and for how many times in one pass: that is its loop.

Shape legend: B rows, T new tokens, S all tokens, H heads, C head width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.inference.comparison import nudged
from loopscope.inference.decoding import device_of
from loopscope.inference.subjects import OnWrite


def is_pretrained_model(made: object) -> bool:
    """Whether it is a model of transformers that gives logits; transformers is not imported to find out."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(made, transformers.PreTrainedModel)


class TransformersModel:
    """A `PreTrainedModel` as an `inference.subjects.TextModel`."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.device = device_of(network)
        self.vocab_size: int = network.config.get_text_config().vocab_size
        self._parameters = inspect.signature(network.forward).parameters
        self.takes_mask = self._takes("attention_mask")
        transformers = sys.modules["transformers"]  # a model of it is here, so it has been imported
        self._generates = isinstance(network, transformers.GenerationMixin)
        ends = network.generation_config.eos_token_id if self._generates else None
        self.end_ids: Sequence[int] = [] if ends is None else ends if isinstance(ends, list) else [ends]

    def _takes(self, name: str) -> bool:
        kinds = {each.kind for each in self._parameters.values()}
        return name in self._parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def logits(
        self, ids_BT: Tensor, memory: Any = None, mask_BS: Tensor | None = None, on_write: OnWrite | None = None
    ) -> Tensor:
        """Logits_BTV of new tokens, against those in the memory, which has them afterwards."""
        given: dict[str, Any] = {"use_cache": memory is not None, "past_key_values": memory}
        if not self._takes("past_key_values"):
            given = {}
        if mask_BS is not None:
            given["attention_mask"] = mask_BS
            if self._takes("position_ids"):  # as transformers' own generate counts them
                given["position_ids"] = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        if memory is None or on_write is None:
            return self.network(ids_BT, **given).logits
        with _seen(self.network, memory, on_write):
            return self.network(ids_BT, **given).logits

    def logits_of_rounded(self, ids_BT: Tensor) -> Tensor:
        """Logits_BTV of whole texts whose embedded tokens have been `nudged`."""
        table = self.network.get_input_embeddings()
        hook = table.register_forward_hook(lambda module, given, embedded: nudged(embedded))
        try:
            return self.logits(ids_BT)
        finally:
            hook.remove()

    def new_memory(self) -> Any:
        """An empty cache of the class that the model makes by itself; None where it makes none."""
        if not self._takes("past_key_values"):
            return None
        ids_BT = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            made: Any = getattr(self.network(ids_BT, use_cache=True), "past_key_values", None)
        if not hasattr(made, "update"):
            return None
        takes_config = "config" in inspect.signature(type(made)).parameters
        return type(made)(config=self.network.config) if takes_config else type(made)()

    def take_back(self, memory: Any, tokens: int) -> bool:
        """Forget the last tokens of all rows."""
        if not hasattr(memory, "crop"):
            return False
        memory.crop(-tokens)
        return True

    def generate(self, ids_BT: Tensor, mask_BT: Tensor, count: int) -> Tensor | None:
        """Greedy tokens by the model's own `generate`."""
        if not self._generates:
            return None
        settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return self.network.generate(ids_BT, attention_mask=mask_BT, **settings)[:, ids_BT.shape[1] :]


@contextmanager
def _seen(network: nn.Module, memory: Any, on_write: OnWrite) -> Iterator[None]:
    """Tell what is written to a cache, by which module, in which of its visits."""
    running: list[str] = []
    visits: Counter[str] = Counter()
    update = memory.update

    def entered(name: str) -> Any:
        def hook(*_: Any) -> None:
            running.append(name)
            visits[name] += 1

        return hook

    def left(*_: Any) -> None:
        running.pop()

    def watched(k_BHTC: Tensor, v_BHTC: Tensor, layer_idx: int, *more: Any, **named: Any) -> Any:
        on_write(running[-1], visits[running[-1]], layer_idx, k_BHTC, v_BHTC)
        return update(k_BHTC, v_BHTC, layer_idx, *more, **named)

    hooks = []
    for name, module in network.named_modules():
        hooks.append(module.register_forward_pre_hook(entered(name)))
        hooks.append(module.register_forward_hook(left, always_call=True))
    memory.update = watched
    try:
        yield
    finally:
        del memory.update
        for hook in hooks:
            hook.remove()
