"""Open the channel by which weight updates reach engines in other processes."""

from __future__ import annotations

from pathlib import Path

import torch

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.weight_sync.broadcast import LOOPBACK, CollectiveChannel
from atomrl.weight_sync.channel import WeightChannel
from atomrl.weight_sync.files import FileChannel
from atomrl.weight_sync.object_store import ObjectStoreChannel


def open_channel(cluster: RayCluster) -> WeightChannel:
    """Open the channel that `cluster.weight_transfer` names, for the actors of the role `rollout`."""
    config, ray = cluster.config, cluster.ray
    if config.weight_transfer == "files":
        assert config.weight_folder is not None, "the run has set it to its own folder"
        return FileChannel(Path(config.weight_folder).resolve())
    if config.weight_transfer == "collective":
        host = LOOPBACK if config.address is None else ray.util.get_node_ip_address()
        on_gpus = cluster.wanted["rollout"].gpus >= 1 and torch.cuda.is_available()  # this process is the sender
        return CollectiveChannel(host, "nccl" if on_gpus else "gloo", config.timeout_s)
    return ObjectStoreChannel(cluster.put)
