"""Two ranks pass a number back and forth by counted writes."""

import numpy as np

import weft

ROUNDS = 1000


def main() -> None:
    with weft.init() as communicator:
        me = communicator.rank
        peer = 1 - me

        inbox = communicator.alloc(8)
        outbox = communicator.alloc(8)
        arrived = communicator.counter()
        (peers_inbox,) = communicator.share([inbox], [arrived])[peer]

        received = inbox.bytes.view(np.int64)
        to_send = outbox.bytes.view(np.int64)
        page = weft.Page(outbox, 0, peers_inbox, 0, 8)

        def send(number: int) -> None:
            arrived.wait_for_credit(peer)
            to_send[0] = number
            communicator.write(peer, arrived, [page]).wait()

        def receive() -> int:
            arrived.wait({peer: [8]})
            number = int(received[0])
            arrived.credit(peer)
            return number

        if me == 0:
            number = 0
            for _ in range(ROUNDS):
                send(number)
                number = receive()
            assert number == ROUNDS
            print(f"after {ROUNDS} rounds the number is {number}")
        else:
            for _ in range(ROUNDS):
                send(receive() + 1)
        communicator.barrier()


if __name__ == "__main__":
    main()
