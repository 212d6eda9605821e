"""The demonstration from end to end: train, spread, classify, compare."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from weft.base.output_files import OutputFile
from weft.bench.group import run_group, task_directory
from weft.bench.phases import PHASES, PhaseTimes, summarise
from weft.demo.model import CLASSES, HIDDEN, Model, Split
from weft.demo.worker import save_model
from weft.report import RankEvents, RankTrace, collect, write_trace
from weft.report.collect import from_instant
from weft.report.events import on_one_clock
from weft.report.timeline import write_timeline

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["TOLERANCE", "Config", "Findings", "pictures", "run_over_ranks", "write_pictures"]

#: Largest difference between the logits from one process and from several.
TOLERANCE: Final = 1e-5
#: The picture shows this many rounds; the trace has all that were traced.
DRAWN_ROUNDS: Final = 3


@dataclass(frozen=True)
class Config:
    """Demonstration options."""

    ranks: int = 4
    provider: str | None = None
    #: Images per rank and round: few, as in decoding.
    batch: int = 4
    #: Passes over all held-out images.
    passes: int = 10
    progress: bool = True


@dataclass(frozen=True)
class Findings:
    """Demonstration results."""

    ranks: int
    routes: list[str]
    #: `Communicator.provider_details` on rank 0.
    provider_details: dict[str, dict[str, str]]
    images: int
    rounds: int
    accuracy: float
    single_process_accuracy: float
    largest_logit_difference: float
    #: Over all rounds: images sent to each expert.
    expert_load: list[int]
    #: Token and reply bytes sent, without headers; and with a copy per expert.
    bytes_moved: int
    naive_bytes: int
    #: All bytes written, with headers and token metadata.
    bytes_written: int
    phases: list[PhaseTimes]

    @property
    def agrees(self) -> bool:
        """True if the ranks computed the same results as a single process."""
        return (
            self.largest_logit_difference <= TOLERANCE
            and self.accuracy == self.single_process_accuracy
        )

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write."""
        phases = [times._asdict() for times in self.phases]
        return asdict(self) | {"phases": phases, "agrees": self.agrees}


def run_over_ranks(
    config: Config, model: Model, split: Split
) -> tuple[Findings, list[RankEvents], int]:
    """Classify the held-out images with the experts spread over processes.

    Returns:
        The findings, the last rounds' events, and their clock error.

    Raises:
        GroupError: if a rank failed.
    """
    task = {"batch": config.batch, "passes": config.passes, "progress": config.progress}
    with task_directory(task) as directory:
        save_model(directory, model, split.test_images)
        results = run_group("weft.demo.worker", config.ranks, directory, config.provider)
    reference = model.classify(split.test_images)
    logits = assemble(results, config, len(reference))
    correct = [predicted == split.test_digits for predicted in logits.argmax(axis=2)]
    # A token and a reply are both rows with HIDDEN float32 elements.
    row_bytes = 2 * HIDDEN * np.dtype(np.float32).itemsize
    traces = [RankTrace.from_json(result["trace"]) for result in results]
    findings = Findings(
        ranks=config.ranks,
        routes=sorted({route for result in results for route in result["routes"]}),
        provider_details=results[0]["provider_details"],
        images=len(reference),
        rounds=results[0]["rounds"],
        accuracy=float(np.mean(correct)),
        single_process_accuracy=float(np.mean(reference.argmax(axis=1) == split.test_digits)),
        largest_logit_difference=float(np.abs(logits - reference).max()),
        expert_load=results[0]["expert_load"],
        bytes_moved=row_bytes * sum(result["rows_sent"] for result in results),
        naive_bytes=row_bytes * sum(result["naive_rows"] for result in results),
        bytes_written=sum(result["wire_bytes"] for result in results),
        phases=summarise([result["durations"] for result in results]),
    )
    return findings, collect(traces), max(trace.clock_error_ns for trace in traces)


def assemble(results: list[dict[str, Any]], config: Config, images: int) -> NDArray[np.float32]:
    """All ranks' logits in image order, `[passes, images, classes]`."""
    owner = np.arange(images) // config.batch % config.ranks
    by_rank = [
        np.frombuffer(b64decode(result["logits"]), dtype="<f4").reshape(
            config.passes, np.count_nonzero(owner == rank), CLASSES
        )
        for rank, result in enumerate(results)
    ]
    assembled = np.empty((config.passes, images, CLASSES), dtype=np.float32)
    for rank, logits in enumerate(by_rank):
        assembled[:, owner == rank] = logits
    return assembled


def pictures(output: Path) -> list[OutputFile]:
    """Files that `write_pictures` writes: the trace and the timeline."""
    return [
        OutputFile("--output", output / "trace.json", "Perfetto trace", makes_folders=True),
        OutputFile("--output", output / "timeline.png", ".png", makes_folders=True),
    ]


def write_pictures(
    output: Path, ranks: list[RankEvents], clock_error_ns: int, title: str
) -> dict[str, Any]:
    """Write the trace and the timeline; where they are, and how many writes the trace has."""
    output.mkdir(parents=True, exist_ok=True)
    trace, timeline = (file.path for file in pictures(output))
    write_trace(trace, ranks, clock_error_ns=clock_error_ns)
    aligned = on_one_clock(ranks)
    begin = min(
        [phase.begin_ns for phase in events.phases if phase.name == PHASES[0]][-DRAWN_ROUNDS:][0]
        for events in aligned
    )
    write_timeline(timeline, from_instant(aligned, begin), title)
    return {"trace": str(trace), "timeline": str(timeline)}
