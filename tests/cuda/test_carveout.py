"""GEMMs leave SMs inside `weft.cuda.sm_carveout`, and not after it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.errors import ConfigurationError

torch = pytest.importorskip("torch", reason="needs PyTorch, which is not installed")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def gpu_of_132(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def settings() -> tuple[object, object]:
    return (
        torch._C._get_sm_carveout_experimental(),
        torch.backends.cuda.preferred_blas_library(),
    )


def test_the_settings_hold_inside_and_are_restored() -> None:
    from weft.cuda import sm_carveout

    before = settings()
    with sm_carveout(24):
        inside = settings()
        with sm_carveout(0):
            assert settings()[0] == 0
        assert settings() == inside
    assert inside == (24, torch._C._BlasBackend.Cublaslt)
    assert settings() == before

    with pytest.raises(KeyError), sm_carveout(8):
        raise KeyError
    assert settings() == before


@pytest.mark.parametrize("num_sms", [-1, 132])
def test_what_leaves_nothing_is_refused(num_sms: int) -> None:
    from weft.cuda import sm_carveout

    before = settings()
    with pytest.raises(ConfigurationError, match="expected 0 to 131"), sm_carveout(num_sms):
        pass
    assert settings() == before


def test_a_torch_without_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cuda import sm_carveout

    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(ConfigurationError, match=torch.__version__[:4]), sm_carveout(1):
        pass
