"""A device is the cards of a host under one driver, or its processor: nothing else passes for it."""

from typing import Any

import pytest

from dgxlab.model import Device

CUDA = {"GGML_CUDA": "ON"}
GPU = {"uuid": "GPU-1a69cc14-368f", "name": "NVIDIA H200", "driver_version": "580.159.04", "compute_cap": "9.0"}


def facts(**details: Any) -> dict[str, Any]:
    """Return what a job found on a machine whose id its clones share."""
    return {"host_id": "clone", "details": {"cpu": "Xeon", "cpus": 16, "gpus": [GPU], **details}}


def test_a_cuda_build_computes_on_the_cards() -> None:
    device = Device.of(facts(gpus=[GPU, {**GPU, "uuid": "GPU-2"}]), CUDA)
    assert (device.names, device.uuids) == (("NVIDIA H200", "NVIDIA H200"), ("GPU-1a69cc14-368f", "GPU-2"))
    assert (device.driver, device.compute_cap, device.cpus) == ("580.159.04", "9.0", 0)
    assert device.label == "NVIDIA H200 GPU-1a69cc14, NVIDIA H200 GPU-2"
    assert Device.of(facts(), {"GGML_VULKAN": "ON"}) == Device.of(facts(), CUDA)


def test_any_other_build_computes_on_the_processor() -> None:
    device = Device.of(facts(), {"GGML_CUDA": "OFF"})
    assert device == Device.of(facts(gpus=[]), {}) == Device("clone", ("Xeon",), cpus=16)
    assert device.label == "Xeon, 16 processors"


@pytest.mark.parametrize(
    ("details", "cmake"),
    [
        ({"gpus": [{**GPU, "uuid": "GPU-2"}]}, CUDA),
        ({"gpus": [{**GPU, "name": "NVIDIA H100 80GB HBM3"}]}, CUDA),
        ({"gpus": [{**GPU, "driver_version": "590.44.01"}]}, CUDA),
        ({"gpus": [GPU, {**GPU, "uuid": "GPU-2"}]}, CUDA),
        ({"gpus": []}, CUDA),
        ({"gpus": [{**GPU, "uuid": "GPU-2"}]}, {"GGML_VULKAN": "ON"}),
        ({"cpu": "EPYC"}, {}),
        ({"cpus": 8}, {}),
    ],
)
def test_a_clone_of_the_machine_is_another_device(details: dict[str, Any], cmake: dict[str, str]) -> None:
    known = {Device.of(facts(), CUDA).id, Device.of(facts(), {}).id}
    assert Device.of(facts(**details), cmake).id not in known
