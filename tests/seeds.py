"""The seed of a run: tests that choose at random print it when they fail, and ``FOREBAY_SEED`` gives it back."""

from __future__ import annotations

import os
import random

__all__ = ["SEED"]

SEED = int(os.environ.get("FOREBAY_SEED") or random.SystemRandom().getrandbits(32))
