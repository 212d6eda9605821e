"""Error texts: each names the argument, or the operation, in a call with a wrong value.

`WEFT_TEST_SWEEP_SEED` and `WEFT_TEST_SWEEP_VALUES` select further random values (default 0: none).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import weft
from weft import errors, qdl
from weft.group import rendezvous
from weft.sim.sweep import schedule, simulate
from weft.topology import placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Wrong values for any argument, such as huge numbers; some are right for one or the other.
VALUES: list[Any] = [
    *(None, -1, 0, 2**31, 2**63, 2**64, 10**5000, 1.5, float("nan"), 1e300, True, np.int64(-1)),
    *("x", "", "\ud800", "a\0b", b"\xff", [], [None], [-1], [2**64], ["\ud800"]),
    *({}, {None: None}, {"x": "y"}, np.zeros((0, 8)), np.zeros(3, "O"), len),
]


class Call(NamedTuple):
    """A call with one argument in question."""

    operation: str
    argument: str
    make: Callable[[Any], object]
    #: Operation words, or other arguments' names, that texts may have in place of the
    #: argument.
    words: tuple[str, ...] = ()


class Sweep:
    """Calls with each value, and the texts without an argument or operation name."""

    def __init__(self) -> None:
        self.bare: list[str] = []
        chooser = random.Random(int(os.environ.get("WEFT_TEST_SWEEP_SEED", "0")))
        count = int(os.environ.get("WEFT_TEST_SWEEP_VALUES", "0"))
        self.values = VALUES + [drawn(chooser) for _ in range(count)]

    def run(self, call: Call) -> None:
        for value in self.values:
            try:
                call.make(value)
            except Exception as error:
                self.check(call, value, error)
            except BaseException as error:
                # A Rust panic is no `Exception`.
                if type(error).__name__ != "PanicException":
                    raise
                self.add(call, value, error)

    def check(self, call: Call, value: Any, error: Exception) -> None:
        text = str(error).lower()
        names = (call.argument, call.argument.removesuffix("s"), *call.words)
        is_plain = isinstance(error, (OverflowError, UnicodeError, MemoryError, OSError))
        is_kind = isinstance(error, (errors.WeftError, TypeError, ValueError))
        is_ours = isinstance(error, errors.WeftError)
        if not is_kind or (is_plain and not is_ours) or not any(each in text for each in names):
            self.add(call, value, error)

    def add(self, call: Call, value: Any, error: BaseException) -> None:
        try:
            shown = repr(value)[:40]
        except ValueError:
            shown = "a number of too many digits"
        text = f"{type(error).__name__}: {str(error)[:160]}"
        self.bare.append(f"{call.operation}({call.argument}={shown}): {text}")


def drawn(chooser: random.Random) -> Any:
    """A random value: a number near a power of two, a float, a text or a nested list."""
    kind = chooser.randrange(4)
    if kind == 0:
        return chooser.choice((-1, 1)) * (2 ** chooser.randrange(80) + chooser.randrange(-2, 3))
    if kind == 1:
        return chooser.choice((-1, 1)) * 10.0 ** chooser.randrange(-300, 300)
    if kind == 2:
        return "".join(chr(chooser.choice((0, 9, 58, 0xDFFF, 0x10FFFF, 97))) for _ in range(5))
    return [chooser.choice(VALUES) for _ in range(chooser.randrange(3))]


@pytest.fixture
def sweep() -> Iterator[Sweep]:
    made = Sweep()
    yield made
    assert not made.bare, "\n".join(made.bare)


@pytest.fixture
def communicator() -> Iterator[weft.Communicator]:
    with weft.init(rank=0, world_size=1) as made:
        yield made


def with_argument(function: Callable[..., Any], sound: dict[str, Any], name: str) -> Any:
    """The function with sound arguments but for one; what it makes is closed."""

    def call(value: Any) -> None:
        made = function(**(sound | {name: value}))
        if hasattr(made, "close"):
            made.close()

    return call


def test_init_names_its_wrong_argument(sweep: Sweep) -> None:
    sound = {"rank": 0, "world_size": 1}
    for name in inspect.signature(weft.init).parameters:
        words = ("rank",) if name == "world_size" else ("world_size", "weft_")
        sweep.run(Call("init", name, with_argument(weft.init, sound, name), words))


def test_calls_on_a_communicator_name_their_wrong_argument(
    sweep: Sweep, communicator: weft.Communicator
) -> None:
    it, counter = communicator, communicator.counter()
    it.share([], [counter])
    region = it.alloc(8)
    remote = weft.RemoteRegion(0, region._native.key(), 8, it._native)
    page = weft.Page(region, 0, remote, 0, 8)
    toward = ("rank", "counter", "peer")

    def poison(value: Any) -> None:
        with weft.init(rank=0, world_size=1) as other:
            other.poison(value)

    def alloc_some(**arguments: Any) -> None:
        it.alloc(8, **arguments)

    def make_counter(**arguments: Any) -> None:
        it.counter(**arguments).release()

    def write_page(**fields: Any) -> None:
        it.write(0, counter, [page._replace(**fields)])

    calls = [
        Call("alloc", "length", it.alloc, ("cannot allocate",)),
        *(
            Call("alloc", name, with_argument(alloc_some, {}, name), ("numa_node",))
            for name in ("device", "numa_node", "huge_pages")
        ),
        Call("register", "array", it.register),
        *(
            Call("counter", name, with_argument(make_counter, {}, name), toward)
            for name in ("window", "peers", "bulk")
        ),
        *(
            Call("share", name, with_argument(it.share, {}, name))
            for name in ("regions", "counters", "timeout")
        ),
        Call("write", "peer", lambda v: it.write(v, counter, []), toward),
        Call("write", "counter", lambda v: it.write(0, v, [])),
        Call("write", "pages", lambda v: it.write(0, counter, v), toward),
        Call("write", "round", lambda v: it.write(0, counter, [], round=v), toward),
        Call("write", "done", lambda v: it.write(0, counter, [], done=v), toward),
        *(
            Call(
                "page",
                name,
                with_argument(write_page, {}, name),
                (*toward, "of one page"),
            )
            for name in weft.Page._fields
        ),
        Call("signal", "peer", lambda v: it.signal(v, counter), toward),
        Call("signal", "counter", lambda v: it.signal(0, v)),
        Call("scatter", "writes", lambda v: it.scatter(v, counter), (*toward, "pages")),
        Call("peer_group", "counter", lambda v: it.peer_group(v, region, [])),
        Call("peer_group", "source", lambda v: it.peer_group(counter, v, [])),
        Call("peer_group", "destinations", lambda v: it.peer_group(counter, region, v)),
        Call("split", "ranks", it.split),
        Call("split", "address", lambda v: it.split([0], address=v), ("port",)),
        Call("split", "timeout", lambda v: it.split([0], timeout=v)),
        Call("route", "peer", it.route, toward),
        Call("parts", "peer", it.parts, toward),
        Call("parts", "lengths", lambda v: it.parts(0, v), toward),
        Call("barrier", "timeout", lambda v: it.barrier(timeout=v)),
        Call("all_gather", "payload", it.all_gather, ("control message",)),
        Call("all_gather", "timeout", lambda v: it.all_gather(b"", timeout=v)),
        Call("wait", "expected", lambda v: counter.wait(v, timeout=0.01), (*toward, "length")),
        Call("wait", "round", lambda v: counter.wait({}, round=v, timeout=0.01), toward),
        Call("wait", "timeout", lambda v: counter.wait({}, timeout=v)),
        Call("count", "peer", counter.count, toward),
        Call("count", "round", lambda v: counter.count(0, v), toward),
        *(
            Call(name, "peer", getattr(counter, name), toward)
            for name in ("next_round", "open_round", "credits", "credit")
        ),
        Call("wait_for_credit", "peer", lambda v: counter.wait_for_credit(v, timeout=0.01), toward),
        Call("wait_for_credit", "round", lambda v: counter.wait_for_credit(0, v), toward),
        Call("release", "timeout", lambda v: counter.release(timeout=v), toward),
        Call("poison", "detail", poison),
        Call("reform", "timeout", lambda v: it.reform(timeout=v), ("reform",)),
    ]
    for call in calls:
        sweep.run(call)


def test_pairs_name_their_wrong_argument(sweep: Sweep) -> None:
    sound = {"address": "127.0.0.1:1", "timeout": 0.001}
    for name in ("address", "secret", "providers"):
        call = with_argument(weft.listen, {}, name)
        sweep.run(Call("listen", name, call, ("listener at",)))
    for name in ("address", "source", "secret", "providers"):
        words = ("listener at",)
        sweep.run(Call("connect", name, with_argument(weft.connect, sound, name), words))

    def unless_long(call: Callable[[Any], object]) -> Callable[[Any], object]:
        # A finite number of seconds is waited for.
        return lambda v: call(-1 if isinstance(v, (int, float)) and v > 0.001 else v)

    connect = with_argument(weft.connect, sound, "timeout")
    sweep.run(Call("connect", "timeout", unless_long(connect), ("listener at",)))
    with weft.listen() as listener:
        accept = unless_long(lambda v: listener.accept(timeout=v))
        sweep.run(Call("accept", "timeout", accept, ("accept at",)))


def test_float8_names_its_wrong_argument(sweep: Sweep) -> None:
    values = np.ones((3, 4), np.float32)
    codes, scales = weft.float8.quantise(values, block=2)
    sound: dict[str, Any] = {"values": values, "block": 2}
    for name in inspect.signature(weft.float8.quantise).parameters:
        call = with_argument(weft.float8.quantise, sound, name)
        sweep.run(Call("quantise", name, call))
    sound = {"codes": codes, "scales": scales, "block": 2}
    for name in sound:
        call = with_argument(weft.float8.dequantise, sound, name)
        sweep.run(Call("dequantise", name, call, ("scales",)))


def test_an_all_to_all_names_its_wrong_argument(
    sweep: Sweep, communicator: weft.Communicator
) -> None:
    sound: dict[str, Any] = {
        "communicator": communicator,
        "experts": 4,
        "top_k": 2,
        "hidden": 4,
        "max_tokens": 8,
        # Larger numbers than these are refused by their bytes.
        "max_bytes": 1 << 20,
    }
    for name in inspect.signature(weft.moe.AllToAll.__init__).parameters:
        # Devices and gradients need torch.
        if name in ("self", "options", "device", "gradients"):
            continue
        words = ("bytes", "experts", "top_k", "device")
        call = with_argument(weft.moe.AllToAll, sound, name)
        sweep.run(Call("AllToAll", name, call, words))
    with weft.moe.AllToAll(**sound) as it:
        tokens, ids = np.ones((3, 4), np.float32), np.array([[0, 1], [2, 3], [-1, 0]])
        given: dict[str, Any] = {
            "tokens": tokens,
            "ids": ids,
            "weights": np.ones((3, 2), np.float32),
        }
        for name in ("tokens", "ids", "weights", "scales"):

            def dispatch(value: Any, name: str = name) -> None:
                it.dispatch(**(given | {name: value})).release()

            sweep.run(Call("dispatch", name, dispatch, ("tokens",)))
        with it.dispatch(**given) as received:
            for name in ("of_expert", "scales_of_expert"):
                sweep.run(Call(name, "expert", getattr(received, name), ("scales",)))
            sweep.run(Call("combine", "received", lambda v: it.combine(v, received.tokens)))
            sweep.run(Call("combine", "outputs", lambda v: it.combine_send(received, v)))


def test_a_closed_listener_and_an_absent_one_are_named_by_their_address() -> None:
    with weft.listen() as listener:
        address = listener.address
        with pytest.raises(errors.WaitTimeoutError) as late:
            listener.accept(timeout=1.0)
        assert f"accept at {address}: no pair was formed within 1 s; " in str(late.value)
    closed = rf"^the listener at {address} was closed: listen again$"
    for call in (listener.accept, listener.try_accept):
        with pytest.raises(errors.ClosedError, match=closed):
            call()
    with pytest.raises(errors.RendezvousError) as absent:
        weft.connect(address, timeout=0.2)
    text = str(absent.value)
    assert re.match(rf"no pair with the listener at {address} within [\d.]+ m?s: ", text)
    assert "refused" in text
    assert "rank" not in text
    with weft.listen(secret=b"a") as listener:
        accepting = threading.Thread(target=accept_nothing, args=(listener,))
        accepting.start()
        with pytest.raises(errors.SecretError) as refused:
            weft.connect(listener.address, secret=b"b", timeout=10.0)
        listener.close()
        accepting.join()
    assert "rank" not in str(refused.value)
    assert f"the listener at {listener.address} has another secret" in str(refused.value)


def accept_nothing(listener: weft.Listener) -> None:
    with contextlib.suppress(errors.WeftError):
        listener.accept(timeout=10.0)


def test_a_rank_that_comes_after_the_timeout_of_the_others_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert rendezvous.reaches("127.0.0.1", port) is True
    assert rendezvous.reaches("127.0.0.1", port) is None
    rendezvous.check_listening([[True, False], [None, True]], [0, 1, 2])
    with pytest.raises(errors.RendezvousError, match=r"^rank 2 \(rank 5 .* timeout; ") as late:
        rendezvous.check_listening([[True, None], [None, None]], [0, 3, 5])
    assert "address=" not in str(late.value)


@pytest.mark.torch
def test_a_late_rank_of_torch_is_told_why_the_others_gave_up() -> None:
    distributed = pytest.importorskip("torch").distributed
    from weft.torch.formation import Formation

    store = distributed.HashStore()
    first, late = (Formation(store, rank, 2, timedelta(seconds=0.05), int) for rank in range(2))
    with pytest.raises(errors.RendezvousError, match="rank 1 did not come") as gone:
        first.gather(b"")
    first.fail(gone.value)
    with pytest.raises(errors.RendezvousError, match="rank 0 gave up: rank 1 did not come"):
        late.gather(b"")


@pytest.mark.torch
def test_an_embedding_table_without_rows_is_told_so() -> None:
    torch = pytest.importorskip("torch")
    from weft.fused.embedding.tables import _check_table

    table = torch.zeros(0, 8)
    with pytest.raises(
        errors.ShapeError, match=r"^weights\[3\] has no rows: expected at least one"
    ):
        _check_table(3, table, table)


def test_query_dispatch_names_its_wrong_argument(sweep: Sweep) -> None:
    tensor = qdl.Tensor("x", "float32", (4,))
    sound: dict[str, Any] = {
        "model": len,
        "inputs": [tensor],
        "outputs": [tensor],
        "placement": None,
    }

    def node(name: str) -> Callable[[Any], None]:
        return lambda v: qdl.Accelerator(**(sound | {name: v})).stop()

    # Of sizes: "front ends of a node", "queries of a batch", and memory.
    words = ("tensor", "listener at", "front ends", "queries of a batch", "schema", "bytes")
    for name in inspect.signature(qdl.Accelerator.__init__).parameters:
        if name != "self":
            sweep.run(Call("Accelerator", name, node(name), words))
    pass_inputs = node("inputs")
    for name in ("name", "dtype", "shape"):

        def pass_tensor(value: Any, name: str = name) -> None:
            pass_inputs([replace(tensor, **{name: value})])

        sweep.run(Call("Tensor", name, pass_tensor, words))


def test_networks_and_scenarios_name_their_wrong_argument(sweep: Sweep) -> None:
    network = "bigraph:switches=2,endpoints=2"
    sound: dict[str, Any] = {"network": network}
    for name in ("network", "ranks", "names"):
        call = with_argument(placement.hdrm_hosts, sound, name)
        sweep.run(Call("hdrm_hosts", name, call, ("bigraph", "hdrm")))
    sound["hosts"] = placement.hdrm_hosts(network)
    for name in ("network", "hosts", "names"):
        call = with_argument(placement.hdrm_ranks, sound, name)
        sweep.run(Call("hdrm_ranks", name, call, ("bigraph", "hdrm")))
    sweep.run(Call("network_source", "network", placement.network_source))
    sweep.run(Call("simulate", "spec", simulate, ("scenario",)))
    sweep.run(Call("schedule", "job", schedule, ("scenario",)))


@pytest.mark.torch
def test_calls_that_need_torch_name_their_wrong_argument(
    sweep: Sweep, communicator: weft.Communicator
) -> None:
    pytest.importorskip("torch")
    made = weft.Communicator.from_group
    sweep.run(Call("from_group", "group", made, ("process group",)))
    sound = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 8}
    for name in ("device", "gradients"):

        def make(value: Any, name: str = name) -> None:
            weft.moe.AllToAll(communicator, **(sound | {name: value})).close()

        sweep.run(Call("AllToAll", name, make, ("gpu",)))
