"""A server doubles numbers for clients that come and go; each has a pair with it."""

import multiprocessing

import numpy as np

import weft


class End:
    """One end in a pair: an inbox, an outbox, and a counter for arrivals."""

    def __init__(self, pair: weft.Communicator) -> None:
        self.pair, self.peer = pair, 1 - pair.rank
        self.inbox, self.outbox = pair.alloc(8), pair.alloc(8)
        self.arrived = pair.counter()
        (self.theirs,) = pair.share([self.inbox], [self.arrived])[self.peer]

    def send(self, round: int, number: int) -> None:
        self.arrived.wait_for_credit(self.peer, round)
        self.outbox.bytes.view(np.int64)[0] = number
        page = weft.Page(self.outbox, 0, self.theirs, 0, 8)
        self.pair.write(self.peer, self.arrived, round, [page]).wait()

    def receive(self) -> int:
        self.arrived.wait({self.peer: [8]})
        number = int(self.inbox.bytes.view(np.int64)[0])
        self.arrived.credit(self.peer)
        return number


def client(address: str, number: int) -> None:
    with weft.connect(address) as pair:
        end = End(pair)
        for round in range(10):
            end.send(round, number)
            number = end.receive()
        print(f"after 10 rounds the number is {number}", flush=True)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with weft.listen() as listener:
        for number in (1, 3):
            process = context.Process(target=client, args=(listener.address, number))
            process.start()
            with listener.accept() as pair:
                end = End(pair)
                for round in range(10):
                    end.send(round, 2 * end.receive())
                process.join()


if __name__ == "__main__":
    main()
