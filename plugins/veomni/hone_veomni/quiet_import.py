"""Imports VeOmni first, without its log of patches and environment variables."""

from __future__ import annotations

import os

os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")

import veomni  # noqa: F401
