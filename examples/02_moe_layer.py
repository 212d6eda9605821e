"""A mixture-of-experts layer whose experts live on several ranks, compared with one process."""

import numpy as np
from numpy.typing import NDArray

import weft

EXPERTS, TOP_K, HIDDEN, TOKENS = 10, 2, 64, 128


def expert(tokens: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.maximum(tokens @ matrix, 0)


def route(
    tokens: NDArray[np.float32], router: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    scores = tokens @ router
    ids = np.argsort(-scores, axis=1)[:, :TOP_K]
    chosen = np.exp(np.take_along_axis(scores, ids, axis=1))
    return ids, chosen / chosen.sum(axis=1, keepdims=True)


def one_process(
    tokens: NDArray[np.float32],
    ids: NDArray[np.int64],
    weights: NDArray[np.float32],
    matrices: NDArray[np.float32],
) -> NDArray[np.float32]:
    output = np.zeros_like(tokens)
    for slot in range(TOP_K):
        for number, matrix in enumerate(matrices):
            mine = ids[:, slot] == number
            output[mine] += weights[mine, slot, None] * expert(tokens[mine], matrix)
    return output


def main() -> None:
    shared = np.random.default_rng(0)
    router = shared.standard_normal((HIDDEN, EXPERTS), dtype=np.float32) / 8
    matrices = shared.standard_normal((EXPERTS, HIDDEN, HIDDEN), dtype=np.float32) / 8

    with weft.init() as communicator:
        rank = communicator.rank
        own = np.random.default_rng(1 + rank)
        tokens = own.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
        ids, weights = route(tokens, router)

        all_to_all = weft.moe.AllToAll(
            communicator, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS
        )
        with all_to_all.dispatch(tokens, ids, weights) as received:
            outputs = np.zeros_like(received.tokens)
            for local, number in enumerate(all_to_all.local_experts):
                begin = received.expert_offsets[local]
                end = begin + received.expert_counts[local]
                outputs[begin:end] = expert(received.of_expert(local), matrices[number])
            output = all_to_all.combine(received, outputs)
            rows, copies = received.copies_sent()

        expected = one_process(tokens, ids, weights, matrices)
        assert np.abs(output - expected).max() < 1e-5
        assert rows <= copies

        communicator.barrier()
        if rank == 0:
            mine = all_to_all.local_experts
            print(f"rank 0 of {communicator.world_size} owns experts {mine[0]} to {mine[-1]}")
            print(f"it sent {rows} rows where a copy per expert takes {copies}")
            print("the output equals that of one process to 1e-5")


if __name__ == "__main__":
    main()
