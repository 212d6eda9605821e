"""Training over four processes that survives when one dies: three go on from the last step.

    python examples/train_through_loss.py

Each process trains a replica with DistributedDataParallel over the backend `weft`. Rank 2 kills
itself within a step. The others get an error that names it, form a group of three, take the
furthest replica's state, and continue. It needs torch and scikit-learn (`weft[demo,torch]`).
"""

import json
import multiprocessing
import os
import signal
import time
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import weft.torch

RANKS, STEPS, LOST_RANK, LOST_STEP = 4, 60, 2, 25
BATCH = 96
#: Time for survivors to come to a new group; a killed rank is noticed within 2 s.
GRACE_SECONDS = 4


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(images, labels, step, rank, ranks):
    """This rank's share of the samples in a step; the samples depend only on the step."""
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH]
    mine = chosen[rank::ranks]
    return images[mine], labels[mine]


def survivors(store, generation, member, members):
    """The members that came to this point within the grace, the same list on all members."""
    key = f"generation-{generation}"
    store.set(f"{key}/{member}", "here")
    deadline = time.monotonic() + GRACE_SECONDS
    present = []
    while len(present) < len(members) and time.monotonic() < deadline:
        present = [each for each in members if store.check([f"{key}/{each}"])]
        time.sleep(0.05)
    # The first list counts.
    return json.loads(store.compare_set(f"{key}/members", "", json.dumps(present)))


def join(store, generation, member, members):
    distributed.init_process_group(
        "weft",
        store=distributed.PrefixStore(f"group-{generation}", store),
        rank=members.index(member),
        world_size=len(members),
        timeout=timedelta(seconds=60),
    )


def share_state(network, optimizer, step):
    """Give every rank the state from the rank with the most steps; returns that step count."""
    steps = [None] * distributed.get_world_size()
    distributed.all_gather_object(steps, step)
    furthest = max(steps)
    state = [network.state_dict(), optimizer.state_dict()]
    distributed.broadcast_object_list(state, steps.index(furthest))
    network.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return furthest


def train(member, port):
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.5)
    members, generation, step = list(range(RANKS)), 0, 0
    while step < STEPS:
        join(store, generation, member, members)
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        step = share_state(network, optimizer, step)
        if rank == 0:
            print(f"step {step}: {ranks} ranks", flush=True)
        replica = DistributedDataParallel(network)
        try:
            while step < STEPS:
                inputs, targets = batch(images, labels, step, rank, ranks)
                loss = nn.functional.cross_entropy(replica(inputs), targets)
                optimizer.zero_grad()
                if member == LOST_RANK and step == LOST_STEP:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                step += 1
            distributed.barrier()
        except distributed.DistBackendError as error:
            if rank == 0:
                print(f"step {step}: {error}".splitlines()[0], flush=True)
            generation += 1
            members = survivors(store, generation, member, members)
        del replica
        distributed.destroy_process_group()
    right = (network(images).argmax(1) == labels).float().mean().item()
    # One write for the whole line: the ranks share the output.
    end = f"rank {rank} of {ranks}: {step} steps, {right:.1%} of the digits are right\n"
    print(end, end="", flush=True)


def main():
    # Forked from one process, which has imported torch and has no group.
    weft.torch.build.load()
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(each, store.port)) for each in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print("statuses", [rank.exitcode for rank in ranks])


if __name__ == "__main__":
    main()
