"""Plans stay what they were, to the last instruction (see `tests.goldens`)."""

import json

import pytest

from tests import goldens

STORED = json.loads(goldens.FILE.read_text())


@pytest.mark.parametrize(
    "network", ["lenet", pytest.param("unet2d", marks=pytest.mark.slow)]
)
def test_every_policy_plans_as_it_did(network):
    found = dict(goldens.plans({network: goldens.QUICK[network]}))
    assert len(found) == len(goldens.POLICIES) * len(goldens.SHARES)
    assert found == {key: STORED["plans"][key] for key in found}


def test_no_public_name_is_lost():
    gone = STORED["names"].keys() - dict(goldens.names()).keys()
    assert {name for name in gone if not name.startswith("mucudnn.torch.")} == set()
