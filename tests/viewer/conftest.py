"""The browser of the tests of the page: one for each module."""

import pytest

from experiments.viewer.browser import Browser


@pytest.fixture(scope="module")
def browser():
    with Browser() as tab:
        yield tab
