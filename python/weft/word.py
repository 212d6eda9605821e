"""Words by the public path."""

from weft.group.word import Word, WordWatch

__all__ = ["Word", "WordWatch"]
