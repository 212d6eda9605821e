"""A GEMM whose tiles go to their destination ranks as they are computed.

TRITON_INTERPRET=1 weft run -n 2 -- python examples/triton_all_to_all.py
"""

import torch
import triton
import triton.language as tl

import weft
import weft.triton as wt


@triton.jit
def multiply(x, w, out, words, context, rows, columns, depth, tile: tl.constexpr):
    """Tile rows in x @ w are divided among ranks: each goes to row `rank` of `out` on its rank."""
    rank, ranks, each = wt.rank(context), wt.world_size(context), rows // wt.world_size(context)
    here = tl.arange(0, tile)
    down, right = here[:, None], here[None, :]
    for index in range(tl.program_id(0), wt.tile_count(rows, columns), tl.num_programs(0)):
        row, column, to = wt.tile_at(index, rows, columns, rank, ranks)
        total = tl.zeros([tile, tile], tl.float32)
        for step in range(0, depth, tile):
            a = tl.load(x + (row * tile + down) * depth + step + right)
            b = tl.load(w + (step + down) * columns * tile + column * tile + right)
            total = tl.dot(a, b, total)
        at = (rank * each + row - to * each) * tile + down
        wt.put(context, out + at * columns * tile + column * tile + right, total, to)
        wt.signal_add(context, words + rank, 1, to)


@triton.jit
def finish(words, context, failed, rounds, tiles):
    """Waits until each rank has put tiles for this round."""
    rank, ranks, before = wt.rank(context), wt.world_size(context), tl.load(rounds)
    for step in range(ranks):
        source = wt.source_at(step, rank, ranks)
        if not wt.wait(context, words + source, (before + 1) * tiles, source):
            tl.store(failed, 1)
    tl.store(rounds, before + 1)


def main(device: str) -> None:
    tile, rows, columns, depth = 16, 4, 2, 64
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        if device == "cuda":
            torch.cuda.set_device(rank)
        place = torch.device("cpu" if device == "twin" else device)
        size = rows * tile * columns * tile
        block = weft.symmetric_empty(4 * ranks + size, torch.float32, device=device)
        words, out = block[:ranks].view(torch.int32), block[4 * ranks :]
        context = weft.triton.context(block)
        failed, rounds = torch.zeros(2, 1, dtype=torch.int32, device=place)
        xs = torch.randint(-4, 4, (ranks, rows * tile, depth), generator=torch.manual_seed(1))
        w = torch.randint(-4, 4, (depth, columns * tile), generator=torch.manual_seed(2))
        x, w = xs[rank].float().to(place), w.float().to(place)
        multiply[(2,)](x, w, out, words, context, rows, columns, depth, tile)
        finish[(1,)](words, context, failed, rounds, rows // ranks * columns)
        weft.check()
        expected = (xs.float() @ w.cpu()).view(ranks, ranks, -1)[:, rank]
        right = not failed.item() and torch.equal(out.cpu().view(ranks, -1), expected)
        communicator.barrier()
    if rank == 0:
        print("equal to torch" if right else "different from torch")


if __name__ == "__main__":
    main("twin" if triton.knobs.runtime.interpret else "cuda")
