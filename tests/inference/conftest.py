"""The backends that every guarantee of inference holds for."""

from __future__ import annotations

import pytest

from lightning_hmm.inference import backends
from lightning_hmm.inference.cpu import routes


@pytest.fixture(params=["cpu", "reference"])
def backend(request, monkeypatch):
    """Inference runs on one backend. Mostly constant transitions of few states are not replaced by the full matrix."""
    monkeypatch.setenv(backends.VARIABLE, request.param)
    monkeypatch.setattr(routes, "prefers_dense", lambda *sizes, **options: False)
    return request.param
