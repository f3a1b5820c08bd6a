"""The benchmarks are programs in a folder, not a package: their modules import one another by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
