"""Every family, in both precisions and on one and two threads, gives the recorded results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.golden.cases import CASES, VALUES, results

# In float32 the messages are single, the parameters and counts are not; after five steps the difference has grown.
RTOL = {"float64": 1e-11, "float32": 2e-3}
ATOL = {"float64": 1e-12, "float32": 2e-4}


@pytest.fixture(scope="module")
def recorded():
    with np.load(VALUES) as values:
        yield {key: values[key] for key in values.files}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*rows of .* got no counts.*")
@pytest.mark.parametrize("arithmetic", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_as_recorded(recorded, name, arithmetic, threads):
    start = {key.rsplit("/", 1)[1]: value for key, value in recorded.items() if key.startswith(f"{name}/start/")}
    wanted = {key.rsplit("/", 1)[1]: value for key, value in recorded.items() if key.startswith(f"{name}/float64/")}
    _, found = results(name, arithmetic, start)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key == "path":
            np.testing.assert_array_equal(found[key], value)
        else:
            np.testing.assert_allclose(found[key], value, rtol=RTOL[arithmetic], atol=ATOL[arithmetic], err_msg=key)
