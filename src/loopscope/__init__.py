"""loopscope: train, audit and run looped (depth-recurrent, weight-shared) language models.

    import loopscope as ls

    opened = ls.open("runs/nano")                        # or preset:nano, a Hugging Face folder, my_module:factory
    ls.audit(opened)                                     # what the loop carries and no loss sees
    ls.evaluate(opened, depths=range(1, 9))              # what exiting after each loop costs
    ls.check(opened)                                     # the same numbers, however it is run?
    ls.generate(opened, "The river")                     # text
    trace = ls.run_loops(opened.model, ids)              # the states of all loops
    logits = opened.model.readout(trace.states[2], 2)    # an exit

Names are imported on first use, so `import loopscope` is quick and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopscope.auditing.clamp import clamped
    from loopscope.auditing.push import PushOptions, PushResult
    from loopscope.auditing.result import AuditResult
    from loopscope.auditing.survey import AuditOptions
    from loopscope.auditing.trial import Recipe
    from loopscope.auditing.watch import watch
    from loopscope.config import Config, ModelConfig, ObjectiveConfig, TargetConfig, load_config
    from loopscope.errors import LoopscopeError
    from loopscope.inference.cache import KVCache
    from loopscope.model.looped_lm import LoopedLM, build
    from loopscope.objectives.cross_entropy import ReadoutLoss, multi_readout_cross_entropy, reference_cross_entropy
    from loopscope.objectives.placement import Objective, ObjectiveResult, sample_depth
    from loopscope.objectives.terms import NormPenalty, ScaleAnchor, Term, ZLoss, norm_penalty, scale_anchor
    from loopscope.presets import preset
    from loopscope.protocol import (
        Cached,
        DeclaredVisibility,
        ExitGate,
        LinearReadout,
        LoopedModel,
        LoopState,
        LoopTrace,
        MixedDepths,
        OwnLosses,
        ProjectedKeys,
        Scheduled,
        SharedCore,
        adapt,
        run_loops,
    )
    from loopscope.targets import Opened, load
    from loopscope.targets import open_target as open
    from loopscope.verbs.audits import audit
    from loopscope.verbs.calibration import Calibration, calibrate
    from loopscope.verbs.checks import check
    from loopscope.verbs.conversion import Converted, convert
    from loopscope.verbs.downstream import TaskEvaluation, evaluate_tasks
    from loopscope.verbs.evaluation import evaluate
    from loopscope.verbs.generation import Generated, generate
    from loopscope.verbs.pushes import push
    from loopscope.verbs.remedies import remedy
    from loopscope.verbs.training import train

__version__ = "0.1.0"

_HOME = {
    "loopscope.auditing.survey": ("AuditOptions",),
    "loopscope.auditing.clamp": ("clamped",),
    "loopscope.auditing.push": ("PushOptions", "PushResult"),
    "loopscope.auditing.result": ("AuditResult",),
    "loopscope.auditing.trial": ("Recipe",),
    "loopscope.auditing.watch": ("watch",),
    "loopscope.config": ("Config", "ModelConfig", "ObjectiveConfig", "TargetConfig", "load_config"),
    "loopscope.errors": ("LoopscopeError",),
    "loopscope.inference.cache": ("KVCache",),
    "loopscope.model.looped_lm": ("LoopedLM", "build"),
    "loopscope.objectives.cross_entropy": ("ReadoutLoss", "multi_readout_cross_entropy", "reference_cross_entropy"),
    "loopscope.objectives.placement": ("Objective", "ObjectiveResult", "sample_depth"),
    "loopscope.objectives.terms": ("NormPenalty", "ScaleAnchor", "Term", "ZLoss", "norm_penalty", "scale_anchor"),
    "loopscope.presets": ("preset",),
    "loopscope.protocol": (
        *("LoopState", "LoopTrace", "LoopedModel", "adapt", "run_loops"),
        *(
            "Cached",
            "DeclaredVisibility",
            "ExitGate",
            "LinearReadout",
            "MixedDepths",
            "OwnLosses",
            "ProjectedKeys",
            "Scheduled",
            "SharedCore",
        ),
    ),
    "loopscope.targets": ("Opened", "load", "open_target"),
    "loopscope.verbs.audits": ("audit",),
    "loopscope.verbs.checks": ("check",),
    "loopscope.verbs.calibration": ("Calibration", "calibrate"),
    "loopscope.verbs.conversion": ("Converted", "convert"),
    "loopscope.verbs.downstream": ("TaskEvaluation", "evaluate_tasks"),
    "loopscope.verbs.evaluation": ("evaluate",),
    "loopscope.verbs.generation": ("Generated", "generate"),
    "loopscope.verbs.pushes": ("push",),
    "loopscope.verbs.remedies": ("remedy",),
    "loopscope.verbs.training": ("train",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AuditOptions",
    "AuditResult",
    "Cached",
    "Calibration",
    "Config",
    "Converted",
    "DeclaredVisibility",
    "ExitGate",
    "Generated",
    "KVCache",
    "LinearReadout",
    "LoopState",
    "LoopTrace",
    "LoopedLM",
    "LoopedModel",
    "LoopscopeError",
    "MixedDepths",
    "ModelConfig",
    "NormPenalty",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveResult",
    "Opened",
    "OwnLosses",
    "ProjectedKeys",
    "PushOptions",
    "PushResult",
    "ReadoutLoss",
    "Recipe",
    "ScaleAnchor",
    "Scheduled",
    "SharedCore",
    "TargetConfig",
    "TaskEvaluation",
    "Term",
    "ZLoss",
    "adapt",
    "audit",
    "build",
    "calibrate",
    "check",
    "clamped",
    "convert",
    "evaluate",
    "evaluate_tasks",
    "generate",
    "load",
    "load_config",
    "multi_readout_cross_entropy",
    "norm_penalty",
    "open",
    "preset",
    "push",
    "reference_cross_entropy",
    "remedy",
    "run_loops",
    "sample_depth",
    "scale_anchor",
    "train",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "open":  # a module must not define `open` at its top: that would hide the built-in from its own code
        return __getattr__("open_target")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'loopscope' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
