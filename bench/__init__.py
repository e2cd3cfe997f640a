"""Measures the generated service next to what a user would pick instead: `uv run python -m bench`.

The faults and servers are those of the tests' laboratory, and so is the checker that reads the records.
"""

import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TEMPLATE / "tests"))
