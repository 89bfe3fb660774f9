"""The one error of this package."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be served as given; one line that names the file, field or tensor and says what is wrong."""
