"""From one model's checkpoint to another's: other names, other layouts, other formats."""

__all__: list[str] = []
