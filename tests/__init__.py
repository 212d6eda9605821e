"""Tests, and what they share; `ROOT` is the repository."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
