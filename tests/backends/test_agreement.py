"""`agreement`: all ranks need the same settings."""

from __future__ import annotations

import pytest
from fake_ranks import FakeRanks

from deepep_rt import EPConfigError, NetworkOptions
from deepep_rt.backends import agreement
from deepep_rt.config import Config


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "value"),
    [("backend", "auto"), ("on_exhausted", "error"), ("num_slots", 3), ("path", "direct"), ("num_max_recv_tokens", 7)],
)
def test_settings_that_differ_on_one_rank(name, value, odd):
    config = Config(3, 16, 128, 2, 6)
    usual = {**config.settings(), **NetworkOptions().common(), "backend": "host", "on_exhausted": "copy"}
    all_settings = [(usual | {name: value} if rank == odd else usual, None) for rank in range(3)]
    with pytest.raises(EPConfigError, match=rf"disagree.*{name}: .*rank {odd} {value!r}"):
        agreement.agree(FakeRanks(3, gather=lambda mine: all_settings), config, "host", "copy")


def test_network_options_that_both_ends_of_a_connection_need():
    config = Config(2, 16, 128, 2, 4)

    def agree(mine, theirs):
        other = {**config.settings(), "backend": "host", "on_exhausted": "copy", **theirs.common()}
        return agreement.agree(FakeRanks(2, gather=lambda given: [given, (other, None)]), config, "host", "copy", mine)

    assert agree(None, NetworkOptions(nics=["mlx5_0:1"], bootstrap_interface="eth0")) == "host"
    with pytest.raises(EPConfigError, match=r"service_level: rank 0 None, rank 1 3; connections_per_peer: rank 0 4, rank 1 None"):
        agree(NetworkOptions(connections_per_peer=4), NetworkOptions(service_level=3))
    with pytest.raises(EPConfigError, match=r"transport: rank 0 'mpi', rank 1 'auto'"):
        agree(NetworkOptions(transport="mpi"), NetworkOptions())
