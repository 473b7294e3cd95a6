"""loopscope: train, audit and run looped (depth-recurrent, weight-shared) language models.

    import loopscope as ls

    model = ls.build(ls.preset("nano").model, seed=0)
    trace = model(ids)                                   # the states of all loops
    logits = ls.readout(model, trace.states[2], 2)       # an exit

Names are imported on first use, so `import loopscope` is quick and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopscope.auditing.result import AuditResult
    from loopscope.auditing.run import AuditOptions, audit
    from loopscope.auditing.search import Observable
    from loopscope.auditing.watch import watch
    from loopscope.config import Config, ModelConfig, ObjectiveConfig, load_config
    from loopscope.errors import LoopscopeError
    from loopscope.inference.cache import KVCache
    from loopscope.model.looped_lm import LoopedLM, build
    from loopscope.objectives.cross_entropy import ReadoutLoss, multi_readout_cross_entropy, reference_cross_entropy
    from loopscope.objectives.placement import Objective, ObjectiveResult, sample_depth
    from loopscope.objectives.scale import norm_penalty, scale_anchor
    from loopscope.presets import preset
    from loopscope.protocol import LoopedModel, LoopState, LoopTrace, adapt, readout, run_loops
    from loopscope.training.session import load

__version__ = "0.1.0"

_HOME = {
    "loopscope.auditing.result": ("AuditResult",),
    "loopscope.auditing.run": ("AuditOptions", "audit"),
    "loopscope.auditing.search": ("Observable",),
    "loopscope.auditing.watch": ("watch",),
    "loopscope.config": ("Config", "ModelConfig", "ObjectiveConfig", "load_config"),
    "loopscope.errors": ("LoopscopeError",),
    "loopscope.inference.cache": ("KVCache",),
    "loopscope.model.looped_lm": ("LoopedLM", "build"),
    "loopscope.objectives.cross_entropy": ("ReadoutLoss", "multi_readout_cross_entropy", "reference_cross_entropy"),
    "loopscope.objectives.placement": ("Objective", "ObjectiveResult", "sample_depth"),
    "loopscope.objectives.scale": ("norm_penalty", "scale_anchor"),
    "loopscope.presets": ("preset",),
    "loopscope.training.session": ("load",),
    "loopscope.protocol": ("LoopState", "LoopTrace", "LoopedModel", "adapt", "readout", "run_loops"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AuditOptions",
    "AuditResult",
    "Config",
    "KVCache",
    "LoopState",
    "LoopTrace",
    "LoopedLM",
    "LoopedModel",
    "LoopscopeError",
    "ModelConfig",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveResult",
    "Observable",
    "ReadoutLoss",
    "adapt",
    "audit",
    "build",
    "load",
    "load_config",
    "multi_readout_cross_entropy",
    "norm_penalty",
    "preset",
    "readout",
    "reference_cross_entropy",
    "run_loops",
    "sample_depth",
    "scale_anchor",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'loopscope' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
