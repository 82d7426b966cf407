"""The config of a run: sections (`schema`), rules between them (`run`), files and overrides (`files`, `loading`)."""

from atomrl.config.files import merge_trees, nest, parse_overrides, read_yaml
from atomrl.config.loading import load_config, read_tree
from atomrl.config.run import RunConfig, build_config, dump_config, known_keys
from atomrl.config.schema import (
    AsynchronousConfig,
    BackendConfig,
    CheckpointConfig,
    ClusterConfig,
    ClusterRole,
    ConfigError,
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
