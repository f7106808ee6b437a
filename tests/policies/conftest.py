"""Makes the rig of the decide tower importable under importlib import mode."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "decide"))
