import pytest

from weft.cli.table import format_table


def test_columns_are_aligned() -> None:
    table = format_table(
        ("phase", "p50 µs", "writes", "ok"),
        [("dispatch", 12.3456, 1234567, True), ("combine", 123.4, None, False), ("", 0.0, 3, None)],
    )
    assert table == (
        "phase     p50 µs     writes  ok\n"
        "--------  ------  ---------  ---\n"
        "dispatch    12.3  1,234,567  yes\n"
        "combine      123             no\n"
        "               0          3"
    )


def test_a_table_without_rows_is_its_headers() -> None:
    assert format_table(("a", "bc"), []) == "a  bc\n-  --"


def test_a_column_with_text_in_it_is_aligned_to_the_left() -> None:
    assert format_table(("a",), [(1,), ("text",)]).splitlines()[2:] == ["1", "text"]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 values under 2 headers"):
        format_table(("a", "b"), [(1,)])
