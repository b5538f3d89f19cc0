"""Every key that a user may write, as plain dataclasses.

The loader (`loader.py`) validates a YAML tree against these types with pydantic: an unknown key, a wrong type or an
impossible value is an error with its path. Fields carry their explanation in ``metadata["help"]`` and, if they are
numbers, their range in ``metadata["range"]``; the reference page in ``docs/`` is generated from both. The modules
import nothing heavier than the standard library, and hold no logic beyond defaults: ``checks.py`` checks ranges and
relations between keys.
"""

from roll.configs.schema.arguments import (
    DataArguments,
    GeneratingArguments,
    ModelArguments,
    ReasoningGymSource,
    StrategyArguments,
    TrainingArguments,
    ValidationGeneratingArguments,
)
from roll.configs.schema.chaos import (
    PUBLICATION_CHAOS,
    ChaosConfig,
    ChaosEvent,
)
from roll.configs.schema.cluster import (
    ClusterConfig,
)
from roll.configs.schema.environments import (
    CustomEnvConfig,
    EnvManagerConfig,
    EnvWorkersConfig,
    RawTurnsConfig,
)
from roll.configs.schema.names import (
    ADAPTER_KEYS,
    ADAPTER_STRATEGIES,
    BUILTIN_VERIFIERS,
    FORWARD_STRATEGIES,
    INFER_STRATEGIES,
    MODEL_REWARDS,
    PACKING_STRATEGIES,
    ROLL_KNOBS,
    SCORE_STRATEGIES,
    TRAIN_STRATEGIES,
)
from roll.configs.schema.options import (
    ANY_FINITE,
    COUNT,
    DECAY,
    LARGEST_NUMBER,
    NOT_NEGATIVE,
    NUCLEUS,
    POSITIVE,
    SEED,
    SHARE,
    DeviceMapping,
    LossAggregation,
    option,
)
from roll.configs.schema.restarts import (
    RestartsConfig,
)
from roll.configs.schema.rewards import (
    JudgeConfig,
    LengthPenaltyConfig,
    RewardConfig,
    RewardModelConfig,
    ScoreStrategyArguments,
)
from roll.configs.schema.roles import (
    FORWARD_ONLY_KEYS,
    ROLES,
    STRATEGIES_OF_ROLES,
    TRAINED_ROLES,
    TRAINING_ONLY_KEYS,
    UNREAD_KEYS,
    UNREAD_PATHS,
    ActorInferConfig,
    ActorTrainConfig,
    CriticConfig,
    InferStrategyArguments,
    ReferenceConfig,
    ReferenceStrategyArguments,
    TrainStrategyArguments,
    WorkerConfig,
)
from roll.configs.schema.run import (
    AgenticConfig,
    PipelineConfig,
    RLVRConfig,
)
from roll.configs.schema.validation import (
    ValidationConfig,
    ValidationSettings,
)
from roll.configs.schema.weights import (
    WeightUpdateConfig,
)

__all__ = [
    "ADAPTER_KEYS",
    "ADAPTER_STRATEGIES",
    "ANY_FINITE",
    "ActorInferConfig",
    "ActorTrainConfig",
    "AgenticConfig",
    "BUILTIN_VERIFIERS",
    "COUNT",
    "ChaosConfig",
    "ChaosEvent",
    "ClusterConfig",
    "CriticConfig",
    "CustomEnvConfig",
    "DECAY",
    "DataArguments",
    "DeviceMapping",
    "EnvManagerConfig",
    "EnvWorkersConfig",
    "FORWARD_ONLY_KEYS",
    "FORWARD_STRATEGIES",
    "GeneratingArguments",
    "INFER_STRATEGIES",
    "InferStrategyArguments",
    "JudgeConfig",
    "LARGEST_NUMBER",
    "LengthPenaltyConfig",
    "LossAggregation",
    "MODEL_REWARDS",
    "ModelArguments",
    "NOT_NEGATIVE",
    "NUCLEUS",
    "PACKING_STRATEGIES",
    "POSITIVE",
    "PUBLICATION_CHAOS",
    "PipelineConfig",
    "RLVRConfig",
    "ROLES",
    "ROLL_KNOBS",
    "RawTurnsConfig",
    "ReasoningGymSource",
    "ReferenceConfig",
    "ReferenceStrategyArguments",
    "RestartsConfig",
    "RewardConfig",
    "RewardModelConfig",
    "SCORE_STRATEGIES",
    "SEED",
    "SHARE",
    "STRATEGIES_OF_ROLES",
    "ScoreStrategyArguments",
    "StrategyArguments",
    "TRAINED_ROLES",
    "TRAINING_ONLY_KEYS",
    "TRAIN_STRATEGIES",
    "TrainStrategyArguments",
    "TrainingArguments",
    "UNREAD_KEYS",
    "UNREAD_PATHS",
    "ValidationConfig",
    "ValidationGeneratingArguments",
    "ValidationSettings",
    "WeightUpdateConfig",
    "WorkerConfig",
    "option",
]
