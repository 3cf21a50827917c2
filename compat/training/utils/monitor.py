"""The original import path: put the folder `compat` on the path, and the names are where they were."""

from truemfu import TrainingMonitor, calculate_mfu_with_profiler, profile_model_flops

__all__ = ["TrainingMonitor", "calculate_mfu_with_profiler", "profile_model_flops"]
