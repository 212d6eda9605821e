"""Collectives on several hosts: results, refusals, absent and killed ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from weft.collectives.hosts.hierarchy import Hierarchy

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

KINDS = [pytest.param("cuda", marks=pytest.mark.gpu), "twin"]
SHAPES = [(2, 1), (2, 2), (3, 1)]


def played(**arguments: Any) -> dict[str, Any]:
    from tests.gpu import hierarchical_processes as processes

    outcome = processes.play(processes.Spec(**arguments))
    assert "failed" not in outcome, outcome
    return outcome


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize(("hosts", "local"), SHAPES)
def test_random_calls_have_the_bits_of_the_reference(device: str, hosts: int, local: int) -> None:
    outcome = played(device=device, hosts=hosts, local=local, calls=60, seed=hosts * 10 + local)
    for report in outcome["reports"]:
        assert report["checked"] == 60
        mean, unsigned, rows, root, shape = report["errors"]
        assert mean.startswith("ConfigurationError: op 'mean': expected one of")
        assert unsigned.startswith("ShapeError: sum of uint32 between hosts: expected one of")
        assert f"a multiple of {hosts * local} ranks" in rows
        assert root.startswith("UnknownError: ")
        assert shape.startswith("ShapeError: out has shape")
    routes = outcome["reports"][0]["routes"]
    assert routes == [None, *["shm"] * (local - 1), *["tcp"] * (local * (hosts - 1))]


@pytest.mark.parametrize("device", KINDS)
def test_ranks_of_a_host_need_not_have_consecutive_numbers(device: str) -> None:
    played(device=device, hosts=2, local=2, blocks=False, seed=5)


@pytest.mark.parametrize("device", KINDS)
def test_hosts_without_shared_memory_for_their_network(device: str) -> None:
    played(device=device, hosts=2, local=2, providers=["tcp"], seed=6, calls=20)


@pytest.mark.parametrize("device", KINDS)
def test_hosts_exchange_over_libfabric(device: str) -> None:
    from weft import _native, errors

    try:
        _native.check_providers(["ofi"])
    except errors.WeftError as error:
        pytest.skip(f"needs libfabric: {error}")
    played(device=device, hosts=2, local=1, providers=["shm", "ofi"], seed=7)


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize(
    ("local", "victim", "how"),
    [(1, 1, "kill"), (2, 0, "kill"), (2, 3, "kill"), (2, 1, "stop")],
)
def test_a_lost_rank_is_named_at_all_others(device: str, local: int, victim: int, how: str) -> None:
    outcome = played(device=device, hosts=2, local=local, how=how, victim=victim, calls=4)
    for report in outcome["reports"]:
        assert report["error"] in ("PeerLostError", "GroupPoisonedError"), report
        # The first to name it lost the rank itself.
        assert report["error"] != "PeerLostError" or report["rank"] == victim, report
        # By the next call, and by `weft.check`.
        assert report["again"] == 2
        assert report["closed_s"] < 5


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize(("hosts", "local", "victim"), [(2, 1, 0), (2, 2, 2)])
def test_a_rank_that_does_not_call_is_named_at_all_others(
    device: str, hosts: int, local: int, victim: int
) -> None:
    outcome = played(device=device, hosts=hosts, local=local, how="absent", victim=victim, calls=4)
    waited = [each for each in outcome["reports"] if each["error"] == "WaitTimeoutError"]
    assert waited, outcome
    assert {each["rank"] for each in waited} == {victim}


@pytest.mark.parametrize("device", KINDS)
def test_settings_that_differ_are_refused_on_all_ranks(device: str) -> None:
    from tests.gpu import hierarchical_processes as processes

    for error in processes.constructed(device, piece_bytes=[1 << 16, 1 << 17]):
        assert error == (
            "ConfigurationMismatchError: rank 0 passed piece_bytes=65536, skew_timeout=30.0, "
            "rank 1 piece_bytes=131072, skew_timeout=30.0: expected equal values"
        )
    for error in processes.constructed(device, piece_bytes=[511, 511]):
        assert error == (
            "ConfigurationError: piece_bytes 511: expected at least 512 for 2 ranks; pass more"
        )


def hierarchy(hosts: str, rank: int) -> Hierarchy:
    pytest.importorskip("torch")
    from weft.collectives.hosts.hierarchy import Hierarchy

    return Hierarchy.of(hosts, rank)


def test_hosts_are_in_the_order_of_their_lowest_ranks() -> None:
    found = hierarchy("baab", 2)
    assert found.hosts == ((0, 3), (1, 2))
    assert (found.host, found.local) == (1, 1)
    assert found.within == (1, 2)
    assert found.across == (3, 2)
    assert found.order == [0, 1, 3, 2]
    assert found.place(3) == (0, 1)


def test_hosts_with_different_numbers_of_ranks_are_refused() -> None:
    from weft.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=r"ranks of each host: a 2, b 1; expected equal"):
        hierarchy("aba", 0)


def test_errors_of_groups_have_the_numbers_of_the_whole() -> None:
    pytest.importorskip("torch")
    from weft.collectives.hosts.hierarchy import renumbered
    from weft.errors import WaitTimeoutError

    error = WaitTimeoutError("rank 0 waited 3 s for ranks 1 and 2; rank 1 raised 0 of 1")
    error.rank, error.missing = 1, [(1, 1, 0), (2, 1, 0)]
    made = renumbered(error, (4, 6, 8))
    assert str(made) == "rank 4 waited 3 s for ranks 6 and 8; rank 6 raised 0 of 1"
    assert (made.rank, made.missing) == (6, [(6, 1, 0), (8, 1, 0)])
