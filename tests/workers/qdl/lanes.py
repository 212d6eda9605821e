"""Node on lanes over the driver.c driver, which LD_LIBRARY_PATH names; prints its counts."""

import ctypes
import gc
import json
import sys
import threading
import time
from typing import Any

import numpy as np

from weft import _native
from weft.qdl import Tensor, UpTo, ask

QUERIES, BATCH = 300, 16
DRIVER = ctypes.CDLL("libcuda.so.1")
FIXED, TEXT = Tensor("fixed", "uint8", (24,)), Tensor("text", "int32", (UpTo(9),))


class Lane:
    """Buffers in process memory."""

    def __init__(self, stream: int) -> None:
        self.ordinal, self.stream_handle = 0, stream
        self.buffers: list[Any] = [np.zeros((BATCH, 24), np.uint8), np.zeros((BATCH, 9), np.int32)]
        self.addresses = [buffer.ctypes.data for buffer in self.buffers]


def model(lane: Lane, count: int, lengths: list[list[int]]) -> Any:
    """Add one to both inputs, after the lane's copies."""
    DRIVER.cuStreamSynchronize(ctypes.c_uint64(lane.stream_handle))
    fixed = lane.buffers[0][:count] + np.uint8(1)
    texts = [
        lane.buffers[1][query, : length // 4] + np.int32(1)
        for query, length in enumerate(lengths[1])
    ]
    joined, sizes = np.concatenate(texts), [text.nbytes for text in texts]
    begins = (joined.ctypes.data + np.cumsum([0, *sizes[:-1]])).tolist()
    outputs = [
        (True, [row.ctypes.data for row in fixed], [24] * count),
        (True, begins, sizes),
    ]
    return outputs, (fixed, joined)


def main() -> int:
    sys.unraisablehook = lambda found: errors.append(str(found.exc_value))
    errors: list[str] = []
    spec = {
        "address": "127.0.0.1:0",
        "name": "",
        "inputs": [FIXED.to_json(), TEXT.to_json()],
        "outputs": [FIXED.to_json(), TEXT.to_json()],
        "provider": sys.argv[1],
        "slots": 64,
        "checksum": True,
        "front_ends": 4,
        "max_batch": BATCH,
        "window_us": 1000,
    }
    lanes: list[Any] = [Lane(1), Lane(2)]
    node = _native.QdlNode(json.dumps(spec), model, lanes)
    serving = threading.Thread(target=node.serve)
    serving.start()
    queries: list[list[Any]] = [
        [np.full(24, at % 200, np.uint8), np.full(at % 10, at, np.int32)] for at in range(QUERIES)
    ]
    wrong = failed = 0
    for name, value in zip(("sync_fails", "device_fails"), sys.argv[3:], strict=True):
        ctypes.c_int.in_dll(DRIVER, name).value = int(value)
    for _ in range(3):
        ctypes.c_int.in_dll(DRIVER, "fail_at").value = int(sys.argv[2])
        found = ask([node.address], queries)
        failed += found.failed
        for query, answer in zip(queries, found.answers, strict=True):
            expected = tuple((tensor + 1).astype(tensor.dtype).tobytes() for tensor in query)
            wrong += answer is not None and answer != expected
    node.stop()
    serving.join()
    del node
    gc.collect()
    names = ("strided", "rows", "single", "registered", "unregistered")
    deadline = time.monotonic() + 20
    while True:
        counts = {name: ctypes.c_int.in_dll(DRIVER, name).value for name in names}
        if counts["registered"] == counts["unregistered"] or time.monotonic() > deadline:
            break
        if sys.argv[4] == "1":
            break  # Memory is leaked.
        time.sleep(0.01)
    print(json.dumps(counts | {"wrong": wrong, "failed": failed, "errors": errors}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
