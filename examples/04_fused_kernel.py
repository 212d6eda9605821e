"""A GEMV fused with a reduce-scatter: each rank gets its slice of the sum."""

import torch
import triton
import triton.language as tl

import weft
import weft.triton as wt


@triton.jit
def gemv_reduce_scatter(
    w, x, out, inbox, words, context, rounds, each, inner, tile: tl.constexpr, depth: tl.constexpr
):
    rank, ranks = wt.rank(context), wt.world_size(context)
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrived = words + 2 * ranks * program
    consumed = arrived + ranks
    last = tl.load(rounds + program)
    epoch, fine = wt.next_epoch(last), ranks > 0
    for step in range(ranks):
        to = wt.destination_at(step, rank, ranks)
        fine &= wt.wait(context, consumed + to, last, to, program)
        for first in range(program * tile, each, programs * tile):
            rows = first + tl.arange(0, tile)
            total = tl.zeros([tile], tl.float32)
            for column in range(0, inner, depth):
                columns = column + tl.arange(0, depth)
                weights = tl.load(w + (to * each + rows)[:, None] * inner + columns[None, :])
                total += tl.sum(weights * tl.load(x + columns)[None, :], axis=1)
            wt.put(context, inbox + rank * each + rows, total, to, mask=fine)
        wt.signal(context, arrived + rank, tl.where(fine, epoch, last), to)
    for step in range(ranks):
        source = wt.source_at(step, rank, ranks)
        fine &= wt.wait(context, arrived + source, epoch, source, program)
    for first in range(program * tile, each, programs * tile):
        rows = first + tl.arange(0, tile)
        total = tl.zeros([tile], tl.float32)
        for source in range(ranks):
            total += tl.load(inbox + source * each + rows)
        tl.store(out + rows, tl.where(fine, total, float("nan")))
    for source in range(ranks):
        wt.signal(context, consumed + rank, tl.where(fine, epoch, last), source)
    tl.store(rounds + program, epoch)


def main(device: str) -> None:
    programs, each, inner, calls = 4, 96, 128, 5
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        if device == "cuda":
            torch.cuda.set_device(rank)
        count = 2 * ranks * programs
        block = weft.symmetric_empty(count + ranks * each, torch.float32, device=device)
        words, inbox = block[:count].view(torch.int32), block[count:]
        context = weft.triton.context(block)
        rounds = torch.zeros(programs, dtype=torch.int32, device=block.device)
        torch.manual_seed(1)
        ws = torch.randint(-4, 5, (ranks, ranks * each, inner)).float()
        xs = torch.randint(-4, 5, (calls, ranks, inner)).float()
        w, x, out = ws[rank].to(block.device), inbox.new_zeros(inner), inbox.new_empty(each)

        def call() -> None:
            gemv_reduce_scatter[(programs,)](
                w, x, out, inbox, words, context, rounds, each, inner, tile=16, depth=64
            )

        if device == "cuda":
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        right = 0
        for vectors in xs:
            x.copy_(vectors[rank])
            call()
            expected = torch.einsum("sij,sj->i", ws, vectors)[rank * each :][:each]
            right += torch.equal(out.cpu(), expected)
        weft.check()
        communicator.barrier()
        if rank == 0:
            print(f"{right} of {calls} results equal those of torch")


if __name__ == "__main__":
    main("twin" if triton.knobs.runtime.interpret else "cuda")
