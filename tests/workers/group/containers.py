"""Ranks in separate namespaces: a group, and a pair for each two."""

import threading
from typing import Any

import weft
from tests.workers.group.pairs import End
from tests.workers.group.transfer import ring


def everything(length: int) -> dict[str, Any]:
    """Routes in a group in which every rank writes, and in a pair with each other rank."""
    found = ring(length, 2)
    with weft.init() as communicator, weft.listen() as listener:
        rank, size = communicator.rank, communicator.world_size
        addresses = communicator.all_gather(listener.address.encode(), timeout=20)
        routes: dict[int, str | None] = {}

        def answer() -> None:
            for _ in range(rank + 1, size):
                with listener.accept(timeout=20) as pair:
                    End(pair).answer()

        answering = threading.Thread(target=answer)
        answering.start()
        for peer in range(rank):
            with weft.connect(bytes(addresses[peer]).decode(), timeout=20) as pair:
                routes[peer] = pair.routes()[0]
                end = End(pair)
                end.send(21)
                assert end.receive() == 42
        answering.join()
        communicator.barrier()
    return {"right": found["right"], "routes": found["routes"], "pairs": routes}
