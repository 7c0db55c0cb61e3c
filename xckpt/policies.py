"""When a run saves, and which steps it keeps: the policies of `xckpt.CheckpointManager`."""

from xckpt.core.run.policies import (
    All,
    Best,
    EveryMinutes,
    EverySteps,
    FirstStep,
    KeepPolicy,
    Latest,
    Moment,
    OnPreemption,
    OnSteps,
    SavePolicy,
    WhenIdle,
)
from xckpt.core.run.record import StepRecord
from xckpt.core.run.temporary import Temporary

__all__ = [
    "All",
    "Best",
    "EveryMinutes",
    "EverySteps",
    "FirstStep",
    "KeepPolicy",
    "Latest",
    "Moment",
    "OnPreemption",
    "OnSteps",
    "SavePolicy",
    "StepRecord",
    "Temporary",
    "WhenIdle",
]
