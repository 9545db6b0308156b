"""Training: what a model learns, the losses and measures, and the loop."""

from psamil.training.tasks import Task, TaskOptions

__all__ = ["Task", "TaskOptions"]
