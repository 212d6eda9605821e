"""Environment variables: a value that cannot be used is an error that names the variable."""

import ipaddress
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from tests import ROOT
from weft.base import environment
from weft.errors import ConfigurationError, SecretError, WeftError

#: Files that read the environment: the module for it, ranks' environment, the path to a
#: compiler, and a check whether there is any text.
READERS = {"base/environment.py", "base/compile.py", "base/logging.py", "launch/environment.py"}


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], None]:
    """Set a variable to bytes."""

    def set_raw(name: str, value: bytes) -> None:
        monkeypatch.setitem(os.environb, name.encode(), value)

    return set_raw


@pytest.mark.parametrize(
    "name",
    [
        *("WEFT_RANK", "WEFT_WORLD_SIZE", "WEFT_LOCAL_RANK", "WEFT_ADDR", "WEFT_PORT", "WEFT_BIND"),
        *("WEFT_HOST_ID", "WEFT_SILENCE_TIMEOUT", "WEFT_PROVIDERS", "WEFT_HOSTILE"),
        *("WEFT_SHM_READS", "WEFT_OFI_CHECK_SENDERS", "WEFT_OFI_DOMAINS", "WEFT_OFI_PROVIDER"),
        *("WEFT_VERBS_DEVICES", "WEFT_VERBS_TRAFFIC_CLASS", "MASTER_PORT", "SLURM_NTASKS"),
    ],
)
def test_a_value_that_is_not_utf8_is_an_error_by_name(
    name: str, raw: Callable[[str, bytes], None]
) -> None:
    raw(name, b"1\xff")
    with pytest.raises(WeftError, match=f"{name} is .*UTF-8"):
        weft.init()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEFT_PROVIDERS", "shm,tpc"),
        ("WEFT_PROVIDERS", ","),
        ("WEFT_LOCAL_RANK", "first"),
        ("WEFT_OFI_CHECK_SENDERS", "yes"),
        ("WEFT_VERBS_SERVICE_LEVEL", "16"),
        ("WEFT_SHM_READS", "2"),
        ("WEFT_COPY_SMS", "1025"),
        ("WEFT_STAGED", "yes"),
        ("WEFT_ADDR", "[::1]9"),
    ],
)
def test_an_invalid_value_is_an_error_whatever_uses_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WeftError, match=f"{name}.*{re.escape(value)}"):
        weft.init()


def test_raw_secrets_have_to_be_the_same(raw: Callable[[str, bytes], None]) -> None:
    raw("WEFT_SECRET", b"\xff\x01")
    with weft.listen(providers=["tcp"]) as listener:
        accepting = threading.Thread(target=lambda: listener.accept(timeout=40).close())
        accepting.start()
        for other in (b"\xfe\x01", b""):
            raw("WEFT_SECRET", other)
            with pytest.raises(SecretError):
                weft.connect(listener.address, providers=["tcp"], timeout=20)
        raw("WEFT_SECRET", b"\xff\x01")
        weft.connect(listener.address, providers=["tcp"], timeout=20).close()
        accepting.join(40)


def test_a_path_may_have_any_bytes(raw: Callable[[str, bytes], None], tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/se\xffcret"
    raw("WEFT_SECRET_FILE", file)
    with pytest.raises(SecretError, match="No such file"):
        weft.listen()
    with open(file, "wb") as out:
        out.write(b"\xff")
    weft.listen().close()
    # Without its key it is an error, not a listener without TLS.
    raw("WEFT_TLS_CERT", file)
    with pytest.raises(ConfigurationError, match="WEFT_TLS_KEY is not set"):
        weft.listen()


def test_the_environment_is_read_in_one_place() -> None:
    """Any other reader could treat a value that it cannot decode as one that is not set."""
    found = {
        str(path.relative_to(ROOT / "python/weft"))
        for path in (ROOT / "python/weft").rglob("*.py")
        if re.search(r"os\.(environb?(\.get|\[\"\w+\"\](?! =)| or |\)|$)|getenv)", path.read_text())
    }
    assert found <= READERS, found - READERS
    for path in (ROOT / "crates").glob("*/src/**/*.rs"):
        text = path.read_text(encoding="utf-8").partition("mod tests {")[0]
        is_test = path.stem.endswith("tests") or "BLESS" in text
        # Only tests in other crates use the crate `scenarios`.
        crate = path.relative_to(ROOT / "crates").parts[0]
        if crate not in ("environment", "scenarios") and not is_test:
            assert not re.search(r"env::var(?!_os\(name\))|env::vars", text), path


NUMBERS = ["0", "1", "-1", "+1", "4294967296", "9" * 5000, "1.5", "0x10", "\uff11", "1 1"]
TIMES = ["1", "1e-3", "1e300", "nan", "-inf", "1e19", "0", "1s"]
ODD = ["", " ", "\t\n", "é", "/dev/zero", "::1", "10.0.0.1", "x" * 100_000, "a,b", "%n", "=", "-"]


def is_number(most: int) -> Callable[[str], bool]:
    return lambda text: (
        bool(re.fullmatch(r"\+?[0-9]+", text)) and len(text) < 30 and int(text) <= most
    )


def is_time(least: float) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        number = re.fullmatch(r"\+?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", text)
        return number is not None and 0 < float(text) < 2**64 and float(text) >= least

    return check


def is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def is_flag(text: str) -> bool:
    return text in ("0", "1")


#: Each `weft.init` variable: true if it has a meaning; None: the system decides.
MEANINGS: dict[str, Callable[[str], bool | None]] = {
    "WEFT_RANK": lambda _: False,  # without a size
    "WEFT_LOCAL_RANK": is_number(2**32 - 1),
    "WEFT_LOCAL_WORLD_SIZE": is_number(2**32 - 1),
    "WEFT_ADDR": lambda _: None,
    "WEFT_PORT": is_number(65535),
    # The address may be this host's.
    "WEFT_BIND": lambda text: None if is_address(text) else False,
    "WEFT_ADVERTISE": lambda text: None if is_address(text) else False,
    "WEFT_SECRET": lambda _: True,
    "WEFT_SECRET_FILE": lambda _: False,
    "WEFT_HOST_ID": lambda text: len(text.encode()) <= 256,
    "WEFT_CONNECT_TIMEOUT": is_time(0),
    "WEFT_SILENCE_TIMEOUT": is_time(0.01),
    "WEFT_HOSTILE": is_number(2**64 - 1),
    "WEFT_PROVIDERS": lambda _: False,
    "WEFT_SHM_READS": is_flag,
    "WEFT_COPY_SMS": is_number(1024),
    "WEFT_STAGED": lambda text: text in ("0", "1", "twin", "automatic-twin"),
    "WEFT_OFI_PROVIDER": lambda _: True,
    "WEFT_OFI_DOMAINS": lambda _: True,
    "WEFT_OFI_CHECK_SENDERS": is_flag,
    "WEFT_VERBS_DEVICES": lambda _: True,
    "WEFT_VERBS_GID_INDEX": is_number(255),
    "WEFT_VERBS_TRAFFIC_CLASS": is_number(255),
    "WEFT_VERBS_SERVICE_LEVEL": is_number(15),
    "WEFT_VERBS_ACK_TIMEOUT": is_number(31),
    "WEFT_VERBS_ON_DEMAND_PAGING": lambda text: text in ("never", "auto", "always"),
    "MASTER_PORT": is_number(65534),
}
#: A number and what it is below.
PAIR = ("WEFT_LOCAL_RANK", "WEFT_LOCAL_WORLD_SIZE")
#: Variables with any bytes.
BYTES = {"WEFT_SECRET", "WEFT_SECRET_FILE"}


def meaning(name: str, value: bytes) -> bool | None:
    """True if a value has a meaning, False if it is an error, None if the system decides."""
    try:
        text = value.decode().strip()
    except UnicodeDecodeError:
        return MEANINGS[name]("") if name in BYTES else False
    return MEANINGS[name](text) if text else True


@pytest.mark.parametrize("seed", range(int(os.environ.get("WEFT_TEST_ENVIRONMENTS", "60"))))
def test_random_environments_end_in_a_group_or_in_an_error_by_name(
    seed: int, raw: Callable[[str, bytes], None]
) -> None:
    source = random.Random(seed)
    chosen: dict[str, bytes] = {}
    for name in source.sample(sorted(MEANINGS), source.randint(1, 3)):
        text = source.choice(source.choice([NUMBERS, TIMES, ODD]))
        value = text.encode() if source.random() < 0.8 else source.randbytes(8).replace(b"\0", b"1")
        chosen[name] = value
        raw(name, value)
    if chosen.get("WEFT_SECRET", b"").strip():
        # It replaces the file.
        chosen.pop("WEFT_SECRET_FILE", None)
    if chosen.get("WEFT_PORT", b"").strip():
        chosen.pop("MASTER_PORT", None)
    meanings = {name: meaning(name, value) for name, value in chosen.items()}
    wrong = [name for name, it in meanings.items() if it is False]
    if all(chosen.get(name, b"").strip() for name in PAIR):
        # Which one is wrong depends on the other.
        named = [*wrong, *PAIR]
    else:
        named = wrong or [name for name, it in meanings.items() if it is None]
    message = ""
    try:
        weft.init().close()
    except WeftError as error:
        message = str(error)
    assert not message or any(name in message for name in named), (chosen, message)
    assert message or not wrong, chosen


def test_flags_paths_and_text(raw: Callable[[str, bytes], None], tmp_path: Path) -> None:
    raw("WEFT_REPRODUCIBLE", b" 1\n")
    assert environment.flag("WEFT_REPRODUCIBLE", default=False)
    raw("WEFT_REPRODUCIBLE", b"2")
    with pytest.raises(ConfigurationError, match="WEFT_REPRODUCIBLE is '2': it is not 0 or 1"):
        environment.flag("WEFT_REPRODUCIBLE", default=False)
    raw("WEFT_CACHE_DIR", b" ")
    assert environment.path("WEFT_CACHE_DIR") is None
    raw("WEFT_CACHE_DIR", b"/\xff ")
    assert os.fsencode(environment.path("WEFT_CACHE_DIR") or "") == b"/\xff "
