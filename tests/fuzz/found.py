"""Cases that broke a reader once, by the reader and the file that they were found with, and what was wrong.

The fixed corpus holds the first of a kind; here is what only a search came upon. `guided.py` prints a case in this
form.
"""

from __future__ import annotations

FOUND: dict[tuple[str, str], list[bytes]] = {}
