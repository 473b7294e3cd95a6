"""Cases that broke a reader once, by the reader and the file that they were found with, and what was wrong.

The fixed corpus holds the first of a kind; here is what only a search came upon. `guided.py` prints a case in this
form.
"""

from __future__ import annotations

FOUND: dict[tuple[str, str], list[bytes]] = {
    # A number that is shown with one digit and an exponent asked for −1 decimals.
    ("claims and tables", "grid/rows/per-loop+rmsnorm-s42/halting.json"): [
        b'{"mean_loops": 2.4, "fixed_depth": -10000000000000000000, "unit_loops": [2.45]}',
    ],
    # A share through a readout that there is not.
    ("checks of Ouro", "ouro.json"): [
        b'{"asked": {"depths": [1]}, "states": {"loops": [{"k": 3, "radial_share": {"nOrm": 1e-08, "none": 0.4}}]}}',
    ],
}
