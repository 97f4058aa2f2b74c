"""`network`: the options, and the environment variables that they become."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import mmap
from pathlib import Path

import numpy as np
import pytest

from deepep_rt import EPConfigError, NetworkOptions
from deepep_rt.network import REMOTE_TRANSPORTS

ALL = NetworkOptions(
    nvshmem_remote_transport="ibrc",
    ibgda=True,
    service_level=3,
    connections_per_peer=8,
    queue_depth=2048,
    nics=["mlx5_0:1", "mlx5_3:1"],
    bootstrap_interface="eth0",
)


def test_environment():
    assert NetworkOptions().environment() == {}
    assert ALL.environment() == {
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IB_SL": "3",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": "8",
        "NVSHMEM_QP_DEPTH": "2048",
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1,mlx5_3:1:1",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth0",
    }
    assert NetworkOptions(service_level=np.int64(3)).environment() == {"NVSHMEM_IB_SL": "3"}
    assert NetworkOptions(ibgda=False, service_level=0).environment() == {"NVSHMEM_IB_ENABLE_IBGDA": "0", "NVSHMEM_IB_SL": "0"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transport": "tcp"}, ["transport='tcp'", "'auto' or 'nvshmem' or 'nixl' or 'mpi'"]),
        ({"transport": None}, ["transport=None", "'auto' or 'nvshmem' or 'nixl' or 'mpi'"]),
        ({"nvshmem_remote_transport": "ibgda"}, ["nvshmem_remote_transport='ibgda'", "'ibrc' or 'ibdevx'"]),
        ({"ibgda": "yes"}, ["ibgda='yes'"]),
        ({"service_level": 16}, ["service_level=16", "0 to 15"]),
        ({"service_level": -1}, ["service_level=-1"]),
        ({"service_level": True}, ["service_level=True"]),
        ({"connections_per_peer": -1}, ["connections_per_peer=-1"]),
        ({"connections_per_peer": 2.0}, ["connections_per_peer=2.0", "whole number"]),
        ({"queue_depth": 127}, ["queue_depth=127", "128 to 32768"]),
        ({"queue_depth": 32769}, ["queue_depth=32769"]),
        ({"nics": []}, ["nics=[]"]),
        ({"nics": "mlx5_0:1"}, ["nics='mlx5_0:1'", "['mlx5_0:1', 'mlx5_1:1']"]),
        ({"nics": ["mlx5_0"]}, ["nics=['mlx5_0']"]),
        ({"nics": ["mlx5_0:1:1"]}, ["nics=['mlx5_0:1:1']"]),
        ({"nics": ["mlx5_0,mlx5_1:1"]}, ["nics=['mlx5_0,mlx5_1:1']"]),
        ({"nics": ["^mlx5_0:1"]}, ["nics=['^mlx5_0:1']"]),
        ({"nics": ["\ud800:1"]}, ["nics=['\\ud800:1']"]),
        ({"nics": ["\0:1"]}, ["nics=['\\x00:1']"]),
        ({"nics": ["mlx5_0:" + "1" * 5000]}, ["nics=['mlx5_0:1"]),
        ({"bootstrap_interface": "\ud800"}, ["bootstrap_interface='\\ud800'", "eth0"]),
        ({"bootstrap_interface": "eth0\0"}, ["bootstrap_interface='eth0\\x00'", "eth0"]),
        ({"bootstrap_interface": ""}, ["bootstrap_interface=''", "eth0"]),
    ],
)
def test_errors_name_bad_values(change, words):
    with pytest.raises(EPConfigError) as caught:
        NetworkOptions(**change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("value", REMOTE_TRANSPORTS)
def test_former_values_of_transport_name_the_new_option(value):
    with pytest.raises(EPConfigError, match=rf"transport='{value}'; expected .*Pass nvshmem_remote_transport='{value}'"):
        NetworkOptions(transport=value)


def test_ranks_agree_on_the_transport():
    assert NetworkOptions().common()["transport"] == "auto"
    assert NetworkOptions(transport="mpi").common()["transport"] == "mpi"
    assert NetworkOptions(transport="mpi").environment() == {}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ALL.service_level = 1


def test_every_option_is_documented():
    for field in dataclasses.fields(NetworkOptions):
        assert f"\n    {field.name}: " in inspect.getdoc(NetworkOptions)
    assert all(name in NetworkOptions.__doc__ for name in ALL.environment())


def test_the_installed_nvshmem_knows_every_variable():
    """NVSHMEM ignores variables that it does not know, without a message."""
    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    if spec is None:
        pytest.skip("NVSHMEM is not installed")
    libraries = [*Path(next(iter(spec.submodule_search_locations))).glob("lib/*.so*")]
    wanted = {name.removeprefix("NVSHMEM_").encode() for name in ALL.environment()}
    for path in libraries:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            wanted -= {name for name in wanted if content.find(b"\0" + name + b"\0") >= 0}
    assert libraries
    assert not wanted
    loaded = {path.name.split(".")[0] for path in libraries}
    assert {f"nvshmem_transport_{name}" for name in REMOTE_TRANSPORTS if name not in ("none", "gpunetio")} <= loaded
