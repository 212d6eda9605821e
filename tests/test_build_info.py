import weft


def test_the_native_module_says_what_it_was_built_from() -> None:
    info = weft.build_info()
    assert info.version == weft.__version__
    assert info.target.endswith("-linux-gnu")
    assert info.profile in {"debug", "release"}
    assert info.commit in repr(info)
