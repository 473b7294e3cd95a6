"""From when on a number means something: every threshold that measuring, verdicts and views share, each once."""

from __future__ import annotations

import math

from loopscope.show.numbers import LIMITLESS

# --- what an objective notices ---------------------------------------------------------------------------------------

NOTICED = 0.01
"""Nats per token that count as noticed, by an objective as between two scores of one model on the same tokens: 1 % of
perplexity."""
BROKEN = 0.1
"""Nats per token above the trained depth from which a depth is broken: 10 % of perplexity, ten times what is noticed.
No user would pay for loops that cost so much; what lies between is worse and may still be wanted for another reason."""
CERTAIN = 2.0
"""Standard errors by which a cost must keep off `NOTICED` to be called safe or unsafe."""

# --- how far a variable may run --------------------------------------------------------------------------------------

WEAKLY_HELD = 3.0
"""A variable that is free threefold is held, but weakly."""
TENFOLD = 10.0
"""A variable that may run so far before the objective notices is free."""
FURTHEST = LIMITLESS
"""Free ranges from this on are called unlimited: the search ends here."""
RAN = 5.0
"""Times the twin's size from which a pushed variable has run: in the same steps a raw readout lets a scale go
twofold."""
DRIVEN_FROM = 0.01
"""Relative growth per step of training from which a variable is driven: a doubling within 70 steps."""

# --- scale and motion ------------------------------------------------------------------------------------------------

HIDDEN_SHARE = 1e-3
"""A radial gradient share below this at every supervised loop means that no cross-entropy controls the scale."""
CHANCE = 0.8
"""Median |cos| of two directions picked by chance, times √width."""
CLEAR = 10.0
"""Ratio of norms from which a contrast speaks for itself: the rule of claim C1."""
HALVED = 0.5
"""A ratio of last to first up to which a loop's motion dies down; its inverse is where a scale drifts. Of four loops, a
fixed point that is approached at a rate of 0.7 a loop halves its steps; one that stands at 0.9 does not settle."""
FLAT, SHARP = 0.01, 0.1
"""Nats by which CE over α from 0.1 to 10 varies at most where scale is hidden, and at least where it is seen."""
LINEAR_BELOW = 0.1
"""Nats: exit failures are drawn and compared on an axis that is about linear below this (Figure 1 of the paper)."""
SATURATED_LOGIT = math.log(999)
"""|logit| from which a probability is within 0.001 of 0 or 1, and the gradient of a loss a 250th of that at 1/2."""
