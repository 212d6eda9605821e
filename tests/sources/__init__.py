"""Tests on sources, pages and tools. They import no native module: `make check` runs them."""
