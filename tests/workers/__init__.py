"""Functions that ranks run in tests; they return JSON and import only weft and numpy."""
