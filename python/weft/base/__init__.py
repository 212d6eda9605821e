"""Foundations without other Weft imports: errors, arguments, arrays, files, environment."""
