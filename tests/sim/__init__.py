"""`weft sim` and reproductions of published systems."""
