import pytest

from mucudnn.backends import Backend, get_backend
from mucudnn.backends.cuda.loading import LoadedLibrary, load_library
from mucudnn.errors import BackendUnavailableError
from tests.examples import register_profiles

register_profiles()


@pytest.fixture(params=["cpu", "null", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return get_backend(request.param)


@pytest.fixture
def cpu() -> Backend:
    return get_backend("cpu")


@pytest.fixture
def null() -> Backend:
    return get_backend("null")


@pytest.fixture(scope="session")
def cuda() -> Backend:
    try:
        return get_backend("cuda")
    except BackendUnavailableError as e:
        pytest.skip(str(e).split("; ")[0])


@pytest.fixture(scope="session")
def cudnn_library() -> LoadedLibrary:
    try:
        return load_library(without_driver=True)
    except BackendUnavailableError as e:
        pytest.skip(str(e).split("; install")[0])
