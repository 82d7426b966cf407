"""The ways by which weights travel to engines in other processes, by the config's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atomrl.config import ClusterConfig
from atomrl.weights.channels import ObjectStoreChannel, WeightChannel
from atomrl.weights.collective import LOOPBACK, CollectiveChannel
from atomrl.weights.files import FileChannel


def open_channel(cluster: ClusterConfig, ray: Any) -> WeightChannel:
    """The channel of `cluster.weight_transfer`.

    Args:
        cluster: of the config.
        ray: the module, initialized.
    """
    if cluster.weight_transfer == "files":
        assert cluster.weight_folder is not None, "a run puts its own folder there"
        return FileChannel(Path(cluster.weight_folder).resolve())
    if cluster.weight_transfer == "collective":
        host = LOOPBACK if cluster.address is None else ray.util.get_node_ip_address()
        return CollectiveChannel(host, "nccl" if cluster.num_gpus >= 1 else "gloo", cluster.timeout_s)
    return ObjectStoreChannel(ray)
