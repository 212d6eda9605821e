"""`weft run` launcher whose ranks are forked instead of executed, with slow modules imported.

A server imports NumPy once, another one torch. The server forks the launcher, and the launcher
forks ranks: processes, signals, exit statuses and output are the same as in `weft run`. Each rank
imports Weft. Forked ranks have equal addresses and hash seeds; executed ones differ.
"""

import ctypes
import gc
import importlib.util
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from tests import stacks

CONTEXT = multiprocessing.get_context("forkserver")
#: Rank modules that are slow to import; those that are not installed are left out.
MODULES = ["numpy", "ml_dtypes", "typing_extensions"]
TORCH_MODULES = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


def server_with(modules: list[str]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(modules)
    return server


def start_from(server: forkserver.ForkServer, process: BaseProcess) -> None:
    """Start a `CONTEXT` process as a fork from this server.

    The server of `multiprocessing` imports only what is preloaded before its first process.
    """
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()


#: Separate servers: a test that forks ranks from one with Weft cannot share it with a test whose
#: ranks import Weft, because torch registers its operators only once in a process.
SERVER = server_with(MODULES)
TORCH_SERVER = server_with(TORCH_MODULES)


def launch(
    command: Sequence[str],
    ranks: int,
    directory: Path,
    environment: dict[str, str],
    timeout: float,
    *,
    with_torch: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m tests.workers` on all ranks; output and errors are both in `stdout`."""
    server = TORCH_SERVER if with_torch else SERVER
    output = Path(environment["TEST_RESULTS"], "output")
    arguments = (command, ranks, directory, environment, output)
    process = CONTEXT.Process(target=run_launcher, args=arguments)
    start_from(server, process)
    try:
        process.join(timeout)
        if process.exitcode is None:
            late = subprocess.TimeoutExpired(command, timeout, output.read_bytes())
            late.add_note(stacks.shared(output.parent))
            raise late
    finally:
        process.kill()
    text = output.read_text(encoding="utf-8")
    return subprocess.CompletedProcess(command, process.exitcode, text, "")


def run_launcher(
    command: Sequence[str],
    ranks: int,
    directory: Path,
    environment: dict[str, str],
    output: Path,
) -> None:
    """The launcher process."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)

    # The launcher's modules without the native module, which does not log in forked processes.
    package = ModuleType("weft")
    found = importlib.util.find_spec("weft")
    assert found is not None
    package.__path__ = found.submodule_search_locations or []
    sys.modules["weft"] = package

    from weft.launch import launcher
    from weft.launch.config import LaunchConfig

    config = LaunchConfig(command, ranks, grace_seconds=5)
    forking = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(launcher, "subprocess", forking):
        sys.exit(launcher.launch(config).status)


def start(
    command: Sequence[str], *, env: dict[str, str], preexec_fn: Callable[[], None], **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m tests.workers ARGUMENTS` as a fork from this process."""

    def run() -> None:
        preexec_fn()
        run_rank(command, env)

    return subprocess.Popen(command, env=env, preexec_fn=run, restore_signals=False, **options)


def run_rank(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run the command in the forked process, with the interpreter's own start and exit."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    release_descriptors()
    # At exit, cycles among torch's own objects take longer to collect than a short test runs.
    gc.freeze()
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    for name in [each for each in sys.modules if each.partition(".")[0] == "weft"]:
        del sys.modules[name]
    sys.argv = list(command[2:])
    status = 0
    try:
        # Read by OpenMP when it was loaded.
        if (torch := sys.modules.get("torch")) is not None:
            threads = environment.get("OMP_NUM_THREADS", torch.get_num_threads())
            torch.set_num_threads(int(threads))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # Unlike `os._exit`, it waits for threads and calls `atexit` functions and destructors.
    ctypes.pythonapi.Py_Exit(status)


def release_descriptors() -> None:
    """Let go of the launcher's files. Their numbers stay in use: objects that own them exist."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != null and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(null, int(name))
