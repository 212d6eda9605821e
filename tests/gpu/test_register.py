"""Torch tensors on a GPU are registered in place, as sources of writes."""

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_sources() -> None:
    environment = {"WEFT_PROVIDERS": "copy"}
    results = ranks.run(
        "group.device_tensor.sent", 2, "copy", timeout=100, environment=environment, kind="cuda"
    )
    for result in results:
        assert result["device"] == "cuda:0"
        assert "use `alloc`" in result["shared"]
    assert results[1]["arrived"]
    assert results[1]["arrived on the host"]


@pytest.mark.gpu
def test_arrays_with_only_cudas_interface_are_regions_of_their_device() -> None:
    import torch

    import weft

    class Interface:
        """A tensor without DLPack."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__
            self.tensor = tensor

    values = torch.arange(6, dtype=torch.float32, device="cuda").reshape(2, 3)
    with weft.init(rank=0, world_size=1, providers=["copy"]) as communicator:
        region = communicator.register(Interface(values))
        assert (region.device, len(region)) == (f"cuda:{values.device.index}", 24)
        again = torch.as_tensor(region.cuda, device="cuda").view(torch.float32)
        assert again.tolist() == values.flatten().tolist()
        with pytest.raises(weft.errors.ShapeError, match="not contiguous"):
            communicator.register(Interface(values.T))


@pytest.mark.gpu
def test_gradients_and_every_dtype_are_bytes() -> None:
    import torch

    import weft

    with weft.init(rank=0, world_size=1, providers=["copy"]) as communicator:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            tensor = torch.ones(7, dtype=dtype, device="cuda")
            assert len(communicator.register(tensor)) == 7 * tensor.itemsize
        learned = torch.ones(7, device="cuda", requires_grad=True)
        assert communicator.register(learned).address == learned.data_ptr()
