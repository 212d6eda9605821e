import io

import pytest

from weft.base.progress import ERASE_LINE, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_shown_before_two_seconds_have_passed() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("rounds", 100, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.0199
            progress.advance()
    assert stream.getvalue() == ""


def test_the_line_says_how_far_it_is_and_goes_in_the_end() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("rounds", 2000, stream=stream, clock=clock) as progress:
        clock.now = 3.0
        progress.advance(1500)
        assert stream.getvalue() == f"{ERASE_LINE}rounds  1,500 of 2,000  75%  1 s left"
        clock.now = 3.01
        progress.advance()
        clock.now = 4.0
        progress.advance(499)
    *_, last, erased = stream.getvalue().split(ERASE_LINE)
    assert (last, erased) == ("rounds  2,000 of 2,000  100%", "")
    assert stream.getvalue().count(ERASE_LINE) == 3


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False)])
def test_programs_see_none_of_it(stream: io.StringIO, enabled: bool) -> None:
    clock = Clock()
    with Progress("rounds", 2, enabled=enabled, stream=stream, clock=clock) as progress:
        clock.now = 10.0
        progress.advance()
    assert stream.getvalue() == ""
