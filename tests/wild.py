"""The corpus of subjects as model authors write them, from all of its files."""

from __future__ import annotations

import wild_calls
import wild_code
import wild_state
import wild_training
from wild_cases import LEFT_OUT, WILD

FILES = (wild_training, wild_calls, wild_code, wild_state)
HERE = {name: factory for name, factory in WILD.items() if name not in LEFT_OUT}
