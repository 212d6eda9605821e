"""Pages, examples and public names that need the native module."""
