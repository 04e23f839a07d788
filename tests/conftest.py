import pytest

from mucudnn.backends import Backend, get_backend


@pytest.fixture(params=["cpu", "null"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.fixture
def cpu() -> Backend:
    return get_backend("cpu")


@pytest.fixture
def null() -> Backend:
    return get_backend("null")
