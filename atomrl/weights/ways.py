"""The ways by which weights travel to engines in other processes, by the config's names."""

from __future__ import annotations

from pathlib import Path

import torch

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.weights.channels import ObjectStoreChannel, WeightChannel
from atomrl.weights.collective import LOOPBACK, CollectiveChannel
from atomrl.weights.files import FileChannel


def open_channel(cluster: RayCluster) -> WeightChannel:
    """The channel of `cluster.weight_transfer`, which the actors of the role `rollout` read."""
    config, ray = cluster.config, cluster.ray
    if config.weight_transfer == "files":
        assert config.weight_folder is not None, "a run puts its own folder there"
        return FileChannel(Path(config.weight_folder).resolve())
    if config.weight_transfer == "collective":
        host = LOOPBACK if config.address is None else ray.util.get_node_ip_address()
        on_gpus = cluster.wanted["rollout"].gpus >= 1 and torch.cuda.is_available()  # this process is the sender
        return CollectiveChannel(host, "nccl" if on_gpus else "gloo", config.timeout_s)
    return ObjectStoreChannel(cluster.put)
