"""Files that commands write: checked before the work, replaced whole, and only by their kind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

from weft.base.output_files import OutputFile, check_outputs, write_output
from weft.bench import transfer
from weft.bench.record import append_record
from weft.cli import main

TRACE: Final = "Perfetto trace"
NETWORK = "bigraph:switches=2,endpoints=2"
RUN = ("sim", "allreduce", "--topology", NETWORK, "--bytes", "1KiB")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err.splitlines()[-1]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    other, folder = tmp_path / "scenario.json", tmp_path / "folder"
    other.write_text('{"scenario": "collective"}', encoding="utf-8")
    folder.mkdir()
    (tmp_path / "link").symlink_to(other)
    for path, reason in (
        (folder, "a folder; expected a file"),
        (tmp_path / "no" / "trace.json", f"no directory {tmp_path}/no; create it first"),
        (other / "trace.json", f"{other} is not a directory"),
        (other, f"exists, and is no {TRACE}; delete it, or choose another name"),
        (tmp_path / "link", f"exists, and is no {TRACE}; delete it, or choose another name"),
        (Path("/dev/fd/777"), "descriptor 777 is not open"),
    ):
        with pytest.raises(ValueError, match=f"^--trace {path}: {reason}$"):
            check_outputs([OutputFile("--trace", path, TRACE)])
    made = OutputFile("--record", tmp_path / "no" / "such" / "file", "JSON lines of results", True)
    check_outputs([made, OutputFile("--trace", Path("/dev/full"), TRACE)])
    with pytest.raises(ValueError, match="is not a directory"):
        check_outputs([made._replace(path=other / "folder" / "file")])


def test_an_input_is_no_output_and_outputs_differ(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": []}', encoding="utf-8")
    (tmp_path / "link").hardlink_to(file)
    output = OutputFile("--trace", file, TRACE)
    check_outputs([output])
    for inputs in ([file], [tmp_path / "." / "trace.json"], [tmp_path / "link"]):
        with pytest.raises(ValueError, match="an input of this command; choose another name"):
            check_outputs([output], inputs)
    fresh = OutputFile("--trace", tmp_path / "fresh", TRACE)
    with pytest.raises(ValueError, match=r"^--plot .*: the file of --trace of this command"):
        check_outputs([fresh, fresh._replace(option="--plot")])
    device = OutputFile("--trace", Path("/dev/null"), TRACE)
    check_outputs([device, device._replace(option="--plot")])


def test_files_without_permission_are_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="no permission to write in"):
        check_outputs([OutputFile("--trace", tmp_path / "trace.json", TRACE)])


def test_a_file_is_replaced_whole_with_its_mode_and_by_its_link(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    mask = os.umask(0o027)
    try:
        write_output(file, "first")
    finally:
        os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o640
    file.chmod(0o604)
    link.symlink_to("file")
    with file.open(encoding="utf-8") as old:
        write_output(link, b"second")
        assert old.read() == "first"
    assert link.is_symlink()
    assert (file.read_text(encoding="utf-8"), file.stat().st_mode & 0o777) == ("second", 0o604)
    with pytest.raises(OSError, match="File name too long"):
        write_output(tmp_path / ("x" * 300), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_record_that_cannot_be_appended_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_record(file, {"origin": 1})
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from weft.bench.record import append_record\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: append_record(Path(sys.argv[1]), {'origin': 'x' * 200})\n"
        "except OSError as error: print(error.strerror)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, timeout=50, check=True
    )
    assert result.stdout == b"File too large\n"
    assert file.read_text(encoding="utf-8") == '{"origin": 1}\n'
    file.write_text('{"origin"', encoding="utf-8")
    append_record(file, {"origin": 2})
    assert file.read_text(encoding="utf-8") == '{"origin"\n{"origin": 2}\n'


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trace", ""),
        ("--trace", "folder/"),
        ("--plot", ""),
    ],
)
def test_an_empty_name_is_refused(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, *RUN, *arguments)
    expected = f"argument {arguments[0]}: {arguments[1]!r}: expected the name of a file"
    assert message.endswith(expected)
    for command in (
        ("topo", "--write-xml="),
        ("topo", "network", NETWORK, "--out="),
        ("bench", "moe", "--trace="),
        ("bench", "moe", "--record="),
        ("bench", "transfer", "--record="),
        ("tune", "--output="),
        ("tune", "--plot="),
        ("qdl", "bench", "--bytes", "1", "--record="),
    ):
        assert "'': expected the name of a file" in refusal(capsys, *command)


def test_the_input_of_a_command_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, scenario, hosts = (tmp_path / name for name in ("n.json", "s.json", "hostfile.txt"))
    network.write_text('{"bigraph": {"switches": 2, "endpoints": 2}}', encoding="utf-8")
    cluster = {"topology": str(network)}
    job = {"scenario": "collective", "cluster": cluster, "job": {"bytes": 1024}}
    scenario.write_text(json.dumps(job), encoding="utf-8")
    hosts.write_text("".join(f"h{host} slots=1\n" for host in range(4)), encoding="utf-8")
    before = {path: path.read_bytes() for path in (network, scenario, hosts)}
    plan = ("topo", "bigraph", "--switches", "2", "--endpoints", "2")
    for command in (
        ("sim", "run", str(scenario), "--trace", str(scenario)),
        ("sim", "run", str(scenario), "--trace", str(network)),
        ("sim", "allreduce", "--topology", str(network), "--trace", str(network)),
        ("topo", "network", str(network), "--out", str(network)),
        (*plan, "--hosts", str(hosts), "--out", str(tmp_path)),
        ("bench", "moe", "--trace", str(scenario)),
        ("bench", "transfer", "--record", str(network)),
        ("tune", "--output", str(network)),
        ("qdl", "bench", "--bytes", "1", "--record", str(hosts)),
    ):
        message = refusal(capsys, *command)
        assert "of this command" in message or "exists, and is no" in message
    assert {path: path.read_bytes() for path in before} == before


def test_a_result_that_cannot_be_stored_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full")
    suffix = ": No space left on device; the result is complete without it\n"
    assert main([*RUN, "--json", "--trace", str(full)]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["time_s"] > 0
    assert "trace" not in json.loads(output.out)
    assert output.err == f"weft sim: --trace /dev/full{suffix}"
    (tmp_path / "devices").mkdir()
    assert main(["topo", "--sysfs", str(tmp_path), "--write-xml", str(full)]) == 1
    output = capsys.readouterr()
    assert "no GPU was found" in output.out
    assert output.err == f"weft topo: --write-xml /dev/full{suffix}"
    assert main(["topo", "network", NETWORK, "--out", str(full)]) == 1
    output = capsys.readouterr()
    assert "endpoints" in output.out
    assert output.err == f"weft topo: --out /dev/full{suffix}"
    found: dict[str, Any] = {"route": "shm", "provider_details": {}, "sizes": []}
    monkeypatch.setattr(transfer, "measure", lambda *_: found)
    assert main(["bench", "transfer", "--json", "--record", str(full)]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["route"] == "shm"
    assert output.err == f"weft bench transfer: --record /dev/full{suffix}"


def test_an_error_of_the_operating_system_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert main(["bench", "transfer"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"weft: {tmp_path}/missing/weft-")
    assert error.endswith(": No such file or directory\n")


def test_a_trace_may_go_to_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", *RUN, "--json", "--trace", "/dev/stdout"]
    with (tmp_path / "output").open("w+b") as output:
        subprocess.run(command, stdout=output, timeout=50, check=True)
        output.seek(0)
        decoder = json.JSONDecoder()
        trace, end = decoder.raw_decode(text := output.read().decode())
    assert trace["traceEvents"]
    assert json.loads(text[end:])["trace"] == "/dev/stdout"


def test_pictures_replace_pictures_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "links.svg"
    for _ in range(2):
        assert main([*RUN, "--plot", str(file)]) == 0
    assert b"<svg" in file.read_bytes()
    capsys.readouterr()
    file.write_text("notes", encoding="utf-8")
    assert "exists, and is no svg" in refusal(capsys, *RUN, "--plot", str(file))
    assert file.read_text(encoding="utf-8") == "notes"
