"""HDRM in torch process groups on a network, whichever hosts the ranks are on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run
from weft.topology import hdrm_hosts

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
NETWORK = "bigraph:switches=4,endpoints=2"
MAP = hdrm_hosts(NETWORK)
LOG = {"WEFT_LOG": "tuner"}


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def results(ranks: int, environment: dict[str, str], **arguments: Any) -> list[Any]:
    return run(
        "backend.network.sums",
        ranks,
        "tcp",
        environment=LOG | environment,
        quiet=False,
        timeout=120,
        with_torch=True,
        **arguments,
    )


def of_shape(messages: list[str]) -> list[str]:
    return [text for text in messages if text.startswith("all-reduce of 8388608 bytes")]


def test_ranks_on_shuffled_hosts_run_hdrm_and_groups_that_fit_too() -> None:
    hosts = [MAP[number] for number in (2, 0, 3, 1)]
    # Ranks 1 and 3 are neighbours in the map, ranks 0 and 3 are not.
    found = results(
        4,
        {"WEFT_NETWORK": NETWORK},
        hosts=hosts,
        network=None,
        groups=[[1, 3], [0, 3]],
    )
    assert all(all(each["right"]) for each in found)
    for each in found:
        assert of_shape(each["messages"])[0].startswith(
            "all-reduce of 8388608 bytes, 4 ranks: hdrm, estimated on the network"
        )
    first = [text for each in found for text in each["messages"] if text.startswith("hdrm ")]
    assert first.count("hdrm with ranks in the order [1, 3, 0, 2]") == 1
    assert first.count("hdrm with ranks in the order [0, 1]") == 1
    (refusal,) = [text for text in first if "not selected" in text]
    assert f"hosts {MAP[1]}, {MAP[2]} are no part of HDRM's map" in refusal
    chosen = of_shape(found[3]["messages"])
    assert len(chosen) == 3
    assert "hdrm" in chosen[1]
    assert "hdrm" not in chosen[2]


def test_the_option_takes_an_object_and_holds_for_later_groups(tmp_path: Path) -> None:
    network = {"bigraph": {"switches": 4, "endpoints": 2}}
    hosts = [MAP[1], MAP[0]]
    (tmp_path / "network.json").write_text(json.dumps(network), encoding="utf-8")
    for given in (network, str(tmp_path / "network.json")):
        found = results(2, {}, hosts=hosts, network=given, groups=[[0, 1]])
        assert all(all(each["right"]) for each in found)
        orders = [text for text in found[0]["messages"] if text.startswith("hdrm with ranks")]
        assert orders == ["hdrm with ranks in the order [1, 0]"] * 2


def test_split_groups_have_the_network_of_their_parent_or_none() -> None:
    found = run(
        "backend.network.splits",
        2,
        "tcp",
        environment=LOG,
        quiet=False,
        timeout=120,
        with_torch=True,
        hosts=[MAP[3], MAP[2]],
        first="bigraph:switches=2,endpoints=1",
        second=NETWORK,
    )
    assert all(each["right"] == [True] * 5 for each in found)
    orders = ["not selected" if "not selected" in each else each for each in found[0]["orders"]]
    assert orders == ["not selected", "hdrm with ranks in the order [1, 0]"] * 2


def test_a_split_group_has_the_network_that_rank_0_of_its_parent_read(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.json" for rank in range(3)]
    for file in files:
        switches = 4 if file == files[0] else 2
        network = {"bigraph": {"switches": switches, "endpoints": 2}}
        file.write_text(json.dumps(network), encoding="utf-8")
    found = run(
        "backend.network.split_of_others",
        3,
        "tcp",
        environment=LOG,
        quiet=False,
        timeout=120,
        with_torch=True,
        # The second file's network has neither of the last two hosts.
        hosts=[MAP[0], MAP[5], MAP[4]],
        files=[str(file) for file in files],
    )
    assert all(each["right"] for each in found)
    assert found[1]["orders"] == ["hdrm with ranks in the order [1, 0]"]


def test_weft_run_passes_its_network_on() -> None:
    found = run(
        "backend.network.sums",
        2,
        "tcp",
        environment=LOG,
        quiet=False,
        timeout=120,
        options=["--network", NETWORK],
        hosts=None,
        network=None,
        groups=[],
    )
    assert "hdrm with ranks in the order [0, 1]" in found[0]["messages"]


def test_a_network_that_is_not_valid_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "missing.json"
    environment = {"WEFT_NETWORK": str(file)}
    found = run(
        "backend.network.rejected",
        2,
        "tcp",
        environment=environment,
        quiet=False,
        timeout=120,
        with_torch=True,
        network=None,
    )
    assert "neither a file nor one of" in found[0]
    assert found[0].startswith("ConfigurationError: network: ")
    assert "rank 0 could not create its part" in found[1]
