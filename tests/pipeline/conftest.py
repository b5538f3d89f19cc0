import pytest


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with a tiny model and its prompts, for all runs of a file."""
    from tiny import make_task

    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder
