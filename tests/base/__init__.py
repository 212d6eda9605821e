"""Files, environment variables, argument checks and error texts."""
