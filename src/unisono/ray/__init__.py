"""Training on Ray: Trainer, Backup and Dataset. Ray itself is imported when they are used; the modules beside them are internal."""

from unisono._src.tools.ray.backup import Backup
from unisono._src.tools.ray.dataset import Dataset
from unisono._src.tools.ray.trainer import Trainer

__all__ = ["Backup", "Dataset", "Trainer"]


def __dir__() -> list[str]:
    return sorted(__all__)
