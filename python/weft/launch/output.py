"""Output from several processes in one stream."""

from typing import BinaryIO, Final

# A longer line is written in chunks, so that no rank's output is kept without bound.
LONGEST_LINE: Final = 1 << 16


class LinePrefixer:
    """Writes whole lines to `sink`, each after `prefix`, so that two ranks' lines never mix."""

    def __init__(self, prefix: bytes, sink: BinaryIO) -> None:
        self.prefix = prefix
        self.sink = sink
        self.pending = b""

    def write(self, chunk: bytes) -> None:
        """Take what a rank wrote, and write the lines that are now whole."""
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        if len(self.pending) > LONGEST_LINE:
            lines.append(self.pending)
            self.pending = b""
        if lines:
            self.sink.write(b"".join(self.prefix + line + b"\n" for line in lines))
            self.sink.flush()

    def finish(self) -> None:
        """Write what the rank left without a newline."""
        if self.pending:
            self.write(b"\n")
