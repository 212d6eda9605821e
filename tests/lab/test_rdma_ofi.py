"""Provider ofi over libfabric's verbs, in guests with rxe devices; `make rdma-lab` runs it."""

from __future__ import annotations

import ctypes.util
import os
from typing import TYPE_CHECKING

import pytest

from lab.rdma.guests import address, guests
from tests import ROOT
from tests.lab import rdma

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.rdma.guests import Guests

pytestmark = [
    *rdma.needs_guests,
    pytest.mark.skipif(
        ctypes.util.find_library("fabric") is None,
        reason="libfabric is not installed (Debian: libfabric1)",
    ),
]

ENVIRONMENT = {
    "WEFT_TEST_OFI_PROVIDER": "verbs;ofi_rxm",
    # libfabric 1.17's queues for its default 256 peers exceed rxe's limits.
    "FI_UNIVERSE_SIZE": "2",
    # With its registration cache, libfabric keeps released regions writable.
    "FI_MR_CACHE_MAX_COUNT": "0",
    "RUST_BACKTRACE": "1",
}


@pytest.fixture(scope="module")
def lab() -> Iterator[Guests]:
    with guests(count=2) as booted:
        yield booted


@pytest.mark.parametrize(
    "name",
    [
        "bounds::a_released_region_is_no_longer_written",
        "ends::a_stopped_rank_is_cut_off_and_goes_on_later_without_harm",
        "traffic::threads_write_random_pages_to_each_other",
    ],
)
def test_ranks_of_one_guest(lab: Guests, name: str) -> None:
    environment = {**ENVIRONMENT, "WEFT_TEST_BIND": address(0)}
    outcome = lab.run({0: [rdma.binary("ofi"), "--exact", name]}, 100, environment)[0]
    assert "1 passed" in outcome.stdout, outcome


@pytest.mark.skipif(
    "TEST_RDMA_OFI" not in os.environ,
    reason="fi_close of libfabric 1.17 crashes in some runs between guests: set TEST_RDMA_OFI=1",
)
@pytest.mark.parametrize(
    "name",
    [
        "ends::what_was_posted_arrives_although_its_sender_leaves_at_once",
        "ends::a_link_closes_at_once_when_its_peers_have_left",
        "traffic::large_writes_are_spread_over_several_rails",
    ],
)
def test_ranks_of_two_guests(lab: Guests, name: str) -> None:
    command = rdma.ranks("ofi", name, 2)
    outcomes = lab.run(dict.fromkeys((0, 1), command), 100, ENVIRONMENT, directory=ROOT)
    assert all("1 passed" in each.stdout for each in outcomes.values()), outcomes
