"""The configuration: its schema, files and overrides, and errors that name the key."""

from atomrl.config.backend import BackendConfig, FSDPConfig, MegatronConfig, RankedConfig
from atomrl.config.base import ConfigError, Section
from atomrl.config.environments import EnvironmentConfig, ToolConfig
from atomrl.config.files import merge_trees, nest, parse_overrides, read_yaml
from atomrl.config.loading import load_config, read_tree
from atomrl.config.model import LoraConfig, ModelConfig, Quantization
from atomrl.config.run import RunConfig, build_config, dump_config, known_keys
from atomrl.config.schema import (
    AsynchronousConfig,
    CheckpointConfig,
    ClusterConfig,
    ClusterRole,
    CriticConfig,
    DataConfig,
    EvalConfig,
    GptConfig,
    PoolConfig,
    PreferenceConfig,
    PretrainConfig,
    ResourceConfig,
    RewardConfig,
    RewardItem,
    RewardRoute,
    RolloutConfig,
    SftConfig,
    TeacherConfig,
    TrainConfig,
)
from atomrl.config.tracking import TrackingConfig
