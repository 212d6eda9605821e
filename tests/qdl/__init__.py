"""Query dispatch and LoadGen."""
