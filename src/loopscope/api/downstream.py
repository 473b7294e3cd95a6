"""`loopscope.evaluate_tasks`: scores of downstream tasks after each loop, by lm-evaluation-harness.

The harness sees the model only through the protocol, so whatever can be opened can be scored. All depths come from one
pass: a request runs as many loops as the deepest one asked for and is read out at each of them.

Shape legend: B requests, T tokens, N scored tokens, D width, V vocabulary.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from loopscope.api.generation import generate
from loopscope.config import MOST_LOOPS
from loopscope.data.corpora import SEPARATOR
from loopscope.data.tokenizers import Tokenizer
from loopscope.errors import ConfigError, RunError, UnsupportedError, words_of
from loopscope.inference.costs import OnProgress
from loopscope.protocol import LinearReadout, run_loops
from loopscope.results.evaluation import TaskDepth, TaskEvaluation, TaskMetric
from loopscope.targets import Opened, Say, open_target, with_tokenizer
from loopscope.training.session import set_up

BATCH = 16
"""Requests scored at a time."""
MOST_NEW_TOKENS = 256
"""Of an answer that a task does not limit; the harness's own default."""
MOST_WORDS = 400
"""Characters of an error of the harness's own that are passed on."""
LONGEST = 2048
"""Tokens of a request to a model that does not say how many it takes."""

Request = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a context, and of what is to follow it."""
Likelihood = tuple[float, bool]
"""Log-probability of a continuation in nats, and whether each of its tokens is the likeliest."""


def evaluate_tasks(
    target: str | Path | Opened,
    tasks: Sequence[str],
    *,
    depths: Sequence[int] | None = None,
    task_folder: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
    batch: int = BATCH,
    say: Say = lambda text: None,
    progress: OnProgress = lambda what, share: None,
) -> TaskEvaluation:
    """Scores of `tasks` after each of `depths` loops (by default 1 to the trained depth).

    Tasks are those of lm-evaluation-harness, and of the YAML files in `task_folder`. `limit` takes the first so many
    examples of each, `num_fewshot` shows so many before every question.
    """
    harness = _harness()
    opened = with_tokenizer(open_target(target), tokenizer)
    depths = list(range(1, opened.model.num_loops + 1)) if depths is None else sorted(set(depths))
    if not depths or depths[0] < 1 or depths[-1] > MOST_LOOPS:
        raise ConfigError.of("depths", depths, f"depths count loops, from 1 up to {MOST_LOOPS:,}")
    manager = _manager(harness, tasks, task_folder, say)
    likelihoods = Likelihoods.of(opened, depths, batch=batch, progress=progress)
    if likelihoods.prefix_is_made_up:
        say(f"{opened.name} names no token that begins or ends a text: where there is no context, a blank line is it")
    found = {k: _scores_at(harness, manager, likelihoods, k, list(tasks), num_fewshot, limit) for k in depths}
    return TaskEvaluation(
        target=opened.name, step=opened.step, harness=str(harness.__version__), tasks=_by_metric(found)
    )


# --- log-likelihoods -------------------------------------------------------------------------------------------------


@dataclass
class Likelihoods:
    """Log-likelihoods of continuations at all depths, through the protocol; what was asked before is remembered."""

    opened: Opened
    tokenizer: Tokenizer
    depths: Sequence[int]
    batch: int
    progress: OnProgress
    prefix: int
    """The token that stands for an empty context."""
    prefix_is_made_up: bool
    known: dict[Request, dict[int, Likelihood]] = field(default_factory=dict)

    @classmethod
    def of(cls, opened: Opened, depths: Sequence[int], *, batch: int, progress: OnProgress) -> Likelihoods:
        """For a target that has a tokenizer; its model is moved to the device."""
        tokenizer = opened.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{opened.name} has no tokenizer to read tasks with; name one with --tokenizer")
        if isinstance(opened.model, nn.Module):
            opened.model.to(set_up().device).eval()
        named = [tokenizer.special_id("bos_token"), *opened.end_ids, *tokenizer.end_ids]
        prefix = next((token for token in named if token is not None), None)
        made_up = tokenizer.encode(SEPARATOR)[-1:] or [0]
        return cls(opened, tokenizer, depths, batch, progress, made_up[0] if prefix is None else prefix, prefix is None)

    @property
    def longest(self) -> int:
        """Tokens that the model takes."""
        return self.opened.max_length or LONGEST

    def at(self, requests: Iterable[Request], k: int) -> list[Likelihood]:
        """Of every request after k loops."""
        requests = list(requests)
        new = sorted({request for request in requests if request not in self.known}, key=lambda it: -len(sum(it, ())))
        with torch.no_grad():
            for start in range(0, len(new), self.batch):
                chunk = new[start : start + self.batch]
                for request, scores in zip(chunk, self._scored(chunk), strict=True):
                    self.known[request] = scores
                done = start + len(chunk)
                self.progress(f"{done:,} of {len(new):,} requests", done / len(new))
        return [self.known[request][k] for request in requests]

    def _scored(self, requests: Sequence[Request]) -> list[dict[int, Likelihood]]:
        """One pass for a batch; what is filled up at the end, no token before it sees."""
        model, device = self.opened.model, set_up().device
        # As the harness does it: the beginning of what is too long is dropped, and the last token is only predicted.
        whole = [(context + continuation)[-self.longest - 1 :] for context, continuation in requests]
        counts = [min(len(continuation), len(ids) - 1) for (_, continuation), ids in zip(requests, whole, strict=True)]
        length = max(len(ids) - 1 for ids in whole)
        ids_BT = torch.zeros(len(whole), length, dtype=torch.long)
        asked_BT = torch.zeros(len(whole), length, dtype=torch.bool)
        for row, (ids, count) in enumerate(zip(whole, counts, strict=True)):
            ids_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            asked_BT[row, len(ids) - 1 - count : len(ids) - 1] = True
        targets_N = torch.tensor([token for ids, count in zip(whole, counts, strict=True) for token in ids[-count:]])
        asked_BT, targets_N = asked_BT.to(device), targets_N.to(device)
        states = run_loops(model, ids_BT.to(device), num_loops=max(self.depths)).states
        found: list[dict[int, Likelihood]] = [{} for _ in requests]
        linear = LinearReadout.of(model)
        for k in self.depths:
            if linear is None:
                logits_NV = model.readout(states[k], k)[asked_BT]
            else:  # a task asks for a few tokens of each text: no logits for the others
                logits_NV = F.linear(linear.features(states[k], k)[asked_BT], linear.head)
            wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            chosen_N = wide_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0].split(counts)
            greedy_N = (wide_NV.argmax(-1) == targets_N).split(counts)
            for scores, chosen, greedy in zip(found, chosen_N, greedy_N, strict=True):
                scores[k] = (float(chosen.sum()), bool(greedy.all()))
        return found


# --- the harness -----------------------------------------------------------------------------------------------------


def _harness() -> Any:
    try:
        harness = importlib.import_module("lm_eval")
        for name in ("evaluator", "tasks", "api.model", "utils"):
            importlib.import_module(f"lm_eval.{name}")
    except ImportError as error:
        raise UnsupportedError(f"--tasks needs {error.name or 'lm_eval'}: pip install 'loopscope[eval]'") from None
    return harness


def _manager(harness: Any, tasks: Sequence[str], folder: str | Path | None, say: Say) -> Any:
    """The harness's index of tasks, which knows all that are asked for."""
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError.of("task_folder", str(folder), "no such folder")
    unknown = list(tasks)
    # Its own tasks are fourteen thousand files, which take half a minute to look through: only where they are needed.
    for include_defaults in (False, True) if folder is not None else (True,):
        if include_defaults:
            say("looking through the tasks of lm-evaluation-harness, which takes half a minute")
        try:
            manager = harness.tasks.TaskManager(
                include_path=None if folder is None else str(folder), include_defaults=include_defaults
            )
        except Exception as error:  # whatever a YAML file of theirs does to the harness
            raise ConfigError.of("task_folder", str(folder), words_of(error)[:MOST_WORDS]) from error
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if tasks and not unknown:
            return manager
    why = "no such task of lm-evaluation-harness; `lm-eval ls tasks` lists them, --task-folder adds your own"
    raise ConfigError.of("tasks", ",".join(unknown), why)


def _scores_at(
    harness: Any,
    manager: Any,
    likelihoods: Likelihoods,
    k: int,
    tasks: list[str],
    num_fewshot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """What the harness says at one depth."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells every default that it fills in
    try:
        return harness.evaluator.simple_evaluate(
            model=_language_model(harness, likelihoods, k),
            tasks=tasks,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (ConfigError, RunError, UnsupportedError):
        raise
    except Exception as error:  # a dataset that cannot be fetched, a task that is wrong: the harness's own words
        raise RunError(f"{','.join(tasks)} cannot be evaluated: {words_of(error)[:MOST_WORDS]}") from error


def _language_model(harness: Any, likelihoods: Likelihoods, k: int) -> Any:
    """The model after k loops as the harness's own kind of language model."""
    base: Any = harness.api.model.TemplateLM

    class AtDepth(base):  # type: ignore[misc]
        """A looped model that is read out after a fixed number of loops."""

        eot_token_id = likelihoods.prefix
        max_length = likelihoods.longest
        tokenizer_name = likelihoods.tokenizer.fingerprint

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return likelihoods.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[Likelihood]:
            return likelihoods.at(((tuple(context), tuple(rest)) for _, context, rest in requests), k)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            totals = []
            for (text,) in (request.args for request in requests):
                windows = harness.utils.get_rolling_token_windows(
                    self.tok_encode(text), likelihoods.prefix, likelihoods.longest, 1
                )
                pairs = [harness.utils.make_disjoint_window(window) for window in windows]
                scored = likelihoods.at(((tuple(context), tuple(rest)) for context, rest in pairs), k)
                totals.append(sum(value for value, _ in scored))
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            texts = []
            for number, (context, options) in enumerate(request.args for request in requests):
                stops = options.get("until") or []
                made = generate(
                    likelihoods.opened,
                    context,
                    num_loops=k,
                    max_tokens=int(options.get("max_gen_toks", MOST_NEW_TOKENS)),
                    stop=tuple([stops] if isinstance(stops, str) else stops),
                    truncate=True,
                )
                texts.append(made.text)
                likelihoods.progress(f"{number + 1:,} of {len(requests):,} answers", (number + 1) / len(requests))
            return texts

    return AtDepth()


def _by_metric(found: Mapping[int, Mapping[str, Any]]) -> list[TaskMetric]:
    """The harness's results of every depth, put together by task and metric."""
    first = next(iter(found.values()))
    made = []
    for task, row in first["results"].items():
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not kind or metric.endswith("_stderr"):
                continue
            rows = {k: each["results"][task] for k, each in found.items()}
            made.append(
                TaskMetric(
                    task=task,
                    metric=metric if kind == "none" else key,
                    higher_is_better=first.get("higher_is_better", {}).get(task, {}).get(metric),
                    samples=first.get("n-samples", {}).get(task, {}).get("effective"),
                    depths=[
                        TaskDepth(k, finite(row[key]), finite(row.get(f"{metric}_stderr,{kind}")))
                        for k, row in rows.items()
                    ],
                )
            )
    return made


def finite(value: object) -> float | None:
    """A finite number, or None for anything else that a harness may give: "N/A", a text, NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
