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

import ast
import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the one list of public names: type checkers and editors read it as it stands, `_homes` when running
    from loopscope.api.audits import audit as audit
    from loopscope.api.audits import check as check
    from loopscope.api.audits import push as push
    from loopscope.api.calibration import calibrate as calibrate
    from loopscope.api.conversion import Converted as Converted
    from loopscope.api.conversion import convert as convert
    from loopscope.api.downstream import evaluate_tasks as evaluate_tasks
    from loopscope.api.evaluation import evaluate as evaluate
    from loopscope.api.generation import Generated as Generated
    from loopscope.api.generation import generate as generate
    from loopscope.api.remedies import remedy as remedy
    from loopscope.api.training import train as train
    from loopscope.auditing.interventions import clamped as clamped
    from loopscope.auditing.monitor import watch as watch
    from loopscope.config import Config as Config
    from loopscope.config import ModelConfig as ModelConfig
    from loopscope.config import ObjectiveConfig as ObjectiveConfig
    from loopscope.config import TargetConfig as TargetConfig
    from loopscope.config import load_config as load_config
    from loopscope.errors import LoopscopeError as LoopscopeError
    from loopscope.inference.cache import KVCache as KVCache
    from loopscope.model.looped_lm import LoopedLM as LoopedLM
    from loopscope.model.looped_lm import build as build
    from loopscope.objectives.cross_entropy import ReadoutLoss as ReadoutLoss
    from loopscope.objectives.cross_entropy import multi_readout_cross_entropy as multi_readout_cross_entropy
    from loopscope.objectives.cross_entropy import reference_cross_entropy as reference_cross_entropy
    from loopscope.objectives.placement import Objective as Objective
    from loopscope.objectives.placement import ObjectiveResult as ObjectiveResult
    from loopscope.objectives.placement import sample_depth as sample_depth
    from loopscope.objectives.terms import NormPenalty as NormPenalty
    from loopscope.objectives.terms import ScaleAnchor as ScaleAnchor
    from loopscope.objectives.terms import Term as Term
    from loopscope.objectives.terms import ZLoss as ZLoss
    from loopscope.objectives.terms import norm_penalty as norm_penalty
    from loopscope.objectives.terms import scale_anchor as scale_anchor
    from loopscope.options import AuditOptions as AuditOptions
    from loopscope.options import PushOptions as PushOptions
    from loopscope.presets import preset as preset
    from loopscope.protocol import Cached as Cached
    from loopscope.protocol import DeclaredVisibility as DeclaredVisibility
    from loopscope.protocol import ExitGate as ExitGate
    from loopscope.protocol import LinearReadout as LinearReadout
    from loopscope.protocol import LoopedModel as LoopedModel
    from loopscope.protocol import LoopState as LoopState
    from loopscope.protocol import LoopTrace as LoopTrace
    from loopscope.protocol import MixedDepths as MixedDepths
    from loopscope.protocol import OwnLosses as OwnLosses
    from loopscope.protocol import ProjectedKeys as ProjectedKeys
    from loopscope.protocol import Scheduled as Scheduled
    from loopscope.protocol import SharedCore as SharedCore
    from loopscope.protocol import adapt as adapt
    from loopscope.protocol import run_loops as run_loops
    from loopscope.results.audit import AuditResult as AuditResult
    from loopscope.results.audit import PushResult as PushResult
    from loopscope.results.audit import Recipe as Recipe
    from loopscope.results.evaluation import TaskEvaluation as TaskEvaluation
    from loopscope.results.halting import Calibration as Calibration
    from loopscope.targets import Opened as Opened
    from loopscope.targets import load as load
    from loopscope.targets import open as open

__version__ = "0.1.0"


@functools.cache
def _homes() -> dict[str, str]:
    """Public name → its module, from the imports above."""
    listed = next(part for part in ast.parse(Path(__file__).read_text("utf-8")).body if isinstance(part, ast.If))
    return {line.names[0].name: str(line.module) for line in listed.body if isinstance(line, ast.ImportFrom)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'loopscope' has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_homes()])
