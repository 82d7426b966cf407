"""The config of a run: sections (`schema`), rules between them (`run`), and how one is made (`loading`)."""

from atomrl.common.errors import ConfigError
from atomrl.common.yaml_files import read_yaml
from atomrl.config.keys import known_keys
from atomrl.config.loading import dump_config, load_config, read_tree
from atomrl.config.overrides import parse_overrides
from atomrl.config.run import RunConfig
from atomrl.config.schema import (
    AsynchronousConfig,
    BackendConfig,
    CheckpointConfig,
    ClusterConfig,
    ClusterRole,
    CriticConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    FSDPConfig,
    GptConfig,
    LoraConfig,
    MegatronConfig,
    ModelConfig,
    PoolConfig,
    PreferenceConfig,
    PretrainConfig,
    Quantization,
    RankedConfig,
    ResourceConfig,
    RewardConfig,
    RewardItem,
    RewardRoute,
    RolloutConfig,
    Section,
    SftConfig,
    TeacherConfig,
    ToolConfig,
    TrackingConfig,
    TrainConfig,
)
from atomrl.config.trees import merge_trees, nest
